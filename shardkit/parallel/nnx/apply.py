"""Plans put on the layers of an nnx model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax.core import Tracer
from jax.sharding import NamedSharding

from shardkit.attention import FlaxAttention, flax_attention_fn
from shardkit.meshes import holds_arrays
from shardkit.optim.sharded_params import stage3_layout
from shardkit.parallel.around import Around
from shardkit.parallel.claims import Claims
from shardkit.parallel.matching import Framework, Matcher, batch_axes_of
from shardkit.parallel.nnx.dropout import ParallelDropout
from shardkit.parallel.nnx.embedding import ParallelEmbed
from shardkit.parallel.nnx.norms import Averaging
from shardkit.parallel.nnx.regions import InRegion, holds_layers
from shardkit.parallel.nnx.spatial import SPATIAL_LAYERS
from shardkit.parallel.nnx.tensor import ATTENTION, TENSOR_LAYERS, check_own, outputs_of, share_of, share_out
from shardkit.parallel.nnx.wrapping import is_wrapped, own_class, wrap
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
from shardkit.parallel.shares import as_part, check_axes, check_divides, check_heads, unit_plans
from shardkit.parallel.steps import around_layer
from shardkit.parallel.tensor.layers import Sharing
from shardkit.placements import AnyMesh, Layout

_POSITIONWISE = (nnx.LayerNorm, nnx.RMSNorm, nnx.Dropout)
_TWINS = {twin: base for base, twin in SPATIAL_LAYERS.items()} | {
    ParallelDropout: nnx.Dropout,
    ParallelEmbed: nnx.Embed,
}


def _kind_of(layer: Any) -> type:
    cls = own_class(layer)
    return _TWINS.get(cls, cls)


def _spatial_dims(layer: Any) -> int | None:
    return len(layer.kernel_size) if hasattr(layer, "kernel_size") else None


def _holds_spatial(layer: Any) -> bool:
    return holds_layers(layer, tuple(SPATIAL_LAYERS), _kind_of)


NNX = Framework(
    "nnx", tuple(SPATIAL_LAYERS), TENSOR_LAYERS, ATTENTION, _POSITIONWISE, _kind_of, _spatial_dims, _holds_spatial
)


def apply_plans(
    model: nnx.Module, plans: Mapping[PathPattern, tuple[LayerPlan, ...]], mesh: AnyMesh, strict: bool
) -> dict[int, NamedSharding]:
    """Put plans on a model's layers, in place; no array moves.

    Returns:
      Where each variable goes, by its ``id``.
    """
    layers = named_layers(model)
    alone = {path: layer for path, (_, layer) in layers.items()}
    matcher = Matcher(plans, NNX, strict)
    chosen = {path: matcher.plans_for(paths, layer, lambda: alone) for path, (paths, layer) in layers.items()}
    matcher.check_used(alone)
    chosen = _regions_spread(chosen, alone)
    chosen = {path: items for path, items in _heads_cut(chosen, alone, mesh).items() if items}
    claims = _claims(chosen, alone, mesh)
    batch = batch_axes_of(plans.values())
    for layer in alone.values():
        if own_class(layer) is nnx.Dropout:
            layer.__class__ = ParallelDropout  # what's around it is put there anew below
    for path, layer in alone.items():
        knows = NNX.kind_of(layer) in ATTENTION or isinstance(layer, nnx.BatchNorm)  # of a spread batch, plan or none
        if knows and path not in chosen and not is_wrapped(layer):
            _put(layer, (), mesh, path, batch)
    for path, items in chosen.items():
        _put(alone[path], items, mesh, path, batch)
    columns = find_plan((p for items in chosen.values() for p in items), ColWiseParallel)
    if columns is not None and not is_wrapped(model):
        wrap(model, Around(outermost=True))
    return _places(model, mesh, claims, chosen, alone)


def named_layers(model: nnx.Module) -> dict[str, tuple[tuple[str, ...], nnx.Module]]:
    """Every layer by the first path that leads to it, with all such paths (shared layers have several)."""
    paths: dict[int, list[str]] = {}
    found: dict[int, nnx.Module] = {}

    def visit(node: Any, path: tuple[Any, ...], above: tuple[int, ...]) -> None:
        if id(node) in above or not nnx.graphlib.is_node(node):
            return
        if isinstance(node, nnx.Module):
            found[id(node)] = node
            paths.setdefault(id(node), []).append(join_path(path))
        for key, child in nnx.graphlib.iter_children(node):
            visit(child, (*path, key), (*above, id(node)))

    visit(model, (), ())
    return {paths[i][0]: (tuple(paths[i]), node) for i, node in found.items()}


Chosen = Mapping[str, tuple[LayerPlan, ...]]


def _regions_spread(chosen: Chosen, layers: Mapping[str, Any]) -> dict[str, tuple[LayerPlan, ...]]:
    """``ConvParallel`` on a whole module told to its layers, too: they run one by one where it can't be a region."""
    result = dict(chosen)
    for path, items in chosen.items():
        plan = find_plan(items, ConvParallel)
        if plan is None or NNX.kind_of(layers[path]) in SPATIAL_LAYERS:
            continue
        for inner, layer in layers.items():
            inside = not path or inner.startswith(f"{path}/")
            fits = NNX.kind_of(layer) in SPATIAL_LAYERS and NNX.problem(plan, layer) is None
            if inner != path and inside and fits and find_plan(result.get(inner, ()), ConvParallel) is None:
                result[inner] = (*result.get(inner, ()), plan)
    return result


