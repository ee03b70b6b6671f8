"""`value_and_grad`: gradients of a loss over a batch that is spread over devices, not yet reduced."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardkit._compat import spec_entries, varying_axes
from shardkit.arrays import PartialArray
from shardkit.arrays.placing import constrain
from shardkit.meshes import concrete_mesh, manual_axes, resolve_mesh
from shardkit.optim.batch import Leaf, read_batch_axes, read_leaf
from shardkit.optim.stored import known_placements
from shardkit.placements import AnyMesh, Layout, Partial


def value_and_grad(
    fun: Callable,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    batch_axes: str | Sequence[str] | Mapping[str, int],
    mesh: AnyMesh | None = None,
    reduce: str = "mean",
    microbatches: int = 1,
    accumulator_dtype: Any = None,
) -> Callable:
    """As ``jax.value_and_grad``, each device on its part of the batch; gradients come out Partial.

    ``fun`` runs on each device's part, with ``batch_axes`` manual and every other mesh axis left to the compiler.
    Nothing but the value is reduced: ``sk.reduce_gradients`` reduces the gradients, all together.

    Args:
      fun: a scalar loss of its part of the batch: a mean over it (``reduce="mean"``), or a sum. Or it returns
        ``(sum, count)``, whose totals over all devices and microbatches are divided: right where counts differ.
      argnums: which arguments are differentiated: pytrees; their integer leaves get zeros, other leaves are passed on.
      has_aux: ``fun`` returns ``(loss, aux)``. Of aux, float scalars are averaged (added up for ``reduce="sum"``),
        integer and bool scalars added up, and arrays put together along dim 0.
      batch_axes: the mesh axes that cut dim 0 of every array in the other arguments; a mapping from axis to dim for
        others (``{"dp": 0, "sp": 2}``; a leaf that hasn't the dim isn't cut by that axis). Scalars are the same
        everywhere; a random key (``jax.random.key``) is another one on each device and for each microbatch.
      mesh: else that of the arguments, or the ambient one.
      reduce: "mean" or "sum": what the loss over the whole batch is of those of its parts.
      microbatches: each device takes its part in so many slices, one after another, and adds gradients up locally.
      accumulator_dtype: of that sum; None: the gradients' own.

    Returns:
      A function of the same arguments that returns ``(value, gradients)`` or ``((value, aux), gradients)``. Gradients
      are ``PartialArray``s over the batch axes, otherwise placed as the parameters are where that's known.

    Raises:
      ValueError: a batch that doesn't divide, unknown axes or ``reduce``, axes that are manual here.
      TypeError: a loss that's no scalar.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> step = sk.value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2), batch_axes="dp", mesh=sk.make_mesh({"dp": 1}))
      >>> value, gradient = step(jnp.ones(3), jnp.ones((4, 3)))
      >>> float(value), gradient.reduce().tolist()
      (9.0, [6.0, 6.0, 6.0])
    """
    if reduce not in ("mean", "sum"):
        raise ValueError(f'reduce={reduce!r} is unknown; use "mean" or "sum", as the loss is of the examples of a part')
    if isinstance(microbatches, bool) or not hasattr(microbatches, "__index__") or microbatches < 1:
        raise ValueError(f"microbatches={microbatches!r}: a positive number of slices")

    @functools.wraps(fun)
    def wrapped(*args: Any) -> Any:
        numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        numbers = tuple(n % len(args) for n in numbers)
        where = concrete_mesh(resolve_mesh(mesh, *jax.tree.leaves(args), what="value_and_grad"))
        axes = read_batch_axes(batch_axes, where)
        taken = [name for name in axes if name in manual_axes()]
        if taken:
            raise ValueError(
                f"value_and_grad: mesh axes {taken} are manual here (inside jax.shard_map); call it outside, or "
                "jax.value_and_grad on this device's part"
            )
        params = _Split([args[n] for n in numbers], lambda x: Leaf(_kind_of_parameter(x)))
        batch = _Split(
            [() if i in numbers else a for i, a in enumerate(args)],
            lambda x: read_leaf(x, axes, where, microbatches),
        )

        def loss(own: Sequence[Any], fixed: Sequence[Any], data: Sequence[Any]) -> Any:
            values = iter(params.join(own, fixed))
            rebuilt = batch.join(data, ())
            for n in numbers:
                rebuilt[n] = next(values)
            return _read_loss(fun(*rebuilt), has_aux, reduce)

        run = _Region(loss, where, axes, batch.leaves, reduce, microbatches, accumulator_dtype)
        own, fixed = params.take("own"), params.take("fixed")
        data = [_entering(x, leaf, where) for x, leaf in zip(batch.arrays, batch.leaves, strict=True)]
        value, aux, stacks, kind = run(own, fixed, data)
        gradients = [_partial(s, p, where, axes, kind) for s, p in zip(stacks, own, strict=True)]
        found = params.join(gradients, [jnp.zeros_like(x) for x in fixed])
        found = found[0] if isinstance(argnums, int) else tuple(found)
        return ((value, aux) if has_aux else value), found

    return wrapped


def _kind_of_parameter(x: Any) -> str:
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        return "own" if isinstance(x, float | complex) else "static"
    return "own" if jnp.issubdtype(x.dtype, jnp.inexact) else "fixed"


class _Split:
    """Trees taken apart: arrays with what becomes of them, all else aside."""

    def __init__(self, trees: Sequence[Any], read: Callable[[Any], Leaf]):
        found, self._tree = jax.tree.flatten(list(trees))
        every = [read(x) for x in found]
        self._every = every
        self._statics = [x for x, leaf in zip(found, every, strict=True) if leaf.kind == "static"]
        self.leaves = [leaf for leaf in every if leaf.kind != "static"]
        self.arrays = [jnp.asarray(x) for x, leaf in zip(found, every, strict=True) if leaf.kind != "static"]

    def take(self, kind: str) -> list[Any]:
        """The arrays of one kind."""
        return [x for x, leaf in zip(self.arrays, self.leaves, strict=True) if leaf.kind == kind]

    def join(self, arrays: Sequence[Any], fixed: Sequence[Any]) -> list[Any]:
        """The trees again, with other arrays (those of kind "fixed" apart)."""
        left = {"static": iter(self._statics), "fixed": iter(fixed)}
        rest = iter(arrays)
        return jax.tree.unflatten(self._tree, [next(left.get(leaf.kind, rest)) for leaf in self._every])


def _read_loss(result: Any, has_aux: bool, reduce: str) -> tuple[Any, Any, Any]:
    """(loss or sum, count or None, aux) of what the user's function returned."""
    loss, aux = result if has_aux else (result, ())
    weighed = isinstance(loss, tuple | list) and len(loss) == 2
    if weighed and reduce == "sum":
        raise ValueError('value_and_grad: a loss that returns (sum, count) is a mean; give reduce="mean"')
    parts: list[Any] = list(loss) if weighed else [loss]
    shapes = [getattr(part, "shape", () if isinstance(part, int | float | complex) else type(part)) for part in parts]
    if any(shape != () for shape in shapes):
        raise TypeError(
            f"value_and_grad: the loss must be a scalar, or (sum, count) of scalars, got {', '.join(map(str, shapes))}"
        )
    return parts[0], parts[1] if weighed else None, aux


