"""Parameters that are sharded between steps, gathered where they are used: in forward, and once more for backward.

In layers it's a primitive, so that a checkpoint policy can tell its result from all else: everything is kept for the
backward pass but what was gathered. Its gradient is not the usual reduce-scatter: the whole gradient goes to a slot
beside the block, unreduced like that of every other parameter, so that one reduction serves the step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from shardkit import scopes


@dataclasses.dataclass(frozen=True)
class Gather:
    """How a parameter is put together from the devices' blocks.

    Attributes:
      cuts: (dim, mesh axes that cut it, major first), dims counted from the back: -1 is the last.
      stays: the same of axes that are left to the compiler, which go on cutting it.
      flat: the shape of the parameter, where the block is part of its elements in one padded row; else None.
      travels: the dtype the blocks travel in; None: their own.
    """

    cuts: tuple[tuple[int, tuple[str, ...]], ...]
    flat: tuple[int, ...] | None = None
    travels: Any = None
    stays: tuple[tuple[int, tuple[str, ...]], ...] = ()

    def __call__(self, block: jax.Array) -> jax.Array:
        """The whole, inside a region where the axes of ``cuts`` are manual."""
        if not self.stays:
            return self._local(block)
        # The partitioner would first put a block together over its own axes: they are made manual, too.
        entries: list[Any] = [None] * block.ndim
        for dim, axes in self.stays:
            entries[dim] = axes
        spec, names = PartitionSpec(*entries), {a for _, axes in self.stays for a in axes}
        return jax.shard_map(self._local, in_specs=spec, out_specs=spec, axis_names=names)(block)

    def _local(self, block: jax.Array) -> jax.Array:
        x = block if self.travels is None else block.astype(self.travels)
        with scopes.scope(scopes.PARAMETERS):
            for dim, axes in self.cuts:
                x = lax.all_gather(x, axes, axis=x.ndim + dim, tiled=True)
        if self.flat is not None:
            x = x[: math.prod(self.flat)].reshape(self.flat)
        return x.astype(block.dtype)


# Of a block, and a slot of zeros whose gradient is that of the result.
gather_p: jex_core.Primitive = jex_core.Primitive("sk_gather")


def _abstract(block: Any, slot: Any, *, gather: Gather) -> Any:
    del slot
    return jax.make_jaxpr(gather)(block).out_avals[0]


def _jvp(primals: Any, tangents: Any, *, gather: Gather) -> Any:
    return gather_p.bind(*primals, gather=gather), tangents[1]


def _batched(args: Any, dims: Any, *, gather: Gather) -> Any:
    if gather.flat is not None:
        raise NotImplementedError("vmap over a parameter in padded flat shards; gather it first")
    front = [jnp.moveaxis(x, dim, 0) for x, dim in zip(args, dims, strict=True)]
    return gather_p.bind(*front, gather=gather), 0  # its dims count from the back


gather_p.def_abstract_eval(_abstract)
mlir.register_lowering(gather_p, mlir.lower_fun(lambda block, slot, *, gather: gather(block), multiple_results=False))
ad.primitive_jvps[gather_p] = _jvp
batching.primitive_batchers[gather_p] = _batched


def keep_all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy of ``jax.checkpoint``: gathered parameters aren't kept for the backward pass, all else is."""
    return primitive is not gather_p


@functools.partial(jax.tree_util.register_dataclass, data_fields=["block", "slot"], meta_fields=["ndim", "recipe"])
@dataclasses.dataclass(frozen=True)
class ShardedParam:
    """A parameter of which each device has a block, as a loss sees it under ``gather="layer"``.

    ``sk.gather_on_use`` makes an array of it. A pytree: ``lax.scan`` over the first dim of stacked layers takes
    out one layer's.

    Attributes:
      block: this device's part.
      slot: zeros of the whole shape, which the gradient goes to.
      ndim: dims of the whole, as it was handed to the loss.
      recipe: how it's gathered.
    """

    block: jax.Array
    slot: jax.Array
    ndim: int
    recipe: Gather

    def gather(self) -> jax.Array:
        """The whole parameter.

        Raises:
          ValueError: a dim that devices share out has been taken apart.
        """
        lost = [self.ndim + dim for dim, _ in self.recipe.cuts if -dim > jnp.ndim(self.block)]
        if lost and self.recipe.flat is None:
            raise ValueError(
                f"gather_on_use: dim {lost[0]} of a parameter is cut over mesh axes, and was taken apart (by lax.scan, "
                "say): each device would run its own part of the layers. Cut other dims: sk.shard_params(..., "
                "first_dim=1)"
            )
        return gather_p.bind(self.block, self.slot, gather=self.recipe)


def gather_on_use(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A layer that gathers its own sharded parameters, for ``sk.value_and_grad(..., gather="layer")``.

    Called with plain arrays (outside training, on one device) it's ``fun`` itself. To run a layer again in the backward
    pass, gather within: ``jax.checkpoint(sk.gather_on_use(layer))``.

    Args:
      fun: a function of parameters and whatever else, with trees as arguments.

    Returns:
      A function of the same arguments, which gives what ``fun`` gives.

    Raises:
      ValueError: in the call, a parameter of which a dim that devices share has been taken apart, by ``lax.scan``, say
        (``sk.shard_params(..., first_dim=1)``).

    Example:
      >>> import jax, jax.numpy as jnp, shardkit as sk
      >>> mesh = sk.make_mesh({"dp": 1})
      >>> layer = sk.gather_on_use(lambda w, x: jnp.tanh(x @ w))
      >>> def loss(layers, x):
      ...     return jnp.mean(jax.lax.scan(lambda x, w: (layer(w, x), None), x, layers)[0])
      >>> layers = sk.shard_params(jnp.zeros((3, 4, 4)), "dp", mesh, first_dim=1)
      >>> value, _ = sk.value_and_grad(loss, batch_axes="dp", mesh=mesh, gather="layer")(layers, jnp.ones((2, 4)))
      >>> float(value)
      0.0
    """

    @functools.wraps(fun)
    def gathering(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_is_sharded)
        arrays = [i for i, x in enumerate(leaves) if _is_sharded(x) or isinstance(x, jax.Array)]

        def run(given: list[Any]) -> Any:
            now = dict(zip(arrays, given, strict=True))
            whole = [now.get(i, x) for i, x in enumerate(leaves)]
            whole = [x.gather() if _is_sharded(x) else x for x in whole]
            args, kwargs = jax.tree.unflatten(tree, whole)
            return fun(*args, **kwargs)

        if any(map(_is_sharded, leaves)):
            run = jax.checkpoint(run, policy=keep_all_but_gathered)
        return run([leaves[i] for i in arrays])

    return gathering


def _is_sharded(x: Any) -> bool:
    return isinstance(x, ShardedParam)
