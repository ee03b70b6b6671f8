"""A linen model under a plan: the same model, whose ``init`` and ``apply`` run layers as the plan says."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Generator
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax.core.scope import Scope
from jax.core import Tracer
from jax.sharding import NamedSharding

from shardkit.arrays.placing import constrain
from shardkit.meshes import holds_arrays
from shardkit.optim.sharded_params import stage3_layout
from shardkit.parallel.linen.session import Session
from shardkit.parallel.linen.wrapping import WRAPS, plain_class
from shardkit.parallel.matching import read_plans
from shardkit.parallel.paths import PathPattern, join_path
from shardkit.parallel.plans import LayerPlan
from shardkit.parallel.ready.describe import traced
from shardkit.parallel.ready.guessing import ReadyPlan
from shardkit.parallel.tensor.entering import remembering
from shardkit.placements import AnyMesh, Layout


@dataclasses.dataclass(frozen=True)
class LinenPlan:
    """What a model carries.

    Attributes:
      plans: in order; of a plan that is guessed, none.
      mesh: the mesh.
      strict: a pattern must match.
      ready: a plan that is guessed when the model is called.
    """

    plans: tuple[tuple[PathPattern, tuple[LayerPlan, ...]], ...]
    mesh: AnyMesh
    strict: bool
    ready: Same | None = None

    @classmethod
    def of(cls, given: Any, mesh: AnyMesh, strict: bool) -> LinenPlan:
        """As a user gives it."""
        if isinstance(given, ReadyPlan):
            return cls((), mesh, strict, Same(given))
        return cls(tuple(read_plans(given, mesh).items()), mesh, strict)

    def session(self, call: Callable[[], Any]) -> Session:
        """For one ``init`` or ``apply``, which ``call()`` is."""
        plans = dict(self.plans)
        if self.ready is not None:
            plans = read_plans(self.ready.plan.for_layers(traced(call), self.mesh), self.mesh)
        return Session(plans, self.mesh, self.strict)


_active: contextvars.ContextVar[bool] = contextvars.ContextVar("active", default=False)


@contextlib.contextmanager
def _planning() -> Generator[None]:
    """A planned model's own ``init`` or ``apply`` is at work."""
    token = _active.set(True)
    try:
        with remembering():
            yield
    finally:
        _active.reset(token)


class Same:
    """A plan that equals itself only: dictionaries can't be hashed, and modules must be."""

    def __init__(self, plan: ReadyPlan):
        self.plan = plan


def with_plan(model: nn.Module, plan: LinenPlan) -> Any:
    """The model, of a class of the same name that carries the plan."""
    cls = _planned(plain_class(model))
    return cls(**{**_fields(model, type(model)), "shardkit_plan": plan})


def _fields(model: nn.Module, cls: Any) -> dict[str, Any]:
    """What a model of class ``cls`` like this one is made with."""
    return {f.name: getattr(model, f.name) for f in dataclasses.fields(cls) if f.init and f.name != "parent"}


@functools.cache
def _planned(cls: type) -> type:
    def init(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(cls.init_with_output, self)
        return _create(self.shardkit_plan, lambda *a, **k: (None, run(*a, **k)[1]), args, kwargs)[1]

    def init_with_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _create(self.shardkit_plan, functools.partial(cls.init_with_output, self), args, kwargs)

    def apply(self: Any, variables: Any, *args: Any, **kwargs: Any) -> Any:
        with _planning():
            session = self.shardkit_plan.session(lambda: cls.apply(self, variables, *args, **kwargs))
            with nn.intercept_methods(session):
                result = cls.apply(self, variables, *args, **kwargs)
        if kwargs.get("method") is None:
            session.check_weights(_paths(variables))
        return result

    def tabulate(self: Any, *args: Any, **kwargs: Any) -> str:
        return cls(**_fields(self, cls)).tabulate(*args, **kwargs)

    def check_home(self: Any) -> None:
        if self.shardkit_plan is not None and not _active.get() and isinstance(self.parent, nn.Module | Scope):
            raise ValueError(
                f"{cls.__name__} carries a plan, which its own init and apply carry out: call those (not bind, "
                "nn.init, nn.apply), and give a model that holds others its plan as a whole: sk.parallelize(outer, ...)"
            )
        cls.__post_init__(self)

    names = {
        "init": nn.nowrap(init),
        "init_with_output": nn.nowrap(init_with_output),
        "apply": nn.nowrap(apply),
        "tabulate": nn.nowrap(tabulate),
        "__post_init__": check_home,
        "shardkit_plan": None,
        "__annotations__": {"shardkit_plan": Any},
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        WRAPS: cls,
    }
    return type(cls.__name__, (cls,), names)


def _create(plan: LinenPlan, run: Callable[..., tuple[Any, Any]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """(output, variables) with each variable made where it goes, never whole on one device."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    dynamic = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray)]

    def made(arrays: list[Any]) -> tuple[Any, Any]:
        given = dict(zip(dynamic, arrays, strict=True))
        args, kwargs = jax.tree.unflatten(tree, [given.get(i, x) for i, x in enumerate(leaves)])
        with _planning(), nn.intercept_methods(session):
            return run(*args, **kwargs)

    arrays = [leaves[i] for i in dynamic]
    with _planning():
        session = plan.session(lambda: run(*args, **kwargs))
        output, variables = jax.eval_shape(made, arrays)
    if kwargs.get("method") is None:
        session.check_used({})
    places = _places(session, variables, plan.mesh)
    if any(isinstance(x, Tracer) for x in arrays):
        output, variables = made(arrays)
        return output, jax.tree.map(lambda x, place: constrain(x, place.mesh, place.spec), variables, places)
    if holds_arrays(plan.mesh):
        free = jax.tree.map(lambda _: None, output)
        return jax.jit(made, out_shardings=(free, places))(arrays)
    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
    return output, jax.tree.map(place, variables, places)


def _places(session: Session, variables: Any, mesh: AnyMesh) -> Any:
    """Where each variable goes: as claimed, sharded on top of that under ``FullyShard``, else whole."""

    def place(path: Any, x: Any) -> NamedSharding:
        collection, *names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
        full = join_path(n for n in names if n not in ("value", "unboxed"))
        layout = session.claims.layout(full, mesh, len(x.shape)) if collection == "params" else None
        layout = layout or Layout(mesh, {}).resolved(len(x.shape))
        if collection == "params":
            for above, fully in session.sharded.items():
                if (above == "" or full.startswith(above + "/")) and x.size >= max(fully.min_size, 1):
                    layout = stage3_layout(layout, x.shape, fully.axis, fully.first_dim)
        return layout.sharding

    return jax.tree_util.tree_map_with_path(place, variables)


def _paths(variables: Any) -> dict[str, Any]:
    """Paths of the layers whose variables a tree holds, and of all above them."""
    found = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(variables):
        names = [str(getattr(key, "key", key)) for key in path][1:-1]
        found |= {join_path(names[:n]): None for n in range(len(names) + 1)}
    return found
