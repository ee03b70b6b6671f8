"""``tune_conv``: every form of one convolution, timed where it can run, judged by its compiler where it can't."""

from __future__ import annotations

import dataclasses
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardkit.arrays import Padded
from shardkit.meshes import concrete_mesh, holds_arrays, manual_axes, resolve_mesh
from shardkit.spatial.convolution.args import ConvCall, read_conv
from shardkit.spatial.convolution.layers import layer_of
from shardkit.spatial.convolution.method import by_table, form_of
from shardkit.spatial.convolution.ring import ring_conv
from shardkit.spatial.convolution.table import Form, parse_form
from shardkit.spatial.convolution.trial import CantRunError, trying
from shardkit.spatial.convolution.tuned import Trial, Tuned
from shardkit.spatial.operands import padded_shape

CANDIDATES = ("concat", "overlap", *(f"blocks {n}{m}" for n in (2, 4, 8) for m in ("", " major")))
_WHAT = "tune_conv"


def tune_conv(
    lhs: Any,
    rhs: Any,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    spatial_axes: Any,
    padding_mode: Any = "zeros",
    mesh: Mesh | AbstractMesh | None = None,
    candidates: Iterable[str | Form] = CANDIDATES,
    rounds: int = 7,
    progress: Callable[[list[Form]], Iterable[Form]] | None = None,
) -> Tuned:
    """Which form of ``ring_conv`` is best for a convolution, found by trying each.

    What is tried is the value and the gradients of input and kernel, of the convolution after itself with a ReLU
    between where its output can be its input again (so that changes of layout between layers count), else of one. On
    devices that are here the forms are timed in turns, on arrays of these shapes (the arrays given aren't read). On a
    described TPU (``sk.target_mesh``) the compiler's estimates of cycles decide, on another described target the bytes
    of temporaries a device. Of forms as good as the best (within 5% of wall time, 1.5% of cycles, 0.5% of temporaries)
    the one with the least temporaries is chosen (not where times decide, which vary more), then the plainer one.
    ``with sk.spatial.forms(result)`` uses what was found.

    Args:
      lhs, rhs: the operands' shapes: arrays, ``jax.ShapeDtypeStruct`` or, for lhs, a ``sk.Padded`` of one. A sharding
        that they carry holds on ``mesh`` for what ``spatial_axes`` doesn't name (a batch cut over "dp", say).
      window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count, batch_group_count,
        precision, preferred_element_type, spatial_axes, padding_mode: as in ``sk.ring_conv``.
      mesh: real or described devices; else those of ``lhs``, else the ambient one.
      candidates: names of forms: "concat", "overlap", "blocks 8", "blocks 2 major". By default both of these, and 2, 4
        and 8 chunks both ways.
      rounds: runs of each form, whose median counts.
      progress: wraps what is looped over, such as ``tqdm.tqdm`` or ``rich.progress.track``.

    Returns:
      The figures of each form, ``.best``; printed, a table. A form that can't run, or that the compiler refuses, is in
      it with the reason.

    Raises:
      ValueError: what ``sk.ring_conv`` raises; under jit or in a manual region; a mesh without devices, or with devices
        of other processes (each process would find another winner: tune on one host, or on a described target); a name
        that is no form; no form can run.

    Example:
      >>> import jax, shardkit as sk
      >>> x, k = jax.ShapeDtypeStruct((1, 8, 16, 3), "float32"), jax.ShapeDtypeStruct((3, 3, 3, 3), "float32")
      >>> call = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "spatial_axes": {"sp": "W"}}
      >>> found = sk.spatial.tune_conv(x, k, (1, 1), "SAME", **call, mesh=sk.make_mesh({"sp": 1}),
      ...                              candidates=["concat", "blocks 7"], rounds=1)
      >>> str(found.best), found.trials[1].reason
      ('concat', "blocks of 16 inputs and 16 outputs in spatial dim 1 don't divide into 7 chunks")
      >>> with sk.spatial.forms(found):
      ...     pass  # compile and run the model here
    """
    wanted = list(dict.fromkeys(parse_form(c) for c in candidates))
    if not wanted or not isinstance(rounds, int) or rounds < 1:
        raise ValueError(f"{_WHAT}: candidates={wanted!r} and rounds={rounds!r}: give at least one of each")
    if manual_axes() or any(isinstance(a, Tracer) for a in jax.tree.leaves((lhs, rhs))):
        raise ValueError(f"{_WHAT} compiles and runs programs: call it outside of jit and of manual regions")
    found = concrete_mesh(resolve_mesh(mesh, lhs, rhs, what=_WHAT))
    if not isinstance(found, Mesh):
        raise ValueError(f"{_WHAT}: {found} has no devices; give a mesh that has (sk.make_mesh, sk.target_mesh)")
    real = holds_arrays(found)
    if real and any(d.process_index != jax.process_index() for d in found.devices.flat):
        raise ValueError(
            f"{_WHAT}: the mesh has devices of other processes, each of which would time, and choose, for itself; tune "
            "on the devices of one, or on a described target (sk.target_mesh), and set the same forms everywhere"
        )
    keywords: dict[str, Any] = {
        "lhs_dilation": lhs_dilation,
        "rhs_dilation": rhs_dilation,
        "dimension_numbers": dimension_numbers,
        "feature_group_count": feature_group_count,
        "batch_group_count": batch_group_count,
        "precision": precision,
        "preferred_element_type": preferred_element_type,
        "spatial_axes": spatial_axes,
        "padding_mode": padding_mode,
        "mesh": found,
    }

    def conv(x: Any, kernel: Any) -> Any:
        return ring_conv(x, kernel, window_strides, padding, **keywords)

    call = _read(lhs, rhs, window_strides, padding, keywords)
    x, kernel = _placed(lhs, call, found), _struct(rhs, rhs.shape, found, {})
    program = _Program(conv, call, x, kernel)
    conv_met, regime = program.first_met()
    if call.conv.lhs_spec[0] not in call.cuts and regime.images == 1:
        wanted = list(dict.fromkeys(dataclasses.replace(form, major=False) for form in wanted))  # the same thing
    trials = _run_all(program, wanted, real, rounds, progress or (lambda forms: forms))
    if all(trial.reason is not None for trial in trials):
        raise ValueError(f"{_WHAT}: no form can run: " + "; ".join(f"{t.form}: {t.reason}" for t in trials))
    by = "seconds" if real else "cycles" if any(t.cycles is not None for t in trials) else "temporaries"
    layers = [layer_of(conv_met, regime)]
    images = x.sharding.shard_shape(_array(x).shape)[call.conv.lhs_spec[0]]
    if not regime.images_known:
        # In a region that makes the batch's axes manual (sk.value_and_grad) a device's images are known.
        layers.append(layer_of(conv_met, dataclasses.replace(regime, images=images, images_known=True)))
    return Tuned(tuple(layers), by, tuple(trials), form_of(by_table(conv_met, regime)), program.words(found, real))


