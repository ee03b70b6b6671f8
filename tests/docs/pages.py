"""The pages that people read, and the blocks of code in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(r"(?m)^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```\s*?$", re.DOTALL)
_HEADING = re.compile(r"(?m)^#+ +(.*?) *$")
_PRINTS = "<!-- prints -->"


class Block(NamedTuple):
    """A block of code, where it is, and what the page says that it prints (None: nothing is said)."""

    page: str
    heading: str
    line: int
    language: str
    text: str
    prints: str | None = None


def pages() -> list[str]:
    """README.md and all of docs/, the tour first: it sets the number of devices, as a reader would."""
    found = sorted(str(path.relative_to(ROOT)) for path in DOCS.rglob("*.md"))
    return sorted(["README.md", *found], key=lambda page: page != "docs/index.md")


def texts() -> list[str]:
    """All that people read: the pages, and what lies beside the code, such as CONTRIBUTING.md, benchmarks/README.md."""
    beside = [*ROOT.glob("*.md"), *ROOT.glob("[a-z]*/README.md")]
    return [*pages(), *sorted({str(path.relative_to(ROOT)) for path in beside} - {"README.md"})]


def read(page: str) -> str:
    """A page's text."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    """Its fenced blocks, in order. A block after the mark ``<!-- prints -->`` is the output of the one before."""
    text = read(page)
    found: list[Block] = []
    for fence in _FENCE.finditer(text):
        before = text[: fence.start()]
        outside = _FENCE.sub("", before)
        headings = _HEADING.findall(outside)
        if before.rstrip().endswith(_PRINTS):
            found[-1] = found[-1]._replace(prints=fence["text"])
            continue
        line = before.count("\n") + 2
        found.append(Block(page, headings[-1] if headings else "", line, fence["language"], fence["text"]))
    return found


def python_blocks(page: str) -> list[Block]:
    """Those of Python, in order."""
    return [block for block in blocks(page) if block.language == "python"]


def references() -> dict[str, tuple[str, str]]:
    """What the docs' reference has: of each heading ("sk.ring_conv") the page, and the path of the object."""
    entry = re.compile(r"(?m)^::: (\S+)\n    options:\n      heading: (\S+)$")
    return {name: (page, path) for page in pages() for path, name in entry.findall(read(page))}
