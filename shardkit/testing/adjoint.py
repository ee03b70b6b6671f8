"""``assert_adjoint``: one linear map is the transpose of another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from shardkit.arrays.partial import is_whole
from shardkit.testing import closeness
from shardkit.testing.devices import entered
from shardkit.testing.held import read
from shardkit.testing.one_device import the_mesh
from shardkit.testing.values import name_of


def assert_adjoint(
    forward: Callable[..., Any], transpose: Callable[..., Any] | None, x: Any, y: Any, *, rtol: float | None = None
) -> None:
    """Checks ``<F x, y> = <x, F* y>``: what a data movement and its gradient must obey.

    Products are summed on the host in double precision, without conjugation: for complex numbers this is the transpose,
    which is what JAX's derivatives are. Cast to real yourself for the conjugate one. Source: R. Hewett, T. Grady,
    "A Linear Algebraic Approach to Model Parallelism in Deep Learning", https://arxiv.org/abs/2006.03108.

    Args:
      forward: a linear map.
      transpose: the map that should be its transpose. None: the one that ``jax.vjp`` makes of ``forward``.
      x, y: an argument of each: pytrees of arrays, placed anyhow. Take random numbers: ones and zeros hide errors.
      rtol: allowed difference, relative to ``|F x| |y|`` + ``|x| |F* y|``. None: that of the coarsest dtype.

    Raises:
      AssertionError: the products differ; or ``forward(x)`` isn't shaped as ``y``, or ``transpose(y)`` as ``x``.

    Example:
      >>> import jax.numpy as jnp
      >>> from shardkit import testing
      >>> x, y = jnp.arange(4.0), jnp.arange(4.0) ** 2
      >>> testing.assert_adjoint(lambda x: jnp.roll(x, 1), lambda y: jnp.roll(y, -1), x, y)
    """
    with entered(the_mesh(x, y)):
        if transpose is None:
            forth, pullback = jax.vjp(forward, x)
            back = pullback(y)[0]
        else:
            forth, back = forward(x), transpose(y)
        there = _pairs(forth, y, "forward(x)", "y")
        here = _pairs(x, back, "x", "transpose(y)")
    allowed = max((closeness.relative(dtype) for *_, dtype in there + here), default=0.0) if rtol is None else rtol
    (left, left_size), (right, right_size) = _product(there), _product(here)
    scale = left_size + right_size
    if not abs(left - right) <= allowed * scale:
        ratio = f", {left / right:.6g} times the other" if right else ""
        raise AssertionError(
            f"the maps aren't adjoint: <F x, y> = {left:.10g}, but <x, F* y> = {right:.10g}{ratio}; they differ by "
            f"{abs(left - right):.3g}, where {allowed:.3g} * {scale:.3g} is allowed"
        )


def _pairs(one: Any, two: Any, name: str, other: str) -> list[tuple[np.ndarray, np.ndarray, str]]:
    ours, theirs = (jax.tree.leaves_with_path(t, is_leaf=is_whole) for t in (one, two))
    if [path for path, _ in ours] != [path for path, _ in theirs]:
        found, wanted = ([name_of(path) for path, _ in leaves] for leaves in (ours, theirs))
        raise AssertionError(f"{name} has the leaves {found}, but {other} has {wanted}: they can't be multiplied")
    pairs = []
    for (path, a), (_, b) in zip(ours, theirs, strict=True):
        left, right = read(a), read(b)
        if left.shape != right.shape:
            raise AssertionError(
                f"{name} has shape {left.shape} at {name_of(path)}, but {other} has {right.shape}: not a map and its "
                "transpose"
            )
        coarse = max((left.dtype, right.dtype), key=closeness.relative)
        pairs.append((closeness.wide(left.assembled()), closeness.wide(right.assembled()), coarse))
    return pairs


def _product(pairs: list[tuple[np.ndarray, np.ndarray, str]]) -> tuple[Any, float]:
    """The sum of products, and the product of norms."""
    product = sum((a * b).sum() for a, b, _ in pairs)
    sizes = [np.sqrt(sum((np.abs(pair[i]) ** 2).sum() for pair in pairs)) for i in (0, 1)]
    return product, float(sizes[0] * sizes[1])
