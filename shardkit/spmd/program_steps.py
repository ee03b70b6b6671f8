"""The lines of a program, as data."""

from __future__ import annotations

import dataclasses
from typing import Any

from shardkit.placements import Placement
from shardkit.reshard.describe import ReshardStep
from shardkit.reshard.plan import ReshardPlan


@dataclasses.dataclass(frozen=True)
class ProgramStep:
    """One value of the program, or one reshard of it.

    Attributes:
      kind: "input", "op", "reshard" or "output".
      name: of the value it makes.
      op: the operation; of a reshard the kinds of collective ("slice" and "contribute" communicate nothing).
      operands: names of the values it takes.
      dtype, shape, local_shape: of the value: logical, and of one device's block.
      placements: where the value is, in mesh-axis order.
      where: the same in short: the axes that cut each dim, and what it's Partial over.
      source: the user's line.
      bytes: what one device receives in one run of this step, in bytes.
      collectives: how many it runs.
      times: how often the step runs (in loops).
      depth: how many functions it is in.
      note: what else there is to know: who made it Partial, a strategy that isn't the plain one.
      reshard: of a reshard, its plan and ends.

    Example:
      >>> import jax, jax.numpy as jnp, shardkit as sk
      >>> mesh = jax.sharding.AbstractMesh((4,), ("dp",))
      >>> program = sk.partition(jnp.sum, [sk.Shard(0)], mesh=mesh).program(jnp.ones(8, "float32"))
      >>> [(step.kind, step.op, step.local_shape) for step in program.steps][:2]
      [('input', '', (2,)), ('op', 'reduce_sum', ())]
    """

    kind: str
    name: str
    op: str
    operands: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    where: str
    source: str
    bytes: int = 0
    collectives: int = 0
    times: int = 1
    depth: int = 0
    note: str = ""
    reshard: ProgramReshard | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "reshard"}
        found["placements"] = [repr(p) for p in self.placements]
        if self.reshard is not None:
            found["before"] = [repr(p) for p in self.reshard.src]
            found["steps"] = [str(s) for s in self.reshard.steps]
        return found


@dataclasses.dataclass(frozen=True)
class ProgramReshard:
    """A reshard that was inserted.

    Attributes:
      value: the name of what is moved.
      src, dst: its placements before and after, in mesh-axis order.
      steps: those of the plan.
      bytes: what one device receives in one run, in bytes.
      collectives: the kinds it runs, as ``sk.collectives`` calls them.
      times: how often it runs.
      source: the line of the operation that needs it; "" for an output.
      made_by: of each Partial axis, the operation (and its line) that left the value Partial.
      plan: as ``sk.plan_reshard`` gives it.
      crosses: it's one half of a crossing between meshes (``sk.on_mesh``).

    Example:
      >>> import jax, jax.numpy as jnp, shardkit as sk
      >>> mesh = jax.sharding.AbstractMesh((4,), ("dp",))
      >>> program = sk.partition(jnp.sum, [sk.Shard(0)], mesh=mesh).program(jnp.ones(8, "float32"))
      >>> [(reshard.src, reshard.dst, reshard.bytes) for reshard in program.reshards]
      [((Partial(reduce='sum'),), (Replicate(),), 6)]
    """

    value: str
    src: tuple[Placement, ...]
    dst: tuple[Placement, ...]
    steps: tuple[ReshardStep, ...]
    bytes: int
    collectives: tuple[str, ...]
    times: int
    source: str
    made_by: dict[str, str]
    plan: ReshardPlan = dataclasses.field(repr=False)
    crosses: bool = False

    @property
    def bytes_per_device(self) -> int:
        """``bytes``, under the name that plans have."""
        return self.bytes
