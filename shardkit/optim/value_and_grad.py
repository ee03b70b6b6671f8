"""`value_and_grad`: gradients of a loss over a batch that is spread over devices, not yet reduced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from shardkit.meshes import concrete_mesh, manual_axes, resolve_mesh
from shardkit.optim.batch import Leaf, read_batch_axes, read_leaf
from shardkit.optim.changes import refusing_changes
from shardkit.optim.examples import current_examples
from shardkit.optim.parameters import GATHERS, read_parameters
from shardkit.optim.region import Region
from shardkit.optim.stored import FlatShard, said_leaves
from shardkit.placements import AnyMesh


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    batch_axes: str | Sequence[str] | Mapping[str, int],
    mesh: AnyMesh | None = None,
    reduce: str = "mean",
    microbatches: int = 1,
    batch_argnums: int | Sequence[int] | None = None,
    accumulator_dtype: Any = None,
    param_placements: Any = None,
    gather: str | None = None,
    gather_dtype: Any = None,
    keys: str = "split",
) -> Callable[..., Any]:
    """``jax.value_and_grad`` with each device on its part of the batch; gradients come out Partial.

    ``fun`` runs on each device's part, with ``batch_axes`` manual and every other mesh axis left to the compiler.
    Nothing but the value is reduced: ``sk.reduce_gradients`` reduces the gradients, all together. What ``fun`` computes
    over its batch it computes over the part: batch norms of models that ``sk.parallelize`` has seen average their
    statistics over the parts, as they do with ``axis_name=`` in any model; other batch norms don't.

    Args:
      fun: a scalar loss of its part of the batch: a mean over it (``reduce="mean"``), or a sum. Or it returns
        ``(sum, count)``, whose totals over all devices and microbatches are divided: right where counts differ.
      argnums: which arguments are differentiated: pytrees; their integer leaves get zeros, other leaves are passed on.
      has_aux: ``fun`` returns ``(loss, aux)``. Of aux, float scalars are averaged (added up for ``reduce="sum"``),
        integer and bool scalars added up, over devices and slices, and arrays put together along dim 0; those known to
        be the same on every device, without microbatches (statistics that were averaged over them), come out once.
      batch_axes: the mesh axes that cut dim 0 of every array in the other arguments; a mapping from axis to dim for
        others (``{"dp": 0, "sp": 2}``; a leaf that hasn't the dim isn't cut by that axis). Scalars are the same
        everywhere; of random keys see ``keys``.
      mesh: else that of the arguments, or the ambient one.
      reduce: "mean" or "sum": what the loss over the whole batch is of those of its parts.
      microbatches: each device takes its part in so many slices, one after another, and adds gradients up locally.
      batch_argnums: which arguments hold examples, and are cut; others are the same everywhere (state that a model
        reads, say), but for random keys. None: all that aren't differentiated, those given by name too.
      accumulator_dtype: of that sum; None: the gradients' own.
      param_placements: where the differentiated arguments live, in their structure (of the one argument, or a tuple):
        placements in any form, shardings, or the arrays as they are outside ``jit``. None: read from the arguments,
        which within ``jit`` works on Explicit axes only; gradients are then cut as the compiler likes.
      gather: when parameters known to be cut over a batch axis (``sk.shard_params``, stage 3) are put together. "use":
        where they're used, and once more for the backward pass, so that none need stay, in every slice; "layer": the
        same, by ``fun`` itself, whose layers are made with ``sk.gather_on_use`` (for layers in a ``lax.scan``);
        "step": once, before the first slice. None: "use" for one slice and "step" for several, so that nothing is
        communicated in their loop. Where the placement isn't known the compiler gathers, once.
      gather_dtype: what "use" and "layer" gather travels in this dtype (bfloat16, say); None: in its own.
      keys: what becomes of a random key (``jax.random.key``, in a model's state too). "split": it's another one on each
        device and for each microbatch, so what is drawn depends on their numbers. "shared": it's the same everywhere,
        for layers that know which examples they hold and draw what they would draw of the whole batch, as
        ``shardkit.parallel.layers.dropout`` does: the same on any mesh. All other layers would draw the same for each
        part.

    Returns:
      A function of the same arguments that returns ``(value, gradients)`` or ``((value, aux), gradients)``. Gradients
      are ``PartialArray``s over the batch axes, otherwise placed as the parameters are where that's known. Call it
      under ``jax.jit``: else it's traced and compiled anew in every call, as what ``fun`` closes over may have changed.

    Raises:
      ValueError: a batch that doesn't divide, unknown axes, ``reduce``, ``gather`` or ``keys``, axes that are manual
        here, arguments on different meshes, a count of zero (outside ``jit``; within, the value is NaN), shared keys in
        a loss that is itself part of one with shared keys, a loss that changes an nnx module that it's given.
      TypeError: a loss that's no scalar.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> step = sk.value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2), batch_axes="dp", mesh=sk.make_mesh({"dp": 1}))
      >>> value, gradient = step(jnp.ones(3), jnp.ones((4, 3)))
      >>> float(value), gradient.reduce().tolist()
      (9.0, [6.0, 6.0, 6.0])
    """
    if reduce not in ("mean", "sum"):
        raise ValueError(f'reduce={reduce!r} is unknown; use "mean" or "sum", as the loss is of the examples of a part')
    if isinstance(microbatches, bool) or not hasattr(microbatches, "__index__") or microbatches < 1:
        raise ValueError(f"microbatches={microbatches!r}: a positive number of slices")
    if gather is not None and gather not in GATHERS:
        raise ValueError(f"gather={gather!r} is unknown; use one of {GATHERS}, or None")
    if keys not in ("split", "shared"):
        raise ValueError(f'keys={keys!r} is unknown; use "split" or "shared"')
    gather = gather or ("use" if microbatches == 1 else "step")

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        numbers = _numbers(argnums, len(args))
        where = concrete_mesh(resolve_mesh(mesh, *jax.tree.leaves((args, kwargs)), what="value_and_grad"))
        axes = read_batch_axes(batch_axes, where)
        taken = [name for name in axes if name in manual_axes()]
        if taken:
            raise ValueError(
                f"value_and_grad: mesh axes {taken} are manual here (inside jax.shard_map); call it outside, or "
                "jax.value_and_grad on this device's part"
            )
        if keys == "shared" and current_examples() is not None:
            raise ValueError(
                'value_and_grad(keys="shared") within the loss of another: which examples are here is known of one '
                'batch only; use keys="split" in one of the two'
            )
        params = _Split([args[n] for n in numbers], lambda _, x: Leaf(_kind_of_parameter(x)))
        holding = _numbers(batch_argnums, len(args)) if batch_argnums is not None else range(len(args) + 1)
        batch = _Split(
            [*(() if i in numbers else a for i, a in enumerate(args)), kwargs],
            lambda i, x: read_leaf(x, axes if i in holding else {}, where, microbatches),
        )

        def loss(own: Sequence[Any], fixed: Sequence[Any], data: Sequence[Any]) -> Any:
            values = iter(params.join(own, fixed))
            *rebuilt, named = batch.join(data, ())
            for n in numbers:
                rebuilt[n] = next(values)
            # What is differentiated is each device's own: its changes can't come out as aux either.
            held = [rebuilt[n] for n in numbers] if has_aux else (rebuilt, named)
            return _read_loss(refusing_changes(lambda: fun(*rebuilt, **named), held), has_aux, reduce)

        own, fixed = params.take("own"), params.take("fixed")
        known = None
        if param_placements is not None:
            known = params.beside(param_placements if not isinstance(argnums, int) else (param_placements,))
        described, own = read_parameters(own, known, axes, where, gather, gather_dtype)
        run = Region(loss, where, axes, described, batch.leaves, reduce, microbatches, accumulator_dtype, keys)
        value, count, aux, stacks, kind = run(own, fixed, batch.arrays)
        if count is not None and not isinstance(count, Tracer) and float(count) == 0:
            raise ValueError(
                "value_and_grad: the counts that the loss returned sum to zero over the whole batch, so there is no "
                "mean; leave such a batch out, or return a count of at least one"
            )
        gradients = [p.gradient(s, where, axes, kind) for s, p in zip(stacks, described, strict=True)]
        found = params.join(gradients, [jnp.zeros_like(x) for x in fixed])
        found = found[0] if isinstance(argnums, int) else tuple(found)
        return ((value, aux) if has_aux else value), found

    return wrapped


def _numbers(argnums: int | Sequence[int], count: int) -> tuple[int, ...]:
    """Counted from the front.

    Raises:
      ValueError: there's no such argument.
    """
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    if any(not -count <= n < count for n in numbers):
        raise ValueError(f"value_and_grad: argument numbers {numbers}, but the loss was called with {count} arguments")
    return tuple(n % count for n in numbers)


def _is_flat(x: Any) -> bool:
    return isinstance(x, FlatShard)


def _kind_of_parameter(x: Any) -> str:
    if _is_flat(x):
        return "own"
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        return "own" if isinstance(x, float | complex) else "static"
    return "own" if jnp.issubdtype(x.dtype, jnp.inexact) else "fixed"


class _Split:
    """Trees taken apart: arrays with what becomes of them, all else aside."""

    def __init__(self, trees: Sequence[Any], read: Callable[[int, Any], Leaf]):
        named, self._tree = jax.tree_util.tree_flatten_with_path(list(trees), is_leaf=_is_flat)
        found = [x for _, x in named]
        every = [read(path[0].idx, x) for path, x in named]
        self._every = every
        self._statics = [x for x, leaf in zip(found, every, strict=True) if leaf.kind == "static"]
        self.leaves = [leaf for leaf in every if leaf.kind != "static"]
        self.arrays = [
            x if _is_flat(x) else jnp.asarray(x) for x, leaf in zip(found, every, strict=True) if leaf.kind != "static"
        ]

    def take(self, kind: str) -> list[Any]:
        """The arrays of one kind."""
        return [x for x, leaf in zip(self.arrays, self.leaves, strict=True) if leaf.kind == kind]

    def beside(self, trees: Any) -> list[Any]:
        """What a tree of the same structure says of each "own" leaf."""
        said = said_leaves(list(trees), self._tree, "value_and_grad")
        return [x for x, leaf in zip(said, self._every, strict=True) if leaf.kind == "own"]

    def join(self, arrays: Sequence[Any], fixed: Sequence[Any]) -> list[Any]:
        """The trees again, with other arrays (those of kind "fixed" apart)."""
        left = {"static": iter(self._statics), "fixed": iter(fixed)}
        rest = iter(arrays)
        return jax.tree.unflatten(self._tree, [next(left.get(leaf.kind, rest)) for leaf in self._every])


def _read_loss(result: Any, has_aux: bool, reduce: str) -> tuple[Any, Any, Any]:
    """(loss or sum, count or None, aux) of what the user's function returned."""
    loss, aux = result if has_aux else (result, ())
    weighed = isinstance(loss, tuple | list) and len(loss) == 2
    if weighed and reduce == "sum":
        raise ValueError('value_and_grad: a loss that returns (sum, count) is a mean; give reduce="mean"')
    parts: list[Any] = list(loss) if weighed else [loss]
    shapes = [getattr(part, "shape", () if isinstance(part, int | float | complex) else type(part)) for part in parts]
    if any(shape != () for shape in shapes):
        raise TypeError(
            f"value_and_grad: the loss must be a scalar, or (sum, count) of scalars, got {', '.join(map(str, shapes))}"
        )
    loss = jnp.asarray(parts[0])
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(f"value_and_grad: the loss must be a real float to be differentiated, got {loss.dtype}")
    return loss, parts[1] if weighed else None, aux
