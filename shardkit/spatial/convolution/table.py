"""The table that ``method="auto"`` reads: which form suits which hardware. Its rows are data, in forms.json.

``benchmarks/tune.py --write`` fills the file, and keeps in it what it was filled with and the figures that decided. No
JAX here.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import math
import re
from collections.abc import Mapping
from typing import Any

PLATFORMS = ("cpu", "gpu", "tpu")
FILE = "forms.json"
_SPELLINGS = "'concat', 'overlap', 'blocks N' or 'blocks N major' (N: chunks a device, at least 2)"
_FIX = "benchmarks/tune.py --write makes the file"


@dataclasses.dataclass(frozen=True)
class Form:
    """How a block meets its halos, as the table and people spell it: "concat", "overlap", "blocks 8", "blocks 2 major".

    Attributes:
      method: "concat", "overlap" or "blocks".
      chunks: a device, for "blocks"; 0 elsewhere.
      major: all images of a chunk lie together; else all chunks of an image.
    """

    method: str
    chunks: int = 0
    major: bool = False

    def __str__(self) -> str:
        return " ".join([self.method, *([str(self.chunks)] if self.chunks else []), *(["major"] if self.major else [])])


def parse_form(text: Any) -> Form:
    """Reads a form's name.

    Raises:
      ValueError: it is none; the message says how they are spelled.

    Example:
      >>> parse_form("blocks 2 major")
      Form(method='blocks', chunks=2, major=True)
    """
    if isinstance(text, Form):
        return text
    if text in ("concat", "overlap"):
        return Form(text)
    found = re.fullmatch(r"blocks (\d+)( major)?", text) if isinstance(text, str) else None
    if found is None or int(found[1]) < 2:
        raise ValueError(f"{text!r} is no form of a convolution; write {_SPELLINGS}")
    return Form("blocks", int(found[1]), found[2] is not None)


@dataclasses.dataclass(frozen=True)
class Row:
    """Up to ``images`` on a device: this form."""

    images: float
    form: Form


@dataclasses.dataclass(frozen=True)
class Table:
    """What forms.json says, read and checked.

    Attributes:
      rows: of each platform, by growing number of images; the last has no bound.
      least_elements: of a block in space; below, a layer is too small for its form to matter, and cutting it up would
        only add copies.
      least_features: of a layer, likewise.
    """

    rows: Mapping[str, tuple[Row, ...]]
    least_elements: int
    least_features: int

    def form(self, platform: str, images: int) -> Form:
        """The form of the first row that fits; of a platform that isn't in the table, "concat", which always runs."""
        rows = self.rows.get(platform, (Row(math.inf, Form("concat")),))
        return next(row.form for row in rows if images <= row.images)


def read_table(data: Any, where: str = FILE) -> Table:
    """Reads the table's data, and checks it.

    Args:
      data: what ``json.loads`` made of the file.
      where: its name, for messages.

    Raises:
      ValueError: it is malformed; says where, what stands there and what may.
    """
    for name in ("least_elements", "least_features"):
        _check(_is_count(_get(data, name, where)), f"{where}: {name} is {data[name]!r}; write an integer of at least 0")
    platforms = _get(data, "platforms", where)
    _check(isinstance(platforms, dict), f"{where}: platforms is {platforms!r}; write an object with {PLATFORMS}")
    wrong = sorted(set(platforms) ^ set(PLATFORMS))
    _check(not wrong, f"{where}: platforms has {sorted(platforms)}; write each of {PLATFORMS}, and no other")
    rows = {}
    for platform in PLATFORMS:
        at = f"{where}: platforms.{platform}"
        rows[platform] = _rows(_get(platforms[platform], "rows", at), f"{at}.rows")
    return Table(rows, data["least_elements"], data["least_features"])


def _rows(found: Any, where: str) -> tuple[Row, ...]:
    _check(isinstance(found, list) and len(found) > 0, f"{where} is {found!r}; write a list of rows")
    rows: list[Row] = []
    for number, entry in enumerate(found):
        at, last = f"{where}[{number}]", number == len(found) - 1
        images = _get(entry, "images", at)
        _check(
            images is None if last else _is_count(images),
            f"{at}.images is {images!r}; the last row has null (no bound), the others an integer",
        )
        bound = math.inf if images is None else images
        _check(not rows or bound > rows[-1].images, f"{at}.images is {images!r}; bounds grow from row to row")
        try:
            rows.append(Row(bound, parse_form(_get(entry, "form", at))))
        except ValueError as error:
            raise ValueError(f"{at}.form: {error}. {_FIX}") from error
    # The first row also serves where the number of images isn't known: see method.py.
    _check(not rows[0].form.major, f"{where}[0].form is {rows[0].form!s}; the first row can't be 'major'")
    return tuple(rows)


def _get(found: Any, key: str, where: str) -> Any:
    _check(isinstance(found, dict) and key in found, f"{where} lacks {key!r}")
    return found[key]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(f"{message}. {_FIX}")


@functools.cache
def shipped_table() -> Table:
    """The table that came with the package."""
    return read_table(shipped_data())


def shipped_data() -> dict[str, Any]:
    """The same as it stands in the file, with what it was filled with and the figures that decided."""
    return json.loads(importlib.resources.files("shardkit.spatial.convolution").joinpath(FILE).read_text("utf-8"))
