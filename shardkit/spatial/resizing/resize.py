"""Resizing images that are sharded in space: each device fetches a few rows, and multiplies locally."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax import numpy as jnp
from jax.core import Tracer
from jax.image import ResizeMethod

from shardkit.spatial.block_op import At, Operand, channels_last_letters, read_operand, run_block_op
from shardkit.spatial.exchange import AxisName, Index, clear_tail, cut_span, join, receive
from shardkit.spatial.resizing.plan import Chunk, Dim, DimPlan, plan_dim
from shardkit.spatial.resizing.weights import METHODS, Resampling

_SYNONYMS = {
    "linear": ("bilinear", "trilinear", "triangle"),
    "cubic": ("bicubic", "tricubic"),
    "cubic-pytorch": ("bicubic-pytorch",),
}
_NAMES = {name: name for name in METHODS} | {other: name for name, all_ in _SYNONYMS.items() for other in all_}


def ring_resize(
    image: Any,
    shape: Sequence[int],
    method: str | ResizeMethod,
    antialias: bool = True,
    precision: Any = lax.Precision.HIGHEST,
    *,
    spatial_axes: Any,
    mesh: Any = None,
) -> Any:
    """``jax.image.resize`` of an image that is sharded in some dims.

    Only the elements that a device's outputs read and others hold travel, in permutes; dims are resized one
    after the other, those that shrink first. Linear in the image, so every derivative is of the same kind.

    Sources of the kernels: R. Keys, "Cubic Convolution Interpolation for Digital Image Processing", IEEE Trans. ASSP
    29(6), 1981 ("cubic": a = -1/2; "cubic-pytorch": a = -3/4 unless it antialiases); C. Duchon, "Lanczos Filtering in
    One and Two Dimensions", J. Appl. Meteor. 18, 1979.

    Args:
      image: the image, or a ``Padded``; inside a manual region of the mesh axes, this device's block.
      shape: the new shape, over all shards. Dims whose size stays are left as they are.
      method: "nearest", "linear", "cubic", "cubic-pytorch", "lanczos3", "lanczos5", "area", a synonym that
        jax.image knows ("bilinear", ...), or a ``jax.image.ResizeMethod``. "nearest" takes element
        ``floor((i + 1/2) * size / new)``, exactly; jax.image may be one off where that is an integer, since it
        divides in float32.
      antialias: widen the kernel where the image shrinks. "nearest" and "area" don't read it.
      precision: of the matrix products.
      spatial_axes: mesh axis to image dim, a number or a letter of a channels-last image: ``{"sp": "W"}``.
      mesh: the mesh; by default the image's, else the ambient one.

    Returns:
      The new image, sharded as the old one in blocks of ``ceil(new / n)``; a Padded where the image was
      one, or where JAX can't hold the uneven blocks (Explicit axes, manual regions). Its dtype is what
      jax.image.resize gives: integers become floats unless the method is "nearest".

    Raises:
      ValueError: a shape of another length or without elements, an unknown method, a resized dim that is
        sharded over Explicit mesh axes which spatial_axes doesn't name.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> mesh = sk.make_mesh({"sp": 1})
      >>> sk.ring_resize(jnp.arange(2.0), (4,), "linear", spatial_axes={"sp": 0}, mesh=mesh).tolist()
      [0.0, 0.25, 0.75, 1.0]
    """
    what = "ring_resize"
    image = image if hasattr(image, "ndim") else jnp.asarray(image)
    out_shape = _read_shape(shape, image.ndim, what)
    name = _read_method(method, what)
    operand, changed = _read_image(image, out_shape, spatial_axes, mesh, what)
    dims = {}
    for d in changed:
        size, out = operand.shape[d], out_shape[d]
        # 1 / (out / size), not size / out: as jax.image computes it.
        inverse = 1.0 if name == "nearest" else 1.0 / (out / size)
        dims[d] = Resampling(size, out, inverse, 0.0, name, bool(antialias), _float_name())
    return _run(operand, out_shape, dims, name, precision, what)


def ring_scale_and_translate(
    image: Any,
    shape: Sequence[int],
    spatial_dims: Sequence[int],
    scale: Any,
    translation: Any,
    method: str | ResizeMethod,
    antialias: bool = True,
    precision: Any = lax.Precision.HIGHEST,
    *,
    spatial_axes: Any,
    mesh: Any = None,
) -> Any:
    """``jax.image.scale_and_translate`` of an image that is sharded in some dims.

    Output ``o`` of a dim shows what stands at ``(o + 1/2 - translation) / scale`` of the input; outputs that
    lie outside of it are zeros. What travels depends on both numbers, so they have to be concrete.

    Args:
      image: the image, or a ``Padded``; inside a manual region of the mesh axes, this device's block.
      shape: the new shape, over all shards.
      spatial_dims: the dims to resample; the others keep their size.
      scale, translation: one number a spatial dim: NumPy or concrete JAX arrays, or sequences. A negative
        scale mirrors (and then most elements travel far).
      method: "linear", "cubic", "cubic-pytorch", "lanczos3", "lanczos5", a synonym that jax.image knows, or a
        ``jax.image.ResizeMethod``; the kernels are those of ``sk.ring_resize``.
      antialias: widen the kernel where the image shrinks.
      precision: of the matrix products.
      spatial_axes: mesh axis to image dim, a number or a letter of a channels-last image: ``{"sp": "W"}``.
      mesh: the mesh; by default the image's, else the ambient one.

    Returns:
      The new image, sharded as the old one in blocks of ``ceil(new / n)``; a Padded where the image was
      one, or where JAX can't hold the uneven blocks (Explicit axes, manual regions). Integers become floats.

    Raises:
      TypeError: traced scale or translation.
      ValueError: a shape of another length or without elements, a size that changes in a dim not named, an unknown
        method; spatial_dims, scale and translation of different lengths; a scale of 0, numbers that aren't finite.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> mesh = sk.make_mesh({"sp": 1})
      >>> moved = sk.ring_scale_and_translate(
      ...     jnp.arange(4.0), (4,), (0,), [1.0], [1.0], "linear", spatial_axes={"sp": 0}, mesh=mesh)
      >>> moved.tolist()
      [0.0, 0.0, 1.0, 2.0]
    """
    what = "ring_scale_and_translate"
    image = image if hasattr(image, "ndim") else jnp.asarray(image)
    out_shape = _read_shape(shape, image.ndim, what)
    name = _read_method(method, what)
    if name == "nearest":
        raise ValueError(
            f"{what}: method='nearest' has no meaning here, as in jax.image.scale_and_translate; use one of "
            f"{[m for m in METHODS if m != 'nearest']}, or ring_resize"
        )
    numbers = _read_dims(spatial_dims, image.ndim, what)
    scales, shifts, dtype = _read_warp(scale, translation, len(numbers), what)
    operand, changed = _read_image(image, out_shape, spatial_axes, mesh, what, mixed=numbers)
    if extra := sorted(set(changed) - set(numbers)):
        raise ValueError(
            f"{what}: shape {out_shape} differs from the image's {operand.shape} in dims {extra}, which are not "
            f"in spatial_dims={tuple(numbers)}; dims that aren't resampled keep their size"
        )
    dims = {}
    for d, inverse, shift in zip(numbers, 1.0 / scales, shifts * (1.0 / scales), strict=True):
        size, out = operand.shape[d], out_shape[d]
        dims[d] = Resampling(size, out, float(inverse), float(shift), name, bool(antialias), dtype.name)
    return _run(operand, out_shape, dims, name, precision, what)


# --- reading a call ------------------------------------------------------------------------------------------


def _float_name() -> str:
    """The dtype in which jax.image computes weights: that of a Python float."""
    return jnp.result_type(float).name


def _read_method(method: Any, what: str) -> str:
    name = method.name.lower().replace("_", "-") if isinstance(method, ResizeMethod) else method
    if name not in _NAMES:
        raise ValueError(
            f"{what}: method={method!r} is unknown; use one of {sorted(_NAMES)} or a jax.image.ResizeMethod"
        )
    return _NAMES[name]


def _read_shape(shape: Any, ndim: int, what: str) -> tuple[int, ...]:
    try:
        sizes = tuple(operator.index(s) for s in shape)
    except TypeError:
        raise ValueError(f"{what}: shape takes one integer a dim of the image, got {shape!r}") from None
    if len(sizes) != ndim:
        raise ValueError(
            f"{what}: shape {sizes} has {len(sizes)} entries for an image with {ndim} dims; give one a dim"
        )
    return sizes


def _read_dims(spatial_dims: Any, ndim: int, what: str) -> list[int]:
    try:
        given = [operator.index(d) for d in spatial_dims]
    except TypeError:
        raise ValueError(f"{what}: spatial_dims takes dim numbers, got {spatial_dims!r}") from None
    for d in given:
        if not -ndim <= d < ndim:
            raise ValueError(f"{what}: spatial_dims names dim {d}, but the image has {ndim} dims")
    dims = [d % ndim for d in given]
    if len(set(dims)) < len(dims):
        raise ValueError(f"{what}: spatial_dims={tuple(given)} names a dim twice")
    return dims


def _read_warp(scale: Any, translation: Any, count: int, what: str) -> tuple[np.ndarray, np.ndarray, np.dtype]:
    """Scale and translation as arrays of the dtype in which jax.image would compute with them."""
    for name, value in (("scale", scale), ("translation", translation)):
        if any(isinstance(v, Tracer) for v in jax.tree.leaves(value)):
            raise TypeError(
                f"{what}: {name} is traced, but it decides which elements each device has to fetch; give numbers that "
                "are known when the program is traced (an argument of jit: static, or closed over as NumPy), or use "
                "jax.image.scale_and_translate on an image whose spatial dims aren't sharded"
            )
    arrays = [np.asarray(scale), np.asarray(translation)]
    for name, a in zip(("scale", "translation"), arrays, strict=True):
        if a.shape != (count,):
            raise ValueError(f"{what}: {name} has shape {a.shape} for {count} spatial dims; give one number a dim")
        if not np.isfinite(a.astype(np.float64)).all():
            raise ValueError(f"{what}: {name}={a.tolist()} must be finite")
    if (arrays[0] == 0).any():
        raise ValueError(f"{what}: scale={arrays[0].tolist()} must not be 0; a negative scale mirrors")
    # As arrays of JAX's: 32 bits unless x64 is on, whatever NumPy makes of Python floats.
    dtype = jnp.result_type(*(jax.dtypes.canonicalize_dtype(a.dtype) for a in arrays))
    if not jnp.issubdtype(dtype, jnp.floating):
        dtype = jnp.result_type(float)
    return arrays[0].astype(dtype), arrays[1].astype(dtype), np.dtype(dtype)


def _read_image(
    image: Any, out_shape: tuple[int, ...], spatial_axes: Any, mesh: Any, what: str, mixed: Sequence[int] = ()
) -> tuple[Operand, list[int]]:
    """The operand, and the dims whose size changes."""
    letters = channels_last_letters(image.ndim) if image.ndim > 2 else {}
    everything = range(image.ndim)
    # Of a Padded all dims that could be mixed are cut to their size when they aren't named; which ones change
    # is known only with the logical sizes, so it's read twice where a manual region makes them differ.
    operand = read_operand(image, spatial_axes, mesh, letters=letters, mixed=(), what=what)
    changed = [d for d in everything if operand.shape[d] != out_shape[d]]
    touched = sorted({*changed, *mixed})
    if any(operand.array.shape[d] != operand.shape[d] and d not in operand.cuts for d in touched):
        operand = read_operand(image, spatial_axes, mesh, letters=letters, mixed=touched, what=what)
    if any(out_shape[d] < 1 for d in touched):
        raise ValueError(f"{what}: can't resize to zero elements (shape {out_shape}); every size is at least 1")
    if any(operand.shape[d] < 1 for d in touched):
        raise ValueError(f"{what}: the image of shape {operand.shape} is empty; give at least one element a dim")
    return operand, changed


def _run(
    operand: Operand, out_shape: tuple[int, ...], dims: dict[int, Resampling], name: str, precision: Any, what: str
) -> Any:
    dtype = np.dtype(operand.array.dtype)
    if name != "nearest":
        small = jax.ShapeDtypeStruct((1,), dtype)
        dtype = np.dtype(jax.eval_shape(lambda a: jax.image.resize(a, (1,), name), small).dtype)
    order = sorted(dims, key=lambda d: _growth(dims[d]))
    steps = [Resampler(d, operand.axis_name(d), operand.shards(d), dims[d]) for d in order]
    op = _Resize(tuple(steps), dtype, precision)
    return run_block_op(op, operand, out_shape, mixed=tuple(dims), what=what)


def _growth(dim: Resampling) -> float:
    return dim.out / dim.size


# --- on one device -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Resampler:
    """One dim, static and hashable; its tables are made (once) by plan_dim."""

    dim: int
    axis_name: AxisName
    shards: int
    resampling: Dim

    @property
    def plan(self) -> DimPlan:
        return plan_dim(self.resampling, self.shards)

    def fetch(self, x: Array, index: Index) -> Array:
        """The block with what this device's outputs read beside it."""
        exchange = self.plan.exchange
        x = clear_tail(x, self.resampling.size, self.shards, index, self.dim)
        line = join(x, receive(x, exchange, self.axis_name, index, self.dim), exchange, index, self.dim)
        return line if self.plan.whole_line else cut_span(line, exchange, index, self.dim)

    def weigh(self, line: Array, index: Index, dtype: np.dtype, precision: Any) -> Array:
        """The outputs of this device, from what it fetched."""
        if self.resampling.method == "nearest":
            return _take(line, self.plan.chunks[0], index, self.dim)
        line = line.astype(dtype)
        parts = [_multiply(line, c, index, self.dim, precision) for c in self.plan.chunks]
        return parts[0] if len(parts) == 1 else lax.concatenate(parts, self.dim)


