"""Golden losses and metrics of the text tasks' reference jobs. A refactoring must not change them.

    python tests/parity/golden.py --write

trains both jobs in one process, in fp32 on the CPU, and writes golden.json. Use it only for an intended
change of the numbers (another loss, order of rows or initial weights, a new version of a library), and
explain the change in the commit message.
"""

import json
import sys
from pathlib import Path

FILE = Path(__file__).with_name("golden.json")
TESTS = Path(__file__).resolve().parents[1]


def write(home: Path) -> None:
    """Runs the reference jobs in `home` and writes their losses, norms, rates and metrics to golden.json."""
    import launchers
    import title_job

    from samerun.reports.tracker import read_history
    from samerun.run_folder import library_versions

    launchers.write_corpus(home)
    title_job.write_corpus(home)
    content = {"versions": library_versions()}
    for task, name in {"classify": "python", "titlegen": "titles"}.items():
        finished = launchers.launch(name, title_job.ALL_JOBS[name], home).check()
        content[task] = read_history(finished.folder)
    FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    import tempfile

    sys.path[:0] = [str(TESTS), str(TESTS.parent / "app")]
    with tempfile.TemporaryDirectory() as place:
        write(Path(place))
    print(f"written: {FILE}; look at `git diff --stat {FILE}` before you commit it")
