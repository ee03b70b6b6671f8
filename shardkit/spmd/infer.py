"""Where outputs and gradients would be, without running anything."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardkit.placements import AnyMesh, Placement
from shardkit.spmd.arguments import INFERRED, is_placements
from shardkit.spmd.partition import Partitioned, partition


def infer_placements(fun: Callable[..., Any], in_placements: Any, *, mesh: AnyMesh | None = None) -> Callable[..., Any]:
    """Where the outputs of a function would be, Partial included, if it were partitioned.

    Args:
      fun: of pytrees of arrays, written for one device.
      in_placements: placements in any form, once for all arguments; or a tuple with one entry an argument, each
        placements or a pytree of them that is a prefix of the argument. None: as the arrays are.
      mesh: else that of a ``Layout``/``NamedSharding`` placement, of an argument, or the ambient one.

    Returns:
      A function of the same arguments (``jax.ShapeDtypeStruct`` will do as arrays), which runs nothing and returns, in
      place of each output array, its placements in mesh-axis order.

    Raises:
      ValueError: in the call, placements that don't match the arguments, sizes that don't divide, no mesh.
      NotImplementedError: in the call, host callbacks and other effects.

    Example:
      >>> import jax, jax.numpy as jnp, shardkit as sk
      >>> mesh = jax.sharding.AbstractMesh((2, 4), ("dp", "tp"))
      >>> x, w = jnp.ones((8, 16)), jnp.ones((16, 4))
      >>> given = {"dp": sk.Shard(0), "tp": sk.Shard(1)}, {"tp": sk.Shard(0)}
      >>> sk.infer_placements(jnp.matmul, given, mesh=mesh)(x, w)
      (Shard(dim=0), Partial(reduce='sum'))
    """
    whole = partition(fun, in_placements, INFERRED, mesh=mesh)

    def inferred(*args: Any, **kwargs: Any) -> Any:
        program, results = whole.inspect(*args, **kwargs)
        return jax.tree.unflatten(jax.tree.structure(results), list(program.out_placements))

    return inferred


@dataclasses.dataclass(frozen=True)
class GradientPlacement:
    """Where one parameter's gradient is before anything is reduced.

    Attributes:
      name: of the parameter, its path.
      shape, dtype: global.
      placements: of the gradient, in mesh-axis order.
      partial_axes: those over which it's a sum of contributions.
      made_by: of each of these, the operation that made it so, and the user's line.
      bytes: of one device's contribution.

    Example:
      >>> import jax, jax.numpy as jnp, shardkit as sk
      >>> mesh = jax.sharding.AbstractMesh((4,), ("dp",))
      >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
      >>> report = sk.infer_gradient_placements(loss, {}, {"dp": sk.Shard(0)}, mesh=mesh)
      >>> (gradient,) = report(jnp.ones((5, 3), "float32"), jnp.ones((8, 5), "float32")).gradients
      >>> gradient.partial_axes, gradient.bytes, gradient.made_by["dp"].split()[0]
      (('dp',), 60, 'dot_general')
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    placements: tuple[Placement, ...]
    partial_axes: tuple[str, ...]
    made_by: dict[str, str]
    bytes: int


@dataclasses.dataclass(frozen=True)
class ReductionGroup:
    """Gradients that one collective can reduce together: they're Partial over the same axes.

    Attributes:
      axes: the mesh axes.
      size: devices along them.
      parameters: names.
      bytes: of all contributions of one device.
      mean_scale: what sums must be multiplied by, if each device takes the mean of its own examples (in the
        function as traced, a mean already divides by all of them).

    Example:
      >>> import jax, jax.numpy as jnp, shardkit as sk
      >>> mesh = jax.sharding.AbstractMesh((4,), ("dp",))
      >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
      >>> report = sk.infer_gradient_placements(loss, {}, {"dp": sk.Shard(0)}, mesh=mesh)
      >>> (group,) = report(jnp.ones((5, 3), "float32"), jnp.ones((8, 5), "float32")).groups
      >>> group.axes, group.size, group.bytes, group.mean_scale
      (('dp',), 4, 60, 0.25)
    """

    axes: tuple[str, ...]
    size: int
    parameters: tuple[str, ...]
    bytes: int
    mean_scale: float


