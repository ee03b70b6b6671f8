"""``loss_parallel``: softmax cross entropy of logits that devices share out by class.

With top the largest logit of an example, Z = sum exp(x - top) over classes, and t the target probabilities, the loss is
sum(t) log Z - sum(t (x - top)), and its derivative by x is sum(t) softmax(x) - t. Sums over classes are of what the
devices hold, so the logits stay where they are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array, lax
from jax import numpy as jnp
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from shardkit import scopes
from shardkit.arrays import Padded, pad_to
from shardkit.meshes import resolve_mesh
from shardkit.parallel.tensor.vocabulary import (
    combined,
    held,
    lead_entries,
    own_ids,
    read_cut,
    region_of,
    run_region,
)
from shardkit.placements import entry_names
from shardkit.spatial.operands import Cut, as_array, axis_entries, explicit_axes


def loss_parallel(
    logits: Any,
    labels: Any,
    *,
    axis: str | tuple[str, ...] = "tp",
    mesh: Mesh | AbstractMesh | None = None,
    where: Any = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Array:
    """Softmax cross entropy of every example, its logits cut over a mesh axis by class.

    As ``optax.softmax_cross_entropy_with_integer_labels`` or ``optax.softmax_cross_entropy``, but no logits travel:
    forward there is one all-reduce of the largest logit of each example, and one of a few sums of each; backward there
    is none. Between the two only the logits as they are and two numbers an example are kept. Differentiable in both
    modes and more than once, by logits and by probabilities. Source: M. Shoeybi et al., "Megatron-LM",
    https://arxiv.org/abs/1909.08053, section 3.

    Args:
      logits: ``[..., classes]``, floats, an array or ``sk.Padded``; inside a manual region of ``axis`` this device's
        block. Classes that the axis doesn't divide are padded within. -inf leaves a class out of an example. Logits
        that are placed otherwise are resharded first.
      labels: ``[...]``, integers, the same on all devices of ``axis``: the right classes, negative ones counted from
        the end; one that's no class makes the loss NaN. Or ``[..., classes]``, probabilities, cut as the logits are
        (they needn't sum to one); a probability of 0 counts as nothing even where the logit is -inf, as in
        ``optax.safe_softmax_cross_entropy``.
      axis: the mesh axis that cuts the classes; several, major first. Other axes may cut other dims.
      mesh: else that of the logits, or of the labels, else the ambient one.
      where: ``[...]``, bools: examples that count. The loss of others is 0, as is its gradient, whatever their logits
        and labels are. (For classes that don't count, use logits of -inf.)
      label_smoothing: a probability spread evenly over all classes and taken from ``labels``, as by
        ``optax.smooth_labels``. Classes with a logit of -inf count here: the loss is then infinite.
      z_loss: times ``logsumexp(logits) ** 2`` is added, which keeps logits from drifting (A. Chowdhery et al., "PaLM",
        https://arxiv.org/abs/2204.02311, section 5).

    Returns:
      Losses ``[...]``, the same on all devices of ``axis``; computed in at least float32 and rounded to the dtype that
      optax has: that of the logits, or the common one with probabilities.

    Raises:
      ValueError: an unknown axis, shapes that disagree, classes that an Explicit axis which isn't named cuts, a
        ``Padded`` that pads other dims than classes, a label_smoothing or z_loss out of range.
      TypeError: logits that aren't real floats, labels or where of the wrong dtype, a traced label_smoothing or z_loss.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> logits, mesh = jnp.zeros((2, 4)), sk.make_mesh({"tp": 1})
      >>> [f"{loss:.4f}" for loss in sk.loss_parallel(logits, jnp.array([0, 3]), mesh=mesh).tolist()]
      ['1.3863', '1.3863']
    """
    what = "loss_parallel"
    logits, labels = as_array(logits), as_array(labels)
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"{what}: logits must be real floats, got {logits.dtype}")
    if logits.ndim < 1:
        raise ValueError(f"{what}: logits must be [..., classes], got a scalar")
    mesh = resolve_mesh(mesh, logits, labels, what=what)
    smoothing = _read_number(label_smoothing, "label_smoothing", "at least 0 and below 1", lambda s: 0 <= s < 1)
    z = _read_number(z_loss, "z_loss", "at least 0, and finite", lambda s: 0 <= s < float("inf"))
    classes = logits.ndim - 1
    array, cut = read_cut(logits, classes, axis, mesh, what)
    _check_padded(logits, array, classes, "logits", what)
    probabilities, labels = _read_labels(labels, logits, array, cut, what)
    examples = array.shape[:-1]
    if where is not None:
        where = as_array(where)
        if where.dtype != jnp.bool_:
            raise TypeError(f"{what}: where must be bools, got {where.dtype}")
        if where.shape != examples:
            raise ValueError(
                f"{what}: where says which examples count, and must have their shape {examples}, got {where.shape}; "
                "to leave classes out, make their logits -inf"
            )
    lead = _lead(array, cut, mesh, what)
    width = cut.block * (1 if cut.manual else cut.shards)
    cut_spec, whole_spec = PartitionSpec(*lead, held(cut)), PartitionSpec(*lead)
    call = _Call(
        cut=cut,
        mesh=mesh,
        probabilities=probabilities,
        smoothing=smoothing,
        z=z,
        specs=(cut_spec, cut_spec if probabilities else whole_spec, whole_spec),
        dtype=jnp.promote_types(jnp.promote_types(array.dtype, labels.dtype) if probabilities else array.dtype, "f4"),
    )
    dtype = jnp.result_type(array, labels) if probabilities else array.dtype
    array = pad_to(array, (*examples, width))
    labels = pad_to(labels, (*examples, width)) if probabilities else labels
    loss, _, _ = _losses(call, array, labels, where)
    return loss.astype(dtype)


@dataclasses.dataclass(frozen=True)
class _Call:
    """The static part of a call.

    Attributes:
      cut: how the classes are cut.
      mesh: the mesh.
      probabilities: labels are these; else numbers of classes.
      smoothing, z: see ``loss_parallel``.
      specs: of logits, labels, and what there is one of an example.
      dtype: in which it's computed.
    """

    cut: Cut
    mesh: Any
    probabilities: bool
    smoothing: float
    z: float
    specs: tuple[PartitionSpec, PartitionSpec, PartitionSpec]
    dtype: Any

    def run(self, local: Any, results: int | None, *operands: Any) -> Any:
        """``local`` on blocks: of logits, labels, numbers an example (or None); last, a tangent of one of these."""
        given = [x is not None for x in operands]
        kinds = [*self.specs[:2], *[self.specs[2]] * (len(operands) - 2)]
        if isinstance(local, _Tangent):
            kinds[-1] = self.specs[0]
        specs = [spec for spec, here in zip(kinds, given, strict=True) if here]
        out = self.specs[2] if results is None else (self.specs[2],) * results
        region = region_of(self.cut, self.mesh, specs, out)
        return run_region(region, _Present(local, tuple(given)), *(x for x in operands if x is not None))

    def masked(self, at: Any, logits: Array, where: Array | None) -> Array:
        """Logits to compute with: zeros in examples that don't count, -inf in what was padded."""
        x = logits.astype(self.dtype)
        if where is not None:
            x = jnp.where(where[..., None], x, 0)
        inside = self.inside(at)
        return x if inside is None else jnp.where(inside, x, -jnp.inf)

    def inside(self, at: Any) -> Array | None:
        """Which classes of this block exist; None: all."""
        cut = self.cut
        if cut.size == cut.block * cut.shards:
            return None
        return lax.iota(jnp.int32, cut.block) + at * cut.block < cut.size

    def target(self, at: Any, labels: Array) -> Array:
        """The block of target probabilities, and zeros in what was padded."""
        cut = self.cut
        if self.probabilities:
            t = labels.astype(self.dtype)
        else:
            local, _ = own_ids(labels, cut, at)
            t = (local[..., None] == lax.iota(jnp.int32, cut.block)).astype(self.dtype)
        if self.smoothing:
            t = (1 - self.smoothing) * t + self.smoothing / cut.size
        inside = self.inside(at)
        return t if inside is None else jnp.where(inside, t, 0)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _losses(call: _Call, logits: Array, labels: Array, where: Array | None) -> tuple[Array, Array, Array | None]:
    """Of every example the loss, the logarithm of the sum of exponentials, and the sum of target probabilities.

    The last is None for numbers of classes, where it's one.
    """
    out = call.run(_Forward(call), 3 if call.probabilities else 2, logits, labels, where)
    return out if call.probabilities else (*out, None)


@functools.partial(_losses.defjvp, symbolic_zeros=True)
def _losses_jvp(call: _Call, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """Each tangent is a sum over classes of what's linear in the tangent of logits (or labels).

    Its transpose is local: the sum's is a copy on every device.
    """
    logits, labels, where = primals
    by_logits, by_labels, _ = tangents
    loss, lse, weight = _losses(call, logits, labels, where)

    def sums(of: str) -> Array:
        total = jnp.zeros_like(loss)
        if not isinstance(by_logits, SymbolicZero):
            total = total + _slope(call, of, "logits", logits, labels, where, lse, weight, by_logits)
        if call.probabilities and not isinstance(by_labels, SymbolicZero):
            total = total + _slope(call, of, "labels", logits, labels, where, lse, weight, by_labels)
        return total

    # Of what isn't used, as all but the first isn't in a first derivative, nothing is compiled.
    out = (sums("loss"), sums("lse"), sums("weight") if call.probabilities else None)
    return (loss, lse, weight), out


def _slope(call: _Call, of: str, by: str, *operands: Any) -> Array:
    return call.run(_Tangent(call, of, by), None, *operands)


@dataclasses.dataclass(frozen=True)
class _Forward:
    call: _Call

    def __call__(self, at: Any, logits: Array, labels: Array, where: Array | None) -> tuple[Array, ...]:
        call = self.call
        x = call.masked(at, logits, where)
        with scopes.scope(scopes.REDUCTION):
            top = combined(lax.pmax, jnp.max(x, -1), call.cut)
        # Where it's infinite nothing is subtracted (-inf - -inf is no number). Where it's NaN, or where an all-reduce
        # hides that some logit is, the sum says so.
        top = jnp.where(jnp.isfinite(top), top, 0)
        x = x - top[..., None]
        t = call.target(at, labels)
        # What isn't wanted counts as nothing, not as 0 times -inf.
        found = [jnp.exp(x).sum(-1), jnp.where(t == 0, 0, t * x).sum(-1)]
        if call.probabilities:
            found.append(t.sum(-1))
        with scopes.scope(scopes.REDUCTION):
            z, picked, *rest = combined(lax.psum, jnp.stack(found), call.cut)
        log_z = jnp.log(z)
        lse = top + log_z
        loss = (rest[0] * log_z if rest else log_z) - picked
        if not call.probabilities:
            _, valid = own_ids(labels, call.cut, at)
            loss = jnp.where(valid, loss, jnp.nan)
        if call.z:
            loss = loss + call.z * lse**2
        if where is not None:
            loss = jnp.where(where, loss, 0)
        return (loss, lse, *rest)


@dataclasses.dataclass(frozen=True)
class _Tangent:
    """The tangent of the loss, the logarithm or the weight, by logits or by labels: linear in the last operand."""

    call: _Call
    of: str
    by: str

    def __call__(
        self, at: Any, logits: Array, labels: Array, where: Any, lse: Array, weight: Any, tangent: Array
    ) -> Array:
        call = self.call
        log_p = call.masked(at, logits, where) - lse[..., None]
        slope = (self._by_logits if self.by == "logits" else self._by_labels)(at, log_p, labels, lse, weight)
        if where is not None and self.of == "loss":
            slope = jnp.where(where[..., None], slope, 0)
        inside = call.inside(at)
        if inside is not None:
            slope = jnp.where(inside, slope, 0)
        with scopes.scope(scopes.REDUCTION):
            return combined(lax.psum, (slope * tangent.astype(call.dtype)).sum(-1), call.cut)

    def _by_logits(self, at: Any, log_p: Array, labels: Array, lse: Array, weight: Any) -> Array:
        call = self.call
        if self.of == "weight":
            return jnp.zeros_like(log_p)
        p = jnp.exp(log_p)
        if self.of == "lse":
            return p
        factor = 1 if weight is None else weight
        if call.z:
            factor = factor + 2 * call.z * lse
        return p * (factor if isinstance(factor, int) else factor[..., None]) - call.target(at, labels)

    def _by_labels(self, at: Any, log_p: Array, labels: Array, lse: Array, weight: Any) -> Array:
        del lse, weight
        if self.of == "lse":
            return jnp.zeros_like(log_p)
        part = 1 - self.call.smoothing
        if self.of == "weight":
            return jnp.full_like(log_p, part)
        nothing = jnp.isneginf(log_p) & (self.call.target(at, labels) == 0)
        return jnp.where(nothing, 0, -log_p * part)


@dataclasses.dataclass(frozen=True)
class _Present:
    """Hands operands that are None to what wants them: no array goes into the region for them."""

    local: Callable[..., Any]
    given: tuple[bool, ...]

    def __call__(self, at: Any, *blocks: Any) -> Any:
        rest = iter(blocks)
        return self.local(at, *(next(rest) if here else None for here in self.given))


# --- reading arguments -------------------------------------------------------------------------------------


def _read_number(value: Any, name: str, allowed: str, fits: Callable[[float], bool]) -> float:
    if isinstance(value, Tracer):
        raise TypeError(f"loss_parallel: {name} must be a number that's known when tracing, got {value}")
    number = float(value)
    if not fits(number):
        raise ValueError(f"loss_parallel: {name} must be {allowed}, got {value}")
    return number


def _read_labels(labels: Any, logits: Any, array: Any, cut: Cut, what: str) -> tuple[bool, Any]:
    """Whether they are probabilities, and the array they're in."""
    if labels.ndim == logits.ndim:
        if isinstance(labels, Padded):
            _check_padded(labels, labels.array, logits.ndim - 1, "labels", what)
        held_labels = labels.array if isinstance(labels, Padded) else labels
        same = held_labels.shape == array.shape if cut.manual else labels.shape == logits.shape
        if not same:
            raise ValueError(
                f"{what}: labels {labels.shape} must be of the shape of logits {logits.shape} (probabilities), or of "
                f"{logits.shape[:-1]} (numbers of classes)"
            )
        if jnp.issubdtype(labels.dtype, jnp.complexfloating):
            raise TypeError(f"{what}: labels must be real probabilities or integers, got {labels.dtype}")
        return True, held_labels
    if tuple(labels.shape) != tuple(array.shape[:-1]):
        raise ValueError(
            f"{what}: labels {labels.shape} must be of the shape of logits without classes, {array.shape[:-1]}, or, as "
            f"probabilities, of that of logits, {logits.shape}"
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(
            f"{what}: labels of shape {labels.shape} are numbers of classes and must be integers, got {labels.dtype}; "
            f"probabilities have the shape of logits, {logits.shape}"
        )
    return False, labels


def _check_padded(x: Any, array: Any, classes: int, name: str, what: str) -> None:
    if not isinstance(x, Padded):
        return
    for dim in range(classes):
        if array.shape[dim] != x.logical_shape[dim]:
            raise ValueError(
                f"{what}: dim {dim} of {name} holds {array.shape[dim]} elements for {x.logical_shape[dim]} of shape "
                f"{x.logical_shape}; only classes, the last dim, may be padded. Give its .array as it is, and say "
                "with where= which examples count"
            )


def _lead(array: Any, cut: Cut, mesh: Any, what: str) -> list[Any]:
    """How other Explicit axes cut the examples."""
    if explicit_axes(mesh):
        extra = [a for a in entry_names(axis_entries(array)[-1]) if a not in cut.axes]
        if extra:
            raise ValueError(
                f"{what}: classes are cut over Explicit mesh axes {extra} that axis={cut.axis_name!r} doesn't name; "
                "give all axes that cut them, axis=(..., ...), or reshard first"
            )
    return lead_entries(array, cut, mesh)[:-1]
