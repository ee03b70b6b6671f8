"""``parallelize``: a plan applied to the layers of a model, by path."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardkit.meshes import resolve_mesh
from shardkit.parallel.nnx_layers import SPATIAL_LAYERS
from shardkit.parallel.paths import PathPattern, join_path, matches, nearest, takes_everything
from shardkit.parallel.plans import Applied, ConvParallel

M = TypeVar("M")


def parallelize(
    model: M,
    plan: Mapping[PathPattern, ConvParallel],
    mesh: Mesh | AbstractMesh | None = None,
    *,
    strict: bool = True,
) -> M:
    """Apply plans to the layers of an nnx model, by path.

    The layers change in place: same parameters under the same names, same code around them, but their
    inputs may be sharded as the plan says. Parameters of these layers are placed on the mesh,
    replicated.

    Args:
      model: an ``nnx.Module``.
      plan: ``{path pattern: plan}``. In a pattern ``*`` is one level and ``**`` any number of levels;
        one that ends in ``**`` takes every layer below that the plan knows, any other must match only
        such layers. A compiled regex must match the whole path.
      mesh: else the ambient mesh.
      strict: a pattern that matches nothing, or a layer of the wrong kind, is an error; with
        ``strict=False`` a warning.

    Returns:
      The same model.

    Raises:
      ValueError: see ``strict``; a mesh axis the mesh doesn't have; two patterns for one layer.
      TypeError: not an nnx.Module, or not a plan object.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp, shardkit as sk
      >>> class Net(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
      ...     def __call__(self, x):
      ...         return nnx.relu(self.conv(x))
      >>> net = sk.parallelize(Net(nnx.Rngs(0)), {"conv": sk.ConvParallel("sp", dim="W")},
      ...                      sk.make_mesh({"sp": 1}))
      >>> net(jnp.ones((1, 8, 9, 1))).shape
      (1, 8, 9, 4)
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"parallelize takes a flax.nnx.Module, got {type(model).__name__}; a linen model needs "
            "its layers written with flax.nnx first"
        )
    mesh = resolve_mesh(mesh, what="parallelize")
    for key, item in plan.items():
        if not isinstance(item, ConvParallel):
            raise TypeError(f"the plan for {key!r} is {item!r}; use a plan object such as sk.ConvParallel")
        absent = [a for a in item.mesh_axes if a not in mesh.axis_names]
        if absent:
            raise ValueError(f"the plan for {key!r} uses mesh axes {absent}, but the mesh has {tuple(mesh.axis_names)}")
    layers = {join_path(path): layer for path, layer in nnx.iter_modules(model)}
    chosen: dict[str, tuple[PathPattern, ConvParallel]] = {}
    for pattern, item in plan.items():
        for path in _matched(pattern, item, layers, strict):
            if path in chosen and chosen[path][1] != item:
                raise ValueError(
                    f"layer {path!r} is matched by both {chosen[path][0]!r} and {pattern!r} with different plans; "
                    "make one of them narrower"
                )
            chosen[path] = (pattern, item)
    for path, (_, item) in chosen.items():
        _apply(layers[path], Applied(item, mesh, path))
    return model


def _kind(layer: Any) -> type | None:
    """The Flax layer that a twin exists for, if ``layer`` is one (or already is its twin)."""
    for base, twin in SPATIAL_LAYERS.items():
        if type(layer) is base or type(layer) is twin:
            return base
    return None


def _matched(pattern: PathPattern, item: ConvParallel, layers: Mapping[str, Any], strict: bool) -> list[str]:
    known = sorted(SPATIAL_LAYERS, key=lambda t: t.__name__)
    names = ", ".join(f"nnx.{t.__name__}" for t in known)

    def complain(text: str) -> None:
        if strict:
            raise ValueError(text)
        warnings.warn(text, UserWarning, stacklevel=4)

    found = [path for path in layers if matches(pattern, path)]
    usable = []
    for path in found:
        layer = layers[path]
        kind = _kind(layer)
        spatial = len(layer.kernel_size) if hasattr(layer, "kernel_size") else 3
        if kind is None and isinstance(layer, tuple(SPATIAL_LAYERS)):
            text = f"{path!r} is a {type(layer).__name__}, a subclass with code of its own: it is left alone"
            if takes_everything(pattern):
                warnings.warn(text, UserWarning, stacklevel=3)
            else:
                complain(text)
        elif kind is None:
            if not takes_everything(pattern):
                complain(
                    f"pattern {pattern!r} matches {path!r}, a {type(layer).__name__}, which ConvParallel doesn't know; "
                    f"it applies to {names}. Layers of these kinds: {_usable_paths(layers)[:8]}"
                )
        elif item.missing_dim(spatial) is not None:
            complain(
                f"{path!r} convolves over {spatial} spatial dims, so it has no dim {item.missing_dim(spatial)!r} for "
                f"{item.dims} to cut"
            )
        else:
            usable.append(path)
    if not found or (not usable and takes_everything(pattern)):
        near = nearest(pattern, _usable_paths(layers) or list(layers))
        complain(f"pattern {pattern!r} matches no layer that ConvParallel applies to ({names}); nearest paths: {near}")
    return usable


def _usable_paths(layers: Mapping[str, Any]) -> list[str]:
    return [path for path, layer in layers.items() if _kind(layer) is not None]


def _apply(layer: Any, applied: Applied) -> None:
    twin = SPATIAL_LAYERS.get(type(layer))
    if twin is not None:
        layer.__class__ = twin
    layer.shardkit_plan = applied
    if isinstance(applied.mesh, Mesh):
        whole = NamedSharding(applied.mesh, PartitionSpec())
        state = nnx.state(layer)
        # An abstract model (nnx.eval_shape) has nothing to place yet.
        if all(isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) for leaf in jax.tree.leaves(state)):
            nnx.update(layer, jax.tree.map(lambda leaf: jax.device_put(leaf, whole), state))
