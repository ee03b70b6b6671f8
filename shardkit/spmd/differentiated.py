"""A partitioned function differentiated from outside: its derivative is partitioned in its turn.

JAX could differentiate the operations we run, and does so where that's all there is to it. But a function with
derivatives of its own (``jax.custom_jvp``: relu at 0; ``jax.custom_vjp``) has lost them by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardkit.placements import Layout


def with_own_derivative(
    run: Callable[..., Any],
    fun: Callable[..., Any],
    inputs: Sequence[Layout],
    outputs: Sequence[Layout],
    partition: Callable[..., Any],
    plain: bool,
) -> Callable[..., Any]:
    """``run`` with the derivative of ``fun`` in reverse mode.

    Args:
      run: of arrays, a list of arrays; on a mesh.
      fun: the same on one device, traceable.
      inputs, outputs: where arrays are that enter and leave.
      partition: ``sk.partition``, on the mesh.
      plain: none of them is Partial or padded; else the derivative is refused.
    """

    @jax.custom_vjp
    def whole(*arrays: Any) -> list[Any]:
        return run(*arrays)

    def forth(*arrays: Any) -> tuple[list[Any], Any]:
        return run(*arrays), arrays

    def back(arrays: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        if not plain:
            raise NotImplementedError(
                "partition: a function with derivatives of its own (custom_jvp, custom_vjp) and Partial or padded "
                "arguments or results can't be differentiated from outside; take the gradient in the function itself"
            )
        real = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.inexact)]
        given = [i for i, c in enumerate(cotangents) if c.dtype != jax.dtypes.float0]

        def pull(values: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            def of_reals(*reals: Any) -> list[Any]:
                every = list(values)
                for i, value in zip(real, reals, strict=True):
                    every[i] = value
                results = jax.tree.leaves(fun(*every))
                return [results[i] for i in given]

            return list(jax.vjp(of_reals, *(values[i] for i in real))[1](list(cotangents)))

        places = ([*inputs], [outputs[i] for i in given])
        pulled = partition(pull, places, [inputs[i] for i in real])(list(arrays), [cotangents[i] for i in given])
        gradients: list[Any] = [None] * len(arrays)
        for i, gradient in zip(real, pulled, strict=True):
            gradients[i] = gradient
        return tuple(gradients)

    whole.defvjp(forth, back)
    return whole
