"""Orders of a sequence over the devices of a mesh axis: plain integers, no JAX.

Under a causal mask row ``i`` meets ``i + 1`` columns. In contiguous blocks the last device has nearly all of the work,
and the others wait for it at every step of the ring. In zigzag order device ``i`` of ``n`` holds chunks ``i`` and
``2n - 1 - i`` of ``2n``: an early one and a late one, so that all have the same work.
"""

from __future__ import annotations

CONTIGUOUS = "contiguous"
ZIGZAG = "zigzag"
ORDERS = (CONTIGUOUS, ZIGZAG)

# Moving q, k, v and the result into zigzag order and back costs about as many bytes as two steps of the ring, and
# saves up to half of the matrix products, (n - 1) * L / 4 operations a moved byte for blocks of L rows (bfloat16).
# Chips do 2,000 (TPU v5e, H100 in one box) to 20,000 (H100 over InfiniBand) operations in the time of a byte: from
# this (n - 1) * L on it pays on the former.
PAYS_FROM = 16_384


def zigzag_chunks(shards: int) -> tuple[tuple[int, int], ...]:
    """The two chunks, of ``2 * shards``, that each device holds.

    Example:
      >>> zigzag_chunks(3)
      ((0, 5), (1, 4), (2, 3))
    """
    return tuple((i, 2 * shards - 1 - i) for i in range(shards))


def zigzag_order(size: int, shards: int) -> tuple[int, ...]:
    """Which element of the sequence stands at each place of its zigzag order.

    ``x[list(zigzag_order(size, n))]`` is in zigzag order, to be cut in ``n`` contiguous blocks: block ``i`` has chunks
    ``i`` and ``2n - 1 - i`` of ``2n``, so that a causal mask leaves each as much work as any other. Source: "The Llama
    3 Herd of Models", section 3.3.2, https://arxiv.org/abs/2407.21783.

    Args:
      size: elements of the sequence.
      shards: devices along the mesh axis.

    Returns:
      ``size`` integers.

    Raises:
      ValueError: ``2 * shards`` doesn't divide ``size``.

    Example:
      >>> import shardkit as sk
      >>> sk.zigzag_order(8, 2)
      (0, 1, 6, 7, 2, 3, 4, 5)
    """
    check_zigzag(size, shards, "zigzag_order")
    chunk = size // (2 * shards)
    return tuple(c * chunk + i for pair in zigzag_chunks(shards) for c in pair for i in range(chunk))


def inverse_order(order: tuple[int, ...]) -> tuple[int, ...]:
    """Where each element went.

    Example:
      >>> inverse_order((2, 0, 1))
      (1, 2, 0)
    """
    place = [0] * len(order)
    for i, element in enumerate(order):
        place[element] = i
    return tuple(place)


def check_zigzag(size: int, shards: int, what: str) -> None:
    """Raises ValueError where a sequence can't be in zigzag order."""
    if shards < 1 or size < 1 or size % (2 * shards):
        raise ValueError(
            f"{what}: zigzag order cuts the sequence in 2 * {shards} chunks, which must divide its length {size}; "
            f"pad it to a multiple of {2 * max(shards, 1)}, or keep the contiguous order"
        )


def zigzag_sends(shards: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Contiguous halves to zigzag: (sender, receiver) pairs for the first half of each block, and for the second.

    Every device receives one piece of either. On even devices the piece of the first halves is the earlier one.

    Example:
      >>> zigzag_sends(2)
      (((0, 0), (1, 1)), ((0, 1), (1, 0)))
    """
    home = {c: i for i, pair in enumerate(zigzag_chunks(shards)) for c in pair}
    return tuple(tuple((i, home[2 * i + half]) for i in range(shards)) for half in (0, 1))


def balancing_pays(block: int, shards: int) -> bool:
    """Whether a causal call in contiguous order should go through zigzag order, by the arithmetic above.

    Example:
      >>> balancing_pays(8192, 8), balancing_pays(512, 4)
      (True, False)
    """
    return (shards - 1) * block >= PAYS_FROM
