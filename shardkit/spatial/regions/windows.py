"""Convolutions and pooling: windows over blocks, which eat margins or fetch their halos themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax import Array, lax

from shardkit.spatial.convolution.blocks import cut_into_chunks, why_not_chunks
from shardkit.spatial.convolution.local import laid_out_conv
from shardkit.spatial.convolution.method import choose_form, regime_of
from shardkit.spatial.convolution.spec import Chunks, LocalConv
from shardkit.spatial.pooling.reduce_window import WindowedDim, WindowReduction, identity
from shardkit.spatial.regions.block import (
    ANYTHING,
    CIRCULAR,
    ZEROS,
    Block,
    CutDim,
    Cuts,
    InChunks,
    cleared,
    cropped,
    holds,
    into_chunks,
    out_of_chunks,
    widened,
)
from shardkit.spatial.regions.graph import Node
from shardkit.spatial.regions.margins import NONE, is_regular, on_a_line, suffices
from shardkit.spatial.regions.step import OWN, WINDOW, Ensure, Held, Link, Step, Wants
from shardkit.spatial.regions.views import Extension
from shardkit.spatial.windows import Window, shard_window


def on_blocks(window: Window, cut: CutDim, mode: str) -> bool:
    """Margins can serve this window; else it fetches what it needs itself."""
    return is_regular(window, cut.shards) and (mode == ZEROS or (mode == CIRCULAR and not cut.has_tail))


def _through(window: Window, view: Extension | None) -> Window | None:
    """A window over a view as one over what the view shows; None where that isn't the same."""
    if view is None:
        return window
    dilation, ends = window.lhs_dilation, view.offset + view.length
    lo_same = window.pad_lo <= 0 or (view.mode == ZEROS and view.offset <= 0)
    hi_same = window.pad_hi <= 0 or (view.mode == ZEROS and ends >= view.size)
    if not (lo_same and hi_same):
        return None
    return dataclasses.replace(
        window,
        size=view.size,
        pad_lo=window.pad_lo - view.offset * dilation,
        pad_hi=window.pad_hi + (ends - view.size) * dilation,
    )


# --- convolution ----------------------------------------------------------------------------------------------


def convolution(node: Node, lies: Sequence[Cuts], views: Mapping[int, Extension]) -> Step | None:
    """``conv_general_dilated`` with blocked space (and batch), by a kernel that every device has."""
    p, cuts = node.params, lies[0]
    numbers = p["dimension_numbers"]
    lhs, rhs, out = tuple(numbers.lhs_spec), tuple(numbers.rhs_spec), tuple(numbers.out_spec)
    if lies[1] or not cuts or lhs[1] in cuts or (lhs[0] in cuts and p["batch_group_count"] > 1):
        return None
    windows, modes, links = [], [], []
    result: dict[int, CutDim] = {}
    in_shape, kernel_shape, out_shape = node.inputs[0].shape, node.inputs[1].shape, node.outputs[0].shape
    for i, (dim, taps, to) in enumerate(zip(lhs[2:], rhs[2:], out[2:], strict=True)):
        window = Window(
            in_shape[dim],
            kernel_shape[taps],
            p["window_strides"][i],
            p["padding"][i][0],
            p["padding"][i][1],
            p["lhs_dilation"][i],
            p["rhs_dilation"][i],
        )
        window, mode = _through(window, views.get(dim)), views[dim].mode if dim in views else ZEROS
        if window is None or window.output_size != out_shape[to]:
            return None
        windows.append(window)
        modes.append(mode)
        if dim in cuts:
            links.append(Link(dim, to, cuts[dim].shards, None if window == Window(window.size, 1) else window, mode))
            result[to] = dataclasses.replace(cuts[dim], size=out_shape[to])
    regular = p["batch_group_count"] == 1 and all(
        on_blocks(w, cuts[d], m) for d, w, m in zip(lhs[2:], windows, modes, strict=True) if d in cuts
    )
    if lhs[0] in cuts:
        links.append(Link(lhs[0], out[0], cuts[lhs[0]].shards))
        result[out[0]] = cuts[lhs[0]]
    base = LocalConv(
        lhs_spec=lhs,
        rhs_spec=rhs,
        out_spec=out,
        windows=(),
        axes=tuple(None for _ in windows),
        modes=tuple(ZEROS for _ in windows),
        feature_groups=p["feature_group_count"],
        batch_groups=p["batch_group_count"],
        precision=p["precision"],
        preferred_element_type=_preferred(node),
    )
    run = _Convolution(base, tuple(windows), tuple(modes), tuple(links), result, regular)
    return Step(node, WINDOW if regular else OWN, node.inputs, (result,), (tuple(links), ()), run, node.outputs)


