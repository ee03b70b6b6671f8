"""What a rule says: how one operation can run on blocks. Pure data; testable without devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardkit.spmd.placed import Placed, Sizes


@dataclasses.dataclass(frozen=True)
class Type:
    """Global (logical) shape and dtype of a value."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def ndim(self) -> int:
        """Its rank."""
        return len(self.shape)


@dataclasses.dataclass(frozen=True)
class Op:
    """One operation as a rule sees it: nothing of where values are.

    Attributes:
      name: of the JAX primitive.
      params: the primitive's parameters.
      operands, results: their types.
      constants: of each operand its value, where that's known when the program is made; else None.
      primitive: to run it.
    """

    name: str
    params: Mapping[str, Any]
    operands: tuple[Type, ...]
    results: tuple[Type, ...]
    constants: tuple[Any, ...] = ()
    primitive: Any = None


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation whose operands are somewhere.

    Attributes:
      op: the operation.
      placed: where each operand is.
      sizes: of the mesh axes.
      wishes: where the users of each result would like it; None where nothing is known.
      manual: within a region of the user's, the sizes of the axes that are its own.
    """

    op: Op
    placed: tuple[Placed, ...]
    sizes: Sizes
    wishes: tuple[Placed | None, ...] = ()
    manual: Sizes = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """One collective that an operation itself runs (a halo, the maximum over blocks).

    Attributes:
      kind: as ``sk.collectives`` calls it.
      axes: mesh axes.
      bytes: what one device receives.
      count: how many of it.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One way to run an operation on blocks.

    Attributes:
      operands: where each operand must be.
      results: where each result then is.
      params: the primitive's parameters for blocks; None: ``run`` does it.
      run: ``run(here, *blocks)`` gives the list of result blocks; None: the primitive itself does, with ``params``.
      flops: of one device.
      traffic: collectives that ``run`` uses.
      why: for people, where the way is not the plain one ("masked lookup", "halo exchange").
      bodies: (name, arrangement, how often it runs) of the functions it calls.
    """

    operands: tuple[Placed, ...]
    results: tuple[Placed, ...]
    params: Mapping[str, Any] | None = None
    run: Callable[..., Sequence[Any]] | None = None
    flops: float = 0.0
    traffic: tuple[Traffic, ...] = ()
    why: str = ""
    bodies: tuple[tuple[str, Any, int], ...] = ()

    @property
    def bytes(self) -> int:
        """What one device receives by collectives of the operation itself."""
        own = sum(t.bytes * t.count for t in self.traffic)
        return own + sum(body.bytes * times for _, body, times in self.bodies)

    @property
    def collectives(self) -> int:
        """How many collectives the operation itself runs."""
        own = sum(t.count for t in self.traffic)
        return own + sum(body.collectives * times for _, body, times in self.bodies)
