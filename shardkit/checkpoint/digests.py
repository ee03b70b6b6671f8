"""SHA-256 of every file of a checkpoint, in the format of ``sha256sum``, so that damage is found and named.

``cd runs/a/100 && sha256sum --check SHA256SUMS`` does by hand what a restore does. Plain file arithmetic, without JAX.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

LIST = "SHA256SUMS"
# Orbax writes these when all else is written; it doesn't read the arrays by them.
AFTERWARDS = ("_CHECKPOINT_METADATA", "commit_success.txt")
_PIECE = 1 << 22
_AT_ONCE = 4


def files_below(directory: Any) -> list[str]:
    """The paths of all files below a directory, from there, in order.

    Args:
      directory: an ``etils.epath.Path``, local or of a cloud's.
    """
    found: list[str] = []

    def walk(here: Any, prefix: str) -> None:
        for entry in here.iterdir():
            name = f"{prefix}{entry.name}"
            if entry.is_dir():
                walk(entry, f"{name}/")
            else:
                found.append(name)

    walk(directory, "")
    return sorted(found)


def digests_of(directory: Any, names: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of files below a directory, in hexadecimal."""
    names = list(names)
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(names, pool.map(lambda name: _digest(directory / name), names), strict=True))


def _digest(file: Any) -> str:
    found = hashlib.sha256()
    with file.open("rb") as stream:
        while piece := stream.read(_PIECE):
            found.update(piece)
    return found.hexdigest()


def to_text(digests: Mapping[str, str]) -> str:
    """As ``sha256sum`` writes it."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))


def from_text(text: str) -> dict[str, str]:
    """The reverse of ``to_text``.

    Raises:
      ValueError: it's not of that form, or ends within a line.
    """
    found = {}
    for line in text.splitlines(keepends=True):
        digest, _, name = line.partition("  ")
        if len(digest) != 64 or not name.endswith("\n") or not all(c in "0123456789abcdef" for c in digest):
            raise ValueError(f"not a line of digest and name: {line[:80]!r}")
        found[name.removesuffix("\n")] = digest
    return found


def read_list(directory: Any) -> dict[str, str]:
    """What the list of a checkpoint says.

    Raises:
      ValueError: it isn't there, or damaged; the words say which.
    """
    try:
        listed = from_text((directory / LIST).read_text())
    except FileNotFoundError:
        raise ValueError(f"{LIST} is missing") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{LIST} is damaged: {error}") from None
    if not listed:
        raise ValueError(f"{LIST} is empty")
    return listed


def missing_files(directory: Any, listed: Collection[str]) -> list[str]:
    """Which of the listed files aren't there."""
    here = set(files_below(directory))
    return [name for name in sorted(listed) if name not in here]


def unlisted_files(directory: Any, listed: Collection[str]) -> list[str]:
    """Files that a list cut short between two lines would say nothing of. Hidden ones are other programs'."""
    known = {*listed, *AFTERWARDS, LIST}
    return [n for n in files_below(directory) if n not in known and not n.rpartition("/")[2].startswith(".")]


def damaged_files(directory: Any, listed: Mapping[str, str]) -> list[str]:
    """Which of the files don't hold what was written; those that can't be read are among them."""

    def differs(item: tuple[str, str]) -> bool:
        try:
            return _digest(directory / item[0]) != item[1]
        except OSError:
            return True

    items = sorted(listed.items())
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        return [name for (name, _), bad in zip(items, pool.map(differs, items), strict=True) if bad]
