"""A whole nnx module as one region: its layers stay in blocks from the first to the last."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import warnings
from collections.abc import Callable, Generator
from typing import Any

import jax
import numpy as np
from flax import nnx

from shardkit.arrays import Padded
from shardkit.optim.batch import batch_cut
from shardkit.optim.examples import current_examples
from shardkit.parallel.layers.convs import check_batch_cut
from shardkit.parallel.nnx.wrapping import own_class
from shardkit.parallel.plans import Applied
from shardkit.spatial.regions.api import Region

_traced = contextvars.ContextVar("shardkit_region_traced", default=False)


@contextlib.contextmanager
def _tracing() -> Generator[None]:
    token = _traced.set(True)
    try:
        yield
    finally:
        _traced.reset(token)


def plain_inside(base: type, twin: type) -> None:
    """The twin of a layer does what Flax's own does while a region traces it: the region shards that itself."""
    run = twin.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (base.__call__ if _traced.get() else run)(self, *args, **kwargs)

    call.__doc__, call.__wrapped__ = run.__doc__, run  # type: ignore[attr-defined]
    twin.__call__ = call


@dataclasses.dataclass(frozen=True)
class InRegion:
    """What runs in place of a module's own call.

    Attributes:
      applied: the plan on the module.
    """

    applied: Applied

    def __call__(self, layer: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's call as a region, or layer by layer where the region would have to leave its layout."""
        if _traced.get():
            return run(*args, **kwargs)
        reasons = _why_not(layer, args, self.applied)
        if not reasons:
            x, *others = args
            # What isn't an array (a flag of training, say) is part of the program; other images are cut as the first.
            leaves, tree = jax.tree.flatten((others, kwargs), is_leaf=lambda a: isinstance(a, Padded))
            kinds = tuple(_kind(a, x, self.applied) for a in leaves)
            images = [x, *(a for a, kind in zip(leaves, kinds, strict=True) if kind == "image")]
            arrays = [a for a, kind in zip(leaves, kinds, strict=True) if kind == "array"]
            fixed = tuple(None if kind else a for a, kind in zip(leaves, kinds, strict=True))
            graph, state = nnx.split(layer)
            call = _Call(graph, own_class(layer), tree, kinds, fixed, self.applied, x.ndim)
            try:
                region = _region(call)
            except TypeError:  # something among the arguments doesn't hash: nothing is kept of it
                region = _region.__wrapped__(call)
            reasons = region.why_leaves(images, state, arrays)
        if reasons:
            warnings.warn(
                f"{self.applied.path!r} ({own_class(layer).__name__}) runs layer by layer, not as one region: "
                f"{'; '.join(reasons)}",
                UserWarning,
                stacklevel=4,
            )
            return run(*args, **kwargs)
        result, changed = region(images, state, arrays)
        nnx.update(layer, changed)
        return result


def _why_not(layer: Any, args: tuple[Any, ...], applied: Applied) -> list[str]:
    """What a region of the module can't be for, before it's traced."""
    if not args or getattr(args[0], "ndim", 0) < 3:
        return ["its first argument is no image"]
    problem = applied.plan.problem(args[0].ndim - 2)
    if problem is not None:
        raise ValueError(f"{applied.path!r} was given {args[0].shape}, and {problem}")
    check_batch_cut(applied.plan.spatial_axes(args[0].ndim), applied.path)
    inner = [getattr(m, "shardkit_plan", applied) for _, m in nnx.iter_graph(layer) if m is not layer]
    if any((p.plan, p.mesh) != (applied.plan, applied.mesh) for p in inner):
        return ["layers in it have plans of their own"]
    if current_examples() is not None and any(isinstance(m, nnx.Dropout) for _, m in nnx.iter_graph(layer)):
        return ['keys="shared": masks of a spread batch are its dropout layers\' own']
    if batch_cut() and any(
        isinstance(m, nnx.BatchNorm) and not m.use_running_average for _, m in nnx.iter_graph(layer)
    ):
        return ["sk.value_and_grad: statistics of a spread batch are its BatchNorm layers' own"]
    return []


def _kind(a: Any, x: Any, applied: Applied) -> str:
    """ "image": an array of the first one's size where that is cut; "array": another; "": none."""
    if not isinstance(a, jax.Array | np.ndarray | Padded):
        return ""
    dims = applied.plan.spatial_axes(x.ndim).values()
    return "image" if a.ndim == x.ndim and all(a.shape[d] == x.shape[d] for d in dims) else "array"


@dataclasses.dataclass(frozen=True)
class _Call:
    """All of a module's call but its arrays."""

    graph: Any
    kind: type
    tree: Any
    kinds: tuple[str, ...]
    fixed: tuple[Any, ...]
    applied: Applied
    ndim: int


@functools.lru_cache(maxsize=256)
def _region(call: _Call) -> Region:
    """The module's call as a function of its input, its variables and other arrays: the result, and what changed."""

    def whole(images: Any, state: Any, arrays: Any) -> Any:
        x, *more = images
        rest = {"image": iter(more), "array": iter(arrays)}
        leaves = [next(rest[kind]) if kind else f for kind, f in zip(call.kinds, call.fixed, strict=True)]
        others, named = jax.tree.unflatten(call.tree, leaves)
        before = {path: v.get_raw_value() for path, v in nnx.to_flat_state(state)}
        with _tracing():
            module = nnx.merge(call.graph, state, copy=True)
            result = call.kind.__call__(module, x, *others, **named)
        graph, after = nnx.split(module)
        if graph != call.graph:
            raise NotImplementedError("its call sets attributes, or makes variables (sow), which a region would lose")
        changed = [(path, v) for path, v in nnx.to_flat_state(after) if v.get_raw_value() is not before[path]]
        return result, nnx.from_flat_state(changed)

    return Region(whole, call.applied.plan.spatial_axes(call.ndim), call.applied.mesh, "auto")


def holds_layers(layer: Any, kinds: tuple[type, ...], kind_of: Callable[[Any], type]) -> bool:
    """A module that isn't a layer itself, but has some of ``kinds`` in it."""
    if isinstance(layer, nnx.WeightNorm | nnx.SpectralNorm):
        return False  # they change the layer that they wrap
    inside = [m for _, m in nnx.iter_graph(layer) if isinstance(m, nnx.Module) and m is not layer]
    return callable(layer) and any(kind_of(m) in kinds for m in inside)
