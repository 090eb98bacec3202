"""MkDocs hook (see mkdocs.yml): makes the links of docs/ to the sibling folder benchmarks/ work on the site,
as on GitHub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]


def on_files(files: Files, config: Any) -> Files:
    """Adds the files of benchmarks/ to the site."""
    for path in sorted((ROOT / "benchmarks").iterdir()):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Removes one `../`: on the site, benchmarks/ is inside docs/."""
    return re.sub(r"\]\((\.\./)((?:\.\./)*benchmarks/)", r"](\2", markdown)
