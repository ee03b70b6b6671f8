"""``Padded``: an array of any size on a mesh, and the padding itself."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from shardkit._compat import arrays_in_lax, spec_entries
from shardkit.placements import entry_names


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["logical_shape"])
@dataclasses.dataclass(frozen=True, eq=False)
class Padded:
    """An array padded up to what the mesh divides, and the shape it stands for.

    JAX can't hold an array whose sharded dim the mesh doesn't divide. A ``Padded`` can: each sharded
    dim of ``array`` has ``ceil(size / n)`` elements a shard, of which only those below the logical
    size (in elements) mean anything. A pytree: it crosses ``jit``, ``grad`` and optimizers as it is.

    Used as an array (``y + 1``, ``jnp.sum(y)``, ``jax.nn.relu(y)``, ``np.asarray(y)``) it stands for its ``value``.
    Give ``y.value`` itself to functions with a ``jax.custom_vjp``, whose rules would have to return a ``Padded``.

    Attributes:
      array: the padded array, evenly sharded. Inside a manual region: this device's block.
      logical_shape: the sizes that count.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> mesh = sk.make_mesh({"sp": 1})
      >>> x = sk.shard_tensor(jnp.arange(5.0), {"sp": sk.Shard(0)}, mesh, uneven="pad")
      >>> x.shape, float(x.value.sum())
      ((5,), 10.0)
    """

    array: jax.Array
    logical_shape: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return self.logical_shape

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.logical_shape)

    @property
    def size(self) -> int:
        """Number of logical elements."""
        return int(np.prod(self.logical_shape))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the elements."""
        return self.array.dtype

    @property
    def sharding(self) -> Sharding:
        """The sharding of the padded array."""
        return self.array.sharding

    @property
    def value(self) -> jax.Array:
        """The logical array.

        Under jit on Auto axes it stays sharded and nothing is communicated: the shards keep their
        places and the tail is left out. Where JAX can't represent an unevenly sharded array (eagerly,
        and on Explicit axes) the dims that don't divide come back replicated.

        Raises:
          ValueError: inside a manual region, where a device holds only its block.
        """
        if self.array.shape == self.logical_shape:
            return self.array
        if any(a < w for a, w in zip(self.array.shape, self.logical_shape, strict=True)):
            raise ValueError(
                f"inside a manual region a Padded holds this device's block {self.array.shape} of the logical "
                f"{self.logical_shape}; use .array there, and .value outside"
            )
        array = _release_uneven_explicit(self.array, self.logical_shape)
        return crop_to(array, self.logical_shape)

    __hash__: ClassVar[None] = None  # type: ignore[assignment]  # like an array: == is elementwise
    __array_priority__ = 100  # NumPy leaves `ndarray + padded` to us
    _committed: ClassVar[bool] = False  # jax.lax.full_like: the padded array's sharding isn't one of the logical shape

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(np.asarray(self.array)[tuple(slice(0, s) for s in self.logical_shape)], dtype=dtype, copy=copy)

    def __getitem__(self, index: Any) -> jax.Array:
        return self.value[index]

    def __len__(self) -> int:
        return len(self.value)

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __getattr__(self, name: str) -> Any:
        # Array methods (sum, astype, reshape, ...) act on the logical value.
        if name.startswith("_") or name not in _ARRAY_METHODS:
            raise AttributeError(f"'Padded' object has no attribute {name!r}")
        return getattr(self.value, name)


_ARRAY_METHODS = frozenset(
    n for n in dir(ShapedArray((), np.dtype("float32"))) + dir(np.ndarray) if not n.startswith("_")
) - {"array", "data"}


def _operator(fun: Callable[[Any, Any], Any], swap: bool) -> Callable[[Padded, Any], Any]:
    def method(self: Padded, other: Any) -> Any:
        other = other.value if isinstance(other, Padded) else other
        return fun(other, self.value) if swap else fun(self.value, other)

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"):
    setattr(Padded, f"__{_name}__", _operator(getattr(operator, f"__{_name}__"), False))
    setattr(Padded, f"__r{_name}__", _operator(getattr(operator, f"__{_name}__"), True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Padded, f"__{_name}__", _operator(getattr(operator, _name), False))
Padded.__neg__ = lambda self: -self.value  # type: ignore[attr-defined]
Padded.__abs__ = lambda self: abs(self.value)  # type: ignore[attr-defined]
Padded.__invert__ = lambda self: ~self.value  # type: ignore[attr-defined]
arrays_in_lax(Padded, lambda padded: padded.value)


def _release_uneven_explicit(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """On Explicit axes, replicate the dims whose logical size the type system can't shard."""
    sharding = jax.typeof(array).sharding
    mesh = sharding.mesh
    if mesh.empty or AxisType.Explicit not in mesh.axis_types:
        return array
    entries = list(spec_entries(sharding.spec))
    entries += [None] * (array.ndim - len(entries))
    for dim, entry in enumerate(entries):
        if entry is None or array.shape[dim] == shape[dim]:
            continue
        names = entry_names(entry)
        if shape[dim] % int(np.prod([mesh.shape[n] for n in names])):
            entries[dim] = None
    if entries == list(spec_entries(sharding.spec)):
        return array
    if not isinstance(array, Tracer):
        mesh = array.sharding.mesh  # type: ignore[attr-defined]  # a concrete mesh for a concrete array
    return jax.sharding.reshard(array, NamedSharding(mesh, PartitionSpec(*entries)))


def crop_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The first ``shape`` elements of ``x`` in each dim: without padded tails."""
    return x if tuple(x.shape) == tuple(shape) else jax.lax.slice(x, (0,) * x.ndim, shape)


def pad_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """``x`` with zeros after its end in each dim, up to ``shape``."""
    if tuple(x.shape) == tuple(shape):
        return x
    widths = [(0, new - old) for new, old in zip(shape, x.shape, strict=True)]
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # keys, as the numbers they're made of
        data = jax.random.key_data(x)
        padded = jnp.pad(data, [*widths, *[(0, 0)] * (data.ndim - x.ndim)])
        return jax.random.wrap_key_data(padded, impl=jax.random.key_impl(x))
    return jnp.pad(x, widths)
