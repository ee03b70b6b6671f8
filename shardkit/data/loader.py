"""``DataLoader`` and ``shard_dataloader``: global batches, made ahead, at a position that can be kept."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from shardkit.data.batch import check_present
from shardkit.data.batches import Batches
from shardkit.data.leaves import mesh_for
from shardkit.data.order import Order
from shardkit.data.prefetch import Ahead, Shelf
from shardkit.data.records import Columns, Items, Records
from shardkit.data.settling import same_facts
from shardkit.data.telling import tell
from shardkit.hosts import progress
from shardkit.hosts.digests import digest_of_text

WHAT = "shard_dataloader"

_numbers = itertools.count()


def shard_dataloader(
    iterable: Any,
    placements: Any,
    mesh: Mesh | None = None,
    *,
    batch_size: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
    epochs: int | None = 1,
    uneven: str = "error",
    prefetch: int = 2,
    check: bool = True,
) -> DataLoader:
    """Global batches on a mesh, loaded and placed ahead of the step that uses them.

    Two kinds of input:

    - **Records** (with ``batch_size``): a tree of arrays with equal first dims (a dict, a tuple, one array), or
      anything with ``len`` and ``[number]`` that gives a tree a record (a list, a grain or torch-style data source),
      which are stacked. Batches follow from the seed and the epoch alone, whatever the number of processes and devices;
      of each, a process loads the records of which its devices hold something, and passes on the parts that they hold.
      Epoch ``e`` is in the order ``np.random.default_rng([seed, e]).permutation(len(records))`` (8 bytes a record in
      each process). Records are read one after another; to read with several workers, let grain make the batches. An
      error of the data set is raised in its process alone.
    - **An iterator of batches** (without): a grain loader or dataset, a generator, a torch-style loader, a list of
      batches. Each process has its own and gives its part of each batch, as ``shard_batch`` takes it.

    Every process must make its loaders in the same order, and take from them, close them and set their state behind
    the same batch.

    Args:
      iterable: records, or batches.
      placements: as ``shard_batch`` takes them, of a batch.
      mesh: else that of a sharding among the placements, or the ambient one.
      batch_size: rows of the global batch.
      shuffle: records in another order each epoch.
      seed: of the shuffling, at least 0.
      epochs: how often all records come; None for ever.
      uneven: what a last batch that isn't full, or iterators that end at different times, come to. "error": refused
        (records: at once). "drop": left out; with iterators, the first that ends ends all, and so is a last batch whose
        rows don't come out even. "pad": each batch is ``(batch, mask)``, filled up with rows of zeros where the mask is
        False; no batch has fewer rows than one before it, so that a step is compiled once.
      prefetch: batches that are on the devices before they're asked for, in a thread. 0: made when asked for.
      check: whether processes tell each other what they have: with records when the loader is made and at the first
        batch, with iterators each batch (in the thread).

    Returns:
      A ``DataLoader``.

    Raises:
      ValueError: sizes, options or placements that don't fit, a Partial, no mesh; of what an iterator gives, in
        ``next``.
      TypeError: neither records nor batches, a leaf that isn't numeric.
      ProcessMismatchError: processes differ; it says who and in what.

    Example:
      >>> import numpy as np, shardkit as sk
      >>> from shardkit.data import shard_dataloader
      >>> mesh = sk.make_mesh({"dp": 1})
      >>> data = {"x": np.arange(12.0).reshape(6, 2), "y": np.arange(6)}
      >>> with shard_dataloader(data, {"dp": sk.Shard(0)}, mesh, batch_size=2, shuffle=True) as loader:
      ...     [batch["x"].shape for batch in loader], loader.position
      ([(2, 2), (2, 2), (2, 2)], 3)
    """
    channel = f"{WHAT} {next(_numbers)}"

    def make() -> Records | Batches:
        if uneven not in ("error", "pad", "drop"):
            raise ValueError(f'{WHAT}: uneven={uneven!r} is unknown; use "error", "pad" or "drop"')
        if _count(prefetch) is None:
            raise ValueError(f"{WHAT}: prefetch={prefetch!r} must be an integer of at least 0")
        where = mesh_for(mesh, placements, WHAT)
        check_present(where, WHAT)
        if batch_size is None:
            _check_iterable(iterable, shuffle, seed, epochs)
            return Batches(iterable, placements, where, uneven=uneven, check=check, what=WHAT)
        rows = _rows(iterable)
        order = _order(len(rows), batch_size, shuffle, seed, epochs, uneven)
        return Records(rows, placements, where, order, uneven=uneven, check=check, what=WHAT)

    source, everyone = tell(channel, make, lambda made: {"facts": made.facts}, check=check)
    if everyone is not None:
        same_facts(dict(enumerate(everyone)), WHAT)
    return DataLoader(source, prefetch, channel)


class DataLoader:
    """Batches of global arrays, one after another; ``sk.shard_dataloader`` makes it.

    Its own iterator: it goes on where it was, and gives nothing more at its end (``epochs=`` says how often records
    come; ``set_state`` goes back). An error of the dataset comes out of ``next`` with the traceback of the thread,
    again and again until a state is set.

    Raises:
      ValueError: in ``next`` and ``set_state``, after ``close``.

    Example:
      >>> import numpy as np, shardkit as sk
      >>> from shardkit.data import shard_dataloader
      >>> loader = shard_dataloader(np.arange(8), {"dp": sk.Shard(0)}, sk.make_mesh({"dp": 1}), batch_size=2)
      >>> _ = next(loader)
      >>> state = loader.get_state()  # keep it beside the checkpoint
      >>> loader.set_state(state)
      >>> print(next(loader))
      [2 3]
      >>> loader.close()
    """

    def __init__(self, source: Records | Batches, prefetch: int, channel: str):
        self._source: Any = source
        self._prefetch = operator.index(prefetch)
        self._channel = channel
        self._place = source.first()
        self._items: Any = None
        self._runs = 0
        self._failed: Exception | None = None
        self._closed = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._closed:
            raise ValueError(f"{WHAT}: the loader is closed; make another one")
        if self._failed is not None:
            raise self._failed
        if self._items is None:
            self._items = self._begin()
        try:
            batch, self._place = next(self._items)
        except StopIteration:
            raise
        except Exception as error:
            self._failed = error
            raise
        except BaseException:  # the user's Ctrl-C: what was being made is lost, the position isn't
            if not self._prefetch:
                self._stop()
            raise
        progress("batch", self.position)
        return batch

    def __len__(self) -> int:
        """Batches in all, from the very first, where that's known."""
        return len(self._source)

    @property
    def position(self) -> int:
        """Batches delivered, from the very first: those made ahead don't count."""
        return self._source.position(self._place)

    def get_state(self) -> dict[str, Any]:
        """The position, as JSON can hold it: the next batch after ``set_state`` is the one that's next now.

        The same in all processes. With records it holds for any number of processes and devices. With iterators all
        processes must call it together: it holds what the iterator of each says of itself (``get_state``, as grain's
        have). Those without are restarted, and as many batches skipped, which takes the time of loading them.

        Returns:
          A dict of numbers, text, lists and dicts, to be kept beside a checkpoint.

        Raises:
          ProcessMismatchError: with iterators, processes were delivered different numbers of batches.
        """
        return self._source.state_of(self._place, f"{self._channel} get_state")

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where ``get_state`` was called; what was made ahead is dropped.

        Args:
          state: of a loader of the same records and batches, or iterators of as many processes.

        Raises:
          ValueError: a state of other records, batch size, order, or number of processes; it lists what differs.
          ProcessMismatchError: processes were given different states.
        """

        def read() -> Any:
            if self._closed:
                raise ValueError(f"{WHAT}: the loader is closed; make another one")
            keys = {"kind", *self._source.state_keys}
            own = "records" if isinstance(self._source, Records) else "batches"
            if not isinstance(state, Mapping) or "kind" not in state:
                raise ValueError(f"{WHAT}: set_state takes what get_state gave, got {state!r}")
            if state["kind"] != own or set(state) != keys:
                raise ValueError(
                    f"{WHAT}: the state is of a loader of {state['kind']} ({sorted(state)}), but this one is of {own} "
                    f"({sorted(keys)})"
                )
            return self._source.place_of(state)

        def words(_: Any) -> dict[str, Any]:
            short = {k: v for k, v in state.items() if k != "states"}
            return {"facts": {**short, "states": digest_of_text(repr(state.get("states")))[:16]}}

        place, everyone = tell(f"{self._channel} set_state", read, words, check=self._source.check)
        if everyone is not None:
            same_facts(dict(enumerate(everyone)), f"{WHAT}: set_state")
        self._stop()
        self._failed = None
        self._place = place

    def close(self) -> None:
        """Ends the thread and drops what it made; a second time does nothing."""
        self._closed = True
        self._stop()

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self) -> Any:
        self._runs += 1
        channel = f"{self._channel} run {self._runs}"
        shelf = Shelf(self._prefetch)
        items = self._source.run(self._place, channel, shelf.is_open, self._prefetch > 0)
        return Ahead(items, shelf, f"shardkit {channel}") if self._prefetch else items

    def _stop(self) -> None:
        items, self._items = self._items, None
        if items is not None:
            items.close()


def _count(value: Any) -> int | None:
    """An integer of at least 0, or None."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    return operator.index(value) if operator.index(value) >= 0 else None


