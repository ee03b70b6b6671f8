"""Attention over long sequences that are cut over devices."""

from shardkit.attention.all_to_all_attention import all_to_all_attention
from shardkit.attention.flax_attention import FlaxAttention, flax_attention_fn
from shardkit.attention.order import zigzag_order
from shardkit.attention.ring_attention import ring_attention
from shardkit.attention.zigzag import from_zigzag, to_zigzag

__all__ = [
    "FlaxAttention",
    "all_to_all_attention",
    "flax_attention_fn",
    "from_zigzag",
    "ring_attention",
    "to_zigzag",
    "zigzag_order",
]
