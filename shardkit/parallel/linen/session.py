"""One ``init`` or ``apply`` of a linen model under a plan: each layer's call is intercepted and asked for its plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flax import linen as nn
from flax.linen.dtypes import promote_dtype

from shardkit.attention import flax_attention_fn
from shardkit.parallel.claims import Claims
from shardkit.parallel.layers.dropout import linen_dropout
from shardkit.parallel.layers.setting import setting
from shardkit.parallel.linen.norms import spread_batch_norm
from shardkit.parallel.linen.spatial import SPATIAL_LAYERS
from shardkit.parallel.linen.tensor import ATTENTION, TENSOR_LAYERS, outputs_of, run_shared, share_of
from shardkit.parallel.linen.wrapping import plain_class
from shardkit.parallel.matching import Framework, Matcher, batch_axes_of
from shardkit.parallel.paths import PathPattern, below, join_path
from shardkit.parallel.plans import (
    Applied,
    ColWiseParallel,
    ConvParallel,
    FullyShard,
    LayerPlan,
    RingAttention,
    RowWiseParallel,
    SequenceParallel,
)
from shardkit.parallel.plans.base import find_plan
from shardkit.parallel.shares import WeightPlan, as_part, check_axes, check_divides, check_heads, unit_plans
from shardkit.parallel.steps import around_layer
from shardkit.parallel.tensor.layers import Sharing
from shardkit.placements import AnyMesh

_POSITIONWISE = (nn.LayerNorm, nn.RMSNorm, nn.Dropout)


def _spatial_dims(module: Any) -> int | None:
    size = getattr(module, "kernel_size", None)
    return None if size is None else 1 if isinstance(size, int) else len(size)


LINEN = Framework("linen", tuple(SPATIAL_LAYERS), TENSOR_LAYERS, ATTENTION, _POSITIONWISE, plain_class, _spatial_dims)


def _own_parameters(module: Any) -> list[Any] | None:
    if getattr(module, "promote_dtype", promote_dtype) is not promote_dtype:
        return None
    names = [name for name in ("kernel", "bias") if module.has_variable("params", name)]
    return [nn.unbox(module.get_variable("params", name)) for name in names] or None


class Session:
    """An interceptor for ``flax.linen.intercept_methods``.

    Attributes:
      claims: what plans say of parameters, by path.
      sharded: paths of layers whose parameters are fully sharded, with the plan.
      layers: every layer that was called, by path.
    """

    def __init__(self, plans: Mapping[PathPattern, tuple[LayerPlan, ...]], mesh: AnyMesh, strict: bool):
        self._mesh, self._batch = mesh, batch_axes_of(plans.values())
        self._matcher = Matcher(plans, LINEN, strict)
        # of layers within attention that is cut as a unit: its path, its plans, the layer's part of them
        self._within: dict[str, tuple[str, tuple[LayerPlan, ...], WeightPlan]] = {}
        self._chosen: dict[str, tuple[LayerPlan, ...]] = {}
        self.claims: Claims = Claims()
        self.sharded: dict[str, FullyShard] = {}
        self.layers: dict[str, nn.Module] = {}

    def __call__(self, run: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        module, method = context.module, context.method_name
        scores = method == "attend" and isinstance(module, nn.Embed)
        if method != "__call__" and not scores:
            return run(*args, **kwargs)
        path = join_path(module.path)
        items = self._plans(path, module)
        attends = plain_class(module) in ATTENTION
        if not items and not attends:
            return self._run(module, method, path, items, run, args, kwargs)
        plan = find_plan(items, (ColWiseParallel, RowWiseParallel))
        shares = plan is not None and plain_class(module) in TENSOR_LAYERS
        outputs = outputs_of(module) if shares else None
        table = isinstance(module, nn.Embed)
        around = around_layer(
            items, self._mesh, path, outputs=outputs, table=table, attends=attends, parameters=_own_parameters
        )

        def own(*args: Any, **kwargs: Any) -> Any:
            return self._run(module, method, path, items, run, args, kwargs)

        # A layer that is being made may be shown a small batch, which no axis divides.
        return own(*args, **kwargs) if module.is_initializing() or scores else around(module, own, args, kwargs)

    def check_used(self, others: Mapping[str, Any]) -> None:
        """Raises ValueError for a pattern that no layer has been found for, here or in ``others``."""
        self._matcher.check_used({**self.layers, **others})

    def check_weights(self, others: Mapping[str, Any]) -> None:
        """The same of patterns whose layers have parameters: others may name layers that only training calls."""
        self._matcher.check_used({**self.layers, **others}, (ColWiseParallel, RowWiseParallel, ConvParallel))

    def _plans(self, path: str, module: nn.Module) -> tuple[LayerPlan, ...]:
        if path not in self._chosen:
            self.layers[path] = module
            items = self._matcher.plans_for((path,), module, lambda: self.layers)
            if path in self._within:
                items = as_part(path, items, *self._within[path])
            self._chosen[path] = items
            fully = find_plan(items, FullyShard)
            if fully is not None:
                self.sharded[path] = fully
            plan = find_plan(items, (ColWiseParallel, RowWiseParallel))
            if plan is not None and plain_class(module) in ATTENTION:
                heads = module.num_heads  # type: ignore[attr-defined]
                check_axes(path, plan, find_plan(items, RingAttention))
                check_heads(path, heads, heads, plan, self._mesh.shape[plan.axis])
                self._within |= {below(path, name): (path, items, own) for name, own in unit_plans(plan).items()}
            ring = find_plan(items, RingAttention)
            if ring is not None and ring.backend == "all_to_all":
                heads = module.num_heads  # type: ignore[attr-defined]
                check_heads(path, heads, heads, ring, self._mesh.shape[ring.axis])
        return self._chosen[path]

    def _run(
        self, module: Any, method: str, path: str, items: tuple[LayerPlan, ...], run: Any, args: Any, kwargs: Any
    ) -> Any:
        conv = find_plan(items, ConvParallel)
        if conv is not None:

            def plain(*new: Any, **named: Any) -> Any:
                return run(*new, **named) if new or named else run(*args, **kwargs)

            return SPATIAL_LAYERS[plain_class(module)](module, Applied(conv, self._mesh, path), plain, *args, **kwargs)
        if plain_class(module) is nn.Dropout:
            return linen_dropout(module, *args, **kwargs)
        if isinstance(module, nn.BatchNorm):
            return spread_batch_norm(module, run, *args, **kwargs)
        ring = find_plan(items, RingAttention)
        if ring is not None:
            fn = flax_attention_fn(ring.axis, backend=ring.backend, mesh=self._mesh, causal=ring.causal)
            if module.attention_fn is not nn.dot_product_attention:
                raise ValueError(f"{ring} on {path!r}: the layer has its own attention_fn; leave out one of the two")
            if module.is_initializing():
                return run(*args, **kwargs)
            with setting(module, "attention_fn", fn):
                return run(*args, **kwargs)
        plan = find_plan(items, (ColWiseParallel, RowWiseParallel))
        if plan is None or plain_class(module) not in TENSOR_LAYERS:
            return run(*args, **kwargs)
        share = share_of(module, plan)
        if module.is_initializing():
            result = run(*args, **kwargs)
            self._claim(module, path, plan, share)
            return result
        self._claim(module, path, plan, share)
        sequence = find_plan(items, SequenceParallel)
        sharing = Sharing(plan.axis, self._mesh, path, None if sequence is None else sequence.dim, self._batch)
        return run_shared(module, method, plan, share, sharing, run, args, kwargs)

    def _claim(self, module: nn.Module, path: str, plan: Any, share: Any) -> None:
        for name in share.dims:
            dim = share.from_back(name)
            if dim is None or not module.has_variable("params", name):
                continue
            shape = tuple(nn.unbox(module.get_variable("params", name)).shape)
            check_divides(path, name, shape, dim, share, plan, self._mesh.shape[plan.axis])
            full = below(path, name)
            self.claims.add(full, full, plan.axis, dim, f"{plan} on {path!r}")