@dataclasses.dataclass(frozen=True)
class GradientReport:
    """Where gradients become Partial, and by which operation. Print it.

    Attributes:
      gradients: one a parameter.
      groups: the reductions that a step needs, one a set of axes.
      tree: the gradients' placements, in a pytree like the parameters.

    Example:
      >>> import jax, jax.numpy as jnp, shardkit as sk
      >>> mesh = jax.sharding.AbstractMesh((4,), ("dp",))
      >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
      >>> report = sk.infer_gradient_placements(loss, {}, {"dp": sk.Shard(0)}, mesh=mesh)
      >>> report(jnp.ones((5, 3)), jnp.ones((8, 5))).tree
      (Partial(reduce='sum'),)
    """

    gradients: tuple[GradientPlacement, ...]
    groups: tuple[ReductionGroup, ...]
    tree: Any = dataclasses.field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "gradients": [
                {
                    "name": g.name,
                    "shape": list(g.shape),
                    "dtype": str(g.dtype),
                    "placements": [repr(p) for p in g.placements],
                    "partial_axes": list(g.partial_axes),
                    "made_by": dict(g.made_by),
                    "bytes": g.bytes,
                }
                for g in self.gradients
            ],
            "groups": [dataclasses.asdict(g) for g in self.groups],
        }

    def __str__(self) -> str:
        wide = max((len(g.name) for g in self.gradients), default=0)
        lines = []
        for g in self.gradients:
            why = "; ".join(f"{axis}: {maker}" for axis, maker in g.made_by.items())
            lines.append(
                f"  {g.name:<{wide}}  {g.dtype}[{','.join(map(str, g.shape))}]  {_said(g.partial_axes)}  {why}".rstrip()
            )
        lines.append("reductions:")
        for group in self.groups:
            lines.append(
                f"  over {' x '.join(group.axes)} ({group.size} devices): {len(group.parameters)} gradients, "
                f"{group.bytes:,} bytes; mean of local means: x {group.mean_scale:g}"
            )
        return "\n".join(["gradients:", *lines] if self.groups else ["gradients:", *lines, "  none"])


def _said(axes: Sequence[str]) -> str:
    return f"Partial over {' x '.join(axes)}" if axes else "complete"


def infer_gradient_placements(
    loss: Callable[..., Any],
    param_placements: Any,
    input_placements: Any = None,
    *,
    mesh: AnyMesh | None = None,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Where the gradients of a loss become Partial, which operations made them so, and what there is to reduce.

    A dim that is contracted, reduced or broadcast away while it's cut leaves the gradient Partial over the axes that
    cut it: a matrix's over what cuts the leading dims of its activation, a bias's over the dims it is broadcast
    along, a convolution's over batch and space.

    Args:
      loss: ``loss(params, *inputs)``, a scalar (or ``(scalar, aux)``, with ``has_aux``).
      param_placements: of the parameters, once or a pytree that is a prefix of them.
      input_placements: of the inputs, once for all or in a tuple of one entry an input. None: as the arrays are.
      mesh: else that of a ``Layout``/``NamedSharding`` placement, of an argument, or the ambient one.
      has_aux: the loss returns something besides.

    Returns:
      A function of ``(params, *inputs)`` (``jax.ShapeDtypeStruct`` will do) that runs nothing and returns a
      ``GradientReport``.

    Raises:
      ValueError: in the call, placements that don't match the arguments, sizes that don't divide, no mesh.
      NotImplementedError: in the call, host callbacks and other effects.
      TypeError: in the call, the loss is no scalar.

    Example:
      >>> import jax, jax.numpy as jnp, shardkit as sk
      >>> mesh = jax.sharding.AbstractMesh((4,), ("dp",))
      >>> loss = lambda p, x: jnp.mean((x @ p["w"] + p["b"]) ** 2)
      >>> report = sk.infer_gradient_placements(loss, {}, {"dp": sk.Shard(0)}, mesh=mesh)(
      ...     {"b": jnp.ones(3), "w": jnp.ones((5, 3))}, jnp.ones((8, 5))
      ... )
      >>> [(g.name, g.partial_axes) for g in report.gradients]
      [("['b']", ('dp',)), ("['w']", ('dp',))]
    """

    def gradient(params: Any, *inputs: Any) -> Any:
        return jax.grad(loss, has_aux=has_aux)(params, *inputs)[0] if has_aux else jax.grad(loss)(params, *inputs)

    def inferred(params: Any, *inputs: Any) -> GradientReport:
        given = input_placements
        once = is_placements(given) or not isinstance(given, tuple | list)
        each = [given] * len(inputs) if once else list(given)
        placed = (param_placements, *each)
        return _report(partition(gradient, placed, INFERRED, mesh=mesh), (params, *inputs))

    return inferred


def _report(whole: Partitioned, args: tuple[Any, ...]) -> GradientReport:
    program, results = whole.inspect(*args)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.flatten_with_path(results)[0]]
    found = []
    for name, leaf, placements, makers, block in zip(
        paths, jax.tree.leaves(results), program.out_placements, program.out_origins, program.out_blocks, strict=True
    ):
        size = math.prod(block) * leaf.dtype.itemsize
        found.append(GradientPlacement(name, tuple(leaf.shape), leaf.dtype, placements, tuple(makers), makers, size))
    groups = []
    for axes in dict.fromkeys(g.partial_axes for g in found if g.partial_axes):
        mine = [g for g in found if g.partial_axes == axes]
        size = math.prod(program.mesh.shape[a] for a in axes)
        names = tuple(g.name for g in mine)
        groups.append(ReductionGroup(axes, size, names, sum(g.bytes for g in mine), 1 / size))
    tree = jax.tree.unflatten(jax.tree.structure(results), [g.placements for g in found])
    return GradientReport(tuple(found), tuple(groups), tree)
