"""``assert_same_values``: two pytrees of arrays hold the same, on every device."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from shardkit.arrays.partial import is_whole
from shardkit.testing import closeness
from shardkit.testing.blame import Cut, listed, where_wrong
from shardkit.testing.closeness import Tolerance
from shardkit.testing.held import Block, Held, is_array, read


def assert_same_values(
    got: Any, wanted: Any, *, rtol: float | None = None, atol: float | None = None, what: str = "the values"
) -> None:
    """Checks two pytrees of arrays: structure, shapes, dtypes, and the elements on every device.

    An ``sk.Padded`` counts as its logical value, an ``sk.PartialArray`` (or JAX's ``unreduced``) as its reduction. Of
    an array on a mesh every device's own block is read, so that copies that should be the same but aren't are found.

    Args:
      got: what was computed, placed anyhow.
      wanted: what it should be, placed anyhow (NumPy arrays will do).
      rtol: relative tolerance. None: 1e-10 for double, 1e-5 for single precision, 4 epsilons for shorter floats.
        Integers, bools and random keys must be equal, unless a tolerance is given for the first.
      atol: absolute tolerance. None: ``rtol`` times the largest finite element wanted in the leaf; 0 for relative only.
      what: begins the message.

    Raises:
      AssertionError: something differs; says which leaf, how far off the worst element is, and in which dims, blocks
        and on which devices the wrong ones lie.
      TypeError, ValueError: a tolerance that is none.

    Example:
      >>> import jax.numpy as jnp, numpy as np
      >>> from shardkit import testing
      >>> testing.assert_same_values({"w": jnp.ones(3)}, {"w": np.ones(3, "float32")})
    """
    tolerance = Tolerance(rtol, atol)
    found, found_tree = jax.tree.flatten_with_path(got, is_leaf=is_whole)
    goal, goal_tree = jax.tree.flatten_with_path(wanted, is_leaf=is_whole)
    if found_tree != goal_tree:
        raise AssertionError(f"{what} have another structure:\n{_structures(found, goal, found_tree, goal_tree)}")
    texts = []
    for (path, x), (_, y) in zip(found, goal, strict=True):
        text = difference(x, y, tolerance)
        if text:
            texts.append(f"  {name_of(path)}: {text}")
    if texts:
        raise AssertionError(f"{what} differ in {len(texts)} of {len(found)} leaves:\n" + "\n".join(texts))


def name_of(path: Any) -> str:
    """A leaf's path, for messages."""
    return jax.tree_util.keystr(path) or "the array"


def _structures(found: Any, goal: Any, found_tree: Any, goal_tree: Any) -> str:
    ours, theirs = ([name_of(path) for path, _ in leaves] for leaves in (found, goal))
    lines = [f"  only in what was got: {name}" for name in ours if name not in theirs]
    lines += [f"  only in what was wanted: {name}" for name in theirs if name not in ours]
    return "\n".join(lines or [f"  got    {found_tree}", f"  wanted {goal_tree}"])


def difference(got: Any, wanted: Any, tolerance: Tolerance) -> str:
    """How one leaf differs, in words; "" if it doesn't."""
    if not (is_array(got) and is_array(wanted)):
        return "" if type(got) is type(wanted) and got == wanted else f"got {got!r}, wanted {wanted!r}"
    ours, theirs = read(got), read(wanted)
    if ours.shape != theirs.shape:
        return f"got shape {ours.shape}, wanted {theirs.shape}"
    if ours.dtype != theirs.dtype:
        return f"got dtype {ours.dtype}, wanted {theirs.dtype}"
    whole = theirs.assembled()
    rtol, atol = tolerance.of(ours.dtype, whole)
    marked = [_Marked(block, _mark(block, whole, ours, rtol, atol)) for block in ours.blocks]
    return _describe(ours, whole, marked, rtol, atol) if any(m.wrong.any() for m in marked) else ""


@dataclasses.dataclass(frozen=True)
class _Marked:
    block: Block
    wrong: Any


def _mark(block: Block, whole: np.ndarray, held: Held, rtol: float, atol: float) -> Any:
    wrong = closeness.wrong(block.data, whole[block.index], rtol, atol)
    return np.any(wrong, axis=tuple(range(len(held.shape), wrong.ndim)))  # a key is wrong if any of its words is


def _describe(held: Held, whole: np.ndarray, marked: list[_Marked], rtol: float, atol: float) -> str:
    mask = np.zeros(held.shape, bool)
    for m in marked:
        mask[m.block.index] |= m.wrong
    count = f"{int(mask.sum())} of {mask.size} elements differ"
    if held.dtype.startswith("key<"):
        lines = [count]
    else:
        lines = [f"{count} by more than {atol:.3g} + {rtol:.3g} * |wanted|" if rtol or atol else count]
        lines += _worst(whole, marked)
    if held.shape:
        lines.append(where_wrong(mask, _cuts(held)))
    return "\n    ".join(lines + _devices(marked))


def _worst(whole: np.ndarray, marked: list[_Marked]) -> list[str]:
    """The largest absolute error and the largest relative one."""
    lines = []
    for kind in ("absolute", "relative"):
        best = None
        for m in marked:
            goal = whole[m.block.index]
            off = closeness.errors(m.block.data, goal)
            if kind == "relative":
                with np.errstate(all="ignore"):
                    size = np.abs(closeness.wide(goal))
                    off = np.where(off > 0, np.where(np.isfinite(off), off / size, np.inf), 0.0)
            if off.size and (best is None or off.max() > best[0]):
                at = np.unravel_index(int(off.argmax()), off.shape)
                best = (off.max(), m.block, at, goal[at])
        if best is None:
            continue
        error, block, at, goal = best
        index = tuple(int(i) + (part.start or 0) for i, part in zip(at, block.index, strict=True))
        where = f" at {index}" if index else ""
        on = f" on device {block.device}" if block.device else ""
        lines.append(f"largest {kind} error {error:.3g}{where}{on}: got {block.data[at]}, wanted {goal}")
    return lines


def _cuts(held: Held) -> dict[int, Cut]:
    if held.layout is None:
        return {}
    sizes = dict(held.layout.mesh.shape)
    blocks = held.layout.local_shape(held.shape, uneven="pad")
    cuts = held.layout.dim_axes(len(held.shape))
    kept = {dim: tuple((a, sizes[a]) for a in axes if sizes[a] > 1) for dim, axes in cuts.items()}
    return {dim: Cut(axes, blocks[dim]) for dim, axes in kept.items() if axes}


def _devices(marked: list[_Marked]) -> list[str]:
    """Which devices hold the wrong elements, and whether copies of one block disagree."""
    if len(marked) == 1:
        return []
    wrong = [m.block.device for m in marked if m.wrong.any()]
    lines = [] if len(wrong) == len(marked) else [f"on {len(wrong)} of {len(marked)} devices: {listed(wrong)}"]
    copies: dict[Any, set[bool]] = {}
    for m in marked:
        if m.wrong.size:
            key = tuple((part.start, part.stop) for part in m.block.index)
            copies.setdefault(key, set()).add(bool(m.wrong.any()))
    if any(len(seen) > 1 for seen in copies.values()):
        lines.append("copies of the same block differ between devices: it isn't replicated, whatever its sharding says")
    return lines
