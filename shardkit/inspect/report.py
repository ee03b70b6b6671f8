"""What was found: one `Collective` an instruction, and the `CollectiveReport` that holds them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Any

import rich.table

from shardkit.inspect.groups import Groups
from shardkit.inspect.hlo import COLLECTIVE_KINDS
from shardkit.inspect.shapes import Array
from shardkit.inspect.tables import Table, format_bytes

KINDS: tuple[str, ...] = tuple(COLLECTIVE_KINDS.values())


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program.

    Attributes:
      kind: "all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute",
        "collective_broadcast" or "ragged_all_to_all".
      axes: the mesh axes it runs over, in mesh order; None where the groups are those of no set of
        axes, or the mesh is not known.
      shapes: element type and dimensions of the results on one device.
      result_bytes: bytes of the results on one device, without the padding of tiled layouts.
      bytes: bytes one device receives in one run, by the ring algorithms: of `R` result_bytes and `n` devices a
        group, `R (n - 1) / n` for all_gather and all_to_all, `R (n - 1)` for reduce_scatter, twice `R (n - 1) / n`
        for all_reduce, `R` for permutes and broadcasts. Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization
        of Collective Communication Operations in MPICH", IJHPCA 19(1), 2005.
      group_size: devices that exchange with each other; for a permute, those in its longest chain.
      groups: the groups, or the (source, target) pairs of a permute without those that stay in place,
        as positions in the device assignment (`mesh.devices.flat`).
      in_loop: it runs in the body or the condition of a loop.
      trip_count: the product of the trip counts of the loops around it; 1 outside loops, None where the
        compiler does not say (TPU programs never do).
      reduction: "add", "max", "min", "mul", "and", "or", "xor"; None for kinds that reduce nothing, or if
        it is something else.
      op_name: JAX's name for the operation, such as "jit(f)/shard_map/psum"; "" if not recorded.
      source: the user's line, "model.py:123"; "" if not recorded.
      name: name of the HLO instruction.

    Example:
      >>> import jax, jax.numpy as jnp, shardkit as sk
      >>> mesh = sk.make_mesh({"dp": jax.device_count()})
      >>> x = sk.shard_tensor(jnp.ones(8 * jax.device_count()), {"dp": sk.Shard(0)}, mesh)
      >>> all(isinstance(c, sk.Collective) and c.axes == ("dp",) for c in sk.collectives(jnp.sum, x))
      True
    """

    kind: str
    axes: tuple[Hashable, ...] | None
    shapes: tuple[Array, ...]
    result_bytes: int
    bytes: int
    group_size: int
    groups: Groups
    in_loop: bool
    trip_count: int | None
    reduction: str | None
    op_name: str
    source: str
    name: str

    def __repr__(self) -> str:
        return f"<{self}>"  # groups of a pod's devices would fill pages

    def __str__(self) -> str:
        place = f" at {self.source}" if self.source else ""
        return (
            f"{self.kind} over {axes_text(self.axes)}: {_shapes_text(self.shapes)}, "
            f"{format_bytes(self.bytes)}/device, in loop: {loop_text(self)}{place} (%{self.name})"
        )