def _is_tree_of_arrays(source: Any) -> bool:
    if isinstance(source, np.ndarray | jax.Array | Mapping | tuple):
        return True
    # Dataclasses and other nodes known to JAX; a list is a sequence of records.
    return not isinstance(source, list) and source is not None and not jax.tree_util.all_leaves([source])


def _has_random_access(source: Any) -> bool:
    return hasattr(source, "__len__") and hasattr(source, "__getitem__")


def _rows(source: Any) -> Columns | Items:
    if _is_tree_of_arrays(source):
        return Columns(source, WHAT)
    if not _has_random_access(source):
        raise ValueError(
            f"{WHAT}: batch_size= is for records (a tree of arrays, or something with len() and [number]), but "
            f"{type(source).__name__} can only be iterated: it gives batches of its own; leave batch_size out"
        )
    return Items(source, WHAT)


def _order(records: int, batch_size: Any, shuffle: bool, seed: Any, epochs: Any, uneven: str) -> Order:
    size = _count(batch_size)
    if not size:
        raise ValueError(
            f"{WHAT}: batch_size={batch_size!r} must be an integer of at least 1: rows of the global batch"
        )
    if _count(seed) is None:
        raise ValueError(f"{WHAT}: seed={seed!r} must be an integer of at least 0")
    if epochs is not None and not _count(epochs):
        raise ValueError(f"{WHAT}: epochs={epochs!r} must be an integer of at least 1, or None for ever")
    if not records:
        raise ValueError(f"{WHAT}: there are no records")
    rest = records % size
    choices = f'uneven="pad" fills the last batch up, uneven="drop" leaves {rest} records out each epoch'
    if rest and uneven == "error":
        raise ValueError(f"{WHAT}: {records} records don't make whole batches of {size}; {choices}")
    times = None if epochs is None else operator.index(epochs)
    order = Order(records, size, bool(shuffle), operator.index(seed), times, short=uneven == "pad")
    if not order.per_epoch:
        raise ValueError(f"{WHAT}: {records} records don't make one batch of {size}; {choices}")
    return order


def _check_iterable(source: Any, shuffle: bool, seed: Any, epochs: Any) -> None:
    if _is_tree_of_arrays(source) or (_has_random_access(source) and not hasattr(type(source), "__iter__")):
        raise ValueError(
            f"{WHAT}: {type(source).__name__} holds records, so say batch_size= (rows of the global batch); batches "
            "already made come as a list or another iterable"
        )
    if not hasattr(source, "__iter__"):
        raise TypeError(
            f"{WHAT} takes records (with batch_size=) or an iterable of batches, got {type(source).__name__}"
        )
    given = [n for n, wrong in (("shuffle", shuffle), ("seed", seed != 0), ("epochs", epochs != 1)) if wrong]
    if given:
        raise ValueError(
            f"{WHAT}: {', '.join(given)} can't be had of an iterator, which gives its batches in its own order; "
            "shuffle and repeat its source, or give records and batch_size="
        )
    if hasattr(source, "__len__") and len(source) == 0:
        raise ValueError(f"{WHAT}: the iterable is empty")
