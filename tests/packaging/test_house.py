"""The house in CONTRIBUTING.md is the one that's built: rooms import only from rooms below."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Rooms that stand side by side don't know each other either.
FLOORS = [
    re.findall(r"\w+", row[:23])
    for row in re.findall(r"^   \| (.*)\|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
]
ROOMS = [room for floor in FLOORS for room in floor]


def files_of(room):
    folder = ROOT / "shardkit" / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def rooms_imported_by(path):
    """At the top level of a file."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardkit"):
            module = node.module.split(".")
            yield from [module[1]] if len(module) > 1 else [alias.name for alias in node.names]


def test_every_room_is_in_the_picture():
    folders = {path.name for path in (ROOT / "shardkit").iterdir() if (path / "__init__.py").exists()}
    assert folders <= set(ROOMS)
    assert len(ROOMS) == len(set(ROOMS))


@pytest.mark.parametrize("level", range(len(FLOORS)), ids=["+".join(floor) for floor in FLOORS])
def test_rooms_import_only_from_rooms_below(level):
    for room in FLOORS[level]:
        above = {r for floor in FLOORS[: level + 1] for r in floor} - {room}
        found = {str(path): sorted(above.intersection(rooms_imported_by(path))) for path in files_of(room)}
        assert not {path: rooms for path, rooms in found.items() if rooms}
