"""From an array, layout or sharding to what there is to draw."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from shardkit.arrays import Padded, PartialArray
from shardkit.inspect.drawing.blocks import even_cut, listed_holdings, mesh_holdings
from shardkit.inspect.drawing.subject import DeviceName, Subject
from shardkit.meshes import concrete_mesh, mesh_of, resolve_mesh
from shardkit.placements import AnyMesh, Layout, Placement, axes_size

WHAT = "sk.show"
_TAKES = (
    "an array (or jax.ShapeDtypeStruct) with a sharding, an sk.Padded, an sk.PartialArray, an sk.Layout, a sharding, "
    "or placements: a PartitionSpec, a mapping by axis name, or a sequence in mesh-axis order"
)


class _Given(NamedTuple):
    """What x says: where it is (a Layout, a sharding, or placements), and its sizes and dtype where it has any."""

    kind: str
    where: Any
    stored: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    dtype: Any = None


def read_subject(x: Any, mesh: AnyMesh | None, shape: Sequence[int] | None) -> Subject:
    """What there is to draw of ``x``; see ``sk.show`` for the arguments."""
    if mesh is not None:
        resolve_mesh(mesh, what=WHAT)  # refuses what is no mesh
    given = _with_shape(_given(x), shape)
    if isinstance(given.where, Sharding) and not isinstance(given.where, NamedSharding):
        return _of_sharding(given, mesh)
    layout = _layout(given.where, mesh)
    return _of_layout(given, layout)


def _given(x: Any) -> _Given:
    _refuse_tracer(x)
    if isinstance(x, Padded):
        _refuse_tracer(x.array)
        stored = tuple(np.shape(x.array))
        return _Given("Padded", _sharding_of(x.array), stored, tuple(x.logical_shape), x.dtype)
    if isinstance(x, PartialArray):
        _refuse_tracer(x.stack)
        mesh = mesh_of(x)
        layout = x.layout if mesh is None else x.layout.on(mesh)
        stored = tuple(np.shape(x.stack))[len(layout.partial_axes) :]
        return _Given("PartialArray", layout, stored, tuple(x.shape), x.dtype)
    if isinstance(x, Layout):
        return _Given("layout", x)
    if isinstance(x, NamedSharding | PartitionSpec):
        return _Given("layout", x)
    if isinstance(x, Sharding):
        return _Given(type(x).__name__, x)
    if isinstance(x, Mapping | list | tuple):
        _check_placements(x)
        return _Given("layout", x)
    if hasattr(x, "sharding") and hasattr(x, "shape"):
        return _Given("array", _sharding_of(x), tuple(x.shape), tuple(x.shape), x.dtype)
    raise TypeError(f"{WHAT} draws {_TAKES}; got {type(x).__name__}: {_short(x)}{_hint(x)}")


def _refuse_tracer(x: Any) -> None:
    if isinstance(x, Tracer):
        raise TypeError(
            f"{WHAT} needs a layout, which a traced value ({jax.typeof(x)}) may not have yet; call it outside jit, or "
            "inside jit pass the sharding: sk.show(sharding, shape=x.shape)"
        )


def _sharding_of(x: Any) -> Any:
    sharding = getattr(x, "sharding", None)
    if sharding is None:
        raise ValueError(
            f"{WHAT} needs a sharding, but this {type(x).__name__} of shape {tuple(np.shape(x))} has none; give it one "
            "(jax.ShapeDtypeStruct(shape, dtype, sharding=...)), or show placements with shape="
        )
    return sharding


def _check_placements(x: Any) -> None:
    values = list(x.values()) if isinstance(x, Mapping) else list(x)
    wrong = [v for v in values if not isinstance(v, Placement)]
    if wrong:
        raise TypeError(
            f"{WHAT}: {_short(wrong[0])} in this {type(x).__name__} is no placement (sk.Shard(dim), sk.Replicate(), "
            "sk.Partial(reduce)); of a tree of arrays, draw one leaf, or jax.tree.map(sk.show, tree)"
        )


def _short(x: Any) -> str:
    text = repr(x)
    return text if len(text) <= 60 else text[:57] + "..."


def _hint(x: Any) -> str:
    if isinstance(x, Placement):
        return '; say which mesh axis does that, for example {"dp": ' + repr(x) + "}"
    if isinstance(x, np.ndarray | np.generic | int | float | complex):
        return "; it lives on the host: place it first, with sk.shard_tensor(x, placements, mesh)"
    return ""


def _with_shape(given: _Given, shape: Any) -> _Given:
    if shape is None:
        return given
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except TypeError:
        raise TypeError(f"{WHAT}: shape takes the size of each dim, such as (8, 16), got {shape!r}") from None
    if any(size < 0 for size in sizes):
        raise ValueError(f"{WHAT}: sizes are at least 0, got shape={sizes}")
    if given.shape is None:
        return given._replace(stored=sizes, shape=sizes)
    if given.shape != sizes:
        raise ValueError(f"{WHAT}: shape={sizes} was given, but the {given.kind} has shape {given.shape}; leave it out")
    return given


def _layout(where: Any, mesh: AnyMesh | None) -> Layout:
    """On the mesh it is on (with devices, where the given or the ambient mesh knows them), or on the given one."""
    if isinstance(where, NamedSharding):
        where = Layout(where.mesh, where)
    if not isinstance(where, Layout):
        return Layout(concrete_mesh(resolve_mesh(mesh, what=WHAT)), where)
    own = where.mesh
    if mesh is None:
        return where.on(concrete_mesh(own))
    if own.axis_names != mesh.axis_names or own.axis_sizes != mesh.axis_sizes:
        raise ValueError(
            f"{WHAT}: it is on mesh {dict(own.shape)}, but mesh={dict(mesh.shape)} was given; leave mesh out"
        )
    if isinstance(own, Mesh) and isinstance(mesh, Mesh) and not np.array_equal(own.devices, mesh.devices):
        raise ValueError(
            f"{WHAT}: it is on other devices ({own.devices.flat[0]}, ...) than those of the given mesh "
            f"({mesh.devices.flat[0]}, ...); leave mesh out"
        )
    return where if isinstance(own, Mesh) else where.on(concrete_mesh(mesh))


def _of_layout(given: _Given, layout: Layout) -> Subject:
    mesh = layout.mesh
    reduce = layout.reduce
    ndim = None if given.stored is None else len(given.stored)
    if ndim is None and any(getattr(p, "dim", 0) < 0 for p in layout.placements):
        raise ValueError(
            f"{WHAT}: {list(layout.placements)} counts dims from the last one, so the number of dims must be known; "
            "give shape=, or count from the first"
        )
    dim_axes = layout.dim_axes(ndim)
    if given.stored is not None:
        layout.local_shape(given.stored)  # refuses sizes that don't divide
    if ndim is None:
        ndim = max([*dim_axes, (layout.ndim or 0) - 1]) + 1 if dim_axes or layout.ndim else 0
    sizes: Sequence[int | None] = given.shape or (None,) * ndim
    stored: Sequence[int | None] = given.stored or (None,) * ndim
    cuts = [
        even_cut(size, held, axes_size(mesh, dim_axes.get(dim, ())), dim_axes.get(dim, ()))
        for dim, (size, held) in enumerate(zip(sizes, stored, strict=True))
    ]
    axis_sizes = {name: int(size) for name, size in mesh.shape.items()}
    return Subject(
        kind=given.kind,
        holdings=mesh_holdings(axis_sizes, cuts, layout.partial_axes),
        devices=_names(mesh.devices.flat) if isinstance(mesh, Mesh) else (),
        mesh=axis_sizes,
        placements={n: repr(p) for n, p in zip(mesh.axis_names, layout.placements, strict=True)},
        reduce=reduce,
        partial_axes=layout.partial_axes,
        sized=given.stored is not None,
        **_dtype(given.dtype),
    )


def _of_sharding(given: _Given, mesh: AnyMesh | None) -> Subject:
    """A sharding that knows no mesh: it lists what every device holds."""
    name = type(given.where).__name__
    if mesh is not None:
        raise ValueError(
            f"{WHAT}: mesh={dict(mesh.shape)} was given, but the {given.kind} has a {name}, which is on no mesh; leave "
            "mesh out, or place it there with sk.shard_tensor(x, placements, mesh)"
        )
    if given.shape is None or given.stored is None:
        raise ValueError(f"{WHAT}: a {name} says who holds what only of a known shape; give shape=")
    listed = given.where.devices_indices_map(given.stored)
    blocks = [
        [index.indices(size)[:2] for index, size in zip(indices, given.stored, strict=True)]
        for indices in listed.values()
    ]
    return Subject(given.kind, listed_holdings(given.shape, blocks), _names(listed), **_dtype(given.dtype))


def _names(devices: Any) -> tuple[DeviceName, ...]:
    return tuple(DeviceName(int(d.id), str(d.platform), int(getattr(d, "process_index", 0))) for d in devices)


def _dtype(dtype: Any) -> dict[str, Any]:
    if dtype is None:
        return {}
    return {"dtype": str(getattr(dtype, "name", dtype)), "itemsize": int(dtype.itemsize)}