@dataclasses.dataclass(frozen=True)
class _Resize:
    """Dims in the order of their growth: what shrinks a dim makes the halos of the next ones thinner."""

    steps: tuple[Resampler, ...]
    dtype: np.dtype
    precision: Any

    def __call__(self, at: At, block: Array) -> Array:
        growing = [s for s in self.steps if s.resampling.out > s.resampling.size]
        for step in self.steps:
            if step not in growing:
                line = step.fetch(block, at.get(step.dim, 0))
                block = step.weigh(line, at.get(step.dim, 0), self.dtype, self.precision)
        # All halos travel while the image is small; those of a later dim carry the corners.
        for step in growing:
            block = step.fetch(block, at.get(step.dim, 0))
        for step in growing:
            block = step.weigh(block, at.get(step.dim, 0), self.dtype, self.precision)
        return block.astype(self.dtype)


def _row(table: np.ndarray, index: Index) -> Any:
    """This shard's row; a constant where all are equal."""
    if (table == table[:1]).all():
        return table[0]
    return lax.dynamic_index_in_dim(jnp.asarray(table), index, 0, keepdims=False)


def _matrix(chunk: Chunk, index: Index, dtype: np.dtype) -> Array:
    """This shard's weights as a matrix ``[inputs, outputs]``."""
    real = jnp.finfo(dtype).dtype  # of complex numbers: that of their parts
    if chunk.matrix is not None:
        return jnp.asarray(_row(chunk.matrix.astype(real), index)).astype(dtype)
    offsets, weights = _row(chunk.offsets, index), _row(chunk.weights.astype(real), index)
    taps = chunk.weights.shape[-1]
    # One loop over [inputs, outputs, taps], which XLA doesn't lay out: few flops beside the product's.
    tap = np.arange(chunk.length, dtype=np.int32)[:, None] - jnp.asarray(offsets)
    hit = tap[:, :, None] == np.arange(taps, dtype=np.int32)
    return jnp.where(hit, jnp.asarray(weights), jnp.zeros((), real)).sum(-1).astype(dtype)


