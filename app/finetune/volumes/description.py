"""What a data report looks at in volumes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from finetune.reading.fingerprint import fingerprint
from finetune.task import Described
from finetune.volumes.prepared import Prepared

AXES = ("left-right", "back-front", "down-up")


def describe_volumes(volumes: Sequence[Prepared], classes: Sequence[str], closely: bool) -> Described:
    """Volumes of equal files should have labels of equal files. `closely`: their voxels, in the run's spacing, are compared
    too, as compressed files of equal volumes differ."""
    contents, labels = [volume.files[0] for volume in volumes], [volume.files[1:] for volume in volumes]
    sizes = {}
    for name, unit in (("size", "voxels"), ("spacing", "mm")):
        values = np.array([volume.facts[name] for volume in volumes], dtype=float).reshape(-1, 3)
        sizes |= {f"{axis}, {unit}": column for axis, column in zip(AXES, values.T, strict=True)}
    areas = None
    if all(labels):
        counts = [[volume.facts["values"].get(str(value), 0) for value in range(len(classes))] for volume in volumes]
        areas = classes, np.array(counts).reshape(-1, len(classes))
    answers = labels if areas else None
    found = Described(contents, None, answers, None, np.zeros(len(volumes), dtype=bool), sizes=sizes, areas=areas)
    if not closely:
        return found
    voxels = [fingerprint([repr(volume.facts["shape"]), volume.image.tobytes()]) for volume in volumes]
    return found._replace(similar=voxels, nearly="of equal voxels, in files that are not equal")