def _preferred(node: Node) -> Any:
    """What JAX recorded, unless it is what it would choose anyway (a derivative in gather form wants none)."""
    wanted = node.params["preferred_element_type"]
    if wanted is None or all(v.aval.dtype == wanted for v in node.inputs):
        return None
    return np.dtype(wanted)


@dataclasses.dataclass(frozen=True)
class _Convolution:
    base: LocalConv
    windows: tuple[Window, ...]
    modes: tuple[str, ...]
    links: tuple[Link, ...]
    cuts: Cuts
    regular: bool

    def __call__(self, here: Any, operands: Sequence[Any], wants: Wants, ensure: Ensure) -> Sequence[Held]:
        x, kernel = operands[0], operands[1].value
        base = dataclasses.replace(self.base, split_groups=here.free and self.base.feature_groups > 1)
        moving = [link for link in self.links if link.window is not None]
        needs = {link.source: link.needs(wants.get(link.result, NONE)) for link in moving}
        there = self.regular and all(holds(x, link.source, needs[link.source], link.mode) for link in moving)
        plain = all(wants.get(link.result, NONE) == NONE for link in self.links)
        alone = all(suffices(needs[d], m) for d, m in ensure.planned(0).items() if d in needs)
        if not self.regular or (not there and plain and alone):
            return [self._by_itself(here, base, x, kernel)]
        if not there and x.chunks is None:
            # Into chunks first, so that what travels lands beside each of them.
            x = self._form(here, self._sharded(base, x), cropped(x, {}), kernel)[1]
        return [self._with_margins(here, base, ensure(0, x), kernel, wants)]

    def _by_itself(self, here: Any, base: LocalConv, x: Block, kernel: Array) -> Block:
        """Halos and convolution as ``ring_conv`` does them, in the form that its table says."""
        spatial = base.lhs_spec[2:]
        x, conv = cropped(x, {}), self._sharded(base, x)
        at = tuple(here.where(x.cuts[d].axes) if d in x.cuts else 0 for d in spatial)
        conv, x = self._form(here, conv, x, kernel)
        if conv.chunks is not None:
            x = cleared(x, here.where)  # what runs on chunks knows of no tails
        out = laid_out_conv(conv, at, x.array, kernel)
        return self._result(x, out, {}, dict.fromkeys(self.cuts, ANYTHING))

    def _sharded(self, base: LocalConv, x: Block) -> LocalConv:
        """The convolution of all devices' blocks."""
        spatial = base.lhs_spec[2:]
        return dataclasses.replace(
            base,
            windows=tuple(
                shard_window(w, x.cuts[d].shards if d in x.cuts else 1, m)
                for d, w, m in zip(spatial, self.windows, self.modes, strict=True)
            ),
            axes=tuple(x.cuts[d].axis_name if d in x.cuts else None for d in spatial),
            modes=self.modes,
        )

    def _form(self, here: Any, conv: LocalConv, x: Block, kernel: Array) -> tuple[LocalConv, Block]:
        spatial = conv.lhs_spec[2:]
        if x.chunks is not None:
            c = x.chunks
            if c.batch == conv.lhs_spec[0] and c.dim in spatial:
                position = spatial.index(c.dim)
                shifting = dataclasses.replace(conv, shift_kernel=here.platform == "tpu")
                if why_not_chunks(shifting, position, c.count) is None:
                    return cut_into_chunks(shifting, Chunks(position, c.count, c.major)), x
            x = out_of_chunks(x, here.where)
        regime = regime_of(conv, here.platform, x.array.shape, kernel.shape, here.free)
        found = choose_form(conv, "auto", regime, "region")
        if found.chunks is None:
            return found, x
        batch, dim = conv.lhs_spec[0], spatial[found.chunks.position]
        if dim not in x.cuts or (batch in x.cuts and x.cuts[batch].has_tail):
            return dataclasses.replace(conv, shift_kernel=found.shift_kernel), x
        return found, into_chunks(x, InChunks(dim, batch, found.chunks.count, found.chunks.major), here.where)

    def _with_margins(self, here: Any, base: LocalConv, x: Block, kernel: Array, wants: Wants) -> Block:
        """One convolution of what is held, margins and all; what it gives keeps ``wants`` of them."""
        links = {link.source: link for link in self.links}
        x = ready(x, links, wants, base.lhs_spec[0], here)
        windows = tuple(
            on_a_line(w, x.parts(d), x.margins[d], wants.get(links[d].result, NONE)) if d in links else w
            for d, w in zip(base.lhs_spec[2:], self.windows, strict=True)
        )
        conv = dataclasses.replace(base, windows=tuple(shard_window(w, 1) for w in windows))
        out = laid_out_conv(conv, (0,) * len(windows), x.array, kernel)
        kept = {link.result: wants.get(link.result, NONE) for link in self.links}
        beyond = {link.result: after(link, x) for link in self.links}
        return self._result(x, out, kept, beyond)

    def _result(self, x: Block, out: Array, margins: Mapping[int, Any], beyond: Mapping[int, str]) -> Block:
        chunks = x.chunks
        if chunks is not None:
            to = dict(zip(self.base.lhs_spec, self.base.out_spec, strict=True))
            chunks = InChunks(to[chunks.dim], to[chunks.batch], chunks.count, chunks.major)
        return Block(
            out,
            self.cuts,
            {d: margins.get(d, NONE) for d in self.cuts},
            {d: beyond.get(d, ANYTHING) for d in self.cuts},
            chunks,
        )


