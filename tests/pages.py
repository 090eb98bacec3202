"""README and docs/ as tests read them: code blocks, commands, links, headings."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from launchers import REPOSITORY

PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")])
FENCE = re.compile(r"(?:<!-- ([^\n]*?) -->\n+)?^```(\w*)(?: title=\"([^\"]*)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block. `comment`: the HTML comment before it, or ""; `title`: the name of the file that it is, or ""."""

    comment: str
    language: str
    title: str
    text: str

    def commands(self) -> list[list[str]]:
        """The words of each command, without comments and without variables that are set for it."""
        lines = self.text.replace("\\\n", " ").splitlines()
        split = [shlex.split(line, comments=True) for line in lines]
        return [words[next(n for n, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)) :] for words in split if words]


def name_of(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


def blocks(page: Path | str, language: str | None = None) -> list[Block]:
    """The fenced blocks of a page, all or those of one language."""
    found = [Block(*(part or "" for part in match)) for match in FENCE.findall((REPOSITORY / page).read_text(encoding="utf-8"))]
    return [block for block in found if language in (None, block.language)]


def run_by(page: str, test: str) -> list[str]:
    """The lines of the blocks of a page whose comment says that they are run by a test; no comments of bash."""
    marked = [block for block in blocks(page) if block.comment.endswith(f"by {test}")]
    return [line for block in marked for line in block.text.splitlines() if not line.startswith("#")]


def prose(page: Path) -> str:
    """A page without its code: neither blocks nor what stands between backticks."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))


def source_of(page: str, title: str) -> str:
    """The file that a page builds up in blocks with that title."""
    return "\n\n".join(block.text for block in blocks(page) if block.title == title)
