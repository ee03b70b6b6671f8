"""Which dim of each of a layer's parameters a column or row plan cuts: numbers only, for nnx and linen alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardkit.parallel.plans import ColWiseParallel, LayerPlan, RowWiseParallel, SequenceParallel
from shardkit.parallel.plans.base import find_plan
from shardkit.parallel.tensor.layers import column_letter, row_letter
from shardkit.parallel.tensor.product import Letters

WeightPlan = ColWiseParallel | RowWiseParallel
Plans = tuple[LayerPlan, ...]


@dataclasses.dataclass(frozen=True)
class Share:
    """What a plan cuts of a layer.

    Attributes:
      dims: of each parameter by name, the dim that is cut; None: whole.
      ranks: of each parameter, how many dims it has in one layer (layers may be stacked along more, before them).
      says: what that dim is, for messages.
    """

    dims: Mapping[str, int | None]
    says: str
    ranks: Mapping[str, int]

    def from_back(self, name: str) -> int | None:
        """The dim that's cut of a parameter, counted from the back."""
        dim = self.dims[name]
        return None if dim is None else dim - self.ranks[name]

    @property
    def weight_dim(self) -> int:
        """What is cut of the weight itself, the first of the parameters."""
        dim = next(iter(self.dims.values()))
        assert dim is not None
        return dim


def of_linear(plan: WeightPlan, inputs: int = 1, outputs: int = 1, batch: int = 0) -> Share:
    """A kernel ``[batch.., in.., out..]`` with a bias ``[batch.., out..]``: the first dim that goes in, or comes out.

    >>> of_linear(ColWiseParallel()).dims, of_linear(RowWiseParallel(), inputs=2).dims
    ({'kernel': 1, 'bias': 0}, {'kernel': 0, 'bias': None})
    """
    ranks = {"kernel": batch + inputs + outputs, "bias": batch + outputs}
    if isinstance(plan, ColWiseParallel):
        return Share({"kernel": batch + inputs, "bias": batch}, "output features", ranks)
    return Share({"kernel": batch, "bias": None}, "input features", ranks)


def of_embedding(plan: WeightPlan) -> Share:
    """A table ``[vocabulary, features]``.

    >>> of_embedding(RowWiseParallel()).dims
    {'embedding': 0}
    """
    if isinstance(plan, ColWiseParallel):
        return Share({"embedding": 1}, "features", {"embedding": 2})
    return Share({"embedding": 0}, "vocabulary", {"embedding": 2})


def of_einsum(plan: WeightPlan, text: str, kernel_shape: tuple[int, ...], bias_shape: tuple[int, ...] | None) -> Share:
    """A kernel whose dims are letters of an einsum, and a bias of those of them that the result has.

    Raises:
      ValueError: the einsum has no letter to cut.

    >>> of_einsum(ColWiseParallel(), "bsd,dnh->bsnh", (8, 4, 2), (4, 2)).dims
    {'kernel': 1, 'bias': 0}
    """
    # An ellipsis stands for dims of activations only, however many: none will do here.
    letters = Letters.of_einsum(text.replace("...", ""), 0, len(kernel_shape))
    find: Callable[[Letters], str | None] = column_letter if isinstance(plan, ColWiseParallel) else row_letter
    letter = find(letters)
    if letter is None:
        raise ValueError(f"{plan} finds nothing to cut in the einsum {text!r}")
    kept = [c for c in letters.out if c in letters.rhs]
    fits = bias_shape is not None and tuple(kernel_shape[letters.rhs.index(c)] for c in kept) == tuple(bias_shape)
    bias = kept.index(letter) if fits and letter in kept else None
    what = "output features" if isinstance(plan, ColWiseParallel) else "input features"
    ranks = {"kernel": len(kernel_shape), "bias": len(kept)}
    return Share({"kernel": letters.rhs.index(letter), "bias": bias}, f"{what} ({letter!r} of {text!r})", ranks)


def check_divides(path: str, name: str, shape: tuple[int, ...], dim: int, share: Share, plan: Any, size: int) -> None:
    """Raises ValueError where a parameter's dim doesn't divide: a parameter keeps its shape."""
    if shape[dim] % size:
        raise ValueError(
            f"{plan} cuts the {share.says} of {path!r} over mesh axis {plan.axis!r}, but its {size} devices don't "
            f"divide {shape[dim]} ({name} has shape {tuple(shape)}); make it a multiple of {size}, or leave the "
            "layer out of the plan"
        )


def check_heads(path: str, heads: int, kv_heads: int, plan: Any, size: int) -> None:
    """Raises ValueError where heads can't be dealt out."""
    if heads % size or kv_heads % size:
        what = f"{heads} heads" + (f" and {kv_heads} key/value heads" if kv_heads != heads else "")
        fewer = "are fewer than" if min(heads, kv_heads) < size else "can't be dealt out evenly over"
        raise ValueError(
            f"{plan} on {path!r}: its {what} {fewer} the {size} devices of mesh axis {plan.axis!r}; use a smaller axis "
            "(or more heads), or leave this layer out of the plan"
        )


def check_axes(path: str, plan: Any, ring: Any) -> None:
    """Raises ValueError where one mesh axis is to cut heads and the sequence of attention."""
    if ring is not None and ring.axis == plan.axis:
        raise ValueError(
            f"layer {path!r} gets two plans that fight, {plan} and {ring}: mesh axis {plan.axis!r} can cut the heads "
            "or the sequence of one layer; use another axis for one of them"
        )


def as_part(path: str, items: Sequence[LayerPlan], above: str, unit: Sequence[LayerPlan], own: WeightPlan) -> Plans:
    """The plans of a layer within attention that is cut as a unit.

    Args:
      path: the layer's.
      items: what patterns give it.
      above: the path of the attention.
      unit: the plans of the attention.
      own: the layer's part of them.

    Raises:
      ValueError: it has a column or row plan that says otherwise.
    """
    whole = find_plan(unit, (ColWiseParallel, RowWiseParallel))
    given = find_plan(items, (ColWiseParallel, RowWiseParallel))
    if given not in (None, whole, own):
        raise ValueError(
            f"layer {path!r} gets two plans that fight: {given}, and {own} as part of {above!r} ({whole}); leave out "
            "one of them"
        )
    sequence = find_plan(unit, SequenceParallel)
    others = tuple(p for p in items if p.part not in ("weight", "sequence"))
    return (*others, own) if sequence is None else (*others, own, sequence)


def unit_plans(plan: WeightPlan) -> dict[str, WeightPlan]:
    """Attention as a unit: its heads are cut, so what makes them is cut by column, and what takes them in by row."""
    column, row = ColWiseParallel(plan.axis), RowWiseParallel(plan.axis)
    return {"query": column, "key": column, "value": column, "out": row}
