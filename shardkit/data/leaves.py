"""The leaves of a batch, each with its name and where it's to live."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit.meshes import concrete_mesh, resolve_mesh
from shardkit.placements import Layout, Placement


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a batch: ``value`` is this process's own part."""

    name: str
    value: Any
    layout: Layout


def mesh_for(mesh: Any, placements: Any, what: str) -> Mesh:
    """The mesh of a batch: as given, else that of a sharding or layout among the placements, else the ambient one.

    Raises:
      ValueError: there's none, or one without devices.
    """
    if mesh is None:
        mesh = next((p.mesh for p in _mapped(placements) if isinstance(p, NamedSharding | Layout)), None)
    where = concrete_mesh(resolve_mesh(mesh, what=what))
    if not isinstance(where, Mesh):
        raise ValueError(
            f"{what} needs the devices themselves, but mesh {dict(where.shape)} is abstract (or this is in jit); pass "
            "a jax.sharding.Mesh, and call it outside jit"
        )
    return where


def placed_leaves(batch: Any, placements: Any, mesh: Mesh, what: str) -> list[Leaf]:
    """The leaves of a batch in the order of ``jax.tree.leaves``.

    Raises:
      ValueError: placements that don't fit the batch, or a leaf; a Partial; a batch without leaves.
      TypeError: a leaf that is no array of numbers.
    """
    found = [
        Leaf(name, value, _layout(form, mesh, name, np.ndim(value), what))
        for name, value, form in ((n, _array(v, n, what), f) for n, v, f in _pairs("", batch, placements, mesh, what))
    ]
    if not found:
        raise ValueError(f"{what}: the batch {batch!r} has no arrays in it")
    return found


def layouts_in(placements: Any, mesh: Mesh) -> list[Layout]:
    """Every layout that placements name, before the leaves are known."""
    return [Layout(mesh, form) for form in _forms(placements, mesh)]


def dtype_of(value: Any) -> np.dtype:
    """As JAX will hold it: 64 bits become 32, unless those are on."""
    return np.dtype(jax.dtypes.canonicalize_dtype(value.dtype))


def _is_form(given: Any, mesh: Mesh) -> bool:
    """Whether it's placements for one array, and not a tree of them."""
    if isinstance(given, Layout | NamedSharding | PartitionSpec):
        return True
    if isinstance(given, Mapping):
        return all(k in mesh.axis_names for k in given) and all(isinstance(p, Placement) for p in given.values())
    return isinstance(given, list | tuple) and all(isinstance(p, Placement) for p in given)


def _forms(given: Any, mesh: Mesh) -> Iterator[Any]:
    if _is_form(given, mesh):
        yield given
    else:
        for child in _children(given).values():
            yield from _forms(child, mesh)


def _mapped(given: Any) -> Iterator[Any]:
    """The leaves of placements, where no mesh says yet what is a form."""
    if isinstance(given, Layout | NamedSharding | PartitionSpec):
        yield given
    else:
        for child in _children(given).values():
            yield from _mapped(child)


def _children(node: Any) -> dict[str, Any]:
    """What a node of a tree has directly below it, by how it's reached; nothing for a leaf."""
    if node is None:
        return {}
    below, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda n: n is not node)
    return {jax.tree_util.keystr(path): child for path, child in below if path}


def _pairs(name: str, node: Any, given: Any, mesh: Mesh, what: str) -> Iterator[tuple[str, Any, Any]]:
    if _is_form(given, mesh):
        for path, value in jax.tree_util.tree_flatten_with_path(node)[0]:
            yield name + jax.tree_util.keystr(path), value, given
        return
    below, forms = _children(node), _children(given)
    if not forms or below.keys() != forms.keys():
        here = f"at batch{name}" if name else "of the batch"
        lacking = [key for key in below if key not in forms]
        extra = [key for key in forms if key not in below]
        raise ValueError(
            f"{what}: placements {given!r} {here} are neither those of one array (a sequence of sk.Shard/sk.Replicate "
            f"in mesh order, a mapping by mesh axis {mesh.axis_names}, a PartitionSpec, a NamedSharding), nor a "
            f"tree like the batch: {list(below) or 'this is one leaf'}"
            + (f", of which {lacking} have none" if lacking and forms else "")
            + (f"; {extra} are no parts of it" if extra and below else "")
        )
    for key, child in below.items():
        yield from _pairs(name + key, child, forms[key], mesh, what)


def _layout(form: Any, mesh: Mesh, name: str, ndim: int, what: str) -> Layout:
    layout = Layout(mesh, form)
    if layout.partial_axes:
        raise ValueError(
            f"{what} takes each process's part of whole values, but placements of {said(name)} are Partial over "
            f"{layout.partial_axes}; use Shard or Replicate there (contributions: sk.from_local)"
        )
    try:
        return layout.resolved(ndim)
    except ValueError as error:
        raise ValueError(
            f"{what}: {said(name)} has {ndim} dims. {error}. Give placements per leaf, as a tree like the batch: "
            '{"image": {"dp": sk.Shard(0)}, "step": {}}'
        ) from error


def _array(value: Any, name: str, what: str) -> Any:
    if isinstance(value, Tracer):
        raise TypeError(f"{what}: {said(name)} is traced; call it outside jit")
    if isinstance(value, jax.Array):
        if not value.is_fully_addressable:
            raise ValueError(f"{what}: {said(name)} is a global array already; sk.reshard moves it")
        if jnp.issubdtype(value.dtype, jax.dtypes.extended):
            raise TypeError(f"{what}: {said(name)} has dtype {value.dtype}; give its jax.random.key_data")
    array = np.asarray(value)
    check_dtype(array.dtype, name, what)
    return array


def check_dtype(dtype: Any, name: str, what: str) -> None:
    """Refuses what devices can't hold."""
    if not (jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)):
        raise TypeError(
            f"{what}: {said(name)} has dtype {dtype}, which devices can't hold; give numbers or booleans, and leave "
            "text and objects out of the batch"
        )


def said(name: str) -> str:
    """A leaf as messages name it."""
    return f"batch{name}"
