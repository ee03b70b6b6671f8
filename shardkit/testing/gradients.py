"""``assert_same_gradients``: derivatives are the same on 1, 2, 4 and 8 devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from shardkit.arrays import Padded, PartialArray
from shardkit.arrays.partial import is_whole
from shardkit.meshes import make_mesh
from shardkit.placements import Layout, Placement
from shardkit.reshard import shard_tensor
from shardkit.testing.devices import entered, mesh_id
from shardkit.testing.devices import meshes as meshes_of
from shardkit.testing.held import is_array, read
from shardkit.testing.one_device import on_one_device
from shardkit.testing.values import assert_same_values


def assert_same_gradients(
    fun: Callable[..., Any],
    *args: Any,
    placements: Any,
    argnums: int | Sequence[int] = 0,
    meshes: Iterable[Mesh] | None = None,
    reference: Callable[..., Any] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    uneven: str = "error",
    seed: int = 0,
) -> None:
    """Checks that a function's value and gradients are on many devices what they are on one.

    A scalar loss is differentiated as it is. Of any other output the sum of its products with random numbers is (its
    cotangents: ones would hide what cancels), the same ones on every mesh.

    Args:
      fun: differentiated under ``jax.jit``.
      *args: its arguments, whole: pytrees of arrays.
      placements: of the arguments, by axis name: one mapping for all, or a sequence with an entry an argument, each a
        mapping or a pytree of them that is a prefix of the argument; ``{}`` replicates. Axes that a mesh doesn't have
        are left out there.
      argnums: the arguments to differentiate by.
      meshes: where to run. None: ``meshes(axes, axis_types="auto")`` of the axes that placements name.
      reference: the same for one device: given plain whole arrays, without a mesh. None: ``fun`` itself on a mesh of
        one device.
      rtol, atol: as of ``assert_same_values``.
      uneven: "error" or "pad": what becomes of arguments that a mesh doesn't divide (see ``sk.shard_tensor``).
      seed: of the cotangents.

    Raises:
      AssertionError: value or gradients differ; says on which mesh, by how much and where.
      TypeError, ValueError: placements that aren't by axis name, of another number than the arguments, or that name no
        axis of any mesh.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> from shardkit import testing
      >>> x, w = jnp.arange(16.0).reshape(8, 2), jnp.ones(2)
      >>> testing.assert_same_gradients(lambda w, x: jnp.mean((x @ w) ** 2), w, x, placements=({}, {"dp": sk.Shard(0)}))
    """
    given = _by_argument(placements, args)
    names = list(dict.fromkeys(name for leaf in given for _, p in leaf for name in p))
    where = tuple(meshes_of(names or ["dp"], axis_types="auto") if meshes is None else meshes)
    lost = [name for name in names if not any(name in mesh.axis_names for mesh in where)]
    if not where or lost:
        raise ValueError(
            f"placements name axes {lost or names}, which no mesh of meshes={[mesh_id(m) for m in where]} has"
        )
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    one = make_mesh(dict.fromkeys(names or ["dp"], 1), devices=jax.local_devices()[:1])
    small = args if reference is not None else _place(args, given, one, uneven)
    oracle = on_one_device(jax.jit(fun if reference is None else reference), keep_axes=reference is None)
    outputs = [(read(x).shape, x.dtype) for x in jax.tree.leaves(oracle(*small), is_leaf=is_whole)]
    weights = _weights(outputs, seed)
    derived = _gradients(fun if reference is None else reference, weights, numbers)
    value, gradients = on_one_device(derived, keep_axes=reference is None)(*small)
    wanted = {"value": value, "gradients": _unpacked(gradients, argnums)}
    for mesh in where:
        with entered(mesh):
            what = f"on mesh {mesh_id(mesh)} and on one device, value and gradients"
            value, gradients = _gradients(fun, weights, numbers)(*_place(args, given, mesh, uneven))
            found = {"value": value, "gradients": _unpacked(gradients, argnums)}
            assert_same_values(found, wanted, rtol=rtol, atol=atol, what=what)


def _unpacked(gradients: tuple[Any, ...], argnums: Any) -> Any:
    return gradients[0] if isinstance(argnums, int) else gradients


def _by_argument(placements: Any, args: Sequence[Any]) -> list[list[tuple[Any, Mapping[str, Placement]]]]:
    """Of each argument: its leaves' placements, one (leaf, placements) each."""
    if _is_mapping(placements):
        placements = (placements,) * len(args)
    if not isinstance(placements, tuple | list) or len(placements) != len(args):
        raise TypeError(
            f"placements must be a mapping by axis name for all arguments, or a sequence of {len(args)}, one an "
            f"argument; got {placements!r}"
        )
    found = []
    for number, (prefix, arg) in enumerate(zip(placements, args, strict=True)):
        leaves, tree = jax.tree.flatten(prefix, is_leaf=_is_mapping)
        bad = [leaf for leaf in leaves if not _is_mapping(leaf)]
        if bad:
            raise TypeError(
                f"placements of argument {number} must be given by axis name, as meshes differ, such as "
                f'{{"dp": sk.Shard(0)}}; got {bad[0]!r}'
            )
        try:
            branches = tree.flatten_up_to(arg)
        except (TypeError, ValueError) as err:
            raise ValueError(f"placements of argument {number} are no prefix of it: {tree}") from err
        found.append(
            [(x, leaf) for leaf, branch in zip(leaves, branches, strict=True) for x in jax.tree.leaves(branch)]
        )
    return found


