"""What a rule says of one operation: where its results lie, how its operands' margins meet theirs, how it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jax import Array
from jax import numpy as jnp

from shardkit.spatial.exchange import Index
from shardkit.spatial.regions.block import ZEROS, Block, Cuts
from shardkit.spatial.regions.graph import Node, Value
from shardkit.spatial.regions.margins import NONE, Margin, needed
from shardkit.spatial.windows import Window

# How a step treats margins.
LOCAL = "in place"  # acts on margins as on all else
WINDOW = "window"  # eats margin
OWN = "own exchange"  # fetches what it needs itself, from blocks without margins
REDUCTION = "reduction"  # over blocked dims: margins left out, summed over the mesh axes
WHOLE = "whole"  # of values that every device holds
LEFT = "left the layout"  # blocks are put together, every device does all of it


@dataclasses.dataclass(frozen=True)
class Link:
    """A blocked dim of an operand, and the dim of the results that it becomes.

    Attributes:
      source, result: array dims.
      shards: parts of it.
      window: what moves along it, None where each element stays where it is.
      mode: what the window reads beyond the ends.
    """

    source: int
    result: int
    shards: int
    window: Window | None = None
    mode: str = ZEROS

    def needs(self, wanted: Margin) -> Margin:
        """Margin of the operand, for results with a margin ``wanted``."""
        return wanted if self.window is None else needed(self.window, self.shards, wanted)


@dataclasses.dataclass(frozen=True)
class Whole:
    """A value that every device holds: an array, of which dims of size 1 stand for the logical ``shape``."""

    array: Array
    shape: tuple[int, ...]

    @property
    def value(self) -> Array:
        """The array, laid out."""
        return self.array if tuple(self.array.shape) == self.shape else jnp.broadcast_to(self.array, self.shape)


Held = Block | Whole
Wants = Mapping[int, Margin]


class Here(Protocol):
    """This device, and what is known of the program around."""

    platform: str
    free: bool
    names: tuple[str, ...]

    def where(self, axes: tuple[str, ...]) -> Index:
        """Its position along mesh axes."""
        ...


class Ensure(Protocol):
    """What fetches margins of a step's operands."""

    def __call__(self, operand: int, laid_out: Block | None = None, /) -> Block:
        """The operand (as it was ``laid_out``) with the margins that the step and later ones of its group need."""
        ...

    def planned(self, operand: int, /) -> Wants:
        """The margins it would fetch."""
        ...


class Run(Protocol):
    """Carries a step out: operands as they are, margins wanted of results, and what fetches an operand's margins."""

    def __call__(self, here: Any, operands: Sequence[Any], wants: Wants, ensure: Ensure, /) -> Sequence[Held]: ...


@dataclasses.dataclass(eq=False)
class Step:
    """One operation as it runs on blocks.

    Attributes:
      node: the operation.
      kind: how it treats margins, see above.
      inputs: the values it reads (of an operation on a view, what the view shows).
      cuts: of each result, how its dims lie in blocks.
      links: of each input, its blocked dims; empty where it's whole.
      run: see ``Run``.
      note: for people, what isn't plain about it.
      inner: of a loop or call, plans of its body, each with how often it runs.
    """

    node: Node
    kind: str
    inputs: tuple[Value, ...]
    cuts: tuple[Cuts, ...]
    links: tuple[tuple[Link, ...], ...]
    run: Run
    outputs: tuple[Value, ...]
    note: str = ""
    inner: tuple[tuple[Any, int], ...] = ()

    @property
    def eats(self) -> bool:
        """Takes margin from what it reads."""
        return self.kind == WINDOW and any(link.needs(NONE) != NONE for links in self.links for link in links)


Rule = Callable[[Node, Sequence[Cuts]], Step | None]


def is_cut(lies: Sequence[Cuts]) -> bool:
    """Some operand lies in blocks."""
    return any(lies)


def same_links(cuts: Cuts) -> tuple[Link, ...]:
    """Every dim stays."""
    return tuple(Link(d, d, c.shards) for d, c in cuts.items())
