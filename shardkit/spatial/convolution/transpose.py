"""``ring_conv_transpose``: the transposed convolution of ``lax.conv_transpose``, sharded in space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from shardkit.spatial.convolution.ring import ring_conv
from shardkit.spatial.operands import as_array


def transpose_padding(kernel: int, stride: int, padding: str | tuple[int, ...]) -> tuple[int, int]:
    """Padding of the dilated input for one dim of a transposed convolution.

    Args:
      kernel: elements the dilated kernel covers.
      stride: stride of the convolution it is the transpose of.
      padding: "SAME" gives ``size * stride`` outputs, "VALID" all of them; a pair pads the input.

    Source: the arithmetic of ``lax.conv_transpose``.
    """
    if not isinstance(padding, str):
        low, high = padding
        return low, high
    if padding.upper() == "VALID":
        total = kernel + stride - 2 + max(kernel - stride, 0)
        return kernel - 1, total - (kernel - 1)
    total = kernel + stride - 2
    low = kernel - 1 if stride > kernel - 1 else -(-total // 2)
    return low, total - low


def ring_conv_transpose(
    lhs: Any,
    rhs: Any,
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    transpose_kernel: bool = False,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    spatial_axes: Mapping[Any, Any],
    padding_mode: Any = "zeros",
    method: str = "auto",
    mesh: Mesh | AbstractMesh | None = None,
) -> Any:
    """``lax.conv_transpose`` on an input sharded in space: halos travel, nothing else.

    Args:
      lhs: the input, a ``jax.Array`` or ``sk.Padded``, ``[batch, *space, features]`` by default; inside a manual
        region this device's block.
      rhs: the kernel, whole; ``[*window, in_features, out_features]`` by default.
      strides, padding, rhs_dilation, dimension_numbers, transpose_kernel, precision, preferred_element_type: as in
        ``lax.conv_transpose`` (dimension_numbers None: channels last).
      spatial_axes: which mesh axis cuts which dim of ``lhs``: a number or a letter of ``dimension_numbers``, e.g.
        ``{"sp": "W"}``; several allowed.
      padding_mode: what lies beyond the edges of the spatial dims: "zeros", "circular", "reflect", "replicate".
      method: how the block meets its halos, as in ``sk.ring_conv``; values are equal.
      mesh: else the mesh of ``lhs``, else the ambient one.

    Returns:
      The output, sharded over the same axes, of the logical shape; a ``Padded`` where ``sk.ring_conv`` gives one.

    Raises:
      ValueError: operands of different or too low rank, strides, dilation or padding of the wrong length, an unknown
        padding, axis, dim letter, mode or method, features that disagree.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> x, k = jnp.ones((1, 5, 3)), jnp.ones((3, 3, 4))
      >>> sk.ring_conv_transpose(x, k, (2,), "SAME", spatial_axes={"sp": "W"},
      ...                        mesh=sk.make_mesh({"sp": 1})).shape
      (1, 10, 4)
    """
    what = "ring_conv_transpose"
    lhs, rhs = as_array(lhs), as_array(rhs)
    count = rhs.ndim - 2
    if lhs.ndim != rhs.ndim or count < 1:
        raise ValueError(
            f"{what}: lhs and rhs need equal rank of at least 3 (batch, space, feature), got shapes "
            f"{tuple(lhs.shape)} and {tuple(rhs.shape)}"
        )
    if dimension_numbers is None:
        if count > 3:
            raise ValueError(f"{what}: give dimension_numbers for {count} spatial dims")
        space = "DHW"[-count:]
        dimension_numbers = (f"N{space}C", f"{space}IO", f"N{space}C")
    numbers = lax.conv_dimension_numbers(tuple(lhs.shape), tuple(rhs.shape), dimension_numbers)
    kernels = [rhs.shape[d] for d in numbers.rhs_spec[2:]]
    dilation = (1,) * count if rhs_dilation is None else tuple(rhs_dilation)
    if padding.upper() not in ("SAME", "VALID") if isinstance(padding, str) else not isinstance(padding, Sequence):
        raise ValueError(f"{what}: padding={padding!r} is unknown; use 'SAME', 'VALID' or (low, high) pairs")
    pads: list[Any] = [padding] * count if isinstance(padding, str) else list(padding)
    for name, values in (("strides", strides), ("rhs_dilation", dilation), ("padding", pads)):
        if len(values) != count:
            raise ValueError(f"{what}: {name}={values!r} has {len(values)} entries for {count} spatial dims")
    if not isinstance(padding, str) and any(not isinstance(p, Sequence) or len(p) != 2 for p in pads):
        raise ValueError(f"{what}: padding takes a name or one (low, high) pair a spatial dim, got {padding!r}")
    reach = [(k - 1) * d + 1 for k, d in zip(kernels, dilation, strict=True)]
    pads = [transpose_padding(k, s, p) for k, s, p in zip(reach, strides, pads, strict=True)]
    if transpose_kernel:
        out_dim, in_dim = numbers.rhs_spec[:2]
        rhs = jnp.swapaxes(jax.lax.rev(rhs, numbers.rhs_spec[2:]), out_dim, in_dim)
    return ring_conv(
        lhs,
        rhs,
        (1,) * count,
        pads,
        lhs_dilation=tuple(strides),
        rhs_dilation=dilation,
        dimension_numbers=dimension_numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
        spatial_axes=spatial_axes,
        padding_mode=padding_mode,
        method=method,
        mesh=mesh,
    )
