"""``shard_batch``: each process's own part of a batch, as one batch of global arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from shardkit._compat import spec_entries
from shardkit.data import parts
from shardkit.data.cuts import cut_of, grids_of, mesh_text, owners_of, shared_of
from shardkit.data.leaves import Leaf, dtype_of, mesh_for, placed_leaves
from shardkit.data.placing import put
from shardkit.data.settling import Sizes, settle
from shardkit.data.telling import tell
from shardkit.hosts.digests import digest_of_array
from shardkit.placements import Layout

WHAT = "shard_batch"


def shard_batch(
    local_batch: Any,
    placements: Any,
    mesh: Mesh | None = None,
    *,
    uneven: str = "error",
    check: bool = True,
) -> Any:
    """One batch of global arrays from the part that each process has loaded; nothing is communicated.

    Which part a process gives follows from the mesh: of a dim that is cut, what its devices hold; of any other dim, all
    of it. A dim cut only between devices of one process is whole in each process, processes whose devices hold the same
    (a tensor-parallel axis across processes) give the same data, and one process alone gives the whole batch. Where a
    process's blocks aren't neighbours (a mesh whose order interleaves processes), its part is its blocks one after
    another.

    Before anything is placed, processes tell each other what they have (about a millisecond, through JAX's
    coordination service: no device takes part), so that all of them raise where one differs.

    Args:
      local_batch: a tree of arrays, NumPy or JAX. Nested lists are trees, too. The arrays are copied: a buffer may be
        filled anew at once.
      placements: for every leaf the same (any form that ``sk.Layout`` takes), or a tree of such, which may end above
        the leaves. A mapping from mesh axes to placements is one form; any other goes by the parts of the batch:
        ``{"image": {"dp": sk.Shard(0)}, "scale": {}}``.
      mesh: else that of a ``Layout`` or ``NamedSharding`` among the placements, or the ambient one.
      uneven: "error" refuses a first dim that the mesh doesn't divide, or of which processes give unequal parts. "pad"
        fills each process's part up with zeros to the share of the fullest one. Other dims must always come out even.
      check: False leaves out what processes say to each other, for a loop whose batches are known to agree: then a
        difference shows as a hang or as wrong values, and with "pad" every part must need the same share. True asks
        that every process of the job calls this, each with devices on the mesh, and hashes what several processes hold
        (a second or two a GB).

    Returns:
      The same tree of ``jax.Array`` with NamedShardings. With "pad" ``(batch, mask)``: the mask is a bool array, one
      element a row, placed as the first dim of the first leaf that has one, and True where the row is real.

    Raises:
      ValueError: placements that don't fit; a Partial; sizes that don't come out even; no mesh.
      TypeError: a leaf that isn't numeric, or traced.
      ProcessMismatchError: processes differ in structure, dtypes, placements, mesh or sizes, or gave different data for
        a part that they all hold; it says who and in what. Or another process failed; it says why.

    Example:
      >>> import numpy as np, shardkit as sk
      >>> from shardkit.data import shard_batch
      >>> mesh = sk.make_mesh({"dp": 1})
      >>> batch = {"image": np.zeros((4, 8, 8, 3), np.float32), "label": np.arange(4, dtype=np.int32)}
      >>> shard_batch(batch, {"dp": sk.Shard(0)}, mesh)["image"].sharding.spec
      P('dp', None, None, None)
    """
    part, everyone = tell(
        WHAT,
        lambda: read_part(local_batch, placements, mesh, uneven, WHAT),
        lambda part: part.words,
        check=check,
    )
    said = dict(enumerate(everyone)) if everyone else {jax.process_index(): part.words}
    return put_part(part, part.settled(said))


@dataclasses.dataclass(frozen=True)
class Part:
    """What one process has of a batch."""

    leaves: tuple[Leaf, ...]
    treedef: Any
    mesh: Mesh
    uneven: str
    what: str
    structure: Any = None  # in words

    @property
    def cuts(self) -> list[parts.Cut]:
        return [cut_of(leaf.layout) for leaf in self.leaves]

    @functools.cached_property
    def words(self) -> dict[str, Any]:
        """What the other processes need to know of it."""
        facts: dict[str, Any] = {"mesh": mesh_text(self.mesh), "uneven": self.uneven}
        for leaf in self.leaves:
            spec = leaf.layout.spec_for(np.ndim(leaf.value))
            facts[f"batch{leaf.name}"] = f"{dtype_of(leaf.value)} of {np.ndim(leaf.value)} dims, placed {spec}"
        return {
            "facts": facts,
            "names": [f"batch{leaf.name}" for leaf in self.leaves],
            "shapes": [list(np.shape(leaf.value)) for leaf in self.leaves],
            "shared": [_shared(leaf, self.mesh) for leaf in self.leaves],
        }

    def settled(self, said: Mapping[int, Mapping[str, Any]], least: int = 0, ended: Sequence[int] = ()) -> Sizes:
        """The sizes of the whole, from the words of all."""
        owners = owners_of(self.mesh)
        return settle(said, self.cuts, owners, uneven=self.uneven, what=self.what, least=least, ended=ended)

    def emptied(self, sizes: Sizes) -> Part:
        """A part of the same structure without rows, of a process that has nothing any more."""
        leaves = []
        for leaf, block in zip(self.leaves, sizes.blocks, strict=True):
            grid = grids_of(leaf.layout)[jax.process_index()]
            rest = [size * len(held) for size, held in zip(block[1:], grid[1:], strict=True)]
            leaves.append(dataclasses.replace(leaf, value=np.zeros((0, *rest), dtype_of(leaf.value))))
        return dataclasses.replace(self, leaves=tuple(leaves))


def read_part(batch: Any, placements: Any, mesh: Mesh | None, uneven: str, what: str) -> Part:
    """A batch with placements for each leaf, as far as one process can check it."""
    if uneven not in ("error", "pad"):
        raise ValueError(f'{what}: uneven={uneven!r} is unknown; use "error" or "pad"')
    where = mesh_for(mesh, placements, what)
    check_present(where, what)
    leaves = tuple(placed_leaves(batch, placements, where, what))
    for leaf in leaves:
        grids_of(leaf.layout)  # refuses what makes no array
    rows = {f"batch{leaf.name}": np.shape(leaf.value)[0] for leaf in leaves if np.ndim(leaf.value)}
    if uneven == "pad" and len(set(rows.values())) > 1:
        raise ValueError(
            f'{what}: uneven="pad" fills up rows, of which all leaves must have equally many; got first dims {rows}'
        )
    return Part(leaves, jax.tree.structure(batch), where, uneven, what)


def check_present(mesh: Mesh, what: str) -> None:
    """Refuses a mesh on which this process has no device."""
    if jax.process_index() not in owners_of(mesh):
        raise ValueError(
            f"{what}: process {jax.process_index()} has no device on mesh {dict(mesh.shape)}, so it has no part in "
            "the batch; use a mesh of all processes, or check=False and call it where the mesh has devices only"
        )


def put_part(part: Part, sizes: Sizes) -> Any:
    """The global arrays; with "pad", and the mask."""
    arrays: list[Any] = []
    for leaf, block in zip(part.leaves, sizes.blocks, strict=True):
        arrays.append((leaf.layout, block, functools.partial(_block, leaf, block)))
    if part.uneven == "pad":
        first, block = next((leaf, b) for leaf, b in zip(part.leaves, sizes.blocks, strict=True) if b)
        real = Leaf("", np.ones(np.shape(first.value)[0], bool), mask_layout(first.layout))
        arrays.append((real.layout, block[:1], functools.partial(_block, real, block[:1])))
    found = put(arrays)
    batch = jax.tree.unflatten(part.treedef, found[: len(part.leaves)])
    return (batch, found[-1]) if part.uneven == "pad" else batch


def mask_layout(layout: Layout) -> Layout:
    """Of one element a row, placed as the rows are."""
    entries = spec_entries(layout.spec_for(layout.ndim))
    return Layout(layout.mesh, PartitionSpec(entries[0]))


def _block(leaf: Leaf, sizes: tuple[int, ...], block: parts.Block) -> np.ndarray:
    """A block of this process's part, copied, with zeros where the part is short of rows."""
    value = np.asarray(leaf.value)
    piece = value[parts.inside(block, grids_of(leaf.layout)[jax.process_index()], sizes)]
    found = np.zeros(sizes, dtype_of(value)) if piece.shape != sizes else np.empty(sizes, dtype_of(value))
    found[tuple(slice(0, n) for n in piece.shape)] = piece
    return found


def _shared(leaf: Leaf, mesh: Mesh) -> dict[str, str]:
    """Digests of the blocks that other processes' devices hold, too."""
    me = jax.process_index()
    among = [block for block, who in shared_of(leaf.layout).items() if me in who]
    if not among:
        return {}
    grid = grids_of(leaf.layout)[me]
    value = np.asarray(leaf.value)
    # Rounded up: rows that don't come out even are padded or refused later, alike in processes with the same rows.
    sizes = [-(-size // len(held)) for size, held in zip(value.shape, grid, strict=True)]
    value = value.astype(dtype_of(value), copy=False)
    return {str(block): digest_of_array(value[parts.inside(block, grid, sizes)])[:32] for block in among}
