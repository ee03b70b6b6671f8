"""What happens around a layer's own code: its input placed or prepared, its result too."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardkit.arrays import Padded
from shardkit.meshes import manual_axes, resolve_mesh
from shardkit.optim.examples import current_examples
from shardkit.parallel.tensor.entering import remembering
from shardkit.parallel.tensor.layers import cast_once
from shardkit.placements import entry_names
from shardkit.spatial.operands import axis_entries, explicit_axes

Arguments = tuple[Any, ...]


class Before(Protocol):
    """A layer's arguments to others. Hashable."""

    def __call__(
        self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], /
    ) -> tuple[tuple[Any, ...], dict[str, Any]]: ...


class After(Protocol):
    """A layer's result to another. Hashable."""

    def __call__(self, layer: Any, result: Any, /) -> Any: ...


class Instead(Protocol):
    """What runs in place of a layer's own code (and may call it). Hashable."""

    def __call__(
        self, layer: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], /
    ) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Around:
    """All that happens around one layer's call, in order."""

    before: tuple[Before, ...] = ()
    after: tuple[After, ...] = ()
    instead: Instead | None = None  # of the layer's own code
    outermost: bool = False  # the whole model: layers within share what they make of one input

    def __bool__(self) -> bool:
        return bool(self.before or self.after or self.instead or self.outermost)

    def __call__(self, layer: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``run(*args, **kwargs)``, the layer's own code, with what comes before and after."""
        with remembering():
            for step in self.before:
                args, kwargs = step(layer, args, kwargs)
            result = run(*args, **kwargs) if self.instead is None else self.instead(layer, run, args, kwargs)
            for step in self.after:
                result = step(layer, result)
            return result


@dataclasses.dataclass(frozen=True)
class Cut:
    """A dim of arrays is cut over a mesh axis (``axis=None``: put together); other dims stay as they are.

    ``joins`` is the axis that has cut what is put together.
    """

    dim: int
    axis: str | None
    mesh: Mesh | AbstractMesh
    path: str
    plan: str
    joins: str | None = None

    def divides(self, x: Any) -> bool:
        """Whether an array has the dim, and the axis divides it."""
        fits = isinstance(x, jax.Array) and -x.ndim <= self.dim < x.ndim
        return fits and (self.axis is None or x.shape[self.dim] % self.mesh.shape[self.axis] == 0)

    def __call__(self, x: Any) -> Any:
        """The array so placed; what isn't an array of that many dims is passed on."""
        if not isinstance(x, jax.Array) or not -x.ndim <= self.dim < x.ndim:
            return x
        if self.axis is not None and (self.axis in manual_axes() or self.mesh.shape[self.axis] == 1):
            return x  # there, each device has its part
        dim = self.dim % x.ndim
        if self.joins in manual_axes():
            return lax.all_gather(x, self.joins, axis=dim, tiled=True)
        if self.axis is not None and x.shape[dim] % self.mesh.shape[self.axis]:
            raise ValueError(
                f"layer {self.path!r}: {self.plan} cuts dim {dim} of shape {x.shape} over mesh axis {self.axis!r}, but "
                f"its {self.mesh.shape[self.axis]} devices don't divide {x.shape[dim]}; pad it to a multiple, or leave "
                "the plan out"
            )
        return _placed(x, dim, self.axis, resolve_mesh(self.mesh, what=self.plan))


@functools.partial(jax.jit, static_argnums=(1, 2, 3), inline=True)
def _placed(x: Any, dim: int, axis: str | None, mesh: Any) -> Any:
    if explicit_axes(mesh):
        entries = axis_entries(x)
        entries = [tuple(n for n in entry_names(e) if n != axis) or None for e in entries]
        entries[dim] = axis if axis is None else (*entry_names(entries[dim]), axis)
        return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*entries)))
    entries = [PartitionSpec.UNCONSTRAINED] * x.ndim
    entries[dim] = axis
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*entries)))


