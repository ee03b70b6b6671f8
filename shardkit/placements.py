"""Where an array lives on a mesh: ``Shard``, ``Replicate``, ``Partial``, and ``Layout``.

A placement says what one mesh axis does to an array; a ``Layout`` has one for every axis of a
mesh. Both translate to JAX's own ``PartitionSpec`` and ``NamedSharding`` and back without loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardkit._compat import partition_spec, spec_entries, unreduced_kind, unreduced_kinds

REDUCE_KINDS = ("sum", "mean", "max", "min", "prod", "any", "all")


@dataclasses.dataclass(frozen=True)
class Placement:
    """Base of the three placements; not built by itself.

    Example:
      >>> import shardkit as sk
      >>> [isinstance(p, sk.Placement) for p in (sk.Shard(0), sk.Replicate(), sk.Partial())]
      [True, True, True]
    """


@dataclasses.dataclass(frozen=True)
class Shard(Placement):
    """The mesh axis cuts array dim ``dim`` into equal consecutive blocks.

    Args:
      dim: the array dim. A negative one counts from the last and is resolved where the rank is known.

    Raises:
      TypeError: ``dim`` is no integer.

    Example:
      >>> import jax, shardkit as sk
      >>> mesh = jax.sharding.AbstractMesh((4,), ("sp",))
      >>> sk.Layout(mesh, [sk.Shard(1)]).local_shape((2, 8))
      (2, 2)
    """

    dim: int

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not hasattr(self.dim, "__index__"):
            raise TypeError(f"Shard(dim) takes an integer array dim, got {self.dim!r}")
        object.__setattr__(self, "dim", self.dim.__index__())


@dataclasses.dataclass(frozen=True)
class Replicate(Placement):
    """Every device along the mesh axis holds the same values.

    Example:
      >>> import jax, shardkit as sk
      >>> sk.to_partition_spec([sk.Replicate(), sk.Shard(0)], jax.sharding.AbstractMesh((2, 4), ("dp", "sp")))
      P('sp',)
    """


@dataclasses.dataclass(frozen=True)
class Partial(Placement):
    """Devices along the mesh axis hold contributions; the value is their reduction.

    Args:
      reduce: one of "sum", "mean", "max", "min", "prod", "any", "all".

    Raises:
      ValueError: another ``reduce``.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> sk.placements(sk.from_local([jnp.ones(2)], {"dp": sk.Partial("max")}, sk.make_mesh({"dp": 1})))
      (Partial(reduce='max'),)
    """

    reduce: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce not in REDUCE_KINDS:
            raise ValueError(f"Partial(reduce={self.reduce!r}): reduce must be one of {REDUCE_KINDS}")


def _is_partial(placement: Placement) -> bool:
    return isinstance(placement, Partial)


Placements = Sequence[Placement] | Mapping[str, Placement] | PartitionSpec | NamedSharding
AnyMesh = Mesh | AbstractMesh


@dataclasses.dataclass(frozen=True)
class _Parsed:
    """One placement an axis, plus what placements alone can't say."""

    placements: tuple[Placement, ...]
    order: tuple[tuple[int, tuple[str, ...]], ...]  # dim -> axes, major first, where not mesh order
    ndim: int | None = dataclasses.field(compare=False)  # what a spec is padded to, not where things live
    reduced: frozenset[str] = frozenset()


def _check_axes(names: Sequence[str], mesh: AnyMesh, given: Any) -> None:
    unknown = [n for n in names if n not in mesh.axis_names]
    if unknown:
        raise ValueError(
            f"placements {given!r} name mesh axes {unknown}, but the mesh has {tuple(mesh.axis_names)}; use those names"
        )