def after(link: Link, x: Block) -> str:
    """What stands beyond the ends of a result: what a window read there, or what stood there before."""
    mode = x.beyond[link.source] if link.window is None else link.mode
    return CIRCULAR if mode == CIRCULAR else ANYTHING


def ready(x: Block, moving: Mapping[int, Link], wants: Wants, batch: int, here: Any, fill: Any = None) -> Block:
    """An operand with just the margins that windows read, and what they read beyond the ends in place."""
    needs = {d: link.needs(wants.get(link.result, NONE)) for d, link in moving.items()}
    c = x.chunks
    if c is not None and not _runs_on_chunks(c, moving, batch, x):
        x = widened(out_of_chunks(x, here.where), needs, {d: k.mode for d, k in moving.items()}, here.where)
    x = cropped(x, {d: needs.get(d, NONE) for d in x.margins})
    # Zeros where windows read them beyond the ends; what stands beyond those of other dims stays.
    padded = {d for d, link in moving.items() if link.window is not None and link.mode == ZEROS}
    known = {d: (ANYTHING if b == CIRCULAR else b) if d in padded else CIRCULAR for d, b in x.beyond.items()}
    found = cleared(dataclasses.replace(x, beyond=known), here.where, fill)
    return dataclasses.replace(found, beyond={d: found.beyond[d] if d in padded else b for d, b in x.beyond.items()})


