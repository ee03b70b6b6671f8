"""Which input elements a block of convolution outputs needs, and who holds them.

Pure integer arithmetic: no JAX, no arrays. Everything that moves later (halos, their
permutes, the offset of each shard into what it received) is decided here, so that it can be
tested as tables of integers.

Words. A dim of logical size ``W`` is cut over ``n`` shards into blocks of ``b = ceil(W / n)``
elements; shard ``i`` holds ``[i*b, (i+1)*b)``, of which only elements below ``W`` exist. The
*extended* dim continues the elements over both ends as ``padding_mode`` says.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

PADDING_MODES = ("zeros", "circular", "reflect", "replicate")


def ceil_div(a: int, b: int) -> int:
    """Smallest integer >= a / b, exact for negative ``a``."""
    return -(-a // b)


def block_size(size: int, shards: int) -> int:
    """Elements a shard stores of a dim of ``size`` elements: ``ceil(size / shards)``."""
    return ceil_div(size, shards)


def extended_index(position: int, size: int, mode: str) -> int | None:
    """The element that stands at ``position`` of the extended dim; None for a zero.

    ``reflect`` mirrors without repeating the edge element, as ``numpy.pad`` does; ``symmetric``, which only
    padding knows (convolutions take ``PADDING_MODES``), repeats it.

    >>> [extended_index(p, 4, "reflect") for p in (-2, -1, 0, 3, 4)]
    [2, 1, 0, 3, 2]
    """
    if 0 <= position < size:
        return position
    if mode == "zeros":
        return None
    if mode == "circular":
        return position % size
    if mode == "replicate":
        return 0 if position < 0 else size - 1
    if mode == "reflect":
        if size == 1:
            return 0
        period = 2 * (size - 1)
        folded = position % period
        return folded if folded < size else period - folded
    if mode == "symmetric":
        folded = position % (2 * size)
        return folded if folded < size else 2 * size - 1 - folded
    raise ValueError(f"unknown padding mode {mode!r}; use one of {PADDING_MODES}")


@dataclasses.dataclass(frozen=True)
class Window:
    """One spatial dim of a convolution, in elements; padding counts dilated positions, as in lax.

    Attributes:
      size: logical elements of the input dim.
      kernel: taps of the kernel along this dim.
      stride: window stride.
      pad_lo, pad_hi: padding in lhs-dilated positions; negative values crop.
      lhs_dilation, rhs_dilation: input and kernel dilation.
    """

    size: int
    kernel: int
    stride: int = 1
    pad_lo: int = 0
    pad_hi: int = 0
    lhs_dilation: int = 1
    rhs_dilation: int = 1

    @property
    def reach(self) -> int:
        """Dilated positions one window covers."""
        return (self.kernel - 1) * self.rhs_dilation + 1

    @property
    def dilated_size(self) -> int:
        """Input length after lhs dilation, before padding."""
        return (self.size - 1) * self.lhs_dilation + 1 if self.size else 0

    @property
    def output_size(self) -> int:
        """Number of windows that fit: the usual convolution arithmetic."""
        room = self.pad_lo + self.dilated_size + self.pad_hi - self.reach
        return max(0, room // self.stride + 1) if room >= 0 else 0

    def start(self, output: int) -> int:
        """Dilated position where the window of ``output`` begins."""
        return output * self.stride - self.pad_lo

    def input_gradient(self) -> Window:
        """The window of the convolution that maps output gradients to input gradients.

        Stride and lhs dilation change places and the kernel is flipped, so the padding is what
        completes it (Dumoulin & Visin 2016, relationship 13, with cropped tails kept).
        """
        lo = self.reach - 1 - self.pad_lo
        dilated_out = (self.output_size - 1) * self.stride + 1
        hi = self.dilated_size + self.reach - 1 - dilated_out - lo
        return Window(
            size=self.output_size,
            kernel=self.kernel,
            stride=self.lhs_dilation,
            pad_lo=lo,
            pad_hi=hi,
            lhs_dilation=self.stride,
            rhs_dilation=self.rhs_dilation,
        )


@dataclasses.dataclass(frozen=True)
class Span:
    """The piece of the extended dim that one shard works on.

    ``[start, start + length)`` is what is laid out in memory (the same length on every shard);
    ``[need_lo, need_hi)`` within it is what reaches a result, the rest may hold anything finite.
    """

    start: int
    need_lo: int
    need_hi: int


@dataclasses.dataclass(frozen=True)
class Message:
    """One collective permute: each sender's block, from its offset on, ``length`` elements.

    Attributes:
      pairs: (source, destination) shards; each shard at most once on either side.
      offsets: first element sent by each shard (one entry a shard; 0 for those that don't send).
      length: elements sent; equal for all pairs.
    """

    pairs: tuple[tuple[int, int], ...]
    offsets: tuple[int, ...]
    length: int

    @property
    def travels(self) -> bool:
        """False where nobody needs it, or where a ring of one wraps onto itself: no communication."""
        return any(source != destination for source, destination in self.pairs)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """How every shard gets its span: the messages, and where each piece ends up.

    Two layouts of what a shard then holds:

    * ``table is None`` (a line): ``[messages before] + block + [messages after]`` is a contiguous
      piece of the extended dim that begins ``reach_lo`` elements before the block;
    * otherwise ``table[i]`` lists, for each position of shard ``i``'s span, the index into
      ``block + messages`` (concatenated in that order), -1 for a zero.

    Attributes:
      shards, block, size: the cut: number of shards, elements a shard stores, logical elements.
      before, after: messages in the order in which they are laid out.
      reach_lo, reach_hi: elements that the line extends beyond the block on either side.
      starts: first position of each shard's span, relative to the line's first element.
      length: elements in each span.
      table: see above.
    """

    shards: int
    block: int
    size: int
    before: tuple[Message, ...]
    after: tuple[Message, ...]
    reach_lo: int
    reach_hi: int
    starts: tuple[int, ...]
    length: int
    table: tuple[tuple[int, ...], ...] | None = None

    @property
    def messages(self) -> tuple[Message, ...]:
        return self.before + self.after

    @property
    def received(self) -> int:
        """Elements along this dim that a device receives: the halo lower bound of an SPMD program.

        An SPMD permute moves equally many elements for every pair, so this is the sum over
        directions of the largest need of any shard.
        """
        return sum(m.length for m in self.messages if m.travels)

    @property
    def permutes(self) -> int:
        """Number of collective permutes."""
        return sum(1 for m in self.messages if m.travels)

    @property
    def aligned(self) -> bool:
        """True when every shard's span begins at the same place of its line."""
        return self.table is None and len(set(self.starts)) <= 1


def plan_exchange(size: int, shards: int, mode: str, spans: Sequence[Span], length: int) -> Exchange:
    """Messages that give every shard its span of the extended dim.

    Args:
      size: logical elements of the dim.
      shards: number of blocks it is cut into.
      mode: how it continues beyond its ends, one of ``PADDING_MODES``.
      spans: one a shard.
      length: elements each span holds.

    Returns:
      An ``Exchange``. Zero padding and an evenly cut circle give a line (concatenation only);
      the other modes give a table (a local gather over what arrived).
    """
    block = block_size(size, shards)
    even_circle = mode == "circular" and size == block * shards
    if mode == "zeros" or even_circle:
        return _plan_line(size, shards, block, even_circle, spans, length)
    if all(s.need_lo >= 0 and s.need_hi <= size for s in spans):
        return _plan_line(size, shards, block, False, spans, length)
    return _plan_table(size, shards, block, mode, spans, length)


def _plan_line(size: int, shards: int, block: int, circle: bool, spans: Sequence[Span], length: int) -> Exchange:
    # What must travel: needed elements that exist, outside the shard's own block.
    needs: list[tuple[int, int] | None] = []
    for span in spans:
        lo, hi = span.need_lo, span.need_hi
        if not circle:
            lo, hi = max(lo, 0), min(hi, size)
        needs.append((lo, hi) if lo < hi else None)
    left = max((i * block - need[0] for i, need in enumerate(needs) if need), default=0)
    right = max((need[1] - (i + 1) * block for i, need in enumerate(needs) if need), default=0)
    left, right = max(left, 0), max(right, 0)

    def messages(total: int, sign: int) -> list[Message]:
        found = []
        for hop in range(1, ceil_div(total, block) + 1 if block else 1):
            part = min(block, total - (hop - 1) * block)
            offset = block - part if sign < 0 else 0
            pairs = []
            for i, need in enumerate(needs):
                source = i + sign * hop
                if need is None or not (circle or 0 <= source < shards):
                    continue
                first = source * block + offset  # extended position of the piece's first element
                if need[0] < first + part and first < need[1]:
                    pairs.append((source % shards, i))
            found.append(Message(tuple(pairs), (offset,) * shards, part))
        return found

    before = tuple(reversed(messages(left, -1)))
    after = tuple(messages(right, +1))
    starts = []
    for i, span in enumerate(spans):
        # An idle shard (no outputs) may look anywhere: let it look where shard 0 does.
        idle = span.need_lo >= span.need_hi
        starts.append(None if idle else span.start - (i * block - left))
    busy = [s for s in starts if s is not None] or [0]
    filled = tuple(busy[0] if s is None else s for s in starts)
    return Exchange(shards, block, size, before, after, left, right, filled, length)


def _plan_table(size: int, shards: int, block: int, mode: str, spans: Sequence[Span], length: int) -> Exchange:
    wanted: dict[int, dict[int, list[int]]] = {}  # shift -> receiver -> local offsets at the source
    for i, span in enumerate(spans):
        for position in range(span.need_lo, span.need_hi):
            element = extended_index(position, size, mode)
            if element is None or element // block == i:
                continue
            shift = (element // block - i) % shards
            wanted.setdefault(shift, {}).setdefault(i, []).append(element % block)
    # Neighbours first on either side, so that the common case reads "left, right".
    shifts = sorted(wanted, key=lambda s: (min(s, shards - s), s))
    found, place = [], {}
    base = block
    for shift in shifts:
        receivers = wanted[shift]
        length_here = max(max(v) - min(v) + 1 for v in receivers.values())
        offsets = [0] * shards
        for i, local in receivers.items():
            source = (i + shift) % shards
            offsets[source] = min(min(local), block - length_here)
            place[shift, i] = base - offsets[source]
        pairs = tuple(((i + shift) % shards, i) for i in sorted(receivers))
        found.append(Message(pairs, tuple(offsets), length_here))
        base += length_here
    table = []
    for i, span in enumerate(spans):
        row = []
        for position in range(span.start, span.start + length):
            index = -1
            if span.need_lo <= position < span.need_hi:
                element = extended_index(position, size, mode)
                if element is not None:
                    shift = (element // block - i) % shards
                    index = element % block + (place[shift, i] if shift else 0)
            row.append(index)
        table.append(tuple(row))
    return Exchange(shards, block, size, (), tuple(found), 0, 0, (0,) * shards, length, tuple(table))


@dataclasses.dataclass(frozen=True)
class ShardedWindow:
    """A window over a sharded dim: what each shard receives, and the convolution it then runs.

    Shard ``i`` computes outputs ``[i*out_block, (i+1)*out_block)``. Its first window begins at
    dilated position ``start_i = i*out_block*stride - pad_lo``; the elements from
    ``floor(start_i / lhs_dilation)`` on are laid out, and ``phases[i]`` is the rest, in
    ``[0, lhs_dilation)``.
    """

    window: Window
    exchange: Exchange
    out_block: int
    phases: tuple[int, ...]

    @property
    def static_phase(self) -> bool:
        return len(set(self.phases)) <= 1

    @property
    def kept_whole(self) -> bool:
        """The line needs no slicing: where the window starts can be said by the operator's padding."""
        return self.exchange.aligned and self.static_phase

    @property
    def slices_output(self) -> bool:
        """Phases differ and the stride is 1: compute up to lhs_dilation - 1 more outputs, slice."""
        return not self.static_phase and self.window.stride == 1

    @property
    def outputs_computed(self) -> int:
        return self.out_block + (self.window.lhs_dilation - 1 if self.slices_output else 0)

    @property
    def dilated_length(self) -> int:
        """Dilated positions that the local convolution reads."""
        return (self.outputs_computed - 1) * self.window.stride + self.window.reach


@functools.lru_cache(maxsize=4096)
def shard_window(window: Window, shards: int, mode: str = "zeros") -> ShardedWindow:
    """Cut a window over ``shards``: who needs what, and how it travels."""
    out = window.output_size
    out_block = block_size(out, shards)
    dilation = window.lhs_dilation
    firsts = [window.start(i * out_block) for i in range(shards)]
    busy = [max(0, min(out_block, out - i * out_block)) for i in range(shards)]
    phases = [f % dilation for f in firsts]
    live = [p for p, m in zip(phases, busy, strict=True) if m] or [0]
    phases = [p if m else live[0] for p, m in zip(phases, busy, strict=True)]
    varies = len(set(phases)) > 1
    extra = dilation - 1 if varies else max(phases)
    # With varying phases every shard lays out enough for the largest phase.
    reach = (out_block - 1) * window.stride + window.reach
    length = (extra + reach - 1) // dilation + 1 if out_block else 0
    spans = []
    for first, count in zip(firsts, busy, strict=True):
        stop = first + (count - 1) * window.stride + window.reach
        lo = ceil_div(first, dilation)
        hi = (stop - 1) // dilation + 1
        spans.append(Span(first // dilation, lo, max(lo, hi) if count else lo))
    exchange = plan_exchange(window.size, shards, mode, spans, length)
    return ShardedWindow(window, exchange, out_block, tuple(phases))


@functools.lru_cache(maxsize=4096)
def shard_halo(size: int, shards: int, before: int, after: int, mode: str = "zeros") -> Exchange:
    """The exchange behind ``halo_exchange``: every block with ``before`` and ``after`` more."""
    block = block_size(size, shards)
    spans = []
    for i in range(shards):
        lo, hi = i * block - before, (i + 1) * block + after
        spans.append(Span(lo, lo, hi))
    return plan_exchange(size, shards, mode, spans, before + block + after)