def _parse(given: Any, mesh: AnyMesh) -> _Parsed:
    if isinstance(given, Layout):
        given = given._parsed_for(mesh)  # pyright: ignore[reportPrivateUsage]
        return given
    if isinstance(given, NamedSharding):
        if given.mesh.axis_names != mesh.axis_names or given.mesh.axis_sizes != mesh.axis_sizes:
            raise ValueError(
                f"the sharding lives on mesh {dict(given.mesh.shape)}, not on the given mesh "
                f"{dict(mesh.shape)}; reshard it there first, or leave mesh out"
            )
        given = given.spec
    if isinstance(given, PartitionSpec):
        return _parse_spec(given, mesh)
    if isinstance(given, Mapping):
        _check_axes(list(given), mesh, given)
        placements = tuple(given.get(name, Replicate()) for name in mesh.axis_names)
    elif isinstance(given, Sequence) and not isinstance(given, str):
        placements = tuple(given)
        if len(placements) != len(mesh.axis_names):
            raise ValueError(
                f"got {len(placements)} placements {list(placements)} for a mesh with "
                f"{len(mesh.axis_names)} axes {tuple(mesh.axis_names)}; give one an axis in mesh order, "
                "or a mapping by axis name (absent axes replicate)"
            )
    else:
        raise TypeError(
            f"placements must be a sequence in mesh-axis order, a mapping by axis name, a PartitionSpec "
            f"or a NamedSharding, got {type(given).__name__}: {given!r}"
        )
    for placement in placements:
        if not isinstance(placement, Shard | Replicate | Partial):
            raise TypeError(f"{placement!r} is no placement; use Shard(dim), Replicate() or Partial(reduce)")
    return _Parsed(placements, (), None)


def _parse_spec(spec: PartitionSpec, mesh: AnyMesh) -> _Parsed:
    found: dict[str, Placement] = {}
    order = []
    for dim, entry in enumerate(spec_entries(spec)):
        if entry is None:
            continue
        if entry is PartitionSpec.UNCONSTRAINED:
            raise ValueError(f"{spec} leaves dim {dim} UNCONSTRAINED; a layout must say where it lives")
        axes = entry_names(entry)
        _check_axes(axes, mesh, spec)
        for axis in axes:
            if axis in found:
                raise ValueError(f"{spec} uses mesh axis {axis!r} twice; an axis can cut one dim only")
            found[axis] = Shard(dim)
        if list(axes) != sorted(axes, key=mesh.axis_names.index):
            order.append((dim, axes))
    unreduced = frozenset(getattr(spec, "unreduced", ()) or ())
    _check_axes(sorted(unreduced), mesh, spec)
    for axis in sorted(unreduced):
        if axis in found:
            raise ValueError(f"{spec} both cuts a dim over mesh axis {axis!r} and leaves it unreduced")
        found[axis] = Partial(unreduced_kind(spec))
    placements = tuple(found.get(name, Replicate()) for name in mesh.axis_names)
    reduced = frozenset(getattr(spec, "reduced", ()) or ())
    return _Parsed(placements, tuple(order), len(spec_entries(spec)), reduced)


