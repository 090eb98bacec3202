"""Reads code blocks, commands and prose of README and docs/."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from launchers import REPOSITORY

PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")])
FENCE = re.compile(
    r"(?:<!-- ([^\n]*?) -->\n+)?^```(\w*)(?: title=\"([^\"]*)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE
)

NAME = re.compile(r"# ([\w-]+\.\w+|Dockerfile)(, .*)?\n")


@dataclass(frozen=True)
class Block:
    """A fenced block. `comment`: the HTML comment before it or ""; `title`: the file name in its title or
    "", or that in its first line ("# NAME"), which GitHub shows as well."""

    comment: str
    language: str
    title: str
    text: str

    def commands(self) -> list[list[str]]:
        """The words of each command, without comments and leading variable assignments."""
        lines = self.text.replace("\\\n", " ").splitlines()
        split = [shlex.split(line, comments=True) for line in lines]
        return [
            words[next(n for n, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)) :]
            for words in split
            if words
        ]


def name_of(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


def blocks(page: Path | str, language: str | None = None) -> list[Block]:
    """The fenced blocks of a page, all or of one language."""
    matches = FENCE.findall((REPOSITORY / page).read_text(encoding="utf-8"))
    fenced = []
    for comment, kind, title, text in matches:
        name = NAME.match(text) if kind in ("python", "yaml", "dockerfile") else None
        fenced.append(Block(comment, kind, name[1] if name else title, text))
    return [block for block in fenced if language in (None, block.language)]


def run_by(page: str, test: str) -> list[str]:
    """The lines of a page's blocks whose comment ends with "by TEST", without bash comments."""
    marked = [block for block in blocks(page) if block.comment.endswith(f"by {test}")]
    return [line for block in marked for line in block.text.splitlines() if not line.startswith("#")]


def prose(page: Path) -> str:
    """A page without code blocks and inline code."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))


def source_of(page: str, title: str) -> str:
    """The file in a page's blocks with this title, joined."""
    return "\n\n".join(block.text for block in blocks(page) if block.title == title)
