"""Attention over a cut sequence as the ``attention_fn`` of Flax modules."""

from __future__ import annotations

import dataclasses
from typing import Any

from shardkit.attention.all_to_all_attention import all_to_all_attention
from shardkit.attention.order import ORDERS, ZIGZAG
from shardkit.attention.ring_attention import ring_attention
from shardkit.placements import AnyMesh

_BACKENDS = ("ring", "all_to_all")


@dataclasses.dataclass(frozen=True)
class FlaxAttention:
    """What ``flax_attention_fn`` makes; hashable, and equal to others of the same arguments."""

    axis: str | tuple[str, ...]
    backend: str = "ring"
    mesh: AnyMesh | None = None
    causal: bool = False
    order: str = "contiguous"
    balance: bool | str = "auto"

    def __call__(
        self,
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        mask: Any = None,
        broadcast_dropout: bool = True,
        dropout_rng: Any = None,
        dropout_rate: float = 0.0,
        deterministic: bool | None = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        is_causal: bool = False,
    ) -> Any:
        """As ``flax.nnx.dot_product_attention`` and ``flax.linen.dot_product_attention``."""
        if module is not None:
            raise ValueError(
                "flax_attention_fn: attention weights can't be sown, as they're never made whole; call the layer with "
                "sow_weights=False"
            )
        more: dict[str, Any] = {}
        if self.backend == "ring":
            more = {"order": self.order, "balance": self.balance}
        attention = ring_attention if self.backend == "ring" else all_to_all_attention
        drops = not deterministic and dropout_rate > 0
        return attention(
            query,
            key,
            value,
            axis=self.axis,
            causal=self.causal or is_causal,
            bias=bias,
            mask=mask,
            dropout_rng=dropout_rng if drops else None,
            dropout_rate=dropout_rate if drops else 0.0,
            broadcast_dropout=broadcast_dropout,
            dtype=dtype,
            precision=precision,
            mesh=self.mesh,
            **more,
        )


def flax_attention_fn(
    axis: str | tuple[str, ...],
    backend: str = "ring",
    *,
    mesh: AnyMesh | None = None,
    causal: bool = False,
    order: str = "contiguous",
    balance: bool | str = "auto",
) -> FlaxAttention:
    """An ``attention_fn`` for ``flax.nnx.MultiHeadAttention`` and ``flax.linen.MultiHeadDotProductAttention``.

    Dropout drops the same weights as Flax's own function does.

    Args:
      axis: the mesh axis that cuts the sequence.
      backend: "ring" (``ring_attention``) or "all_to_all" (``all_to_all_attention``).
      mesh: else that of the arrays, else the ambient one.
      causal: a causal mask in every call; costs nothing, while one given as ``mask`` takes memory and skips no work.
      order, balance: as in ``ring_attention``; of "ring" alone.

    Returns:
      A hashable callable, ``FlaxAttention``.

    Raises:
      ValueError: an unknown backend or order, or an order that the backend hasn't.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> from flax import nnx
      >>> from shardkit.attention import flax_attention_fn
      >>> attend = flax_attention_fn("sp", mesh=sk.make_mesh({"sp": 1}), causal=True)
      >>> layer = nnx.MultiHeadAttention(2, 8, attention_fn=attend, decode=False, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 6, 8))).shape
      (1, 6, 8)
    """
    if backend not in _BACKENDS:
        raise ValueError(f"flax_attention_fn: backend={backend!r} is unknown; use one of {_BACKENDS}")
    if order not in ORDERS:
        raise ValueError(f"flax_attention_fn: order={order!r} is unknown; use one of {ORDERS}")
    if backend != "ring" and (order == ZIGZAG or balance != "auto"):
        raise ValueError(
            'flax_attention_fn: order="zigzag" and balance belong to backend="ring"; with "all_to_all" all devices '
            "have the same work anyway, in contiguous order"
        )
    axis = axis if isinstance(axis, str) else tuple(axis)
    return FlaxAttention(axis, backend, mesh, causal, order, balance)