def _entering(x: Any, leaf: Leaf, mesh: AnyMesh) -> Any:
    """A batch leaf where the region expects it; on Explicit axes types say where it is."""
    if leaf.kind != "batch" or AxisType.Explicit not in mesh.axis_types:
        return x
    own = jax.typeof(x).sharding
    entries = list(spec_entries(own.spec)) if not own.mesh.empty else []
    entries += [None] * (x.ndim - len(entries))
    cut = [want if want is not None else have for want, have in zip(spec_entries(leaf.spec), entries, strict=True)]
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*cut)))


def _partial(stack: Any, param: Any, mesh: AnyMesh, axes: Mapping[str, int], kind: str) -> PartialArray:
    """The contributions with their label: Partial over the batch axes, else where the parameter is."""
    known = dict(zip(mesh.axis_names, known_placements(param, mesh), strict=True))
    placements = known | dict.fromkeys(axes, Partial(kind))
    layout = Layout(mesh, placements)
    return PartialArray(constrain(stack, mesh, layout.stack_spec(stack.ndim - len(axes))), layout)


class _Region:
    """What each device does: gradients of its part, slice by slice. Made for one call."""

    def __init__(
        self,
        loss: Callable,
        mesh: AnyMesh,
        axes: Mapping[str, int],
        leaves: Sequence[Leaf],
        reduce: str,
        slices: int,
        accumulator_dtype: Any,
    ):
        self._loss, self._mesh, self._names = loss, mesh, tuple(axes)
        self._leaves, self._mean, self._slices = leaves, reduce == "mean", slices
        self._dtype = accumulator_dtype
        # Known once the loss has been traced.
        self._kind = "sum"
        self._varies: tuple[str, ...] = ()
        self._aux_tree: Any = None
        self._aux_is_array: list[bool] = []

    def __call__(self, own: Sequence[Any], fixed: Sequence[Any], data: Sequence[Any]) -> Any:
        """(value, aux, stacked gradients of ``own``, the kind of reduction they wait for)."""
        names, mesh = self._names, self._mesh
        sizes = tuple(mesh.shape[n] for n in names)
        # Each device is handed its position: it can't ask for it where other axes are left to the compiler.
        positions = jnp.arange(math.prod(sizes)).reshape(sizes)
        if AxisType.Explicit in mesh.axis_types:
            positions = jax.sharding.reshard(positions, NamedSharding(mesh, PartitionSpec(*names)))
        whole, part = PartitionSpec(), PartitionSpec(*names)
        region = jax.shard_map(
            self._body,
            mesh=mesh,
            in_specs=(whole, whole, [leaf.spec for leaf in self._leaves], part),
            out_specs=(whole, whole, part, part),
            axis_names=set(names),
        )
        value, scalars, arrays, stacks = jax.jit(region, inline=True)(list(own), list(fixed), list(data), positions)
        merged = iter([a.reshape(-1, *a.shape[len(names) + 1 :]) for a in arrays])
        scalars = iter(scalars)
        aux = [next(merged if is_array else scalars) for is_array in self._aux_is_array]
        return value, jax.tree.unflatten(self._aux_tree, aux), stacks, self._kind

    def _body(self, own: Sequence[Any], fixed: Sequence[Any], data: Sequence[Any], position: jax.Array) -> Any:
        own = [_varying(x, self._names) for x in own]
        run = self._one if self._slices == 1 else self._scan
        total, count, grads, aux = run(own, fixed, data, position.reshape(()))
        value, grads = self._over_devices(total, count, grads)
        scalars, arrays = self._aux_over_devices(aux)
        return value, scalars, arrays, [self._stacked(g) for g in grads]

    def _one(self, own: Any, fixed: Any, data: Sequence[Any], position: jax.Array, number: Any = 0) -> Any:
        """(loss, count, gradients, aux) of one slice."""
        key = position * self._slices + number
        data = [
            jax.random.fold_in(x, key) if leaf.kind == "key" else x for x, leaf in zip(data, self._leaves, strict=True)
        ]

        def scalar(own: Any) -> Any:
            loss, count, aux = self._loss(own, fixed, data)
            return loss, (count, aux)

        (total, (count, aux)), grads = jax.value_and_grad(scalar, has_aux=True)(own)
        # A loss that the user has summed over an axis doesn't vary along it, and isn't to be summed again.
        self._varies = tuple(n for n in self._names if n in varying_axes(total))
        total, count = (None if x is None else _varying(jnp.asarray(x), self._names) for x in (total, count))
        return total, count, grads, aux

    def _scan(self, own: Any, fixed: Any, data: Sequence[Any], position: jax.Array) -> Any:
        """The same of all slices, one after another, added up."""
        slices = self._slices
        cut = [leaf.kind == "batch" and spec_entries(leaf.spec)[0] is not None for leaf in self._leaves]
        parts = [
            x.reshape(slices, x.shape[0] // slices, *x.shape[1:]) if c else None for x, c in zip(data, cut, strict=True)
        ]

        def one(number: Any, part: Sequence[Any]) -> Any:
            now = [p if c else x for p, x, c in zip(part, data, cut, strict=True)]
            total, count, grads, aux = self._one(own, fixed, now, position, number)
            if self._dtype is not None:
                grads = [g.astype(self._dtype) for g in grads]
            return (total, count, grads), aux

        def step(carry: Any, numbered: Any) -> Any:
            new, aux = one(*numbered)
            return jax.tree.map(jnp.add, carry, new), aux

        shapes = jax.eval_shape(lambda: one(0, [None if p is None else p[0] for p in parts])[0])
        start = jax.tree.map(lambda x: _varying(jnp.zeros(x.shape, x.dtype), self._names), shapes)
        (total, count, grads), aux = lax.scan(step, start, (jnp.arange(slices), parts))
        if self._dtype is not None:
            grads = [g.astype(x.dtype) for g, x in zip(grads, own, strict=True)]
        return total, count, grads, jax.tree.map(self._aux_over_slices, aux)

    def _aux_over_slices(self, x: Any) -> Any:
        if x.ndim > 1:
            return x.reshape(-1, *x.shape[2:])
        averaged = self._mean and jnp.issubdtype(x.dtype, jnp.inexact)
        return x.mean() if averaged else x.sum()

    def _over_devices(self, total: Any, count: Any, grads: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The value of the whole batch, and gradients such that their reduction is its gradient."""
        names, sizes = self._names, self._mesh.shape
        parts = math.prod(sizes[n] for n in self._varies)
        copies = math.prod(sizes[n] for n in names) // parts
        total = lax.psum(total, names) / copies
        if count is not None:
            count = lax.psum(count, names) / copies
            return total / count, [g / count.astype(g.dtype) for g in grads]
        if not self._mean:
            return total, list(grads)
        if self._varies == names:
            self._kind = "mean"  # divided after they are summed: no small gradient is lost before
            return total / (parts * self._slices), [g / self._slices for g in grads]
        return total / (parts * self._slices), [g / (parts * self._slices) for g in grads]

    def _aux_over_devices(self, aux: Any) -> tuple[list[Any], list[Any]]:
        leaves, self._aux_tree = jax.tree.flatten(aux)
        leaves = [jnp.asarray(x) for x in leaves]
        self._aux_is_array = [x.ndim > 0 for x in leaves]
        return [self._scalar(x) for x in leaves if not x.ndim], [self._stacked(x) for x in leaves if x.ndim]

    def _scalar(self, x: Any) -> Any:
        varies = tuple(n for n in self._names if n in varying_axes(x))
        if not varies:
            return x
        if self._mean and jnp.issubdtype(x.dtype, jnp.inexact):
            return lax.pmean(x, varies)
        return lax.psum(x.astype(jnp.int32) if x.dtype == jnp.bool_ else x, varies)

    def _stacked(self, x: Any) -> Any:
        x = _varying(x, self._names)
        return x.reshape((1,) * len(self._names) + x.shape)


def _varying(x: Any, names: Sequence[str]) -> Any:
    """``x`` as a value that may differ along the axes: its gradient is each device's own."""
    missing = tuple(n for n in names if n not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x
