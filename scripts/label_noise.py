#!/usr/bin/env python3
"""How many of the labels that were changed on purpose does `samerun rows` find?

    python scripts/label_noise.py FILE.csv --output_dir FOLDER [--rows N] [--share 0.05] [--folds 3] -- ARGS

Takes the first N rows of a seeded shuffle of FILE.csv (columns text and labels), gives a share of them the
labels of another row, predicts all of them by `samerun cross-validate` with ARGS, and prints how many of the
changed rows are among the first of the list: by `samerun rows`, by the lowest probability of a given label,
and, if it is installed, by cleanlab.
"""

import argparse
import csv
import gzip
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "app"))
from samerun.files import read_lines
from samerun.tools.rows import doubts


def change_labels(file: Path, rows: int, share: float, target: Path) -> set[str]:
    """Writes the rows with changed labels to `target`. Returns the ids of the changed ones."""
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rt", newline="", encoding="utf-8") as source:
        data = list(csv.DictReader(source))
    draw = random.Random(1)
    draw.shuffle(data)
    data = data[:rows]
    changed = set(draw.sample(range(len(data)), round(share * len(data))))
    with target.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(["id", "text", "labels"])
        for number, row in enumerate(data):
            others = [other["labels"] for other in data if other["labels"] != row["labels"]]
            labels = draw.choice(others) if number in changed else row["labels"]
            writer.writerow([f"row{number}", row["text"], labels])
    return {f"row{number}" for number in changed}


def main() -> None:
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--folds", type=int, default=3)
    options = parser.parse_args(sys.argv[1:split])
    options.output_dir.mkdir(parents=True, exist_ok=True)
    noisy = options.output_dir / "noisy.csv"
    changed = change_labels(options.file, options.rows, options.share, noisy)
    command = [sys.executable, "-m", "samerun", "cross-validate", "--folds", str(options.folds), "classify"]
    command += ["--train_file", str(noisy), "--output_dir", str(options.output_dir / "folds")]
    subprocess.run([*command, *sys.argv[split + 1 :]], check=True)
    lines = list(read_lines(options.output_dir / "folds" / "predictions.jsonl"))
    labels = list(lines[0]["probabilities"])
    chances = np.array([[line["probabilities"][name] for name in labels] for line in lines])
    given = np.array([[name in line["reference"] for name in labels] for line in lines])
    is_changed = np.array([line["id"] in changed for line in lines])
    doubt, suggested = doubts(chances, given)
    orders = {"samerun rows": doubt, "lowest given": -np.where(given, chances, 9.0).min(axis=1)}
    try:
        from cleanlab.multilabel_classification.rank import get_label_quality_scores
    except ImportError:
        print("cleanlab is not installed")
    else:
        listed = [np.flatnonzero(row).tolist() for row in given]
        for method in ("self_confidence", "normalized_margin", "confidence_weighted_entropy"):
            orders[f"cleanlab {method}"] = -get_label_quality_scores(listed, chances, method=method)
    flagged = (suggested != given).any(axis=1)
    found = int(is_changed[flagged].sum())
    print(
        json.dumps(
            {"rows": len(lines), "changed": len(changed), "flagged": int(flagged.sum()), "right": found}
        )
    )
    for name, order in orders.items():
        best = is_changed[np.argsort(-order, kind="stable")]
        shares = "  ".join(f"first {n}: {best[:n].sum()} changed" for n in (50, 100, 200))
        print(f"{name:<40}{shares}")


if __name__ == "__main__":
    main()
