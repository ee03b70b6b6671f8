"""Pooling and windowed reductions of arrays sharded in space: halos travel, nothing else."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax import numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh

from shardkit.spatial.block_op import At, channels_last_letters
from shardkit.spatial.operands import as_array
from shardkit.spatial.pooling.reduce_window import WindowReduction, identity, real_taps, shard_row
from shardkit.spatial.pooling.window_args import WindowCall, read_call, read_windows
from shardkit.spatial.window_reading import read_modes
from shardkit.spatial.windows import Window

MeshLike = Mesh | AbstractMesh | None


def ring_reduce_window(
    x: Any,
    init_value: Any,
    computation: Callable[[Any, Any], Any],
    window_dimensions: Sequence[int],
    window_strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "VALID",
    base_dilation: Sequence[int] | None = None,
    window_dilation: Sequence[int] | None = None,
    *,
    spatial_axes: Mapping[Any, Any],
    padding_mode: Any = "zeros",
    mesh: MeshLike = None,
) -> Any:
    """``lax.reduce_window`` of an array sharded in any of its dims.

    Each device reduces its block after fetching the thin edges it needs from its neighbours around the
    mesh axis: at most two permutes a sharded dim while a halo fits one block, as many backward, none where
    windows and blocks align. Values equal the unsharded reduction's. ``lax.add``, ``lax.max`` and ``lax.min``
    run as lax's own reductions and have all derivatives, over dilated windows too. Any other computation
    is folded tap by tap and has those of the function itself (lax has no reverse mode there).

    Args:
      x: one array or ``sk.Padded``; inside a manual region this device's block.
      init_value: a scalar of the dtype of ``x``, folded into every window once. It may be traced, and is
        differentiated.
      computation: an associative function of two scalars, such as ``lax.add`` or ``jnp.logaddexp``.
      window_dimensions, window_strides, base_dilation, window_dilation: one integer an array dim.
      padding: "SAME", "SAME_LOWER", "VALID" or one (low, high) pair an array dim; may be negative.
      spatial_axes: which mesh axis cuts which dim: a number, or a letter of a channels-last array
        (``...DHWC``), e.g. ``{"sp": "W"}``; several allowed.
      padding_mode: what lies beyond the ends. "zeros" is what lax does: nothing does, and a window
        without any element gives ``init_value``. "circular", "reflect" and "replicate" repeat elements of
        the array. One for all dims, one a dim, or a mapping by letter or dim.
      mesh: else the mesh of ``x``, else the ambient one.

    Returns:
      The reduced windows, sharded as ``x`` is; a ``Padded`` where ``x`` was one, or where an output size
      doesn't divide and the type can't say so (Explicit axes, manual regions).

    Raises:
      TypeError: several operands, an initial value or a computation of another dtype.
      ValueError: arguments of the wrong length or below 1, no output, an unknown padding, mode or axis.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> from jax import lax
      >>> sk.ring_reduce_window(jnp.arange(1.0, 6.0), 1.0, lax.mul, (2,), spatial_axes={"sp": 0},
      ...                    mesh=sk.make_mesh({"sp": 1}))
      Array([ 2.,  6., 12., 20.], dtype=float32)
    """
    what = "ring_reduce_window"
    if isinstance(x, tuple | list | dict):
        raise TypeError(
            f"{what} reduces one array, got a {type(x).__name__} of operands; reduce them one by one, or use "
            "lax.reduce_window on unsharded arrays"
        )
    x = as_array(x)
    init = _initial(init_value, computation, x.dtype, what)
    letters = channels_last_letters(x.ndim)
    modes = read_modes(padding_mode, range(x.ndim), letters, what)

    def windows_of(sizes: Sequence[int]) -> list[Window]:
        return read_windows(
            sizes,
            window_dimensions,
            window_strides,
            padding,
            base_dilation,
            window_dilation,
            names=("window_dimensions", "window_strides"),
            what=what,
        )

    call = read_call(
        x,
        windows_of,
        dict(enumerate(modes)),
        spatial_axes=spatial_axes,
        mesh=mesh,
        letters=letters,
        what=what,
    )
    return call.run(WindowReduction(call.dims, computation), *init)


def _initial(init_value: Any, computation: Callable[..., Any], dtype: Any, what: str) -> tuple[Array, ...]:
    """The initial value as an operand; none where it's known to change nothing."""
    if np.ndim(init_value):
        raise TypeError(f"{what}: init_value must be a scalar, got shape {np.shape(init_value)}")
    weak = isinstance(init_value, bool | int | float | complex)
    imaginary = isinstance(init_value, complex) and not jnp.issubdtype(dtype, jnp.complexfloating)
    if imaginary or (not weak and jnp.result_type(init_value) != dtype):
        raise TypeError(
            f"{what}: init_value is {jnp.result_type(init_value)}, x is {np.dtype(dtype)}; give both one dtype"
        )
    if isinstance(init_value, Tracer):
        init = (jnp.asarray(init_value, dtype),)
    else:
        value, neutral = np.asarray(init_value), identity(computation, dtype)
        if jnp.issubdtype(dtype, np.integer):
            info = jnp.iinfo(dtype)
            if not (info.min <= value <= info.max and value % 1 == 0):
                raise TypeError(
                    f"{what}: init_value={init_value!r} is not a value of {np.dtype(dtype)}, the dtype of x"
                )
        init = () if neutral is not None and value == neutral else (jnp.asarray(value, dtype),)
    scalar = jax.ShapeDtypeStruct((), dtype)
    out = jax.eval_shape(computation, scalar, scalar)
    if getattr(out, "shape", None) != () or out.dtype != dtype:
        raise TypeError(f"{what}: computation must map two {np.dtype(dtype)} scalars to one, but gives {out}")
    return init


