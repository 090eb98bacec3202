"""MkDocs hook (see mkdocs.yml): makes the links of docs/ to the sibling folders benchmarks/ and examples/
work on the site, as on GitHub."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]


def on_files(files: Files, config: Any) -> Files:
    """Adds the files of the sibling folders to the site."""
    for path in sorted([*(ROOT / "benchmarks").iterdir(), *(ROOT / "examples").rglob("*.*")]):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Removes one `../`: on the site, the sibling folders are inside docs/."""
    return re.sub(r"\]\((\.\./)((?:\.\./)*(?:benchmarks|examples)/)", r"](\2", markdown)
