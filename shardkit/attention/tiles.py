"""How a block of the score matrix is worked through, tile by tile: plain integers, no JAX."""

from __future__ import annotations

import dataclasses
import functools

# Rows and columns of a tile. Large enough for a matrix unit to be busy, small enough that a tile's scores (a MiB in
# float32 for each head and example) cost little beside the block of a long sequence.
TILE = 512


@dataclasses.dataclass(frozen=True)
class Tiling:
    """One side of a block: ``parts`` equal parts (2 in zigzag order), each in ``tiles`` tiles of ``tile`` elements.

    The last tile of a part may reach beyond it.
    """

    length: int
    parts: int
    tiles: int
    tile: int

    @property
    def part(self) -> int:
        return self.length // self.parts

    @property
    def count(self) -> int:
        return self.parts * self.tiles

    @property
    def padded(self) -> bool:
        return self.tiles * self.tile != self.part

    @property
    def laid(self) -> int:
        """Elements with those that pad the parts."""
        return self.count * self.tile


def tiling(length: int, parts: int = 1, target: int | None = None) -> Tiling:
    """Tiles of at most ``target`` elements (None: ``TILE``), as equal as can be.

    Example:
      >>> tiling(1000, 1, 400)
      Tiling(length=1000, parts=1, tiles=3, tile=334)
    """
    part = length // parts
    tiles = -(-part // (target or TILE))
    return Tiling(length, parts, tiles, -(-part // tiles))


Table = tuple[tuple[int, int], ...]  # (tile of rows, tile of columns), in the order they're worked through


@functools.lru_cache(maxsize=256)
def all_tiles(rows: Tiling, cols: Tiling) -> Table:
    """Every pair, row by row."""
    return tuple((r, c) for r in range(rows.count) for c in range(cols.count))


@functools.lru_cache(maxsize=256)
def lower_tiles(rows: Tiling, cols: Tiling) -> Table:
    """Those that a causal mask leaves something of, where a device's rows meet its own columns.

    In either order a device's elements stand in the order of the sequence.
    """
    return tuple((r, c) for r, c in all_tiles(rows, cols) if c <= r)


@functools.lru_cache(maxsize=256)
def columns_before(rows: Tiling, cols: Tiling) -> Table:
    """Zigzag, columns of a device before ours: all rows see its first part, none its second."""
    return tuple((r, c) for r, c in all_tiles(rows, cols) if c < cols.tiles)


@functools.lru_cache(maxsize=256)
def columns_after(rows: Tiling, cols: Tiling) -> Table:
    """Zigzag, columns of a device after ours: the second part of our rows sees all of them, the first none."""
    return tuple((r, c) for r, c in all_tiles(rows, cols) if r >= rows.tiles)