def ring_max_pool(
    x: Any,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "VALID",
    *,
    window_dilation: Sequence[int] | None = None,
    spatial_axes: Mapping[Any, Any],
    padding_mode: Any = "zeros",
    mesh: MeshLike = None,
) -> Any:
    """Max pooling of a channels-last array sharded in space: ``flax.linen.max_pool`` with halos.

    Beyond the ends lies minus infinity (the smallest integer), whatever signs the elements have. Of equal
    maxima in a window the first gets the gradient, as in lax, also where a shard's border lies between
    them, and over dilated windows (which lax can't differentiate in reverse).

    Args:
      x: ``[*batch, *space, features]``, an array or ``sk.Padded``; any number of batch dims, none too.
      window_shape: one integer a spatial dim; it says how many there are.
      strides: one a spatial dim; 1 by default, as in Flax.
      padding: "SAME", "SAME_LOWER", "VALID" or one (low, high) pair a spatial dim.
      window_dilation: one a spatial dim, distance between the elements of a window.
      spatial_axes: which mesh axis cuts which dim: a number or a letter ("D", "H", "W"), e.g. ``{"sp": "W"}``.
      padding_mode: what lies beyond the ends: "zeros" (nothing does), or "circular", "reflect" and "replicate", which
        repeat elements of the array. One for all dims, one a dim, or a mapping by letter or dim.
      mesh: else the mesh of ``x``, else the ambient one.

    Returns:
      The pooled array, sharded as ``x`` is; a ``Padded`` where ``x`` was one, or where an output size doesn't divide
      and the type can't say so (Explicit axes, manual regions).

    Raises:
      ValueError: windows, strides or a padding of the wrong length, no output, an unknown padding, mode or axis.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> x = jnp.arange(16.0).reshape(1, 4, 4, 1)
      >>> sk.ring_max_pool(x, (2, 2), (2, 2), spatial_axes={"sp": "W"}, mesh=sk.make_mesh({"sp": 1}))[0, ..., 0]
      Array([[ 5.,  7.],
             [13., 15.]], dtype=float32)
    """
    call = _read_pool(
        x, window_shape, strides, padding, window_dilation, spatial_axes, padding_mode, mesh, "ring_max_pool"
    )
    return call.run(WindowReduction(call.dims, lax.max))


def ring_min_pool(
    x: Any,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "VALID",
    *,
    window_dilation: Sequence[int] | None = None,
    spatial_axes: Mapping[Any, Any],
    padding_mode: Any = "zeros",
    mesh: MeshLike = None,
) -> Any:
    """Min pooling of a channels-last array sharded in space: ``flax.nnx.min_pool`` with halos.

    Beyond the ends lies infinity (the largest integer). Of equal minima in a window the first gets the gradient, also
    where a shard's border lies between them, and over dilated windows (which lax can't differentiate in reverse).

    Args:
      x: ``[*batch, *space, features]``, an array or ``sk.Padded``; any number of batch dims, none too.
      window_shape: one integer a spatial dim; it says how many there are.
      strides: one a spatial dim; 1 by default, as in Flax.
      padding: "SAME", "SAME_LOWER", "VALID" or one (low, high) pair a spatial dim.
      window_dilation: one a spatial dim, distance between the elements of a window.
      spatial_axes: which mesh axis cuts which dim: a number or a letter ("D", "H", "W"), e.g. ``{"sp": "W"}``.
      padding_mode: what lies beyond the ends: "zeros" (nothing does), or "circular", "reflect" and "replicate", which
        repeat elements of the array. One for all dims, one a dim, or a mapping by letter or dim.
      mesh: else the mesh of ``x``, else the ambient one.

    Returns:
      The pooled array, sharded as ``x`` is; a ``Padded`` where ``x`` was one, or where an output size doesn't divide
      and the type can't say so (Explicit axes, manual regions).

    Raises:
      ValueError: windows, strides or a padding of the wrong length, no output, an unknown padding, mode or axis.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> x = jnp.asarray([3.0, 1.0, 2.0, 5.0])[:, None]
      >>> sk.ring_min_pool(x, (2,), spatial_axes={"sp": "W"}, mesh=sk.make_mesh({"sp": 1}))[:, 0]
      Array([1., 1., 2.], dtype=float32)
    """
    call = _read_pool(
        x, window_shape, strides, padding, window_dilation, spatial_axes, padding_mode, mesh, "ring_min_pool"
    )
    return call.run(WindowReduction(call.dims, lax.min))