@dataclasses.dataclass(frozen=True)
class CutInputs:
    """The first ``count`` positional arguments, those that are arrays of as many dims as the first (no masks).

    If there are none, the first of those given by name.
    """

    cut: Cut
    count: int = 1

    def __call__(self, layer: Any, args: Arguments, kwargs: dict[str, Any]) -> tuple[Arguments, dict[str, Any]]:
        if not args and kwargs:
            name = next(iter(kwargs))
            return args, {**kwargs, name: self.cut(kwargs[name])}
        first = jnp.ndim(args[0]) if args and isinstance(args[0], jax.Array) else None
        done = [
            self.cut(x) if i < self.count and isinstance(x, jax.Array) and x.ndim == first else x
            for i, x in enumerate(args)
        ]
        return tuple(done), kwargs


@dataclasses.dataclass(frozen=True)
class CutBatch:
    """Every array among the arguments that holds the examples which the first of them holds."""

    cut: Cut

    def __call__(self, layer: Any, args: Arguments, kwargs: dict[str, Any]) -> tuple[Arguments, dict[str, Any]]:
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_is_padded)
        dim = self.cut.dim
        sizes = [x.shape[dim] if _is_data(x) and x.ndim > dim else None for x in leaves]
        examples = next((size for size in sizes if size is not None), None)
        leaves = [
            self.cut(jnp.asarray(x)) if size is not None and size == examples else x
            for x, size in zip(leaves, sizes, strict=True)
        ]
        return jax.tree.unflatten(tree, leaves)


def _is_padded(x: Any) -> bool:
    return isinstance(x, Padded)


def _is_data(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray) and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


@dataclasses.dataclass(frozen=True)
class CutResult:
    """Every array of the result; ``may``: of those that the axis divides."""

    cut: Cut
    may: bool = False

    def __call__(self, layer: Any, result: Any) -> Any:
        def one(x: Any) -> Any:
            return x if self.may and not self.cut.divides(x) else self.cut(x)

        return jax.tree.map(one, result, is_leaf=_is_padded)


@dataclasses.dataclass(frozen=True)
class CastOnce:
    """The input in the dtype that the layer multiplies in, one array for all layers that read it.

    ``parameters`` finds the layer's own; None where they aren't known, or the layer promotes dtypes in its own way.
    """

    parameters: Callable[[Any], Sequence[Any] | None]

    def __call__(self, layer: Any, args: Arguments, kwargs: dict[str, Any]) -> tuple[Arguments, dict[str, Any]]:
        if not args or not isinstance(args[0], jax.Array) or not jnp.issubdtype(args[0].dtype, jnp.inexact):
            return args, kwargs
        own = self.parameters(layer)
        if own is None:
            return args, kwargs
        dtype = layer.dtype
        if dtype is None:
            dtype = jnp.result_type(args[0].dtype, *(x.dtype for x in own))
        return (cast_once(args[0], jnp.dtype(dtype)), *args[1:]), kwargs


@dataclasses.dataclass(frozen=True)
class OneMaskForAll:
    """Attention whose dropout draws a mask for each example is refused where it has a part of the examples only."""

    path: str

    def __call__(self, layer: Any, args: Arguments, kwargs: dict[str, Any]) -> tuple[Arguments, dict[str, Any]]:
        still = kwargs.get("deterministic")
        still = layer.deterministic if still is None else still
        if current_examples() is not None and layer.dropout_rate > 0 and not layer.broadcast_dropout and not still:
            raise ValueError(
                f'layer {self.path!r}: with keys="shared" attention can\'t draw a dropout mask for each example, as it '
                "doesn't know which it has; make it with broadcast_dropout=True (Flax's default), or use "
                'keys="split"'
            )
        return args, kwargs


@dataclasses.dataclass(frozen=True)
class UserInput:
    """A user's function of the arguments."""

    fn: Callable[..., Any]
    mesh: Mesh | AbstractMesh

    def __call__(self, layer: Any, args: Arguments, kwargs: dict[str, Any]) -> tuple[Arguments, dict[str, Any]]:
        found = self.fn(self.mesh, *args, **kwargs)
        if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], tuple) and isinstance(found[1], dict):
            return found
        return (found if isinstance(found, tuple) else (found,)), {}


@dataclasses.dataclass(frozen=True)
class UserOutput:
    """A user's function of the result."""

    fn: Callable[..., Any]
    mesh: Mesh | AbstractMesh

    def __call__(self, layer: Any, result: Any) -> Any:
        return self.fn(self.mesh, result)
