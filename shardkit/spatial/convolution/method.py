"""Which form a convolution runs in: the caller's choice, what was set for a while, or the table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from shardkit.spatial.convolution.blocks import cut_into_chunks, why_not_chunks
from shardkit.spatial.convolution.forms import found_form
from shardkit.spatial.convolution.layers import Regime, layer_of
from shardkit.spatial.convolution.overlap import why_not_overlap
from shardkit.spatial.convolution.spec import Chunks, LocalConv
from shardkit.spatial.convolution.table import Form, shipped_table
from shardkit.spatial.convolution.trial import current_trial

METHODS = ("auto", "concat", "overlap", "blocks")


def choose_form(conv: LocalConv, method: str, regime: Regime, what: str) -> LocalConv:
    """``conv`` in the form asked for.

    Raises:
      ValueError: the form can't run this convolution; says why.
    """
    conv = dataclasses.replace(conv, shift_kernel=regime.platform == "tpu")
    if method == "auto":
        return _auto(conv, regime)
    if method == "overlap":
        found, reason = in_form(conv, Form("overlap"), regime)
        if found is None:
            raise ValueError(f"{what}: method='overlap' can't run this convolution: {reason}; method='concat' can")
        return found
    if method == "blocks":
        form = _from_table("tpu", regime)
        found, reason = _blocks(conv, [n for n in (form.chunks, 8, 4, 2) if n], form.major, regime)
        if found is None:
            raise ValueError(f"{what}: method='blocks' can't run this convolution: {reason}; method='concat' can")
        return found
    return conv


def _auto(conv: LocalConv, regime: Regime) -> LocalConv:
    """In the form set for a while (forms.py), else the table's; "concat" where that can't run."""
    layer = layer_of(conv, regime)
    trial = current_trial()
    if trial is not None:
        return trial.enter(conv, regime, *in_form(conv, trial.form, regime))
    found = found_form(layer)
    if found is not None:
        local, _ = in_form(conv, found, regime)
        if local is not None:
            return local
    return by_table(conv, regime)


def by_table(conv: LocalConv, regime: Regime) -> LocalConv:
    """In the table's form; "concat" where that can't run, and for layers too small to matter."""
    table = shipped_table()
    if regime.elements < table.least_elements or regime.features < table.least_features:
        return conv
    return in_form(conv, _from_table(regime.platform, regime), regime)[0] or conv


def in_form(conv: LocalConv, form: Form, regime: Regime) -> tuple[LocalConv | None, str | None]:
    """``conv`` in just this form; or None, and why it can't run in it."""
    if form.method == "overlap":
        reason = why_not_overlap(conv)
        return (dataclasses.replace(conv, method="overlap"), None) if reason is None else (None, reason)
    if form.method == "blocks":
        return _blocks(conv, [form.chunks], form.major, regime)
    return conv, None


def form_of(conv: LocalConv) -> Form:
    """The form that a convolution is in."""
    return Form(conv.method) if conv.chunks is None else Form(conv.method, conv.chunks.count, conv.chunks.major)


def _from_table(platform: str, regime: Regime) -> Form:
    """Where the number of images isn't known, that for few: with more, it is good as well."""
    return shipped_table().form(platform, regime.images if regime.images_known else 1)


def _blocks(conv: LocalConv, counts: Sequence[int], major: bool, regime: Regime) -> tuple[LocalConv | None, str | None]:
    """In the first number of chunks that some dim can be cut into: sharded dims first, the last of them first."""
    # A batch that is cut further must stay the major part of the merged dim, or the compiler gathers it: the table's
    # first row, which serves here, isn't "major".
    if major and not regime.images_known:
        return None, "mesh axes left to the compiler may cut the batch, which must not be the minor part of a dim then"
    positions = sorted(range(len(conv.windows)), key=lambda p: (conv.axes[p] is None, -p))
    first = None
    for count in counts:
        for position in positions:
            reason = why_not_chunks(conv, position, count)
            if reason is None:
                return cut_into_chunks(conv, Chunks(position, count, major)), None
            first = first or reason
    return None, first


def regime_of(conv: LocalConv, platform: str, block: Sequence[int], kernel: Sequence[int], free: bool) -> Regime:
    """The regime of a convolution.

    Args:
      conv: the convolution.
      platform: of the mesh's devices.
      block: shape of a device's block.
      kernel: shape of the kernel a device uses.
      free: mesh axes are left to the compiler.
    """
    return Regime(
        platform=platform,
        images=block[conv.lhs_spec[0]],
        images_known=not free,
        elements=math.prod(block[d] for d in conv.lhs_spec[2:]),
        features=min(kernel[conv.rhs_spec[1]], kernel[conv.rhs_spec[0]] // conv.feature_groups),
    )
