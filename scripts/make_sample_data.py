"""Makes sample data without a download.

    python scripts/make_sample_data.py titles [--output_dir sample_titles]     descriptions of parameters
    python scripts/make_sample_data.py names [--output_dir sample_names]       short news with tagged names
    python scripts/make_sample_data.py images [--output_dir sample_images]     digits
    python scripts/make_sample_data.py masks [--output_dir sample_masks]       shapes with masks
    python scripts/make_sample_data.py volumes [--output_dir sample_volumes]   balls in NIfTI volumes

The modules of scripts/sampling/ say what the files look like. The same versions of the libraries yield the
same bytes. A second run reuses the files; to make them again, delete the folder.
"""

import contextlib
import importlib
import json
import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

MODULES = {"titles": "titles", "names": "names", "images": "digits", "masks": "shapes", "volumes": "volumes"}
MANIFEST = "sample_data.json"  # written last, when the folder is complete


def write_once(folder: Path, module: Any) -> dict[str, int]:
    """Has `module.write`(folder) fill the folder, unless it holds data of the same `module.ORIGIN`: what
    decides the data, for JSON. Returns the rows by split. Raises `FileExistsError` for a folder with other
    files."""
    manifest = folder / MANIFEST
    known = {}
    if manifest.is_file():
        with contextlib.suppress(ValueError):  # cut off by a crash
            known = json.loads(manifest.read_text(encoding="utf-8"))
    if known.get("origin") == module.ORIGIN:
        return known["rows"]
    if folder.exists() and any(folder.iterdir()) and not manifest.is_file():
        raise FileExistsError(f"it holds {min(os.listdir(folder))} from elsewhere")
    folder.mkdir(parents=True, exist_ok=True)
    manifest.write_text("{}", encoding="utf-8")
    rows = module.write(folder)
    manifest.write_text(json.dumps({"origin": module.ORIGIN, "rows": rows}), encoding="utf-8")
    return rows


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=MODULES)
    parser.add_argument("--output_dir", type=Path, help="default: sample_WHAT")
    args = parser.parse_args()
    folder = args.output_dir or Path(f"sample_{args.what}")
    try:
        rows = write_once(folder, importlib.import_module(f"sampling.{MODULES[args.what]}"))
    except ModuleNotFoundError as error:
        parser.error(f"{error.name} is not installed: pip install -r requirements-vision.txt")
    except OSError as error:
        parser.error(f"cannot write to --output_dir {folder} ({error}); delete it or choose another folder")
    print(f"{folder}: " + ", ".join(f"{split} {count} rows" for split, count in rows.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
