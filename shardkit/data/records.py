"""Batches from records with random access: each process loads the rows that its devices hold."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from shardkit.data import parts
from shardkit.data.batch import mask_layout
from shardkit.data.cuts import cut_of, mesh_text, owners_of
from shardkit.data.leaves import Leaf, dtype_of, layouts_in, placed_leaves, said
from shardkit.data.order import Order, Place
from shardkit.data.placing import put
from shardkit.data.settling import same_facts
from shardkit.data.telling import tell
from shardkit.placements import Layout, Shard

# Of a leaf's number, the rows of the source, and slices of the other dims: those rows, stacked, in new memory.
Reader = Callable[[int, np.ndarray, tuple[slice, ...]], np.ndarray]


class Columns:
    """Records as a tree of arrays whose first dims count them; on disk they stay there (memory maps, h5py, zarr)."""

    treedef: Any
    columns: list[Any]

    def __init__(self, tree: Any, what: str):
        named, self.treedef = jax.tree_util.tree_flatten_with_path(tree)
        self.columns = [_array_like(column) for _, column in named]
        names = [jax.tree_util.keystr(path) for path, _ in named]
        rows = {said(n): (c.shape[0] if c.shape else "no rows") for n, c in zip(names, self.columns, strict=True)}
        if len(set(rows.values())) > 1 or "no rows" in rows.values():
            raise ValueError(f"{what}: arrays of records need equal first dims, got {rows}")
        self._length = next(iter(rows.values()), 0)

    def __len__(self) -> int:
        return int(self._length)

    def example(self, _: int) -> Any:
        """A record's structure."""
        return jax.tree.unflatten(
            self.treedef, [np.broadcast_to(np.zeros((), c.dtype), c.shape[1:]) for c in self.columns]
        )

    def reader(self, _: Iterable[int]) -> Reader:
        """What gives parts of those rows."""
        return self._read

    def _read(self, leaf: int, rows: np.ndarray, rest: tuple[slice, ...]) -> np.ndarray:
        column = self.columns[leaf]
        if isinstance(column, np.ndarray):
            return np.asarray(column[(rows, *rest)])
        ascending = np.argsort(rows)  # as files want them
        found = np.asarray(column[(rows[ascending], *rest)])
        return found[np.argsort(ascending)]


class Items:
    """Records by ``source[number]``, each a tree."""

    source: Any
    what: str

    def __init__(self, source: Any, what: str):
        self.source, self.what = source, what
        self._at_hand: dict[int, Any] = {}  # the first record, which needn't be loaded twice
        self.shapes: list[tuple[Any, tuple[int, ...]]] = []
        self.treedef: Any = None
        self.names: list[str] = []

    def __len__(self) -> int:
        return len(self.source)

    def example(self, row: int) -> Any:
        """A record, whose structure all others must have."""
        record = self._at_hand[row] = self._take(row)
        named, self.treedef = jax.tree_util.tree_flatten_with_path(record)
        self.names = [jax.tree_util.keystr(path) for path, _ in named]
        self.shapes = [(np.asarray(v).dtype, np.shape(v)) for _, v in named]
        return record

    def reader(self, rows: Iterable[int]) -> Reader:
        """Loads those rows, and gives parts of them."""
        loaded = {row: self._load(row) for row in rows}
        return lambda leaf, rows, rest: np.stack([loaded[row][leaf][rest] for row in rows.tolist()])

    def _take(self, row: int) -> Any:
        try:
            return self.source[row]
        except StopIteration as error:  # of the user's code: here it would look like the end of all batches
            raise RuntimeError(f"{self.what}: reading record {row} raised StopIteration") from error

    def _load(self, row: int) -> list[np.ndarray]:
        values, treedef = jax.tree.flatten(self._at_hand.pop(row) if row in self._at_hand else self._take(row))
        if treedef != self.treedef:
            raise ValueError(f"{self.what}: record {row} is {treedef}, but others are {self.treedef}")
        arrays = [np.asarray(value) for value in values]
        for name, array, (dtype, shape) in zip(self.names, arrays, self.shapes, strict=True):
            if (array.dtype, array.shape) != (dtype, shape):
                raise ValueError(
                    f"{self.what}: record {row}{name} is {array.dtype}{list(array.shape)}, but the first one read "
                    f"is {dtype}{list(shape)}; records of a batch are stacked, so all need one dtype and one shape"
                )
        return arrays


