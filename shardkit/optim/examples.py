"""Which part of the batch is here: what layers ask inside a loss of `value_and_grad(..., keys="shared")`.

A layer that draws random numbers for the examples of a part draws what it would draw of the whole batch, if it knows
where the part begins. ``read_cuts`` is arithmetic only: how the batch is cut. ``Examples`` is that, with this device's
and this slice's place in it, as traced numbers. ``examples_here`` sets it while a loss is traced, ``current_examples``
is what layers read.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardkit._compat import varying_axes
from shardkit.meshes import manual_axes

# JAX keeps what it traced of jitted and checkpointed functions. What a layer read here is traced into it, so it may be
# used in this one trace of a region only: the context is part of the cache's key.
_trace = jax.make_user_context(None)
_current: contextvars.ContextVar[Examples | None] = contextvars.ContextVar("shardkit_examples", default=None)


@dataclasses.dataclass(frozen=True)
class Cut:
    """How one dim of the batch is cut.

    Attributes:
      axes: the mesh axes that cut it, major first.
      sizes: theirs.
      slices: into how many microbatches each device's part is cut, one after another.
      rows: elements of the dim in one part; None where arrays of the batch disagree, or there's none.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    slices: int = 1
    rows: int | None = None

    @property
    def parts(self) -> int:
        """Of the whole batch."""
        return math.prod(self.sizes) * self.slices


def read_cuts(
    axes: Mapping[str, int], sizes: Mapping[str, int], slices: int, shapes: Iterable[Sequence[int]]
) -> dict[int, Cut]:
    """How each dim is cut.

    Args:
      axes: the dim that each batch axis cuts, in mesh-axis order.
      sizes: of the mesh axes.
      slices: microbatches, which cut dim 0.
      shapes: of the batch's arrays, whole.

    Example:
      >>> cuts = read_cuts({"dp": 0, "sp": 2}, {"dp": 2, "sp": 4}, 3, [(12, 5, 8), (12,)])
      >>> [(dim, cut.axes, cut.parts, cut.rows) for dim, cut in cuts.items()]
      [(0, ('dp',), 6, 2), (2, ('sp',), 4, 2)]
    """
    shapes = list(shapes)
    cuts = {}
    for dim in sorted({*axes.values(), *((0,) if slices > 1 else ())}):
        names = tuple(name for name, d in axes.items() if d == dim)
        cut = Cut(names, tuple(sizes[n] for n in names), slices if dim == 0 else 1)
        held = {shape[dim] // cut.parts for shape in shapes if dim < len(shape)}
        cuts[dim] = dataclasses.replace(cut, rows=held.pop() if len(held) == 1 else None)
    return cuts


@dataclasses.dataclass(frozen=True)
class Part:
    """The part that's here, of one dim of the batch.

    Attributes:
      index: which of the parts, counted from the start of the batch: traced, varying over ``cut.axes``.
      cut: how the dim is cut.
    """

    index: Any
    cut: Cut

    @property
    def rows(self) -> int | None:
        """Elements here; None where arrays of the batch disagree."""
        return self.cut.rows

    @property
    def whole(self) -> int | None:
        """Elements of the whole batch."""
        return None if self.cut.rows is None else self.cut.rows * self.cut.parts

    @property
    def start(self) -> Any:
        """Where this part begins: traced, or None."""
        return None if self.cut.rows is None else self.index * self.cut.rows


@dataclasses.dataclass(frozen=True)
class Examples:
    """The part of the batch that a device works on.

    Attributes:
      parts: by dim of the batch's arrays, the dims that are cut.
      manual: mesh axes that are manual where that's known.
    """

    parts: Mapping[int, Part]
    manual: frozenset[str] = frozenset()

    def block(
        self, x: Any, dims: Mapping[int, int] | None = None, key: Any = None, what: str = "a random layer"
    ) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """Where ``x``, made of the examples here, begins in the same of the whole batch, and how large that is.

        A dim whose size is a multiple of the rows here, or a fraction, is cut alike: rows put together with what
        follows them (``[b, t, d]`` as ``[b * t, d]``), or a dim that a stride has made shorter.

        Args:
          x: anything with a shape.
          dims: which dim of ``x`` is which of the batch, those that are (``{0: 1}``: examples are dim 1 of ``x``);
            None: each is its own, where ``x`` has it.
          key: what's drawn with: one that's another on each device along an axis (the key of an example) draws for
            these examples alone.
          what: the caller, for messages.

        Returns:
          Start indices (an int 0 where the dim isn't cut), and the shape.

        Raises:
          ValueError: a dim that can't be made of the rows here; in a region that makes more mesh axes manual.
        """
        nested = sorted(set(manual_axes()) - self.manual)
        if nested:
            raise ValueError(
                f'{what}: under value_and_grad(keys="shared") in a region of its own (jax.shard_map over mesh axes '
                f"{nested}), where it isn't known which block of the examples is here; draw outside of it, or use "
                'keys="split"'
            )
        shape = jnp.shape(x)
        starts: list[Any] = [0] * len(shape)
        whole = list(shape)
        given, drawing = varying_axes(x), frozenset() if key is None else varying_axes(key)
        names = {name for part in self.parts.values() for name in part.cut.axes}
        for of_batch, part in self.parts.items():
            dim = of_batch if dims is None else dims.get(of_batch, len(shape))
            cut = part.cut
            if dim >= len(shape) or drawing & set(cut.axes):
                continue
            # A value known to be the same along these axes, and not along others, isn't cut by them; one that's the
            # same everywhere may be a constant of the examples' shape.
            if cut.axes and given & names and not given & set(cut.axes):
                continue
            if cut.rows and shape[dim] % cut.rows and cut.rows % max(shape[dim], 1):
                raise ValueError(
                    f'{what}: under value_and_grad(keys="shared") dim {dim} of an array of shape {tuple(shape)} is '
                    f"taken for dim {of_batch} of the batch, of which {cut.rows} rows are here, and {shape[dim]} is no "
                    "multiple of them. Keep the batch's dims where they are; draw for anything else (weights, single "
                    'examples under vmap) within shardkit.optim.examples.examples_here(None); or use keys="split"'
                )
            whole[dim] = shape[dim] * cut.parts
            if cut.parts > 1:
                starts[dim] = jnp.asarray(part.index).astype(jnp.uint32) * shape[dim]
        return tuple(starts), tuple(whole)


def place(cuts: Mapping[int, Cut], indices: Mapping[str, Any], number: Any) -> Examples:
    """This device's and slice's part.

    Args:
      cuts: how the dims are cut.
      indices: this device's index along each mesh axis.
      number: which of the slices it is.
    """
    parts = {}
    for dim, cut in cuts.items():
        index: Any = 0
        for name, size in zip(cut.axes, cut.sizes, strict=True):
            index = index * size + indices[name]
        parts[dim] = Part(index * cut.slices + number if cut.slices > 1 else index, cut)
    return Examples(parts, frozenset(manual_axes()))


def current_examples() -> Examples | None:
    """The part of the batch that's here; None outside of a loss of ``value_and_grad(..., keys="shared")``."""
    return _current.get()


@contextlib.contextmanager
def examples_here(examples: Examples | None) -> Generator[None]:
    """What ``current_examples`` gives while a function is traced; ``None`` hides it.

    Example:
      >>> with examples_here(None):
      ...     print(current_examples())
      None
    """
    if examples is None and _current.get() is None:
        yield
        return
    token = _current.set(examples)
    try:
        with _trace(None if examples is None else object()):
            yield
    finally:
        _current.reset(token)