def _heads_cut(chosen: Chosen, layers: Mapping[str, Any], mesh: AnyMesh) -> dict[str, tuple[LayerPlan, ...]]:
    """A column or row plan on attention told as plans of the layers within: heads are cut.

    Raises:
      ValueError: heads that can't be dealt out; a layer within that has another plan of its own.
    """
    result = dict(chosen)
    for path, items in chosen.items():
        plan = find_plan(items, (ColWiseParallel, RowWiseParallel))
        ring = find_plan(items, RingAttention)
        attention = layers[path]
        if ring is not None:
            _check_attention(attention.attention_fn, ring, path)
        if ring is not None and ring.backend == "all_to_all":
            check_heads(path, attention.num_heads, attention.num_heads, ring, mesh.shape[ring.axis])
        if plan is None or NNX.kind_of(attention) not in ATTENTION:
            continue
        check_heads(path, attention.num_heads, attention.num_kv_heads, plan, mesh.shape[plan.axis])
        check_axes(path, plan, ring)
        for name, own in unit_plans(plan).items():
            inside = below(path, name)
            result[inside] = as_part(inside, chosen.get(inside, ()), path, items, own)
    return result


def _claims(chosen: Chosen, layers: Mapping[str, Any], mesh: AnyMesh) -> Claims:
    """What column and row plans say of parameters.

    Raises:
      ValueError: sizes that don't divide; plans that fight over a parameter.
    """
    claims = Claims()
    for path, items in chosen.items():
        plan, layer = find_plan(items, (ColWiseParallel, RowWiseParallel)), layers[path]
        if plan is None or NNX.kind_of(layer) in ATTENTION:
            continue
        check_own(layer, plan, path)
        share = share_of(layer, plan)
        for name in share.dims:
            variable, dim = getattr(layer, name, None), share.from_back(name)
            if dim is None or variable is None:
                continue
            shape = tuple(variable.shape)
            check_divides(path, name, shape, dim, share, plan, mesh.shape[plan.axis])
            claims.add(id(variable), below(path, name), plan.axis, dim, f"{plan} on {path!r}")
    return claims