class Records:
    """A source of batches whose place is an epoch and the number of a batch in it."""

    rows: Columns | Items
    placements: Any
    mesh: Mesh
    order: Order
    uneven: str
    check: bool
    what: str
    lock: threading.Lock

    def __init__(
        self, rows: Columns | Items, placements: Any, mesh: Mesh, order: Order, *, uneven: str, check: bool, what: str
    ):
        self.rows, self.placements, self.mesh, self.order = rows, placements, mesh, order
        self.uneven, self.check, self.what = uneven, check, what
        self.leaves: list[Leaf] | None = None  # as far as known: of a batch of rows that are all alike
        self.lock = threading.Lock()
        self._check_batch_size()
        if isinstance(rows, Columns):
            self.leaves = self._structure(0)

    @property
    def facts(self) -> dict[str, Any]:
        """What must be the same in all processes."""
        order, words = self.order, {} if self.leaves is None else self._words(self.leaves)
        shuffled = f"shuffled with seed {order.seed}" if order.shuffle else "in order"
        return {
            "input": "records",
            "mesh": mesh_text(self.mesh),
            "records": order.records,
            "batch_size": order.batch_size,
            "order": shuffled,
            "epochs": order.epochs,
            "uneven": self.uneven,
        } | words

    def first(self) -> Place:
        return Place()

    def position(self, place: Place) -> int:
        return self.order.number(place)

    def __len__(self) -> int:
        total = self.order.total
        if total is None:
            raise TypeError("a DataLoader with epochs=None has no length")
        return total

    def state_of(self, place: Place, _: str) -> dict[str, Any]:
        order = self.order
        return {
            "kind": "records",
            "epoch": place.epoch,
            "batch": place.batch,
            "seed": order.seed,
            "shuffle": order.shuffle,
            "batch_size": order.batch_size,
            "records": order.records,
        }

    def place_of(self, state: Mapping[str, Any]) -> Place:
        own = self.state_of(Place(), "")
        unlike = [f"{k}: {state[k]!r} in the state, {own[k]!r} here" for k in list(own)[3:] if state[k] != own[k]]
        if unlike:
            raise ValueError(
                f"{self.what}: the state is of a loader with other batches ({'; '.join(unlike)}), where its position "
                "means something else; make the loader as it was then"
            )
        place = Place(int(state["epoch"]), int(state["batch"]))
        if place.epoch < 0 or not 0 <= place.batch <= self.order.per_epoch:
            raise ValueError(
                f"{self.what}: the state says batch {place.batch} of epoch {place.epoch}, but an epoch has "
                f"{self.order.per_epoch} batches here"
            )
        return self.order.normal(place)

    state_keys: tuple[str, ...] = ("epoch", "batch", "seed", "shuffle", "batch_size", "records")

    def run(self, place: Place, channel: str, alive: Callable[[], bool], ahead: bool) -> Iterator[tuple[Any, Place]]:
        """Batches from a place on, each with the place behind it."""
        del ahead
        while not self.order.ended(place):
            with self.lock:  # a reader that was left behind may still be in the user's code
                if not alive():
                    return
                if self.leaves is None:
                    self.leaves = self._agreed(place, channel)
                loaded = self._load(place, self.leaves)
            place = self.order.after(place)
            yield self._placed(loaded), place  # no name for the batch here: it would keep its memory

    def _agreed(self, place: Place, channel: str) -> list[Leaf]:
        leaves, everyone = tell(
            channel,
            lambda: self._structure(self._own_row(place)),
            lambda made: {"facts": self._words(made)},
            check=self.check,
        )
        if everyone is not None:
            same_facts(dict(enumerate(everyone)), self.what)
        return leaves

    def _own_row(self, place: Place) -> int:
        """A record of the batch that this process needs anyway (as a rule: dims aren't known yet)."""
        rows = self.order.rows(place)
        given = _rows_cut(next(iter(layouts_in(self.placements, self.mesh))))
        number = given.blocks[owners_of(self.mesh).index(jax.process_index())][0]
        start = number * (self.order.batch_size // given.counts[0])
        return int(rows[start] if start < len(rows) else rows[0])

    def _structure(self, row: int) -> list[Leaf]:
        """The leaves of a batch: their values are one record, broadcast, which takes no memory."""
        batch = self.order.batch_size
        example = self.rows.example(row)
        stacked = jax.tree.map(lambda v: np.broadcast_to(np.asarray(v), (batch, *np.shape(v))), example)
        leaves = placed_leaves(stacked, self.placements, self.mesh, self.what)
        for leaf in leaves:
            for dim, (size, count) in enumerate(zip(leaf.value.shape, cut_of(leaf.layout).counts, strict=True)):
                if size % count:
                    raise ValueError(
                        f"{self.what}: dim {dim} of {said(leaf.name)} has {size} elements, which the {count} blocks "
                        "that the mesh cuts it into don't divide"
                        + ("; " + _multiples(size, count) if dim == 0 else "; pad or crop it, or cut another dim")
                    )
        return leaves

    def _words(self, leaves: list[Leaf]) -> dict[str, str]:
        return {
            said(leaf.name): f"{dtype_of(leaf.value)}{list(leaf.value.shape)}, placed {leaf.layout.spec}"
            for leaf in leaves
        }

    def _check_batch_size(self) -> None:
        for layout in layouts_in(self.placements, self.mesh):
            count = _rows_cut(layout).counts[0]
            if self.order.batch_size % count:
                raise ValueError(
                    f"{self.what}: batch_size={self.order.batch_size} is not divided by the {count} blocks that the "
                    f"mesh {dict(self.mesh.shape)} cuts the batch into; {_multiples(self.order.batch_size, count)}"
                )

    def _load(self, place: Place, leaves: list[Leaf]) -> list[Any]:
        """What ``put`` takes for the batch there."""
        rows = self.order.rows(place)
        mine = [p for p, process in enumerate(owners_of(self.mesh)) if process == jax.process_index()]
        needed: set[int] = set()
        for leaf in leaves:
            given = cut_of(leaf.layout)
            size = leaf.value.shape[0] // given.counts[0]
            for number in {given.blocks[p][0] for p in mine}:
                needed.update(rows[number * size : (number + 1) * size].tolist())
        reader = self.rows.reader(sorted(needed))
        arrays: list[Any] = []
        for number, leaf in enumerate(leaves):
            sizes = tuple(n // c for n, c in zip(leaf.value.shape, cut_of(leaf.layout).counts, strict=True))
            arrays.append(
                (leaf.layout, sizes, functools.partial(_block, reader, number, leaf.value.dtype, rows, sizes))
            )
        if self.uneven == "pad":
            layout, sizes = mask_layout(leaves[0].layout), arrays[0][1][:1]
            arrays.append((layout, sizes, functools.partial(_mask, len(rows), sizes[0])))
        return arrays

    def _placed(self, arrays: list[Any]) -> Any:
        found = put(arrays)
        batch = jax.tree.unflatten(self.rows.treedef, found[: len(arrays) - (self.uneven == "pad")])
        return (batch, found[-1]) if self.uneven == "pad" else batch


def _array_like(column: Any) -> Any:
    lazy = hasattr(column, "shape") and hasattr(column, "dtype") and not isinstance(column, jax.Array)
    return column if lazy else np.asarray(column)


def _block(
    reader: Reader, leaf: int, dtype: Any, rows: np.ndarray, sizes: tuple[int, ...], block: parts.Block
) -> np.ndarray:
    own = rows[block[0] * sizes[0] : (block[0] + 1) * sizes[0]]
    rest = tuple(slice(k * size, (k + 1) * size) for k, size in zip(block[1:], sizes[1:], strict=True))
    if len(own) == sizes[0]:
        return reader(leaf, own, rest)
    found = np.zeros(sizes, dtype)
    if len(own):
        found[: len(own)] = reader(leaf, own, rest)
    return found


def _mask(real: int, size: int, block: parts.Block) -> np.ndarray:
    return np.arange(block[0] * size, (block[0] + 1) * size) < real


def _rows_cut(layout: Layout) -> parts.Cut:
    """How dim 0 is cut, before the rank is known: dims counted from the end are looked at later."""
    named = zip(layout.mesh.axis_names, layout.placements, strict=True)
    return parts.cut(dict(layout.mesh.shape), {0: [axis for axis, placement in named if placement == Shard(0)]}, 1)


def _multiples(size: int, count: int) -> str:
    below = size // count * count
    return f"give a multiple of {count}, e.g. " + (f"{below} or {below + count}" if below else f"{count}")
