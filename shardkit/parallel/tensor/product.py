"""A product of activations and a weight that devices share out: each multiplies what it holds of the weight.

The product is said in letters, as for einsum: lhs "bsf", rhs "fh", out "bsh". The mesh axis cuts one letter of the
weight. If it's a letter of the result (a column layer) every device needs all of lhs, and the result is cut; if it's
summed over (a row layer) lhs is cut, and the devices' results are added up; if it's in all three (a batched product)
nothing travels.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Protocol

import jax
from jax import lax
from jax import numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardkit import scopes
from shardkit.meshes import manual_axes, resolve_mesh
from shardkit.parallel.tensor.entering import enter_once, sum_dtype
from shardkit.placements import axes_size, entry_names
from shardkit.spatial.operands import axis_entries, explicit_axes, in_manual_region
from shardkit.varying import varying


class Multiply(Protocol):
    """The product itself, of whole operands or of blocks. Hashable (it keys a compilation cache)."""

    @property
    def preferred_element_type(self) -> Any: ...

    def __call__(self, lhs: Any, rhs: Any, /) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Dot:
    """``lax.dot_general`` with everything said but its operands."""

    dimension_numbers: Any
    precision: Any = None
    preferred_element_type: Any = None

    def __call__(self, lhs: Any, rhs: Any) -> Any:
        return lax.dot_general(
            lhs, rhs, self.dimension_numbers, self.precision, preferred_element_type=self.preferred_element_type
        )


@dataclasses.dataclass(frozen=True)
class Einsum:
    """``jnp.einsum`` with everything said but its operands."""

    letters: str
    precision: Any = None
    preferred_element_type: Any = None

    def __call__(self, lhs: Any, rhs: Any) -> Any:
        return jnp.einsum(
            self.letters, lhs, rhs, precision=self.precision, preferred_element_type=self.preferred_element_type
        )


@dataclasses.dataclass(frozen=True)
class Letters:
    """What each dim of a product is.

    Attributes:
      lhs, rhs, out: one letter a dim.
    """

    lhs: str
    rhs: str
    out: str

    @property
    def contracted(self) -> int:
        """How many letters are summed over."""
        return sum(c not in self.out for c in self.lhs)

    @classmethod
    def of_dot(cls, dimension_numbers: Any, lhs_ndim: int, rhs_ndim: int) -> Letters:
        """Of ``lax.dot_general``: batch dims, then what's left of lhs, then what's left of rhs.

        >>> Letters.of_dot((((2,), (0,)), ((), ())), 3, 2)
        Letters(lhs='abc', rhs='cd', out='abd')
        """
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
        names = iter("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
        lhs = [next(names) for _ in range(lhs_ndim)]
        shared = dict(zip((*rhs_contract, *rhs_batch), (*lhs_contract, *lhs_batch), strict=True))
        rhs = [lhs[shared[d]] if d in shared else next(names) for d in range(rhs_ndim)]
        out = [lhs[d] for d in lhs_batch]
        out += [c for d, c in enumerate(lhs) if d not in lhs_contract and d not in lhs_batch]
        out += [c for d, c in enumerate(rhs) if d not in shared]
        return cls("".join(lhs), "".join(rhs), "".join(out))

    @classmethod
    def of_einsum(cls, text: str, lhs_ndim: int, rhs_ndim: int) -> Letters:
        """Of two operands and an explicit result; an ellipsis stands for dims of lhs (and of the result).

        >>> Letters.of_einsum("...f,fh->...h", 3, 2)
        Letters(lhs='ABf', rhs='fh', out='ABh')
        """
        operands, out = text.replace(" ", "").split("->")
        lhs, rhs = operands.split(",")
        free = (c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz" if c not in text)
        extra = "".join(next(free) for _ in range(lhs_ndim - len(lhs.replace("...", "")))) if "..." in lhs else ""
        return cls(lhs.replace("...", extra), rhs, out.replace("...", extra))


@dataclasses.dataclass(frozen=True)
class Shared:
    """How a product is shared out.

    Attributes:
      axis: the mesh axis.
      letter: what it cuts of the weight.
      sequence: a letter of activations that it cuts between layers (sequence parallelism): lhs of a column layer is
        put together along it, the result of a row layer is cut. None: they're whole there.
      batch: mesh axes that cut dim 0 of lhs, where types don't say so: the compiler would put the batch together for
        collectives along the sequence. Left aside where they don't divide it.
    """

    axis: str
    letter: str
    sequence: str | None = None
    batch: tuple[str, ...] = ()


def share_product(
    multiply: Multiply, letters: Letters, shared: Shared, lhs: Any, rhs: Any, mesh: Mesh | AbstractMesh
) -> Any:
    """``multiply(lhs, rhs)`` with the weight ``rhs`` shared out over a mesh axis.

    Column: nothing travels forward (with ``sequence``: one all-gather of lhs), backward one all-reduce (or
    reduce-scatter) of lhs's gradient, together for all products of the same lhs. Row: one all-reduce of the result
    (with ``sequence``: a reduce-scatter) forward, nothing (an all-gather) backward.

    Inside a region where the axis is manual, ``rhs`` and what's cut of ``lhs`` are this device's blocks.
    """
    axis, column = shared.axis, shared.letter in letters.out and shared.letter not in letters.lhs
    mesh = resolve_mesh(mesh, what="a tensor-parallel layer")
    preferred = multiply.preferred_element_type
    sums = sum_dtype(jnp.result_type(lhs, rhs) if preferred is None else preferred, mesh)
    if axis in manual_axes():
        held, here = rhs.shape[letters.rhs.index(shared.letter)], None
        if shared.letter in letters.lhs:
            here = lhs.shape[letters.lhs.index(shared.letter)]
        if here not in (None, held):
            raise ValueError(
                f"a row layer in a manual region of {axis!r} takes this device's {held} input features, got {here}; "
                "put a column layer before it, or cut its input"
            )
        return _Local(multiply, letters, shared, sums)(lhs, rhs)
    if mesh.shape[axis] == 1 and axis not in explicit_axes(mesh):
        return multiply(lhs, rhs)
    typed = explicit_axes(mesh)
    lhs_entries: list[Any] = axis_entries(lhs) if typed else [None] * lhs.ndim
    rhs_entries: list[Any] = axis_entries(rhs) if typed else [None] * rhs.ndim
    batch = _batch_axes(letters, shared, lhs, mesh) if not typed else ()
    if batch:
        lhs_entries[0] = batch
    lhs_entries, rhs_entries = _entries(letters, shared, lhs_entries, rhs_entries)
    placed = dict(zip(letters.rhs, rhs_entries, strict=True)) | {
        c: e for c, e in zip(letters.lhs, lhs_entries, strict=True) if e is not None
    }
    if column:
        at = None if shared.sequence is None else letters.lhs.index(shared.sequence)
        lhs = enter_once(lhs, axis, lhs_entries, at, mesh)
        lhs_spec = PartitionSpec(axis, *lhs_entries)
        if shared.sequence is not None:
            placed[shared.sequence] = _without(placed.get(shared.sequence), axis)
    else:
        lhs_spec = PartitionSpec(*lhs_entries)
        if shared.sequence is not None and shared.letter not in letters.out:
            placed[shared.sequence] = _with(placed.get(shared.sequence), axis)
    region = _Region(
        multiply=_Local(
            multiply, letters, dataclasses.replace(shared, sequence=None if column else shared.sequence), sums
        ),
        entered=column,
        mesh=mesh,
        axis_names=frozenset({axis, *typed, *batch}),
        in_specs=(lhs_spec, PartitionSpec(*rhs_entries)),
        out_spec=PartitionSpec(*(placed.get(c) for c in letters.out)),
        reshard=bool(typed),
        nested=in_manual_region(),
    )
    return _run(region, lhs, rhs)


def _entries(letters: Letters, shared: Shared, lhs: list[Any], rhs: list[Any]) -> tuple[list[Any], list[Any]]:
    """Where operands live in the region: as they are over other (Explicit) axes, ours as the product wants it."""
    axis = shared.axis
    lhs = [_without(e, axis) for e in lhs]
    # Contracted letters may be cut by our axis only; others of the weight by axes that cut nothing of lhs.
    lhs = [e if c in letters.out else None for c, e in zip(letters.lhs, lhs, strict=True)]
    used = {n for e in lhs for n in entry_names(e)} | {axis}
    rhs = [None if c in letters.lhs or set(entry_names(e)) & used else e for c, e in zip(letters.rhs, rhs, strict=True)]
    rhs[letters.rhs.index(shared.letter)] = axis
    if shared.letter in letters.lhs:
        lhs[letters.lhs.index(shared.letter)] = axis
    return lhs, rhs


def _batch_axes(letters: Letters, shared: Shared, lhs: Any, mesh: Any) -> tuple[str, ...]:
    """Of ``shared.batch`` those that the region takes over from the compiler."""
    if shared.sequence is None or not letters.lhs or letters.lhs[0] in (shared.sequence, shared.letter):
        return ()
    free = tuple(n for n in shared.batch if n in mesh.axis_names and n not in manual_axes() and n != shared.axis)
    kept = letters.lhs[0] in letters.out and lhs.shape[0] % axes_size(mesh, free) == 0
    return free if kept else ()


def _without(entry: Any, axis: str) -> Any:
    left = tuple(n for n in entry_names(entry) if n != axis)
    return left[0] if len(left) == 1 else left or None


def _with(entry: Any, axis: str) -> Any:
    names = (*entry_names(_without(entry, axis)), axis)
    return names[0] if len(names) == 1 else names


@dataclasses.dataclass(frozen=True)
class _Local:
    """What a device does with its blocks."""

    multiply: Multiply
    letters: Letters
    shared: Shared
    sums: Any  # the dtype that results are added up in

    def __call__(self, lhs: Any, rhs: Any) -> Any:
        letters, shared = self.letters, self.shared
        if shared.letter in letters.out:
            if shared.sequence is not None and shared.letter not in letters.lhs:
                with scopes.scope(scopes.RESHARD):
                    lhs = lax.all_gather(lhs, shared.axis, axis=letters.lhs.index(shared.sequence), tiled=True)
            return self.multiply(lhs, rhs)
        out = self.multiply(lhs, rhs)
        with scopes.scope(scopes.REDUCTION):
            wide = out.astype(self.sums)
            if shared.sequence is None:
                return lax.psum(wide, shared.axis).astype(out.dtype)
            wide, dim = varying(wide, (shared.axis,)), letters.out.index(shared.sequence)
            return lax.psum_scatter(wide, shared.axis, scatter_dimension=dim, tiled=True).astype(out.dtype)


@dataclasses.dataclass(frozen=True)
class _Region:
    multiply: _Local
    entered: bool
    mesh: Any
    axis_names: frozenset[str]
    in_specs: tuple[PartitionSpec, PartitionSpec]
    out_spec: PartitionSpec
    reshard: bool
    nested: bool


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _run(region: _Region, lhs: Any, rhs: Any) -> Any:
    if region.reshard:
        lhs, rhs = (
            jax.sharding.reshard(x, NamedSharding(region.mesh, spec))
            for x, spec in zip((lhs, rhs), region.in_specs, strict=True)
        )

    def body(lhs: Any, rhs: Any) -> Any:
        return region.multiply(lhs.squeeze(0) if region.entered else lhs, rhs)

    if region.nested:
        body = jax.checkpoint(body)  # see spatial/convolution/region.py: residuals may not leave a nested region
    return jax.shard_map(
        body,
        mesh=region.mesh,
        in_specs=region.in_specs,
        out_specs=region.out_spec,
        axis_names=set(region.axis_names),
    )(lhs, rhs)
