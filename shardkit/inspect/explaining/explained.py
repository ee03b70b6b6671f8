"""A collective, and what it is for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from shardkit.inspect.explaining.estimate import runs
from shardkit.inspect.explaining.purposes import PURPOSES
from shardkit.inspect.report import Collective


@dataclasses.dataclass(frozen=True)
class Explained:
    """A collective, and what it is for: an entry of ``sk.explain(...).collectives``.

    Attributes:
      collective: an ``sk.Collective``.
      purpose: "halo", "gradient reduction", "parameter gather", "attention", "reduction", "reshard" or "unexplained"
        (nothing in the program asks for it).
      what: what exactly, in words: the parameter, the operation.
      seconds: an estimate for all its runs in a step; None where the hardware isn't in the table.

    Example:
      >>> import jax, jax.numpy as jnp, shardkit as sk
      >>> mesh = sk.make_mesh({"dp": jax.device_count()})
      >>> x = sk.shard_tensor(jnp.ones(8 * jax.device_count()), {"dp": sk.Shard(0)}, mesh)
      >>> {entry.purpose for entry in sk.explain(jnp.sum, x).collectives} <= {"reduction"}
      True
    """

    collective: Collective
    purpose: str
    what: str
    seconds: float | None

    @property
    def runs(self) -> int:
        """How often it runs in a step, as far as the compiler says; else once."""
        return runs(self.collective)

    @property
    def bytes(self) -> int:
        """Bytes that one device receives in a step: all runs."""
        return self.collective.bytes * self.runs


def by_purpose(collectives: Iterable[Explained]) -> dict[str, list[Explained]]:
    """The collectives of each purpose that occurs, in the order of ``PURPOSES``."""
    collectives = tuple(collectives)
    groups = {purpose: [e for e in collectives if e.purpose == purpose] for purpose in PURPOSES}
    return {purpose: found for purpose, found in groups.items() if found}