# --- operands ----------------------------------------------------------------------------------------------


def _array(x: Any) -> Any:
    return x.array if isinstance(x, Padded) else x


def _read(lhs: Any, rhs: Any, window_strides: Any, padding: Any, keywords: dict[str, Any]) -> ConvCall:
    """The arguments, checked; no array is needed."""
    found = []

    def read(x: Any, kernel: Any) -> None:
        found.append(read_conv(x, kernel, window_strides, padding, **keywords))

    def shape_of(a: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(a.shape, a.dtype)

    jax.eval_shape(read, jax.tree.map(shape_of, lhs), jax.tree.map(shape_of, rhs))
    return found[0]


def _placed(lhs: Any, call: ConvCall, mesh: Mesh) -> Any:
    """lhs as a shape on the mesh, cut as ``spatial_axes`` says; a Padded where blocks don't divide it."""
    logical = tuple(lhs.shape)
    entries = {dim: cut.axis_name for dim, cut in call.cuts.items()}
    held = padded_shape(_array(lhs).shape, call.cuts)
    struct: Any = _struct(_array(lhs), held, mesh, entries)
    return Padded(struct, logical) if held != logical else struct


def _struct(a: Any, shape: Sequence[int], mesh: Mesh, entries: dict[int, Any]) -> jax.ShapeDtypeStruct:
    """A shape on the mesh, cut as the array's own sharding says, but for the dims of ``entries``."""
    sharding = getattr(a, "sharding", None)
    own = list(sharding.spec) if isinstance(sharding, NamedSharding) else []
    spec = [entries.get(d, own[d] if d < len(own) else None) for d in range(len(shape))]
    return jax.ShapeDtypeStruct(tuple(shape), a.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def _filled(struct: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.jit(lambda: jnp.ones(struct.shape, struct.dtype), out_shardings=struct.sharding)()


# --- the program and its figures ---------------------------------------------------------------------------


class _Program:
    """The value and gradients of the convolution, twice with a ReLU between where it fits on itself."""

    def __init__(self, conv: Callable[[Any, Any], Any], call: ConvCall, x: Any, kernel: Any):
        self.conv, self.x, self.kernel = conv, x, kernel
        same = call.out_shape == tuple(x.shape) and call.conv.out_spec == call.conv.lhs_spec
        narrow = call.conv.preferred_element_type in (None, np.dtype(x.dtype))
        self.layers = 2 if same and narrow else 1
        self.differentiable = all(jnp.issubdtype(a.dtype, jnp.inexact) for a in (x, kernel))

    def function(self) -> Callable[..., Any]:
        """A new one each time, which JAX hasn't traced yet."""

        def loss(x: Any, kernels: list[Any]) -> Any:
            for number, kernel in enumerate(kernels):
                x = self.conv(x if number == 0 else jax.tree.map(_activation, x), kernel)
            y = _array(x)
            return jnp.sum((y * jnp.conj(y)).real)

        return jax.value_and_grad(loss, (0, 1)) if self.differentiable else loss

    @property
    def arguments(self) -> tuple[Any, list[Any]]:
        return self.x, [self.kernel] * self.layers

    def first_met(self) -> Any:
        """The convolution as the choice of a form sees it, and its regime."""
        with trying(Form("concat")) as attempt:
            jax.eval_shape(self.function(), *self.arguments)
        return attempt.met[0]

    def compiled(self, form: Form) -> Any:
        with trying(form):
            return jax.jit(self.function()).lower(*self.arguments).compile()

    def words(self, mesh: Mesh, real: bool) -> str:
        shape, kernel = " x ".join(map(str, self.x.shape)), " x ".join(map(str, self.kernel.shape))
        devices = f"{mesh.devices.size} {'' if real else 'described '}devices ({mesh.devices.flat[0].device_kind})"
        return (
            f"convolution of {shape} by {kernel}, {np.dtype(self.x.dtype).name}"
            f"{', twice' if self.layers == 2 else ''}{', and gradients' if self.differentiable else ''}, on {devices}"
        )


def _activation(x: jax.Array) -> jax.Array:
    return jax.nn.relu(x) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _run_all(
    program: _Program, wanted: list[Form], real: bool, rounds: int, progress: Callable[[list[Form]], Iterable[Form]]
) -> list[Trial]:
    trials, runs = [], {}
    for form in progress(wanted):
        try:
            compiled = program.compiled(form)
        except CantRunError as error:
            trials.append(Trial(form, reason=str(error)))
            continue
        except jax.errors.JaxRuntimeError as error:  # more memory than the device has, say
            trials.append(Trial(form, reason=f"the compiler refuses: {str(error).splitlines()[0]}"))
            continue
        cycles = None if real else _estimated_cycles(compiled.as_text() or "")
        trials.append(Trial(form, cycles=cycles, temporaries=compiled.memory_analysis().temp_size_in_bytes))
        if real:
            runs[form] = compiled
    if runs:
        operands = jax.tree.map(_filled, program.arguments)
        seconds = _in_turns({form: lambda run=run: run(*operands) for form, run in runs.items()}, rounds)
        trials = [dataclasses.replace(t, seconds=seconds.get(t.form)) for t in trials]
    return trials


def _estimated_cycles(text: str) -> float | None:
    """Of a compiled TPU program: its compiler's estimates, summed; None where there are none, or a loop hides some."""
    entry = text[text.find("\nENTRY") :]
    found = re.findall(r'"estimated_cycles":"(\d+)"', entry[: entry.find("\n}")])
    return float(sum(map(int, found))) if found and " while(" not in text else None


def _in_turns(runs: dict[Form, Callable[[], Any]], rounds: int) -> dict[Form, float]:
    """Median seconds of each, after one round that doesn't count; every other round goes the other way round."""
    wall: dict[Form, list[float]] = {form: [] for form in runs}
    for number in range(rounds + 1):
        for form in list(runs) if number % 2 else list(runs)[::-1]:
            start = time.perf_counter()
            jax.block_until_ready(runs[form]())
            if number:
                wall[form].append(time.perf_counter() - start)
    return {form: statistics.median(times) for form, times in wall.items()}
