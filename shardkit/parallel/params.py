"""``parallelize_params``: parameters without a model, placed by rules of path and placement."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh

from shardkit.arrays.placing import constrain
from shardkit.meshes import check_holds_arrays, concrete_mesh, resolve_mesh
from shardkit.parallel.paths import PathPattern, join_path, matches, nearest
from shardkit.placements import Layout, Placements


def parallelize_params(
    params: Any,
    rules: Mapping[PathPattern, Placements],
    mesh: Mesh | AbstractMesh | None = None,
    *,
    strict: bool = True,
) -> Any:
    """Place every parameter of a tree as the first rule that matches its path says; others are whole on every device.

    For models that aren't Flax modules (a tree of arrays and a function), and for state of any kind.

    Args:
      params: a tree of arrays, or of ``jax.ShapeDtypeStruct`` (which get the sharding).
      rules: ``{path pattern: placements}``. A path joins keys, attributes and indices with "/"; in a pattern ``*`` is
        one level and ``**`` any number of levels; a compiled regex must match the whole path. Placements in any form.
      mesh: else that of the parameters, or the ambient one.
      strict: a rule that matches nothing is an error; with ``strict=False`` a warning.

    Returns:
      The tree.

    Raises:
      TypeError: rules that are no mapping.
      ValueError: a rule that matches nothing, a Partial, placements with an axis that the mesh doesn't have, dims that
        don't exist or that the axis doesn't divide (the parameter is named).

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> params = {"mlp": {"up": jnp.ones((4, 8)), "down": jnp.ones((8, 4))}}
      >>> rules = {"**/up": {"tp": sk.Shard(1)}, "**/down": {"tp": sk.Shard(0)}}
      >>> placed = sk.parallelize_params(params, rules, sk.make_mesh({"tp": 1}))
      >>> sk.placements(placed["mlp"]["up"])
      (Shard(dim=1),)
    """
    where = concrete_mesh(resolve_mesh(mesh, *jax.tree.leaves(params), what="parallelize_params"))
    if not isinstance(rules, Mapping):
        raise TypeError(
            f'rules map path patterns to placements, e.g. {{"**/up": {{"tp": sk.Shard(1)}}}}; got {rules!r}'
        )
    named, tree = jax.tree_util.tree_flatten_with_path(params)
    paths = [path_of(path) for path, _ in named]
    found = [next((rule for rule in rules if matches(rule, path)), None) for path in paths]
    for rule in rules:
        if not any(matches(rule, path) for path in paths):
            text = f"rule {rule!r} matches no parameter; nearest paths: {nearest(rule, paths)}"
            if strict:
                raise ValueError(text)
            warnings.warn(text, UserWarning, stacklevel=2)
    placed = [
        _placed(x, path, {} if rule is None else rules[rule], where)
        for (_, x), path, rule in zip(named, paths, found, strict=True)
    ]
    return jax.tree.unflatten(tree, placed)


def path_of(keys: Any) -> str:
    """A tree path as "a/0/b".

    >>> path_of(jax.tree_util.tree_leaves_with_path({"a": [1, {"b": 2}]})[1][0])
    'a/1/b'
    """
    names = [getattr(k, "key", getattr(k, "idx", getattr(k, "name", k))) for k in keys]
    return join_path(names[:-1] if names and names[-1] in ("value", "raw_value") else names)


def _placed(x: Any, path: str, placements: Placements, mesh: Mesh | AbstractMesh) -> Any:
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        return x
    try:
        layout = Layout(mesh, placements).resolved(len(x.shape))
        layout.local_shape(x.shape)
    except ValueError as error:
        raise ValueError(f"parameter {path!r} of shape {tuple(x.shape)}: {error}") from None
    if layout.partial_axes:
        raise ValueError(f"parameter {path!r}: a parameter is Shard or Replicate, got {placements!r}")
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout.sharding)
    if isinstance(x, Tracer):
        return constrain(x, mesh, layout.spec_for(x.ndim))
    check_holds_arrays(mesh, "parallelize_params")
    return jax.device_put(x, layout.sharding)
