"""What each device does in `value_and_grad`: gradients of its part of the batch, slice by slice, nothing reduced."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardkit import scopes
from shardkit._compat import spec_entries, varying_axes
from shardkit.optim.batch import Leaf, cutting, entering
from shardkit.optim.changes import of_random_state
from shardkit.optim.examples import examples_here, place, read_cuts
from shardkit.optim.parameters import Parameter
from shardkit.placements import AnyMesh
from shardkit.varying import varying


class Region:
    """What each device does: gradients of its part, slice by slice. Made for one call."""

    def __init__(
        self,
        loss: Callable[..., Any],
        mesh: AnyMesh,
        axes: Mapping[str, int],
        parameters: Sequence[Parameter],
        leaves: Sequence[Leaf],
        reduce: str,
        slices: int,
        accumulator_dtype: Any,
        keys: str = "split",
    ):
        self._loss, self._mesh, self._names, self._axes = loss, mesh, tuple(axes), axes
        self._parameters = parameters
        self._leaves, self._mean, self._slices = leaves, reduce == "mean", slices
        self._dtype, self._shared = accumulator_dtype, keys == "shared"
        self._cuts: Any = {}
        # Known once the loss has been traced.
        self._kind = "sum"
        self._varies: tuple[str, ...] = ()
        self._value_dtype: Any = None
        self._aux_tree: Any = None
        self._aux_is_array: list[bool] = []

    def __call__(self, own: Sequence[Any], fixed: Sequence[Any], data: Sequence[Any]) -> Any:
        """(value, its count or None, aux, stacked gradients of ``own``, the kind of reduction they wait for)."""
        names, mesh = self._names, self._mesh
        # Each device is handed its position: it can't ask for it where other axes are left to the compiler. One number
        # an axis: what is made of one doesn't vary along the others.
        along = [PartitionSpec(n) for n in names]
        positions = [jnp.arange(mesh.shape[n]) for n in names]
        if AxisType.Explicit in mesh.axis_types:
            positions = jax.sharding.reshard(positions, [NamedSharding(mesh, spec) for spec in along])
        if self._shared:
            holding = [leaf.sliced or any(spec_entries(leaf.spec)) for leaf in self._leaves]
            shapes = [x.shape for x, holds in zip(data, holding, strict=True) if holds]
            self._cuts = read_cuts(self._axes, mesh.shape, self._slices, shapes)
        whole, part = PartitionSpec(), PartitionSpec(*names)
        region = jax.shard_map(
            self._body,
            mesh=mesh,
            in_specs=([p.spec for p in self._parameters], whole, [leaf.spec for leaf in self._leaves], along),
            out_specs=(whole, whole, whole, part, part),
            axis_names=set(names),
        )
        own = [entering(x, p.spec, names, mesh) for x, p in zip(own, self._parameters, strict=True)]
        data = [
            entering(x, leaf.spec, names, mesh) if leaf.kind == "batch" else x
            for x, leaf in zip(data, self._leaves, strict=True)
        ]
        out = jax.jit(region, inline=True)(own, list(fixed), data, positions)
        value, count, scalars, arrays, stacks = out
        merged = iter([a.reshape(-1, *a.shape[len(names) + 1 :]) for a in arrays])
        scalars = iter(scalars)
        aux = [next(merged if is_array else scalars) for is_array in self._aux_is_array]
        return value, count, jax.tree.unflatten(self._aux_tree, aux), stacks, self._kind

    def _body(self, own: Sequence[Any], fixed: Sequence[Any], data: Sequence[Any], positions: Any) -> Any:
        blocks = [varying(x, self._names) for x in own]

        def loss(points: Sequence[Any], data: Sequence[Any], number: jax.Array) -> Any:
            seen = [p.seen(block, point) for block, point, p in zip(blocks, points, self._parameters, strict=True)]
            return self._loss(seen, [self._key_of(x, number) for x in fixed], data)

        run = self._one if self._slices == 1 else self._scan
        total, count, grads, aux = run(loss, blocks, data, [p.reshape(()) for p in positions])
        value, count, grads = self._over_devices(total, count, grads)
        grads = [g.astype(x.dtype) for g, x in zip(grads, blocks, strict=True)]
        scalars, arrays = self._aux_over_devices(aux)
        return value, count, scalars, arrays, [self._stacked(g) for g in grads]

    def _one(
        self, loss: Callable[..., Any], blocks: Any, data: Sequence[Any], positions: Sequence[Any], number: Any = 0
    ) -> Any:
        """(loss, count, gradients, aux) of one slice."""
        indices = dict(zip(self._names, positions, strict=True))
        shared = examples_here(place(self._cuts, indices, number) if self._shared else None)
        with shared, cutting(self._axes):
            return self._differentiated(loss, blocks, data, self._number(positions, number))

    def _number(self, positions: Sequence[Any], number: Any) -> Any:
        """Counts all slices of all devices."""
        position: Any = 0
        for name, index in zip(self._names, positions, strict=True):
            position = position * self._mesh.shape[name] + index
        return position * self._slices + number

    def _differentiated(self, loss: Callable[..., Any], blocks: Any, data: Sequence[Any], key: Any) -> Any:
        data = [self._key_of(x, key) if leaf.kind == "key" else x for x, leaf in zip(data, self._leaves, strict=True)]

        def scalar(points: Any) -> Any:
            value, count, aux = loss(points, data, key)
            return value, (count, aux)

        points = [self._point(block, p) for block, p in zip(blocks, self._parameters, strict=True)]
        total, pull, (count, aux) = jax.vjp(scalar, points, has_aux=True)
        gathered = {id(x): i for i, (x, p) in enumerate(zip(points, self._parameters, strict=True)) if p.eager}
        if gathered:
            pull = self._gathering_again(pull, gathered, blocks, total)
        (grads,) = pull(varying(jnp.ones((), total.dtype), sorted(varying_axes(total))))
        # A loss that the user has summed over an axis doesn't vary along it, and isn't to be summed again.
        self._varies = tuple(n for n in self._names if n in varying_axes(total))
        total, count = (None if x is None else jnp.asarray(x) for x in (total, count))
        self._value_dtype = jnp.result_type(*(x.dtype for x in (total, count) if x is not None))
        total, count = (None if x is None else varying(_wide(x), self._names) for x in (total, count))
        return total, count, grads, aux

    def _point(self, block: jax.Array, p: Parameter) -> jax.Array:
        """What is differentiated: the parameter, or, where the loss is to gather it, a slot for its gradient."""
        if p.gather is None:
            return block
        return varying(jnp.zeros(p.shape, block.dtype), self._names) if p.lazily else p.gather(block)

    def _gathering_again(self, pull: Any, gathered: Mapping[int, int], blocks: Sequence[Any], total: Any) -> Any:
        """The backward pass, with parameters gathered once more in place of what forward has gathered.

        It keeps what it needs of forward as leaves, and those that are parameters are these very objects.
        """
        leaves, tree = jax.tree.flatten(pull)
        needed = sorted({gathered[id(x)] for x in leaves if id(x) in gathered})
        # After forward, or the compiler would take both gathers for one.
        again, _ = lax.optimization_barrier(([blocks[i] for i in needed], total))
        new = {i: self._point(x, self._parameters[i]) for i, x in zip(needed, again, strict=True)}
        leaves = [new[gathered[id(x)]] if id(x) in gathered else x for x in leaves]
        return jax.tree.unflatten(tree, leaves)

    def _scan(self, loss: Callable[..., Any], blocks: Any, data: Sequence[Any], positions: Sequence[Any]) -> Any:
        """The same of all slices, one after another, added up."""
        slices = self._slices
        cut = [leaf.sliced for leaf in self._leaves]
        parts = [
            x.reshape(slices, x.shape[0] // slices, *x.shape[1:]) if c else None for x, c in zip(data, cut, strict=True)
        ]

        def one(number: Any, part: Sequence[Any]) -> Any:
            now = [p if c else x for p, x, c in zip(part, data, cut, strict=True)]
            total, count, grads, aux = self._one(loss, blocks, now, positions, number)
            if self._dtype is not None:
                grads = [g.astype(self._dtype) for g in grads]
            return (total, count, grads), aux

        def step(carry: Any, numbered: Any) -> Any:
            new, aux = one(*numbered)
            return jax.tree.map(jnp.add, carry, new), aux

        shapes = jax.eval_shape(lambda: one(0, [None if p is None else p[0] for p in parts])[0])
        start = jax.tree.map(lambda x: varying(jnp.zeros(x.shape, x.dtype), self._names), shapes)
        (total, count, grads), aux = lax.scan(step, start, (jnp.arange(slices), parts))
        leaves, tree = jax.tree.flatten(aux)
        found = [self._aux_over_slices(x, draws) for x, draws in zip(leaves, of_random_state(aux), strict=True)]
        return total, count, grads, jax.tree.unflatten(tree, found)

    def _aux_over_slices(self, x: Any, draws: bool) -> Any:
        if draws and x.ndim == 1:
            return x[0]
        if x.ndim > 1:
            return x.reshape(-1, *x.shape[2:])
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x.sum()
        return (_wide(x).mean() if self._mean else _wide(x).sum()).astype(x.dtype)

    def _over_devices(self, total: Any, count: Any, grads: Sequence[Any]) -> tuple[Any, Any, list[Any]]:
        """The value of the whole batch, its count, and gradients such that their reduction is its gradient."""
        names, sizes = self._names, self._mesh.shape
        parts = math.prod(sizes[n] for n in self._varies)
        copies = math.prod(sizes[n] for n in names) // parts
        with scopes.scope(scopes.REDUCTION):
            total = lax.psum(total, names) / copies
            count = None if count is None else lax.psum(count, names) / copies
        if count is not None:
            return (total / count).astype(self._value_dtype), count, [_divided(g, count) for g in grads]
        if not self._mean:
            return total.astype(self._value_dtype), None, list(grads)
        value = (total / (parts * self._slices)).astype(self._value_dtype)
        if self._varies == names:
            self._kind = "mean"  # divided after they are summed: no small gradient is lost before
            return value, None, [_divided(g, self._slices) for g in grads]
        return value, None, [_divided(g, parts * self._slices) for g in grads]

    def _aux_over_devices(self, aux: Any) -> tuple[list[Any], list[Any]]:
        leaves, self._aux_tree = jax.tree.flatten(aux)
        draws = of_random_state(aux)
        leaves = [jnp.asarray(x) for x in leaves]
        # What is the same on all devices (statistics that were averaged over them) comes out once, as it is.
        self._aux_is_array = [x.ndim > 0 and (self._slices > 1 or self._varies_along(x)) for x in leaves]
        found = list(zip(leaves, draws, self._aux_is_array, strict=True))
        once = [x if x.ndim else self._scalar(x, own) for x, own, is_part in found if not is_part]
        return once, [self._stacked(x) for x, _, is_part in found if is_part]

    def _varies_along(self, x: Any) -> bool:
        """Whether it isn't known to be the same on all devices along the batch axes."""
        return not varying_axes(x).isdisjoint(self._names)

    def _scalar(self, x: Any, draws: bool) -> Any:
        key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        if (draws or key) and not self._varies_along(x):
            return x
        if key:
            raise TypeError(
                'value_and_grad: aux has a random key that is another on each device (keys="split"), so that none can '
                "come out; leave keys out of aux: nnx.state(model, (nnx.BatchStat, nnx.RngCount)) has what changes"
            )
        # Over the axes that the loss varies along, even where this doesn't: a number of examples is to be added up.
        varies = tuple(n for n in self._names if n in varying_axes(x) or n in self._varies)
        x = varying(x, varies)
        if not varies:
            return x
        with scopes.scope(scopes.REDUCTION):
            if self._mean and jnp.issubdtype(x.dtype, jnp.inexact):
                return lax.pmean(_wide(x), varies).astype(x.dtype)
            if x.dtype == jnp.bool_:
                return lax.psum(x.astype(jnp.int32), varies)
            return lax.psum(_wide(x), varies).astype(x.dtype)

    def _stacked(self, x: Any) -> Any:
        x = varying(x, self._names)
        return x.reshape((1,) * len(self._names) + x.shape)

    def _key_of(self, x: Any, number: jax.Array) -> Any:
        """A random key's own one for each device and slice, unless they share it; anything else as it is."""
        if self._shared or x.ndim or not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        return jax.random.fold_in(x, number)


def _wide(x: jax.Array) -> jax.Array:
    """Shorter floats as float32, to be summed. (XLA on CPU stops at sums of bfloat16 beside an Auto axis, too.)"""
    short = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32
    return x.astype(jnp.float32) if short else x


def _divided(x: jax.Array, by: Any) -> jax.Array:
    """A quotient in at least float32: in short floats a count may be infinite, or the sum of the slices' gradients."""
    return x if isinstance(by, int) and by == 1 else x.astype(jnp.promote_types(x.dtype, jnp.float32)) / by
