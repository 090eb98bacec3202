"""Volumes for the data report."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from samerun.reading.fingerprint import fingerprint
from samerun.task import DataInfo
from samerun.volumes.prepared import Prepared

AXES = ("left-right", "back-front", "down-up")


def describe_volumes(volumes: Sequence[Prepared], classes: Sequence[str], decode_rows: bool) -> DataInfo:
    """Describes volumes by hashes of their files: equal image files should have equal label files.
    `decode_rows`: hashes the voxels too, because compressed files of equal volumes differ."""
    contents, labels = [volume.files[0] for volume in volumes], [volume.files[1:] for volume in volumes]
    sizes = {}
    for name, unit in (("size", "voxels"), ("spacing", "mm")):
        values = np.array([volume.facts[name] for volume in volumes], dtype=float).reshape(-1, 3)
        sizes |= {f"{axis}, {unit}": column for axis, column in zip(AXES, values.T, strict=True)}
    areas = None
    if all(labels):
        counts = [
            [volume.facts["values"].get(str(value), 0) for value in range(len(classes))] for volume in volumes
        ]
        areas = classes, np.array(counts).reshape(-1, len(classes))
    answers = labels if areas else None
    described = DataInfo(
        contents, None, answers, None, np.zeros(len(volumes), dtype=bool), sizes=sizes, areas=areas
    )
    if not decode_rows:
        return described
    voxel_hashes = [fingerprint([repr(volume.facts["shape"]), volume.image.tobytes()]) for volume in volumes]
    return described._replace(similar=voxel_hashes, similarity="of equal voxels, in files that are not equal")
