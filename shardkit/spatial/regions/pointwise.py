"""Operations on each element alone: margins stay as good as they were."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import Array, lax
from jax import numpy as jnp

from shardkit.elementwise import ARITHMETIC, NONLINEAR
from shardkit.spatial.regions.block import CutDim, Cuts
from shardkit.spatial.regions.graph import Node
from shardkit.spatial.regions.local import local_step
from shardkit.spatial.regions.step import Step, same_links
from shardkit.varying import alike

NAMES = frozenset((*NONLINEAR, *ARITHMETIC))


def pointwise(node: Node, lies: Sequence[Cuts]) -> Step | None:
    """Where its blocked operands agree on how they lie, the result lies so too."""
    if node.name not in NAMES:
        return None
    shape, cuts = node.outputs[0].shape, dict[int, CutDim]()
    for lie in lies:  # an operand may be whole in dims that others are cut in
        if any(cuts.setdefault(dim, cut) != cut for dim, cut in lie.items()):
            return None
    if any(o.shape != shape for o in node.outputs):
        return None
    if any(len(v.shape) != len(shape) for v, c in zip(node.inputs, lies, strict=True) if c):
        return None

    def apply(here: Any, arrays: Sequence[Array], shape: tuple[int, ...]) -> Sequence[Array]:
        out = node.primitive.bind(*alike(arrays), **node.params)
        return out if node.primitive.multiple_results else [out]

    links = [same_links(c) for c in lies]
    return local_step(node, [cuts] * len(node.outputs), links, apply, spread="shape")


def is_relu(node: Node) -> bool:
    """``jax.nn.relu``, by what it does."""
    body = node.body
    if node.name != "custom_jvp_call" or body is None or len(body.nodes) != 1 or len(body.inputs) != 1:
        return False
    (only,) = body.nodes
    if only.name != "max" or only.inputs[0] is not body.inputs[0] or body.outputs != only.outputs:
        return False
    zero = only.inputs[1].constant
    return zero is not None and not zero.ndim and zero == 0 and "relu" in str(node.params.get("name", _name(node)))


def _name(node: Node) -> str:
    called: Any = node.params.get("call_jaxpr")
    return str(called.eqns[0].params.get("name", "")) if getattr(called, "eqns", None) else ""


def rectified(node: Node, lies: Sequence[Cuts]) -> Step | None:
    """ReLU that keeps for its derivative what comes out of it, which the next layer keeps anyway."""
    if not is_relu(node):
        return None

    def apply(here: Any, arrays: Sequence[Array], shape: tuple[int, ...]) -> Sequence[Array]:
        return [_relu(here.platform == "tpu", arrays[0])]

    return local_step(node, [lies[0]], [same_links(lies[0])], apply)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _relu(apart: bool, x: Array) -> Array:
    out = jnp.maximum(x, jnp.zeros((), x.dtype))
    # Else the compiler lays out, beside the result, what the maximum was taken of: it finds the mask there, too.
    return lax.optimization_barrier(out) if apart else out


@_relu.defjvp
def _relu_jvp(apart: bool, primals: Any, tangents: Any) -> Any:
    out = _relu(apart, primals[0])
    return out, jnp.where(out > 0, tangents[0], jnp.zeros((), tangents[0].dtype))
