"""``ring_conv``: a convolution whose input is sharded in space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from shardkit.spatial.convolution.args import read_conv
from shardkit.spatial.convolution.region import run_conv


def ring_conv(
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
    spatial_axes: Mapping[Any, Any],
    padding_mode: Any = "zeros",
    method: str = "auto",
    mesh: Mesh | AbstractMesh | None = None,
) -> Any:
    """``lax.conv_general_dilated`` on an input sharded in space: halos travel, nothing else.

    Each device convolves its block after fetching the thin edges it needs from its neighbours around
    the mesh axis. Values and all derivatives equal the unsharded convolution's. At most two permutes
    a sharded dim forward, two more for the input gradient, none for the kernel gradient (which is
    summed over the mesh axis: reduced at top level; inside a manual region it follows the kernel's
    own variance, so a kernel made varying with ``lax.pcast`` keeps a Partial gradient). Source: N. Dryden
    et al., "Improving Strong-Scaling of CNN Training by Exploiting Finer-Grained Parallelism", IPDPS 2019,
    https://arxiv.org/abs/1903.06681.

    Args:
      lhs: the input, a ``jax.Array`` or ``sk.Padded`` of the shape that ``dimension_numbers`` says,
        ``[batch, features, *space]`` by default; inside a manual region this device's block.
      rhs: the kernel, whole; ``[out_features, in_features / groups, *window]`` by default.
      window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count,
        batch_group_count, precision, preferred_element_type: as in ``lax.conv_general_dilated``;
        padding may be negative.
      spatial_axes: which mesh axis cuts which dim of ``lhs``: a number or a letter of
        ``dimension_numbers``, e.g. ``{"sp": "W"}``; several allowed. Other mesh axes stay with the
        compiler. A batch dim may be named too; that makes its axis manual (a grouped convolution then
        runs as one convolution instead of one a group).
      padding_mode: what lies beyond the edges of the spatial dims: "zeros", "circular", "reflect",
        "replicate"; one for all, one a spatial dim, or a mapping by letter or dim.
      method: how the block meets its halos; values are equal. "concat": one convolution over both. "overlap": the
        block is convolved while halos travel, then its edges are put right; keeps least memory. "blocks": the
        block is cut into chunks that lie side by side in the batch dim, what a TPU likes with few images.
        "auto": what the benchmark found best for the platform (benchmarks/README.md), "concat" where that
        can't run.
      mesh: else the mesh of ``lhs``, else the ambient one.

    Returns:
      The output, sharded over the same axes. A ``Padded`` input gives a ``Padded`` output. An array
      gives an array of the logical shape; where its size doesn't divide and the type can't say so
      (Explicit axes, or inside a manual region) a ``Padded`` comes back instead. To take an uneven
      result through a jit boundary without gathering it, return a ``Padded``:
      ``sk.shard_tensor(y, placements, uneven="pad")``.

    Raises:
      ValueError: unknown axis or dim letter, an axis used twice, features that disagree, padding or
        strides of the wrong length, no output, an empty batch, unknown mode or method, a method that can't
        run this convolution (the message says why, and which can).

    Example:
      >>> import jax, jax.numpy as jnp, shardkit as sk
      >>> n = jax.device_count()
      >>> x, k = jnp.ones((1, 8, 8 * n, 3)), jnp.ones((3, 3, 3, 4))
      >>> how = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
      >>> y = sk.ring_conv(x, k, (1, 2), "SAME", **how, spatial_axes={"sp": "W"}, mesh=sk.make_mesh({"sp": n}))
      >>> bool((y == jax.lax.conv_general_dilated(x, k, (1, 2), "SAME", **how)).all())
      True
      >>> y.sharding.shard_shape(y.shape)  # a device's block
      (1, 8, 4, 4)
    """
    call = read_conv(
        lhs,
        rhs,
        window_strides,
        padding,
        lhs_dilation,
        rhs_dilation,
        dimension_numbers,
        feature_group_count,
        batch_group_count,
        precision,
        preferred_element_type,
        spatial_axes=spatial_axes,
        padding_mode=padding_mode,
        method=method,
        mesh=mesh,
    )
    return run_conv(call)
