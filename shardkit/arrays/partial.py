"""``PartialArray``: the contributions of several devices to one value, not yet reduced."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, Sharding

from shardkit.arrays.contributions import combine
from shardkit.arrays.kinds import check_dtype
from shardkit.arrays.padded import Padded
from shardkit.arrays.placing import describe, misplaced, same_layout
from shardkit.meshes import manual_axes
from shardkit.placements import Layout, Placement

_REDUCE_FIRST = "reduce first: sk.reshard(x, ...)"


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PartialArray:
    """A value that is the reduction of contributions, which the devices of some mesh axes still hold apart.

    What linear code may do without communication works: ``+`` and ``-``, ``*`` and ``/`` by a plain value,
    negation, casts between float types. A plain value is added once, not once a device. All else raises a
    ``TypeError`` that says to reduce first. Works on Auto and Explicit meshes, and for every kind of reduction;
    JAX's own ``unreduced`` arrays (``sk.to_unreduced``) need Explicit axes.

    A pytree: it crosses ``jit``, ``scan`` and ``grad`` as it is. ``jax.tree.map``, and so a bare optax optimizer, sees
    the contributions: what is linear in each of them is right. The gradient with respect to a ``PartialArray`` is
    a ``PartialArray`` whose stack holds the gradient of each contribution.

    Attributes:
      stack: one leading dim a Partial axis of ``layout``, in mesh order and sharded over it, then the dims of the
        array. Inside a manual region: this device's block, with leading dims of size 1.
      layout: where it lives, and which reduction it waits for.
      logical_shape: the sizes that count, where dims are padded as in ``sk.Padded``; else None.

    Raises:
      ValueError: no axis of ``layout`` is Partial, or they wait for different kinds; a leading size that isn't its
        axis's, a stack that lives elsewhere, a logical shape that doesn't fit.
      TypeError: the dtype doesn't have this reduction (an integer mean, a max of complex numbers).

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> x = sk.from_local([jnp.arange(3, dtype="float32")], {"dp": sk.Partial()}, sk.make_mesh({"dp": 1}))
      >>> x
      PartialArray(float32[3], dp=Partial('sum'))
      >>> (2 * x + 1).stack.tolist()
      [[1.0, 3.0, 5.0]]
    """

    stack: Any
    layout: Layout
    logical_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.layout, Layout):
            raise TypeError(f"PartialArray takes an sk.Layout, got {self.layout!r}; use sk.Layout(mesh, placements)")
        if not self.layout.partial_axes:
            raise ValueError(
                f"a PartialArray needs a Partial placement on at least one mesh axis, got {self.layout.placements}; "
                "a value without one is a plain jax.Array"
            )
        kind = self.layout.reduce
        ndim = np.ndim(self.stack) - self._lead
        if ndim < 0:
            raise ValueError(
                f"the stack has shape {np.shape(self.stack)}, but needs a leading dim for each of the Partial axes "
                f"{self.layout.partial_axes}; make it with sk.from_local or sk.reshard"
            )
        object.__setattr__(self, "layout", self.layout.resolved(ndim))
        check_dtype(kind, self.stack.dtype, "PartialArray")  # type: ignore[arg-type]
        self._check_sizes()
        self._check_place(ndim)

    def _check_sizes(self) -> None:
        mesh, manual = self.layout.mesh, manual_axes()
        for axis, size in zip(self.layout.partial_axes, self.stack.shape, strict=False):
            want = 1 if axis in manual else mesh.shape[axis]
            if size != want:
                raise ValueError(
                    f"the stack of shape {self.stack.shape} has {size} contributions along Partial axis {axis!r}, "
                    f"which has {want} here; make it with sk.from_local or sk.reshard"
                )
        if self.logical_shape is None:
            return
        object.__setattr__(self, "logical_shape", tuple(self.logical_shape))
        cuts = self.layout.dim_axes(len(self._block))
        if not any(manual.intersection(axes) for axes in cuts.values()):  # a block says nothing of the whole
            padded = self.layout.padded_shape(self.logical_shape)
            if padded != self._block:
                raise ValueError(
                    f"contributions of shape {self._block} don't fit logical_shape={self.logical_shape}: on this "
                    f"layout it is padded to {padded}"
                )

    def _check_place(self, ndim: int) -> None:
        spec = self.layout.stack_spec(ndim)
        where = misplaced(self.stack, self.layout.mesh, spec)
        if where is not None:
            raise ValueError(
                f"the stack lives at {describe(where)}, but layout {self._placed()} puts it at {spec} on mesh "
                f"{dict(self.layout.mesh.shape)}; make it with sk.from_local or sk.reshard"
            )
        object.__setattr__(self, "layout", _known_mesh(self.stack, self.layout))

    # --- a pytree ---------------------------------------------------------------------------------

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], _Aux]:
        """For JAX: the stack is data, all else isn't."""
        return ((jax.tree_util.GetAttrKey("stack"), self.stack),), _Aux(self.layout, self.logical_shape)

    @classmethod
    def tree_unflatten(cls, aux: _Aux, leaves: Any) -> PartialArray:
        # Leaves may be anything (None, specs, tracers with a batch dim), so nothing is checked.
        return _build(leaves[0], aux.layout, aux.logical_shape)

    # --- what it says of itself -------------------------------------------------------------------

    @property
    def _lead(self) -> int:
        return len(self.layout.partial_axes)

    @property
    def _block(self) -> tuple[int, ...]:
        if np.ndim(self.stack) - self._lead != self.layout.ndim:
            raise ValueError(
                f"the stack of shape {np.shape(self.stack)} isn't that of a PartialArray of {self.layout.ndim} dims "
                f"over {self.layout.partial_axes}: a new dim before it, as vmap and scan put there, can't be told from "
                "contributions; reduce within, or return the stack and sk.PartialArray it again"
            )
        return tuple(self.stack.shape[self._lead :])

    @property
    def _kind(self) -> str:
        return self.layout.reduce  # type: ignore[return-value]  # never None: it has a Partial axis

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value (inside a manual region: of this device's contribution, unless padded)."""
        return self._block if self.logical_shape is None else self.logical_shape

    @property
    def ndim(self) -> int:
        """Number of dims of the value."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements of the value."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the contributions, and of the value."""
        return self.stack.dtype

    @property
    def sharding(self) -> Sharding:
        """The sharding of the stack."""
        return self.stack.sharding

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement a mesh axis, in mesh order."""
        return self.layout.placements

    def _placed(self) -> str:
        named = zip(self.layout.mesh.axis_names, self.layout.placements, strict=True)
        return ", ".join(f"{n}={type(p).__name__}({', '.join(repr(v) for v in vars(p).values())})" for n, p in named)

    def __repr__(self) -> str:
        if not hasattr(self.stack, "dtype"):
            return f"PartialArray({self.stack!r}, {self._placed()})"
        shape = self.logical_shape or np.shape(self.stack)[self._lead :]
        return f"PartialArray({np.dtype(self.dtype).name}{list(shape)}, {self._placed()})"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a PartialArray without dims")
        return self.shape[0]

    # --- what it can do ---------------------------------------------------------------------------

    def reduce(self) -> Any:
        """The value: Replicate where it was Partial, all other placements as they are.

        Raises:
          ValueError: inside a manual region of a Partial axis, for "prod", "any" and "all".
        """
        from shardkit.reshard import reshard  # the room below, which moves data

        return reshard(self, self.layout.without_partial())

    def astype(self, dtype: Any) -> Any:
        """This value in another dtype.

        Casts to float and complex types are done contribution by contribution and stay Partial (each rounds by
        itself: reduce first where the sum of roundings matters). Casts to integers and bools, and from complex to
        float, aren't linear: the value is reduced first and a plain array comes back.

        Args:
          dtype: the dtype wanted.

        Returns:
          A ``PartialArray``; a ``jax.Array`` where the value was reduced.

        Raises:
          TypeError: the dtype doesn't have this reduction (a max of complex numbers).
        """
        dtype = jax.dtypes.canonicalize_dtype(dtype)
        if dtype == self.dtype:
            return self
        real = jnp.issubdtype(self.dtype, np.complexfloating) and not jnp.issubdtype(dtype, np.complexfloating)
        if not jnp.issubdtype(dtype, np.inexact) or real or self._kind in ("any", "all"):
            return self.reduce().astype(dtype)
        check_dtype(self._kind, dtype, "PartialArray.astype")
        return self._with(self.stack.astype(dtype))

    def _with(self, stack: Any) -> PartialArray:
        return _build(stack, self.layout, self.logical_shape)

    def _plain(self, other: Any, name: str) -> Any:
        """The other operand as a value broadcastable to ours."""
        if isinstance(other, Padded):
            if self.logical_shape != other.logical_shape:
                raise ValueError(
                    f"{name}: an sk.Padded of shape {other.logical_shape} meets {self!r}"
                    + ("" if self.logical_shape else ", which isn't padded; use its .value")
                )
            return other.array if other.array.shape == self._block else other.value
        shape = tuple(np.shape(other))
        # Padded blocks within a manual region stand for no global shape: there a block meets a block.
        local = any(manual_axes().intersection(a) for a in self.layout.dim_axes(len(self._block)).values())
        own = self._block if local else self.shape
        fits = len(shape) <= len(own)
        fits = fits and all(s in (1, o) for s, o in zip(reversed(shape), reversed(own), strict=False))
        if not fits:
            raise ValueError(
                f"{name}: a value of shape {shape} doesn't broadcast to the shape {own} of {self!r}, and enlarging a "
                f"Partial is left to you; {_REDUCE_FIRST}, or reshape the value"
            )
        return other

    def _combine(
        self, op: Callable[..., Any], other: Any, neutral: int, once: bool, swapped: bool = False
    ) -> PartialArray:
        value = self._plain(other, op.__name__)
        check_dtype(self._kind, jnp.result_type(self.dtype, value), f"PartialArray {op.__name__}")
        return self._with(combine(op, self.layout, self.stack, value, neutral=neutral, once=once, swapped=swapped))

    def _merge(self, other: PartialArray, op: Callable[..., Any]) -> PartialArray:
        if not same_layout(self.layout, other.layout):
            raise ValueError(
                f"{op.__name__}: {self!r} and {other!r} live differently; sk.reshard one of them to the placements "
                "(and mesh) of the other first"
            )
        if self._kind not in ("sum", "mean"):
            _refuse(self, f"{op.__name__} of two contributions each")
        if self.shape != other.shape:
            raise ValueError(f"{op.__name__}: {self!r} and {other!r} differ in shape; {_REDUCE_FIRST}")
        check_dtype(self._kind, jnp.result_type(self.dtype, other.dtype), f"PartialArray {op.__name__}")
        return self._with(op(self.stack, other.stack))

    def _add(self, other: Any, op: Callable[..., Any], swapped: bool) -> Any:
        if isinstance(other, PartialArray):
            return self._merge(other, op)
        if not _is_value(other):
            return NotImplemented
        if self._kind in ("prod", "any", "all"):
            _refuse(self, op.__name__)
        if swapped and op is operator.sub and self._kind in ("max", "min"):
            _refuse(self, "value - x")  # it turns a max into a min
        return self._combine(op, other, 0, once=self._kind == "sum", swapped=swapped)

    def __add__(self, other: Any) -> PartialArray:
        return self._add(other, operator.add, False)

    def __radd__(self, other: Any) -> PartialArray:
        return self._add(other, operator.add, True)

    def __sub__(self, other: Any) -> PartialArray:
        return self._add(other, operator.sub, False)

    def __rsub__(self, other: Any) -> PartialArray:
        return self._add(other, operator.sub, True)

    def __neg__(self) -> PartialArray:
        if self._kind not in ("sum", "mean"):
            _refuse(self, "-x")
        return self._with(-self.stack)

    def __pos__(self) -> PartialArray:
        return self

    def _scale(self, other: Any, op: Callable[..., Any]) -> Any:
        if isinstance(other, PartialArray):
            _refuse(self, f"{op.__name__} of two Partials")
        if not _is_value(other):
            return NotImplemented
        if self._kind not in ("sum", "mean", "prod"):
            _refuse(self, op.__name__)  # a negative factor turns a max into a min
        return self._combine(op, other, 1, once=self._kind == "prod")

    def __mul__(self, other: Any) -> PartialArray:
        return self._scale(other, operator.mul)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> PartialArray:
        return self._scale(other, operator.truediv)

    # --- what needs the value ---------------------------------------------------------------------

    __hash__: ClassVar[None] = None  # type: ignore[assignment]  # like an array: == is elementwise
    __array_priority__ = 100

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        op = _UFUNCS.get(ufunc.__name__)
        if op is None or method != "__call__" or kwargs:
            _refuse(self, f"np.{ufunc.__name__}")
        return op(*inputs)

    def __jax_array__(self) -> Any:
        # Not raised here: JAX asks before it leaves `array + x` to __radd__, which it does for what it doesn't know.
        return _Refusal(self)

    def __getattr__(self, name: str) -> NoReturn:
        if name in _VALUE_METHODS:
            _refuse(self, f".{name}")
        raise AttributeError(f"'PartialArray' object has no attribute {name!r}")


def is_whole(x: Any) -> bool:
    """Whether this pytree is to be taken for one array (``is_leaf`` of JAX's tree functions)."""
    return isinstance(x, PartialArray | Padded)


@dataclasses.dataclass(frozen=True, eq=False)
class _Aux:
    """What isn't data. Equal for equal placements, whichever form of the mesh each side knows."""

    layout: Layout
    logical_shape: tuple[int, ...] | None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Aux):
            return NotImplemented
        return self.logical_shape == other.logical_shape and same_layout(self.layout, other.layout)

    def __hash__(self) -> int:
        mesh = self.layout.mesh
        return hash((mesh.axis_names, mesh.axis_sizes, self.layout.placements, self.logical_shape))


def _build(stack: Any, layout: Layout, logical_shape: tuple[int, ...] | None) -> PartialArray:
    """A PartialArray of parts known to be right, or that stand for others."""
    x = object.__new__(PartialArray)
    for name, value in (("stack", stack), ("layout", _known_mesh(stack, layout)), ("logical_shape", logical_shape)):
        object.__setattr__(x, name, value)
    return x


def _known_mesh(stack: Any, layout: Layout) -> Layout:
    """The layout on the devices of a concrete stack: what comes out of ``jit`` may know an abstract mesh only."""
    if isinstance(stack, jax.Array) and not isinstance(stack, Tracer) and isinstance(stack.sharding, NamedSharding):
        mesh = stack.sharding.mesh
        if mesh != layout.mesh and (mesh.axis_names, mesh.axis_sizes) == (
            layout.mesh.axis_names,
            layout.mesh.axis_sizes,
        ):
            return layout.on(mesh)
    return layout


def _is_value(x: Any) -> bool:
    return isinstance(x, (bool, int, float, complex, np.generic, np.ndarray, jax.Array, Padded))


def _refuse(x: PartialArray, what: str) -> NoReturn:
    raise TypeError(f"{what} needs the value, but {x!r} holds contributions that aren't reduced yet; {_REDUCE_FIRST}")


class _Refusal:
    """Stands for the value where JAX asks for it; any use says to reduce first."""

    def __init__(self, x: PartialArray):
        object.__setattr__(self, "x", x)

    def __repr__(self) -> str:
        return f"{self.x!r}, which isn't reduced yet: {_REDUCE_FIRST}"

    def __getattr__(self, name: str) -> NoReturn:
        _refuse(self.x, "this")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(self.x, "this")


# NumPy comes here for `ndarray + x` as well: by reflected operators, for an ndarray would come back.
_UFUNCS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b if isinstance(a, PartialArray) else b.__radd__(a),
    "subtract": lambda a, b: a - b if isinstance(a, PartialArray) else b.__rsub__(a),
    "multiply": lambda a, b: a * b if isinstance(a, PartialArray) else b.__rmul__(a),
    "divide": lambda a, b: a / b if isinstance(a, PartialArray) else b.__rtruediv__(a),
    "true_divide": lambda a, b: a / b if isinstance(a, PartialArray) else b.__rtruediv__(a),
    "negative": operator.neg,
    "positive": operator.pos,
}
_UNARY = "abs invert bool float int complex index iter array round"
_BINARY = "pow floordiv mod matmul divmod and or xor lshift rshift"
_OTHERS = "eq ne lt le gt ge rtruediv getitem setitem contains"


def _refusing(name: str):
    def method(self: PartialArray, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(self, name)

    method.__name__ = name
    return method


for _name in (*_UNARY.split(), *_BINARY.split(), *(f"r{n}" for n in _BINARY.split()), *_OTHERS.split()):
    setattr(PartialArray, f"__{_name}__", _refusing(f"__{_name}__"))

# Methods of the value. What speaks of devices is asked of the stack, and `hasattr` of it must stay harmless.
_OF_THE_STACK = {
    *("addressable_data", "addressable_shards", "committed", "copy_to_host_async", "device", "global_shards"),
    *("is_fully_addressable", "is_fully_replicated", "itemsize", "nbytes", "sharding"),
}
_VALUE_METHODS = frozenset(n for n in dir(jax.Array) if not n.startswith("_")) - _OF_THE_STACK
