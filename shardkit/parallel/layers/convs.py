"""Convolution layers as ring convolutions: a layer's settings, its arrays and its plan in, the result out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from shardkit.optim.batch import batch_cut
from shardkit.parallel.layers.operands import array_of, like
from shardkit.parallel.plans import Applied
from shardkit.spatial.convolution.ring import ring_conv
from shardkit.spatial.convolution.transpose import ring_conv_transpose, transpose_padding

_FLAX_MODES = {"CIRCULAR": "circular", "REFLECT": "reflect"}


@dataclasses.dataclass(frozen=True)
class ConvSettings:
    """How a Flax convolution moves its kernel, one number a spatial dim.

    Attributes:
      kernel_size: positions of the kernel.
      strides, input_dilation, kernel_dilation: as in ``lax.conv_general_dilated``.
      padding: (low, high) pairs, or a name that Flax knows.
      feature_group_count: as there.
      transpose_kernel: of a transposed convolution.
      precision, preferred_element_type: as there.
      own_function: the layer was given another function than ``lax.conv_general_dilated``.
    """

    kernel_size: tuple[int, ...]
    strides: tuple[int, ...]
    padding: Any
    input_dilation: tuple[int, ...]
    kernel_dilation: tuple[int, ...]
    feature_group_count: int = 1
    transpose_kernel: bool = False
    precision: Any = None
    preferred_element_type: Any = None
    own_function: bool = False

    @classmethod
    def of(cls, layer: Any) -> ConvSettings:
        """Of an nnx or linen layer, transposed or not: they name alike what they share."""
        kernel = (layer.kernel_size,) if isinstance(layer.kernel_size, int) else tuple(layer.kernel_size)
        own = getattr(layer, "conv_general_dilated", None)
        return cls(
            kernel_size=kernel,
            strides=_per_dim(layer.strides, len(kernel)),
            padding=_pairs(layer.padding, len(kernel)),
            input_dilation=_per_dim(getattr(layer, "input_dilation", None), len(kernel)),
            kernel_dilation=_per_dim(layer.kernel_dilation, len(kernel)),
            feature_group_count=getattr(layer, "feature_group_count", 1),
            transpose_kernel=getattr(layer, "transpose_kernel", False),
            precision=layer.precision,
            preferred_element_type=getattr(layer, "preferred_element_type", None),
            own_function=own not in (None, lax.conv_general_dilated)
            or getattr(layer, "conv_general_dilated_cls", None) is not None,
        )

    @property
    def reach(self) -> list[int]:
        """Positions the dilated kernel covers."""
        return [(k - 1) * d + 1 for k, d in zip(self.kernel_size, self.kernel_dilation, strict=True)]


def why_not_conv(settings: ConvSettings, shape: tuple[int, ...]) -> str | None:
    """Why a convolution of an input of this shape can't be a ring, if so."""
    if settings.own_function:
        return "it has its own conv_general_dilated function, which knows nothing of halos"
    if settings.padding == "REFLECT":
        sizes = shape[len(shape) - 1 - len(settings.kernel_size) : -1]
        if any(k // 2 >= s for k, s in zip(settings.reach, sizes, strict=True)):
            return (
                f"REFLECT padding for a kernel covering {settings.reach} repeats more than the {sizes} "
                "elements there are"
            )
    return None


def masked(kernel: Any, mask: Any) -> Any:
    """A kernel with some of its weights taken out."""
    if mask is None:
        return kernel
    if mask.shape != kernel.shape:
        raise ValueError(f"mask of shape {mask.shape} for a kernel of shape {kernel.shape}")
    return kernel * mask


def conv(settings: ConvSettings, x: Any, kernel: Any, bias: Any, applied: Applied) -> Any:
    """``lax.conv_general_dilated`` and a bias, in the ways of Flax's ``Conv``.

    Args:
      settings: of the layer.
      x: (..., spatial dims, channels), an array or ``sk.Padded``, in the dtype of the computation.
      kernel: (spatial dims, channels in / groups, channels out).
      bias: (channels out,) or None.
      applied: which mesh axes cut which dims.
    """
    count = len(settings.kernel_size)
    x, batch = _with_one_batch_dim(x, count)
    padding, mode = settings.padding, "zeros"
    if isinstance(padding, str) and padding in _FLAX_MODES:
        # Flax pads the undilated input, so padding counts input_dilation positions each.
        mode = _FLAX_MODES[padding]
        padding = [((k - 1) // 2 * d, k // 2 * d) for k, d in zip(settings.reach, settings.input_dilation, strict=True)]
    elif padding == "CAUSAL":
        if count != 1:
            raise ValueError("Causal padding is only implemented for 1D convolutions.")
        padding = [((settings.reach[0] - 1) * settings.input_dilation[0], 0)]
    y = ring_conv(
        x,
        kernel,
        settings.strides,
        padding,
        lhs_dilation=settings.input_dilation,
        feature_group_count=settings.feature_group_count,
        padding_mode=mode,
        **_common(settings, x, applied),
    )
    return _finished(y, bias, batch)


def conv_transpose(settings: ConvSettings, x: Any, kernel: Any, bias: Any, applied: Applied) -> Any:
    """``lax.conv_transpose`` and a bias, in the ways of Flax's ``ConvTranspose``; the arguments as for ``conv``.

    With ``transpose_kernel`` the kernel is (spatial dims, channels out, channels in).
    """
    count = len(settings.kernel_size)
    x, batch = _with_one_batch_dim(x, count)
    common = _common(settings, x, applied)
    transposed, strides = settings.transpose_kernel, settings.strides
    if settings.padding == "CIRCULAR":
        if transposed:
            kernel = jnp.swapaxes(jax.lax.rev(kernel, tuple(range(count))), -1, -2)
        pads = [
            circular_transpose_padding(s, k, t, transposed)
            for s, k, t in zip(x.shape[1:-1], settings.reach, strides, strict=True)
        ]
        y = ring_conv(x, kernel, (1,) * count, pads, lhs_dilation=strides, padding_mode="circular", **common)
    else:
        y = ring_conv_transpose(x, kernel, strides, settings.padding, transpose_kernel=transposed, **common)
    return _finished(y, bias, batch)


def circular_transpose_padding(size: int, kernel: int, stride: int, transpose_kernel: bool) -> tuple[int, int]:
    """Padding that makes a transposed convolution on a circle: ``size * stride`` outputs.

    Flax computes the "VALID" result and adds up what wraps around; the same outputs are windows over
    the dilated circle, whose period is ``size * stride`` positions.

    Args:
      size: input elements around the circle.
      kernel: positions the dilated kernel covers.
      stride: input dilation.
      transpose_kernel: which side of an even remainder gets the extra element.
    """
    period = size * stride
    low, high = transpose_padding(kernel, stride, "VALID")
    valid = (size - 1) * stride + 1 + low + high - kernel + 1
    rest = -(valid - period) % (2 * period)
    shift = rest // 2 if transpose_kernel else (rest + 1) // 2
    low = (low + shift) % period
    if low > period // 2:
        low -= period  # the nearer way round
    return low, period - ((size - 1) * stride + 1) + kernel - 1 - low


def check_batch_cut(cut: Mapping[Any, int], path: str) -> None:
    """Refuses images of which a mesh axis cuts the batch, where the plan says that it cuts space.

    The layer would take other images' columns for the neighbours of its own.

    Raises:
      ValueError: the axis, both dims, and what to write.
    """
    for axes, dim in cut.items():
        for name in (axes,) if isinstance(axes, str) else axes:
            held = batch_cut().get(name, dim)
            if held != dim:
                raise ValueError(
                    f"layer {path!r}: ConvParallel cuts dim {dim} of its input over mesh axis {name!r}, but the "
                    f"batch_axes of sk.value_and_grad cut dim {held} over it. Leave {name!r} out of batch_axes: the "
                    f"layers sum over it themselves (or name the dim: batch_axes={{..., {name!r}: {dim}}}, where the "
                    "loss is a mean over it)"
                )


def _common(settings: ConvSettings, x: Any, applied: Applied) -> dict[str, Any]:
    space = "DHW"[-len(settings.kernel_size) :]
    check_batch_cut(applied.plan.spatial_axes(x.ndim), applied.path)
    return {
        "rhs_dilation": settings.kernel_dilation,
        "dimension_numbers": (f"N{space}C", f"{space}IO", f"N{space}C"),
        "precision": settings.precision,
        "preferred_element_type": settings.preferred_element_type,
        "spatial_axes": applied.plan.spatial_axes(x.ndim),
        "mesh": applied.mesh,
    }


def _finished(y: Any, bias: Any, batch: tuple[tuple[int, ...], tuple[int, ...]] | None) -> Any:
    if bias is not None:
        y = like(y, array_of(y) + bias)
    return _restore_batch(y, batch)


def _per_dim(value: Any, count: int) -> tuple[int, ...]:
    return (1,) * count if value is None else (value,) * count if isinstance(value, int) else tuple(value)


def _pairs(padding: Any, count: int) -> Any:
    """Flax's spellings of padding as pairs; names stay names."""
    if isinstance(padding, str):
        return padding
    if isinstance(padding, int):
        return ((padding, padding),) * count
    return tuple((p, p) if isinstance(p, int) else tuple(p) for p in padding)


def _with_one_batch_dim(x: Any, spatial: int) -> tuple[Any, tuple[tuple[int, ...], tuple[int, ...]] | None]:
    """Flax allows any number of batch dims: flatten them, and say how to undo it (dims held, dims that count)."""
    array, count = array_of(x), x.ndim - spatial - 1
    if count == 1:
        return x, None
    flat = array.reshape(-1, *array.shape[count:])
    return like(x, flat, (flat.shape[0], *x.shape[count:])), (array.shape[:count], x.shape[:count])


def _restore_batch(y: Any, batch: tuple[tuple[int, ...], tuple[int, ...]] | None) -> Any:
    if batch is None:
        return y
    array, (held, logical) = array_of(y), batch
    return like(y, array.reshape(*held, *array.shape[1:]), (*logical, *y.shape[1:]))