def _put(layer: Any, items: tuple[LayerPlan, ...], mesh: AnyMesh, path: str, batch: tuple[str, ...]) -> None:
    """One layer changed, in place."""
    wrap(layer, Around())  # what an earlier plan has put around it goes
    conv = find_plan(items, ConvParallel)
    plan = find_plan(items, (ColWiseParallel, RowWiseParallel))
    sequence, ring = find_plan(items, SequenceParallel), find_plan(items, RingAttention)
    attends = NNX.kind_of(layer) in ATTENTION
    if conv is not None and NNX.kind_of(layer) in SPATIAL_LAYERS:
        layer.__class__ = SPATIAL_LAYERS[NNX.kind_of(layer)]
        layer.shardkit_plan = Applied(conv, mesh, path)
    if plan is not None and not attends:
        sharing = Sharing(plan.axis, mesh, path, None if sequence is None else sequence.dim, batch)
        share_out(layer, share_of(layer, plan), sharing)
    if ring is not None:
        layer.attention_fn = flax_attention_fn(ring.axis, backend=ring.backend, mesh=mesh, causal=ring.causal)
    outputs = outputs_of(layer) if plan is not None and not attends else None
    table = isinstance(layer, nnx.Embed)
    around = around_layer(items, mesh, path, outputs=outputs, table=table, attends=attends, parameters=_own_parameters)
    if conv is not None and NNX.kind_of(layer) not in SPATIAL_LAYERS:
        around = dataclasses.replace(around, instead=InRegion(Applied(conv, mesh, path)))
    elif isinstance(layer, nnx.BatchNorm):
        around = dataclasses.replace(around, instead=Averaging())
    wrap(layer, around)


def _own_parameters(layer: Any) -> list[Any] | None:
    if layer.promote_dtype is not promote_dtype:
        return None
    return [x for x in (layer.kernel, layer.bias) if x is not None]


def _check_attention(function: Any, ring: RingAttention, path: str) -> None:
    if function is not nnx.dot_product_attention and not isinstance(function, FlaxAttention):
        raise ValueError(f"{ring} on {path!r}: the layer has its own attention_fn; leave out one of the two")


def _places(
    model: nnx.Module, mesh: AnyMesh, claims: Claims, chosen: Chosen, layers: Mapping[str, Any]
) -> dict[int, NamedSharding]:
    """Where each variable goes: as claimed, sharded on top of that under ``FullyShard``, else whole.

    What nobody claims stays where it is, if it's on this mesh already: an earlier call may have put it there.
    """
    sharded: dict[int, FullyShard] = {}
    for path, items in chosen.items():
        fully = find_plan(items, FullyShard)
        if fully is not None:
            for _, variable in variables_of(layers[path]):
                before = sharded.setdefault(id(variable), fully)
                if before.axis != fully.axis:
                    raise ValueError(f"{before} and {fully} fight over a parameter of {path!r}; leave out one of them")
    places = {}
    for _, variable in variables_of(model):
        if isinstance(variable, nnx.RngState):
            # Small, and on no mesh: a function may close over it, and update it where axes are manual.
            continue
        value = variable.get_raw_value()
        layout = claims.layout(id(variable), mesh, len(value.shape))
        fully = sharded.get(id(variable))
        if layout is None and fully is None and _lives_on(value, mesh):
            continue
        layout = layout or Layout(mesh, {}).resolved(len(value.shape))
        if fully is not None and isinstance(variable, nnx.Param) and value.size >= max(fully.min_size, 1):
            layout = stage3_layout(layout, value.shape, fully.axis, fully.first_dim)
        places[id(variable)] = layout.sharding
    return places


def variables_of(model: nnx.Module) -> Iterator[tuple[str, nnx.Variable[Any]]]:
    """Every variable that holds an array, once, with its first path."""
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable) and hasattr(node.get_raw_value(), "shape"):
            yield join_path(path), node


def _lives_on(value: Any, mesh: AnyMesh) -> bool:
    sharding = getattr(value, "sharding", None)
    return isinstance(sharding, NamedSharding) and sharding.mesh == mesh


def place(model: nnx.Module, places: Mapping[int, NamedSharding]) -> None:
    """Arrays put where they go; abstract ones (``nnx.eval_shape``), or on described devices, say where that is."""
    for _, variable in variables_of(model):
        value, sharding = variable.get_raw_value(), places.get(id(variable))
        if sharding is None or isinstance(value, Tracer):
            continue
        if isinstance(value, jax.Array):
            if holds_arrays(sharding.mesh):
                variable.set_raw_value(jax.device_put(value, sharding))
        else:
            variable.set_raw_value(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding))
