"""Products with a known matrix of few entries a column, along a blocked dim: resizing, lists of positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import Array
from jax import numpy as jnp

from shardkit.spatial.regions.block import ANYTHING, Block, CutDim, Cuts, cleared, cropped, out_of_chunks
from shardkit.spatial.regions.graph import Node, known
from shardkit.spatial.regions.margins import NONE
from shardkit.spatial.regions.step import OWN, Ensure, Held, Link, Step, Wants
from shardkit.spatial.resizing.plan import plan_dim
from shardkit.spatial.resizing.resize import Resampler
from shardkit.spatial.resizing.weights import Band


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A matrix ``[size, out]`` by its band; hashable, for what is planned of it is kept.

    Attributes:
      size, out: its shape.
      method: "nearest" where every output is one input as it is.
      starts, counts, weights: as in ``Band``, as bytes.
    """

    size: int
    out: int
    method: str
    starts: bytes
    counts: bytes
    weights: bytes
    dtype: str

    @classmethod
    def of(cls, matrix: np.ndarray) -> Matrix:
        """A matrix's band: from the first entry of a column that isn't zero to the last."""
        real = matrix != 0
        some = real.any(0)
        first = np.where(some, real.argmax(0), 0)
        last = np.where(some, len(matrix) - real[::-1].argmax(0), 0)
        taps = max(1, int((last - first).max()))
        rows = np.minimum(first[:, None] + np.arange(taps), len(matrix) - 1)
        weights = np.where(np.arange(taps) < (last - first)[:, None], matrix.T[np.arange(len(rows))[:, None], rows], 0)
        return cls._make(matrix.shape, "matrix", first, last - first, weights.astype(matrix.dtype))

    @classmethod
    def taking(cls, index: np.ndarray, size: int) -> Matrix:
        """The matrix that takes elements."""
        return cls._make(
            (size, len(index)), "nearest", index, np.ones_like(index), np.ones((len(index), 1), np.float32)
        )

    @classmethod
    def _make(cls, shape: Any, method: str, starts: Any, counts: Any, weights: np.ndarray) -> Matrix:
        first, many = (np.asarray(a, np.int64).tobytes() for a in (starts, counts))
        return cls(shape[0], shape[1], method, first, many, np.ascontiguousarray(weights).tobytes(), str(weights.dtype))

    @property
    def band(self) -> Band:
        """Starts, counts and weights as arrays."""
        starts, counts = (np.frombuffer(b, np.int64) for b in (self.starts, self.counts))
        return Band(starts, counts, np.frombuffer(self.weights, self.dtype).reshape(self.out, -1))

    def worthwhile(self, shards: int) -> bool:
        """Less travels than if every device got the whole dim."""
        exchange = plan_dim(self, shards).exchange
        return exchange.received < (shards - 1) * exchange.block or shards == 1


def matrix_step_run(matrix: Matrix, cut: CutDim, dim: int, precision: Any) -> Callable[[Any, Array], Array]:
    """What a device does: its block along ``dim`` in, its block of the product out."""
    step = Resampler(dim, cut.axis_name, cut.shards, matrix)

    def run(here: Any, x: Array) -> Array:
        index = here.where(cut.axes)
        return step.weigh(step.fetch(x, index), index, np.dtype(x.dtype), precision)

    return run


def banded(node: Node, lies: Sequence[Cuts]) -> Step | None:
    """``dot_general`` of a blocked dim with a matrix that depends on no input."""
    contracted, batch = node.params["dimension_numbers"]
    at = next((i for i, c in enumerate(lies) if c), None)
    if at is None or lies[1 - at] or any(batch) or len(contracted[0]) != 1:
        return None
    dim, rows = contracted[at][0], contracted[1 - at][0]
    if dim not in lies[at] or len(node.inputs[1 - at].shape) != 2:
        return None
    entries = known(node.inputs[1 - at])
    if entries is None or (not np.issubdtype(entries.dtype, np.inexact) and entries.dtype.kind != "V"):
        return None
    cut = lies[at][dim]
    matrix = Matrix.of(
        np.asarray(entries, np.float64 if entries.dtype == np.float64 else np.float32).T
        if rows
        else np.asarray(entries, np.float64 if entries.dtype == np.float64 else np.float32)
    )
    if not matrix.worthwhile(cut.shards):
        return None
    ndim = len(node.inputs[at].shape)
    last = ndim - 1 if at == 0 else 0  # where the product puts the matrix's columns
    order = [d for d in range(ndim) if d != dim]
    order.insert(last, dim)
    result = {order.index(d): (dataclasses.replace(c, size=matrix.out) if d == dim else c) for d, c in lies[at].items()}
    work = matrix_step_run(matrix, cut, dim, node.params["precision"])
    dtype = node.outputs[0].aval.dtype

    def run(here: Any, operands: Sequence[Any], wants: Wants, ensure: Ensure) -> Sequence[Held]:
        x = operands[at]
        assert isinstance(x, Block)
        x = cleared(out_of_chunks(cropped(x, {}), here.where), here.where)
        out = jnp.transpose(work(here, x.array), order).astype(dtype)
        return [Block(out, result, dict.fromkeys(result, NONE), dict.fromkeys(result, ANYTHING))]

    links: list[tuple[Link, ...]] = [(), ()]
    links[at] = tuple(Link(d, order.index(d), c.shards) for d, c in lies[at].items())
    return Step(node, OWN, node.inputs, (result,), tuple(links), run, node.outputs, "a matrix of few entries a column")
