"""What stands in a layer for ``lax.dot_general`` or ``jnp.einsum``: its own code then multiplies a shared weight."""

from __future__ import annotations

import dataclasses
from typing import Any

from shardkit.parallel.tensor.entering import once
from shardkit.parallel.tensor.product import Dot, Einsum, Letters, Multiply, Shared, share_product
from shardkit.placements import AnyMesh


@dataclasses.dataclass(frozen=True)
class Sharing:
    """How a layer's products are shared out.

    Attributes:
      axis: the mesh axis.
      mesh: the mesh.
      path: the layer's, for messages.
      sequence: the dim of activations that the axis cuts between layers; None: they're whole there.
      batch: mesh axes that cut their dim 0.
    """

    axis: str
    mesh: AnyMesh
    path: str
    sequence: int | None = None
    batch: tuple[str, ...] = ()

    def multiply(self, product: Multiply, letters: Letters, rhs_dim: int, lhs: Any, rhs: Any) -> Any:
        """``product`` with dim ``rhs_dim`` of the weight ``rhs`` cut."""
        sequence = None
        # An input without a sequence (pooled, of one example's time) is whole.
        if self.sequence is not None and lhs.ndim > self.sequence + letters.contracted:
            sequence = self._sequence_letter(letters, lhs.shape)
        shared = Shared(self.axis, letters.rhs[rhs_dim], sequence, self.batch)
        return share_product(product, letters, shared, lhs, rhs, self.mesh)

    def _sequence_letter(self, letters: Letters, shape: tuple[int, ...]) -> str:
        dim, size = self.sequence, self.mesh.shape[self.axis]
        assert dim is not None
        if dim >= len(letters.lhs) or letters.lhs[dim] not in letters.out or letters.lhs[dim] in letters.rhs:
            raise ValueError(
                f"layer {self.path!r}: SequenceParallel(dim={dim}) names a dim that its input of shape {shape} doesn't "
                "have, or that the layer multiplies; dim is that of the sequence"
            )
        if shape[dim] % size:
            raise ValueError(
                f"layer {self.path!r}: SequenceParallel cuts dim {dim} of shape {shape} over mesh axis {self.axis!r}, "
                f"but {size} devices don't divide {shape[dim]}; pad the sequence to a multiple, or leave the plan out"
            )
        return letters.lhs[dim]


@dataclasses.dataclass(frozen=True)
class ParallelDot:
    """In place of ``lax.dot_general``: activations times a weight of which dim ``rhs_dim`` is cut."""

    sharing: Sharing
    rhs_dim: int

    def __call__(
        self,
        lhs: Any,
        rhs: Any,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> Any:
        _no_out_sharding(self.sharing.path, out_sharding)
        (contract, batch) = (tuple(tuple(int(d) for d in dims) for dims in pair) for pair in dimension_numbers)
        product = Dot((contract, batch), precision, preferred_element_type)
        return self.sharing.multiply(
            product, Letters.of_dot((contract, batch), lhs.ndim, rhs.ndim), self.rhs_dim, lhs, rhs
        )


@dataclasses.dataclass(frozen=True)
class ParallelEinsum:
    """In place of ``jnp.einsum`` of two operands, the second a weight of which ``rhs_dim`` is cut."""

    sharing: Sharing
    rhs_dim: int

    def __call__(
        self,
        text: str,
        lhs: Any,
        rhs: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> Any:
        _no_out_sharding(self.sharing.path, out_sharding)
        letters = Letters.of_einsum(text, lhs.ndim, rhs.ndim)
        product = Einsum(f"{letters.lhs},{letters.rhs}->{letters.out}", precision, preferred_element_type)
        return self.sharing.multiply(product, letters, self.rhs_dim, lhs, rhs)


def column_letter(letters: Letters) -> str | None:
    """What a column plan cuts of an einsum's weight: its first letter that only it gives to the result, else one of all
    three operands.

    >>> column_letter(Letters.of_einsum("bsd,dnh->bsnh", 3, 3))
    'n'
    """
    own = [c for c in letters.rhs if c in letters.out and c not in letters.lhs]
    common = [c for c in letters.rhs if c in letters.out and c in letters.lhs]
    return (own or common or [None])[0]


def row_letter(letters: Letters) -> str | None:
    """What a row plan cuts: the first letter that is summed over.

    >>> row_letter(Letters.of_einsum("bsnh,nhd->bsd", 4, 3))
    'n'
    """
    return next((c for c in letters.rhs if c in letters.lhs and c not in letters.out), None)


def cast_once(x: Any, dtype: Any) -> Any:
    """``x.astype(dtype)``, one array for all layers that read ``x``: they then enter together."""
    if dtype is None or x.dtype == dtype:
        return x
    return once(x, ("cast", str(dtype)), lambda x: x.astype(dtype))


def _no_out_sharding(path: str, out_sharding: Any) -> None:
    if out_sharding is not None:
        raise ValueError(
            f"layer {path!r} was called with out_sharding={out_sharding}, but its plan says where its result lives; "
            "leave out_sharding out, or the plan"
        )