def ring_avg_pool(
    x: Any,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "VALID",
    count_include_pad: bool = True,
    *,
    window_dilation: Sequence[int] | None = None,
    spatial_axes: Mapping[Any, Any],
    padding_mode: Any = "zeros",
    mesh: MeshLike = None,
) -> Any:
    """Average pooling of a channels-last array sharded in space: ``flax.linen.avg_pool`` with halos.

    Args:
      x: ``[*batch, *space, features]``, an array or ``sk.Padded``; any number of batch dims, none too.
      window_shape: one integer a spatial dim; it says how many there are.
      strides: one a spatial dim; 1 by default, as in Flax.
      padding: "SAME", "SAME_LOWER", "VALID" or one (low, high) pair a spatial dim.
      window_dilation: one a spatial dim, distance between the elements of a window.
      count_include_pad: divide by the size of the window; else by the number of elements it holds (repeated
        ones count, padded tails never do; a window without any gives a NaN, as in Flax).
      spatial_axes: which mesh axis cuts which dim: a number or a letter ("D", "H", "W"), e.g. ``{"sp": "W"}``.
      padding_mode: what lies beyond the ends: "zeros" (nothing does), or "circular", "reflect" and "replicate", which
        repeat elements of the array. One for all dims, one a dim, or a mapping by letter or dim.
      mesh: else the mesh of ``x``, else the ambient one.

    Returns:
      The pooled array, of the dtype of ``x`` (for integers floating), sharded as ``x`` is; a ``Padded`` where ``x`` was
      one, or where an output size doesn't divide and the type can't say so (Explicit axes, manual regions).

    Raises:
      ValueError: windows, strides or a padding of the wrong length, no output, an unknown padding, mode or axis.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> x = jnp.ones((1, 5, 1))
      >>> sk.ring_avg_pool(x, (3,), padding="SAME", count_include_pad=False, spatial_axes={"sp": "W"},
      ...               mesh=sk.make_mesh({"sp": 1}))[0, :, 0]
      Array([1., 1., 1., 1., 1.], dtype=float32)
    """
    call = _read_pool(
        x, window_shape, strides, padding, window_dilation, spatial_axes, padding_mode, mesh, "ring_avg_pool"
    )
    return call.run(WindowMean(WindowReduction(call.dims, lax.add), math.prod(window_shape), count_include_pad))


@dataclasses.dataclass(frozen=True)
class WindowMean:
    """A block operator (see ``BlockOp``): sums over windows, divided by what each holds.

    Attributes:
      total: the sums.
      size: taps of a window.
      count_include_pad: divide by that; else by the number of taps that are elements.
    """

    total: WindowReduction
    size: int
    count_include_pad: bool

    def __call__(self, at: At, block: Array) -> Array:
        total = self.total(at, block)
        # In the dtype of the sums, as a Python scalar would; integers become floating, as in NumPy.
        dtype = total.dtype if jnp.issubdtype(total.dtype, jnp.inexact) else jnp.result_type(float)
        if self.count_include_pad:
            return total / jnp.asarray(self.size, dtype)
        # How many elements a window holds is a product over dims: index arithmetic, no reduction of ones.
        held: Any = jnp.asarray(1, dtype)
        for d in self.total.dims:
            count = shard_row(real_taps(d).sum(0), at.get(d.dim, 0)).astype(dtype)
            held = held * lax.expand_dims(count, [a for a in range(total.ndim) if a != d.dim])
        return total / held


def _read_pool(
    x: Any,
    window_shape: Any,
    strides: Any,
    padding: Any,
    window_dilation: Any,
    spatial_axes: Any,
    padding_mode: Any,
    mesh: Any,
    what: str,
) -> WindowCall:
    """The arguments of a pooling of a channels-last array, as windows over its spatial dims."""
    x = as_array(x)
    try:
        count = len(window_shape)
    except TypeError:
        raise ValueError(f"{what}: window_shape takes one integer a spatial dim, got {window_shape!r}") from None
    if not 0 < count < x.ndim:
        raise ValueError(
            f"{what}: window_shape={tuple(window_shape)} has {count} entries, but an array of shape {tuple(x.shape)} "
            f"(batch dims, space, features) has room for 1 to {x.ndim - 1} spatial dims"
        )
    letters = channels_last_letters(x.ndim, count)
    dims = range(x.ndim - 1 - count, x.ndim - 1)
    modes = read_modes(padding_mode, dims, letters, what)

    def windows_of(sizes: Sequence[int]) -> list[Window]:
        windows = [Window(size, 1) for size in sizes]
        windows[dims.start : dims.stop] = read_windows(
            sizes[dims.start : dims.stop],
            window_shape,
            strides,
            padding,
            None,
            window_dilation,
            names=("window_shape", "strides"),
            what=what,
        )
        return windows

    return read_call(
        x,
        windows_of,
        dict(zip(dims, modes, strict=True)),
        spatial_axes=spatial_axes,
        mesh=mesh,
        letters=letters,
        what=what,
    )