def _runs_on_chunks(chunks: InChunks, moving: Mapping[int, Link], batch: int, x: Block) -> bool:
    if chunks.batch != batch:
        return False
    link = moving.get(chunks.dim)
    if link is None or link.window is None:
        return True
    out_block = -(-link.window.output_size // link.shards)
    return out_block % chunks.count == 0 and x.cuts[chunks.dim].block % chunks.count == 0


# --- pooling --------------------------------------------------------------------------------------------------

_COMPUTATIONS = {"reduce_window_sum": lax.add, "reduce_window_max": lax.max, "reduce_window_min": lax.min}


def pooling(node: Node, lies: Sequence[Cuts], views: Mapping[int, Extension]) -> Step | None:
    """``reduce_window`` by a sum, maximum or minimum."""
    if node.name not in _COMPUTATIONS or not lies[0] or (views and node.name != "reduce_window_sum"):
        return None
    p, cuts, shape = node.params, lies[0], node.outputs[0].shape
    windows: dict[int, Window] = {}
    for dim, size in enumerate(node.inputs[0].shape):
        window = Window(
            size,
            p["window_dimensions"][dim],
            p["window_strides"][dim],
            p["padding"][dim][0],
            p["padding"][dim][1],
            p["base_dilation"][dim],
            p["window_dilation"][dim],
        )
        found = _through(window, views.get(dim))
        if found is None or found.output_size != shape[dim]:
            return None
        if (found.kernel, found.stride, found.pad_lo, found.pad_hi, found.lhs_dilation) != (1, 1, 0, 0, 1):
            windows[dim] = found
    modes = {d: views[d].mode if d in views else ZEROS for d in windows}
    regular = all(on_blocks(w, cuts[d], modes[d]) for d, w in windows.items() if d in cuts)
    links = tuple(Link(d, d, c.shards, windows.get(d), modes.get(d, ZEROS)) for d, c in cuts.items())
    result = {d: dataclasses.replace(c, size=shape[d]) for d, c in cuts.items()}
    run = _Pooling(_COMPUTATIONS[node.name], windows, modes, links, result, regular)
    return Step(node, WINDOW if regular else OWN, node.inputs, (result,), (links,), run, node.outputs)


@dataclasses.dataclass(frozen=True)
class _Pooling:
    computation: Any
    windows: Mapping[int, Window]
    modes: Mapping[int, str]
    links: tuple[Link, ...]
    cuts: Cuts
    regular: bool

    def __call__(self, here: Any, operands: Sequence[Any], wants: Wants, ensure: Ensure) -> Sequence[Held]:
        if not self.regular:
            return [self._by_itself(here, operands[0])]
        fill = None if self.computation is lax.add else identity(self.computation, operands[0].array.dtype)
        moving = {link.source: link for link in self.links}
        x = ensure(0)
        chunks = x.chunks
        x = ready(x, moving, wants, -1 if chunks is None or chunks.batch in self.windows else chunks.batch, here, fill)
        dims = []
        for dim, window in self.windows.items():
            if dim in self.cuts:
                window = on_a_line(window, x.parts(dim), x.margins[dim], wants.get(dim, NONE))
            dims.append(WindowedDim(dim, shard_window(window, 1), None, ZEROS))
        out = WindowReduction(tuple(dims), self.computation)({}, x.array)
        beyond = {link.result: after(link, x) for link in self.links}
        found = Block(out, self.cuts, {d: wants.get(d, NONE) for d in self.cuts}, beyond, x.chunks)
        return [self._finite(here, found)]

    def _finite(self, here: Any, found: Block) -> Block:
        """Windows of nothing but what isn't there give an infinity, which a product later makes a NaN of."""
        return found if self.computation is lax.add else cleared(found, here.where)

    def _by_itself(self, here: Any, x: Block) -> Block:
        x = out_of_chunks(cropped(x, {}), here.where)
        at = {d: here.where(c.axes) for d, c in x.cuts.items()}
        dims = []
        for dim, window in self.windows.items():
            cut, mode = x.cuts.get(dim), self.modes[dim]
            sharded = shard_window(window, cut.shards if cut else 1, mode)
            dims.append(WindowedDim(dim, sharded, cut.axis_name if cut else None, mode))
        out = WindowReduction(tuple(dims), self.computation)(at, x.array)
        found = Block(out, self.cuts, dict.fromkeys(self.cuts, NONE), dict.fromkeys(self.cuts, ANYTHING))
        return self._finite(here, found)