@dataclasses.dataclass(frozen=True, init=False)
class Layout:
    """Placements on every axis of a mesh.

    Args:
      mesh: a ``Mesh`` or ``AbstractMesh``.
      placements: any form: a sequence in mesh-axis order, a mapping by axis name (absent axes
        replicate), a ``PartitionSpec`` or a ``NamedSharding``. Two axes on one dim: the earlier mesh
        axis is the major one, unless a PartitionSpec says otherwise.

    Raises:
      ValueError: a mesh axis that isn't there or is used twice, another number of placements than axes, a dim left
        UNCONSTRAINED, a sharding on another mesh. Dims are checked where the rank is known.
      TypeError: none of these forms, or something in it that is no placement.

    Example:
      >>> import jax, shardkit as sk
      >>> mesh = jax.sharding.AbstractMesh((2, 4), ("dp", "sp"))
      >>> layout = sk.Layout(mesh, {"dp": sk.Shard(0), "sp": sk.Shard(2)})
      >>> layout.spec
      P('dp', None, 'sp')
      >>> layout.local_shape((8, 3, 16))
      (4, 3, 4)
    """

    mesh: AnyMesh
    placements: tuple[Placement, ...]
    _parsed: _Parsed = dataclasses.field(repr=False)

    def __init__(self, mesh: AnyMesh, placements: Placements | Layout):
        parsed = _parse(placements, mesh)
        object.__setattr__(self, "mesh", mesh)
        object.__setattr__(self, "placements", parsed.placements)
        object.__setattr__(self, "_parsed", parsed)

    def _parsed_for(self, mesh: AnyMesh) -> _Parsed:
        if mesh.axis_names != self.mesh.axis_names or mesh.axis_sizes != self.mesh.axis_sizes:
            raise ValueError(f"layout on mesh {dict(self.mesh.shape)} used on mesh {dict(mesh.shape)}")
        return self._parsed

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """Mesh axes over which the array is a sum (or other reduction) of contributions."""
        return tuple(n for n, p in zip(self.mesh.axis_names, self.placements, strict=True) if _is_partial(p))

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """Mesh axes that cut some dim."""
        return tuple(n for n, p in zip(self.mesh.axis_names, self.placements, strict=True) if isinstance(p, Shard))

    def dim_axes(self, ndim: int | None = None) -> dict[int, tuple[str, ...]]:
        """Which mesh axes cut which array dim, major axis first.

        Args:
          ndim: dims of the array; needed for negative dims. None: as many as the placements speak of.

        Returns:
          ``{dim: mesh axes}``, of the dims that are cut.

        Raises:
          ValueError: a dim out of range, a spec that speaks of more dims, a negative dim without ``ndim``.
        """
        named = self._parsed.ndim
        if ndim is not None and named is not None and named > ndim:
            raise ValueError(f"{self.spec} speaks of {named} dims, but the array has {ndim}; leave the last ones out")
        ndim = named if ndim is None else ndim
        found: dict[int, tuple[str, ...]] = {}
        for name, placement in zip(self.mesh.axis_names, self.placements, strict=True):
            if isinstance(placement, Shard):
                dim = placement.dim
                if ndim is None and dim < 0:
                    raise ValueError(f"Shard({dim}) counts from the last dim; say how many there are (ndim=)")
                if ndim is not None:
                    if not -ndim <= dim < ndim:
                        raise ValueError(
                            f"Shard({dim}) on mesh axis {name!r}: the array has {ndim} dims, "
                            + (f"so dim must lie in [{-ndim}, {ndim - 1}]" if ndim else "so it can only be replicated")
                        )
                    dim %= ndim
                found[dim] = (*found.get(dim, ()), name)
        found.update(dict(self._parsed.order))
        return found

    def spec_for(self, ndim: int | None = None) -> PartitionSpec:
        """The PartitionSpec for an array of some rank.

        Args:
          ndim: dims of the array, so many entries the spec has. None: up to the last dim that is cut.

        Returns:
          A ``PartitionSpec``; Partial axes are its ``unreduced``.

        Raises:
          ValueError: as ``dim_axes``; Partial axes of two kinds, or of one that JAX can't say.
        """
        kinds = {p.reduce for p in self.placements if isinstance(p, Partial)}
        if len(kinds) > 1 or kinds - set(unreduced_kinds()):
            raise ValueError(
                f"a PartitionSpec can only say one Partial of {unreduced_kinds()} (its `unreduced`) in this JAX, "
                f"not {sorted(kinds)}; reduce first"
            )
        dims = self.dim_axes(ndim)
        rank = ndim if ndim is not None else self._parsed.ndim
        if rank is None:
            rank = max(dims, default=-1) + 1
        entries: list[Any] = [None] * rank
        for dim, axes in dims.items():
            entries[dim] = axes[0] if len(axes) == 1 else axes
        return partition_spec(entries, self.partial_axes, "".join(kinds), self._parsed.reduced)

    @property
    def ndim(self) -> int | None:
        """How many dims the array has that it's made for; None where it speaks of any."""
        return self._parsed.ndim

    @property
    def spec(self) -> PartitionSpec:
        """The PartitionSpec that says the same.

        Raises:
          ValueError: a negative dim, Partial axes of two kinds or of one that JAX can't say.
        """
        return self.spec_for()

    @property
    def reduce(self) -> str | None:
        """The kind of reduction that the Partial axes wait for; None where there are none.

        Raises:
          ValueError: axes wait for different kinds, which has no meaning (max of sums is not sum of maxima).
        """
        named = zip(self.mesh.axis_names, self.placements, strict=True)
        kinds = {name: p.reduce for name, p in named if isinstance(p, Partial)}
        if len(set(kinds.values())) > 1:
            raise ValueError(
                f"the Partial axes of one array wait for different reductions, {kinds}, and in which order they "
                "apply would change the value; use one kind, and sk.reshard in two calls to change it"
            )
        return next(iter(kinds.values()), None)

    def stack_spec(self, ndim: int) -> PartitionSpec:
        """The PartitionSpec of a ``PartialArray``'s stack.

        Args:
          ndim: dims of the array, without those that the stack has before them.

        Returns:
          One entry an axis that is Partial, in mesh order, then ``ndim`` entries.

        Raises:
          ValueError: a dim out of range, a spec that speaks of more dims.
        """
        entries: list[Any] = [None] * ndim
        for dim, axes in self.dim_axes(ndim).items():
            entries[dim] = axes[0] if len(axes) == 1 else axes
        return PartitionSpec(*self.partial_axes, *entries)

    def without_partial(self) -> Layout:
        """This layout with Replicate where it was Partial."""
        kept = tuple(Replicate() if _is_partial(p) else p for p in self.placements)
        return self._with(dataclasses.replace(self._parsed, placements=kept))

    def but(self, changed: Mapping[str, Placement]) -> Layout:
        """This layout with other placements on some axes; an axis that newly cuts a dim is the minor one there.

        Args:
          changed: ``{mesh axis: placement}``; other axes keep theirs.

        Returns:
          A ``Layout`` on the same mesh.

        Raises:
          ValueError: an axis that the mesh doesn't have.
        """
        _check_axes(list(changed), self.mesh, changed)
        pairs = zip(self.mesh.axis_names, self.placements, strict=True)
        placements = tuple(changed.get(name, placement) for name, placement in pairs)
        cut = dict(self._parsed.order)
        for name, placement in zip(self.mesh.axis_names, self.placements, strict=True):
            if isinstance(placement, Shard) and name not in cut.get(placement.dim, ()):
                cut[placement.dim] = (*cut.get(placement.dim, ()), name)
        order = []
        for dim, axes in cut.items():
            stay = tuple(a for a in axes if changed.get(a, Shard(dim)) == Shard(dim))
            new = tuple(a for a, p in changed.items() if p == Shard(dim) and a not in axes)
            if list(stay + new) != sorted(stay + new, key=self.mesh.axis_names.index):
                order.append((dim, stay + new))
        return self._with(dataclasses.replace(self._parsed, placements=placements, order=tuple(order)))

    def resolved(self, ndim: int) -> Layout:
        """This layout for an array of known rank: dims counted from the front, checked.

        Args:
          ndim: dims of the array.

        Returns:
          A ``Layout`` without negative dims.

        Raises:
          ValueError: a dim out of range, a spec that speaks of more dims.
        """
        self.dim_axes(ndim)
        counted = tuple(Shard(p.dim % ndim) if isinstance(p, Shard) else p for p in self.placements)
        return self._with(dataclasses.replace(self._parsed, placements=counted, ndim=ndim))

    def on(self, mesh: AnyMesh) -> Layout:
        """These placements on another mesh of the same axes.

        Args:
          mesh: a ``Mesh`` or ``AbstractMesh`` with axes of the same names and sizes.

        Returns:
          A ``Layout`` on it.

        Raises:
          ValueError: other axes.
        """
        layout = self._with(self._parsed_for(mesh))
        object.__setattr__(layout, "mesh", mesh)
        return layout

    def _with(self, parsed: _Parsed) -> Layout:
        layout = object.__new__(Layout)
        for name, value in (("mesh", self.mesh), ("placements", parsed.placements), ("_parsed", parsed)):
            object.__setattr__(layout, name, value)
        return layout

    @property
    def sharding(self) -> NamedSharding:
        """The NamedSharding that says the same.

        Raises:
          ValueError: as ``spec``; a Partial on Auto axes, where JAX can't say it.
        """
        return _named_sharding(self.mesh, self.spec)

    def local_shape(self, shape: Sequence[int], *, uneven: str = "error") -> tuple[int, ...]:
        """The shape one device stores of an array of global ``shape``.

        Args:
          shape: global sizes in elements.
          uneven: "error" refuses sizes the mesh does not divide; "pad" gives the padded block,
            ``ceil(size / n)``.

        Returns:
          Sizes in elements, one a dim.

        Raises:
          ValueError: a dim out of range, or one that doesn't divide, a negative size, an unknown value of ``uneven``.
        """
        if uneven not in ("error", "pad"):
            raise ValueError(f'uneven={uneven!r} is unknown; use "error" or "pad"')
        shape = tuple(shape)
        if any(size < 0 for size in shape):
            raise ValueError(f"sizes are at least 0, got shape {shape}")
        local = list(shape)
        for dim, axes in self.dim_axes(len(shape)).items():
            parts = axes_size(self.mesh, axes)
            if shape[dim] % parts and uneven == "error":
                raise uneven_error(dim, shape, axes, parts)
            local[dim] = -(-shape[dim] // parts)
        return tuple(local)

    def padded_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The global shape of the padded array that holds one of a shape the mesh needn't divide.

        Args:
          shape: global (logical) sizes in elements.

        Returns:
          Sizes in elements: each sharded dim is as long as its shards of ``ceil(size / n)`` together.

        Raises:
          ValueError: a dim out of range, a negative size.
        """
        blocks = self.local_shape(shape, uneven="pad")
        cut = self.dim_axes(len(blocks))
        return tuple(block * axes_size(self.mesh, cut.get(dim, ())) for dim, block in enumerate(blocks))


def entry_names(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one PartitionSpec entry."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def axes_size(mesh: AnyMesh, axes: Sequence[str]) -> int:
    """Number of devices along the axes together."""
    size = 1
    for axis in axes:
        size *= mesh.shape[axis]
    return size


def uneven_error(dim: int, shape: Sequence[int], axes: Sequence[str], parts: int) -> ValueError:
    """The one message about sizes that don't divide."""
    names = " x ".join(repr(a) for a in axes)
    return ValueError(
        f"dim {dim} of shape {tuple(shape)} has {shape[dim]} elements, which mesh axis {names} of size {parts} "
        f'does not divide; use sk.shard_tensor(x, placements, uneven="pad") (an sk.Padded, which keeps the '
        "logical size) or another size"
    )


def _named_sharding(mesh: AnyMesh, spec: PartitionSpec) -> NamedSharding:
    try:
        return NamedSharding(mesh, spec)  # type: ignore[arg-type]
    except ValueError as err:
        if getattr(spec, "unreduced", None):
            raise ValueError(
                f"JAX can say unreduced only on Explicit mesh axes; {spec} on mesh {mesh}. Make the mesh with "
                'sk.make_mesh(..., axis_types="explicit"), or reduce first'
            ) from err
        raise


def to_partition_spec(placements: Placements | Layout, mesh: AnyMesh, ndim: int | None = None) -> PartitionSpec:
    """The PartitionSpec of placements in any form.

    Args:
      placements: any form that ``Layout`` takes.
      mesh: the mesh whose axes they speak of.
      ndim: rank of the array; needed for negative dims, and gives the spec that many entries.

    Returns:
      A ``PartitionSpec``; Partial axes are its ``unreduced``.

    Raises:
      ValueError: unknown axis, dim out of range, a spec for more than ``ndim`` dims, a Partial that JAX can't say
        (jax 0.10: only sums).
      TypeError: no placements.

    Example:
      >>> import jax, shardkit as sk
      >>> mesh = jax.sharding.AbstractMesh((2, 4), ("dp", "sp"))
      >>> sk.to_partition_spec([sk.Shard(0), sk.Shard(0)], mesh)
      P(('dp', 'sp'),)
    """
    return Layout(mesh, placements).spec_for(ndim)


def to_named_sharding(placements: Placements | Layout, mesh: AnyMesh) -> NamedSharding:
    """The NamedSharding of placements in any form.

    Args:
      placements: any form that ``sk.Layout`` takes; dims counted from the front.
      mesh: the mesh whose axes they speak of.

    Returns:
      A ``NamedSharding`` on ``mesh``.

    Raises:
      ValueError: unknown axis, a negative dim, a Partial on Auto axes or of a kind that JAX can't say (jax 0.10: only
        sums).
      TypeError: no placements.

    Example:
      >>> import jax, shardkit as sk
      >>> sk.to_named_sharding({"sp": sk.Shard(1)}, jax.sharding.AbstractMesh((2, 4), ("dp", "sp"))).spec
      P(None, 'sp')
    """
    return Layout(mesh, placements).sharding


def placements(x_or_sharding: Any) -> tuple[Placement, ...]:
    """Placements of an array (or of its sharding), in mesh-axis order.

    Args:
      x_or_sharding: a ``jax.Array`` (a native ``unreduced`` one too), ``Padded``, ``PartialArray``,
        ``NamedSharding``, ``Layout``, or a tracer whose type carries its sharding (Explicit axes).

    Returns:
      One ``Placement`` a mesh axis.

    Raises:
      ValueError: no mesh is known: a single-device array, one of NumPy's, or a tracer on Auto axes, whose placement
        only the compiler knows.

    Example:
      >>> import jax, shardkit as sk
      >>> mesh = jax.sharding.AbstractMesh((2,), ("dp",))
      >>> sk.placements(sk.to_named_sharding({"dp": sk.Shard(1)}, mesh))
      (Shard(dim=1),)
    """
    return layout_of(x_or_sharding).placements


def layout_of(x: Any) -> Layout:
    """The ``Layout`` of an array or sharding; see ``placements``."""
    if isinstance(x, Layout):
        return x
    if isinstance(x, NamedSharding):
        return Layout(x.mesh, x)
    if not isinstance(x, jax.Array):
        if isinstance(getattr(x, "layout", None), Layout):  # PartialArray
            return x.layout
        inner = getattr(x, "array", None)  # Padded
        if inner is not None:
            return layout_of(inner)
    if isinstance(x, Tracer):
        sharding = jax.typeof(x).sharding
        # Axes that a shard_map has made manual are no matter of the type's: it speaks of one device's block.
        explicit = [t == AxisType.Explicit for t in sharding.mesh.axis_types if t != AxisType.Manual]
        if explicit and all(explicit):
            return Layout(sharding.mesh, sharding)
        raise ValueError(
            "the placement of a value under jit on Auto mesh axes is the compiler's to choose and can't be read; "
            "ask outside jit, or use Explicit axes"
        )
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding):
        return Layout(sharding.mesh, sharding)
    raise ValueError(
        f"{type(x).__name__} carries no NamedSharding, so no mesh axis can be named; place it with "
        "sk.shard_tensor(x, placements, mesh) first"
    )