@dataclasses.dataclass(frozen=True)
class CollectiveReport:
    """The collectives of a compiled program, in the order in which the program names them.

    `print` it, or leave it as the last line of a notebook cell, for a table. Iterating gives the
    entries.

    Attributes:
      entries: the collectives.
      mesh_axes: (name, size) of each axis of the mesh that `axes` refer to, or None if none was found.

    Example:
      >>> import jax, jax.numpy as jnp, shardkit as sk
      >>> mesh = sk.make_mesh({"dp": jax.device_count()})
      >>> x = sk.shard_tensor(jnp.ones(8 * mesh.size), {"dp": sk.Shard(0)}, mesh)
      >>> report = sk.collectives(jnp.sum, x)
      >>> n = report.count("all_reduce", axis="dp")  # one, if there are several devices
      >>> n == len(report) == (mesh.size > 1), report.bytes() == n * int(2 * 4 * (mesh.size - 1) / mesh.size)
      (True, True)
    """

    entries: tuple[Collective, ...]
    mesh_axes: tuple[tuple[Hashable, int], ...] | None = None

    def __iter__(self) -> Iterator[Collective]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def count(
        self,
        kind: str | None = None,
        *,
        axis: Hashable | tuple[Hashable, ...] | None = None,
        in_loop: bool | None = None,
    ) -> int:
        """Number of collectives; one in a loop counts once.

        Args:
          kind: only of this kind, such as "all_gather"; None for all.
          axis: a name: only those that run over this axis, alone or together with others. A tuple of
            names: only those that run over exactly these axes.
          in_loop: only those inside (True) or outside (False) loops.

        Returns:
          How many there are.

        Raises:
          ValueError: an unknown kind or axis, or an axis is given and no mesh is known.
        """
        return len(self.select(kind, axis=axis, in_loop=in_loop))

    def bytes(
        self,
        kind: str | None = None,
        *,
        axis: Hashable | tuple[Hashable, ...] | None = None,
        in_loop: bool | None = None,
    ) -> int:
        """Bytes that one device receives, each collective once however often its loop runs.

        Args:
          kind: only of this kind, such as "all_gather"; None for all.
          axis: a name: only those that run over this axis, alone or together with others. A tuple of
            names: only those that run over exactly these axes.
          in_loop: only those inside (True) or outside (False) loops.

        Returns:
          The sum over these collectives, in bytes.

        Raises:
          ValueError: an unknown kind or axis, or an axis is given and no mesh is known.
        """
        return sum(entry.bytes for entry in self.select(kind, axis=axis, in_loop=in_loop))

    def by_kind(self) -> dict[str, int]:
        """Number of collectives of each kind that occurs."""
        return dict(Counter(entry.kind for entry in self.entries))

    def to_dict(self) -> dict[str, Any]:
        """The report as plain dicts and lists, ready for `json.dumps` if the axis names are strings."""
        return {
            "mesh": None if self.mesh_axes is None else dict(self.mesh_axes),
            "collectives": [_plain(dataclasses.asdict(entry)) for entry in self.entries],
        }

    def select(
        self,
        kind: str | None = None,
        *,
        axis: Hashable | tuple[Hashable, ...] | None = None,
        in_loop: bool | None = None,
    ) -> tuple[Collective, ...]:
        """Some of the collectives.

        Args:
          kind: only of this kind, such as "all_gather"; None for all.
          axis: a name: only those that run over this axis, alone or together with others. A tuple of
            names: only those that run over exactly these axes.
          in_loop: only those inside (True) or outside (False) loops.

        Returns:
          Those collectives, in the order of the program.

        Raises:
          ValueError: an unknown kind or axis, or an axis is given and no mesh is known.
        """
        if kind is not None and kind not in KINDS:
            raise ValueError(f"unknown kind of collective {kind!r}; the kinds are {', '.join(KINDS)}")
        if axis is not None:
            self._check_axis(axis)
        return tuple(
            entry
            for entry in self.entries
            if (kind is None or entry.kind == kind)
            and (in_loop is None or entry.in_loop == in_loop)
            and (axis is None or _runs_over(entry, axis))
        )

    def _check_axis(self, axis: Any) -> None:
        if self.mesh_axes is None:
            # A program without collectives has none over any axis, whatever the mesh.
            if not self.entries:
                return
            raise ValueError(
                f"axis={axis!r} was given, but no mesh is known for this program: none was found in the "
                "arguments, the compiled program, its shard_maps or the context (jax.set_mesh). "
                "Pass mesh=."
            )
        names = [name for name, _ in self.mesh_axes]
        unknown = [name for name in (axis if isinstance(axis, tuple) else (axis,)) if name not in names]
        if unknown:
            raise ValueError(f"axis {unknown[0]!r} is not in the mesh; its axes are {_mesh_text(self.mesh_axes)}")

    def _table(self) -> Table:
        if not self.entries:
            return Table(f"No collectives{self._place()}: every device works alone.")
        groups: dict[tuple[str, ...], list[Collective]] = {}
        for entry in self.entries:
            key = (
                entry.kind,
                axes_text(entry.axes),
                _shapes_text(entry.shapes),
                loop_text(entry),
                entry.source or "-",
            )
            groups.setdefault(key, []).append(entry)
        rows = [
            (kind, axes, str(len(same)), shape, format_bytes(sum(e.bytes for e in same)), loop, source)
            for (kind, axes, shape, loop, source), same in groups.items()
        ]
        notes = [
            f"Total {format_bytes(self.bytes())}/device. bytes/device: what one device receives, all of the "
            "row's collectives together;",
            'those in a loop ("yes x8": its body runs 8 times) are counted once.',
        ]
        if any(entry.axes is None for entry in self.entries):
            why = "no mesh is known; pass mesh=" if self.mesh_axes is None else "the groups fit no set of axes"
            notes.append(f"axes ?: {why}.")
        return Table(
            self._headline(),
            ("kind", "axes", "count", "result", "bytes/device", "in loop", "source"),
            rows,
            frozenset({"count", "bytes/device"}),
            notes,
        )

    def _place(self) -> str:
        return "" if self.mesh_axes is None else f" on mesh ({_mesh_text(self.mesh_axes)})"

    def _headline(self) -> str:
        return f"{len(self)} collective{'' if len(self) == 1 else 's'}{self._place()}"

    def __repr__(self) -> str:
        return f"<{self._headline()}, {format_bytes(self.bytes())} a device; print() shows them>"

    def __str__(self) -> str:
        return self._table().to_text()

    def _repr_html_(self) -> str:
        return self._table().to_html()

    def __rich__(self) -> rich.table.Table:
        return self._table().to_rich()


def _runs_over(entry: Collective, axis: Any) -> bool:
    if entry.axes is None:
        return False
    return set(entry.axes) == set(axis) if isinstance(axis, tuple) else axis in entry.axes


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _mesh_text(mesh_axes: tuple[tuple[Hashable, int], ...]) -> str:
    return ", ".join(f"{name}={size}" for name, size in mesh_axes)


def axes_text(axes: tuple[Hashable, ...] | None) -> str:
    return "?" if axes is None else ",".join(map(str, axes))


def _shapes_text(shapes: tuple[Array, ...]) -> str:
    texts = [f"{dtype}[{','.join(map(str, dims))}]" for dtype, dims in shapes]
    return texts[0] + (f" +{len(texts) - 1} more" if len(texts) > 1 else "") if texts else "-"


def loop_text(entry: Collective) -> str:
    if not entry.in_loop:
        return "no"
    return "yes" if entry.trip_count is None else f"yes x{entry.trip_count}"