def _is_mapping(x: Any) -> bool:
    return isinstance(x, dict) and all(isinstance(p, Placement) for p in x.values())


def _place(args: Sequence[Any], given: Any, mesh: Mesh, uneven: str) -> list[Any]:
    placed = []
    for arg, leaves in zip(args, given, strict=True):
        values = [
            _placed(x, {a: p for a, p in said.items() if a in mesh.axis_names}, mesh, uneven) for x, said in leaves
        ]
        placed.append(jax.tree.unflatten(jax.tree.structure(arg), values))
    return placed


def _placed(x: Any, placements: Mapping[str, Placement], mesh: Mesh, uneven: str) -> Any:
    if not is_array(x):
        return x
    shape = np.shape(x)
    fits = Layout(mesh, placements).padded_shape(shape) == shape
    return shard_tensor(x, placements, mesh, uneven="error" if fits else uneven)


def _weights(outputs: Sequence[tuple[tuple[int, ...], Any]], seed: int) -> list[np.ndarray | None]:
    """What each result is multiplied with; None for those that have no derivative."""
    rng = np.random.default_rng(seed)
    weights: list[np.ndarray | None] = []
    for shape, dtype in outputs:
        if not jnp.issubdtype(dtype, jnp.inexact):
            weights.append(None)
            continue
        numbers = rng.normal(size=shape)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            numbers = numbers + 1j * rng.normal(size=shape)
        weights.append(np.asarray(numbers).astype(dtype))
    if len(weights) == 1 and weights[0] is not None and not weights[0].shape:
        weights = [np.ones((), weights[0].dtype)]
    return weights


def _gradients(
    fun: Callable[..., Any], weights: Sequence[np.ndarray | None], argnums: tuple[int, ...]
) -> Callable[..., Any]:
    def loss(*args: Any) -> jax.Array:
        results = jax.tree.leaves(fun(*args), is_leaf=is_whole)
        total: Any = 0.0
        for x, weight in zip(results, weights, strict=True):
            if weight is not None:
                value = x.reduce() if isinstance(x, PartialArray) else x
                value = value.value if isinstance(value, Padded) else value
                total += jnp.sum(jnp.real(value * _beside(weight, value)))
        return total

    return jax.jit(jax.value_and_grad(loss, argnums))


def _beside(weight: np.ndarray, x: Any) -> Any:
    """The numbers where ``x`` is: Explicit axes don't let values meet that live apart."""
    sharding = jax.typeof(x).sharding
    if sharding.mesh.empty or AxisType.Explicit not in sharding.mesh.axis_types:
        return weight
    return jax.sharding.reshard(weight, sharding)