def _multiply(line: Array, chunk: Chunk, index: Index, dim: int, precision: Any) -> Array:
    piece = lax.slice_in_dim(line, chunk.start, chunk.start + chunk.length, axis=dim)
    matrix = _matrix(chunk, index, line.dtype)
    names = list(range(line.ndim))
    out = [line.ndim if d == dim else d for d in names]
    return jnp.einsum(piece, names, matrix, [dim, line.ndim], out, precision=precision)


def _take(line: Array, chunk: Chunk, index: Index, dim: int) -> Array:
    """The element at each output's offset: a slice or a repetition where that says the same on every shard."""
    row, count = chunk.offsets[0], chunk.outputs
    if (chunk.offsets == row).all():
        first = chunk.start + int(row[0])
        step = int(row[1] - row[0]) if count > 1 else 1
        if step and (np.diff(row) == step).all():
            return lax.slice_in_dim(line, first, first + step * (count - 1) + 1, stride=step, axis=dim)
        times = int((row == row[0]).sum())
        if count % times == 0 and (row == row[0] + np.arange(count) // times).all():
            return jnp.repeat(lax.slice_in_dim(line, first, first + count // times, axis=dim), times, axis=dim)
    where = jnp.asarray(_row(chunk.offsets, index)) + chunk.start
    return jnp.take(line, where, axis=dim, mode="clip")
