"""A whole nnx module as one region: its layers stay in blocks from the first to the last."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from shardkit.arrays import Padded
from shardkit.optim.examples import current_examples
from shardkit.parallel.nnx.wrapping import own_class
from shardkit.parallel.plans import Applied
from shardkit.spatial.region.api import Region

_traced = contextvars.ContextVar("shardkit_region_traced", default=False)


@contextlib.contextmanager
def _tracing() -> Iterator[None]:
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
        if not args or not isinstance(args[0], jax.Array | Padded) or args[0].ndim < 3:
            return run(*args, **kwargs)
        if current_examples() is not None and any(isinstance(m, nnx.Dropout) for _, m in nnx.iter_graph(layer)):
            return run(*args, **kwargs)  # its masks are those of the whole batch, which only its twin knows
        x, *others = args
        # What isn't an array (a flag of training, say) is part of the program.
        leaves, tree = jax.tree.flatten((others, kwargs))
        arrays = [a for a in leaves if isinstance(a, jax.Array)]
        fixed = tuple(_ARRAY if isinstance(a, jax.Array) else a for a in leaves)
        graph, state = nnx.split(layer)
        call = _Call(graph, own_class(layer), tree, fixed, self.applied, x.ndim)
        try:
            region = _region(call)
        except TypeError:  # something among the arguments doesn't hash: nothing is kept of it
            region = _region.__wrapped__(call)
        reasons = region.why_leaves(x, state, arrays)
        if reasons:
            warnings.warn(
                f"{self.applied.path!r} ({call.kind.__name__}) runs layer by layer, not as one region: "
                f"{'; '.join(reasons)}",
                UserWarning,
                stacklevel=4,
            )
            return run(*args, **kwargs)
        result, changed = region(x, state, arrays)
        nnx.update(layer, changed)
        return result


_ARRAY = object()  # among a call's arguments: this one is an array


@dataclasses.dataclass(frozen=True)
class _Call:
    """All of a module's call but its arrays."""

    graph: Any
    kind: type
    tree: Any
    fixed: tuple[Any, ...]
    applied: Applied
    ndim: int


@functools.lru_cache(maxsize=256)
def _region(call: _Call) -> Region:
    """The module's call as a function of its input, its variables and other arrays: the result, and what changed."""

    def whole(x: Any, state: Any, arrays: Any) -> Any:
        rest = iter(arrays)
        more, named = jax.tree.unflatten(call.tree, [next(rest) if f is _ARRAY else f for f in call.fixed])
        before = {path: v.get_raw_value() for path, v in nnx.to_flat_state(state)}
        with _tracing():
            module = nnx.merge(call.graph, state, copy=True)
            result = call.kind.__call__(module, x, *more, **named)
        after = nnx.to_flat_state(nnx.state(module))
        changed = [(path, v) for path, v in after if v.get_raw_value() is not before[path]]
        return result, nnx.from_flat_state(changed)

    return Region(whole, call.applied.plan.spatial_axes(call.ndim), call.applied.mesh, "auto")


def holds_layers(layer: Any, kinds: tuple[type, ...], kind_of: Callable[[Any], type]) -> bool:
    """A module that isn't a layer itself, but has some of ``kinds`` in it."""
    return any(isinstance(m, nnx.Module) and m is not layer and kind_of(m) in kinds for _, m in nnx.iter_graph(layer))
