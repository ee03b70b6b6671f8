"""Single Flax layers, each with an input that suits it, and what a layer does: the oracle's side of the tests."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax import nnx
from jax import numpy as jnp

import shardkit as sk
from shardkit.inspect.collectives import read_collectives

F64 = jnp.float64


@dataclasses.dataclass(frozen=True)
class Make:
    """A layer that nnx and linen both have: ``Make("Conv", (2, 3, (3, 3)))(rngs)`` is the nnx one.

    nnx layers are told their input's features first, unless ``told`` is false.
    """

    name: str
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    told: bool = True

    def __call__(self, rngs: nnx.Rngs) -> nnx.Module:
        given = {} if self.name == "PReLU" else {"rngs": rngs}
        return getattr(nnx, self.name)(*self.arguments, **self.keywords, **given)

    def linen(self) -> nn.Module:
        # nnx has defaults for what linen must be told.
        told = {"BatchNorm": {"use_running_average": False}, "Dropout": {"deterministic": False}}.get(self.name, {})
        return getattr(nn, self.name)(*self.arguments[self.told :], **{**told, **self.keywords})


@dataclasses.dataclass(frozen=True)
class LayerCase:
    """``make(rngs)`` gives a layer for an input of ``shape``, whose W (or other dims) are cut over ``mesh``.

    ``placed_parameters``: they have a place in the image, so their gradients are gathered (parameters are whole).
    ``statistics``: of how many places of an image the statistics are taken each by itself.
    """

    make: Make | Callable[[nnx.Rngs], nnx.Module]
    shape: tuple[int, ...]
    mesh: tuple[tuple[str, int], ...] = (("sp", 4),)
    dims: tuple[tuple[str, str], ...] = (("sp", "W"),)
    batch_axis: str | None = None
    placed_parameters: bool = False
    statistics: int = 1

    def build(self) -> nnx.Module:
        return randomized(self.make(nnx.Rngs(0)))

    def operand(self) -> np.ndarray:
        return np.random.default_rng(1).normal(size=self.shape) + 0.5

    def plan(self) -> sk.ConvParallel:
        return sk.ConvParallel(dict(self.dims))

    def placements(self) -> dict:
        placed = {a: sk.Shard(len(self.shape) - 2 - "WHD".index(d)) for a, d in self.dims}
        return placed | ({self.batch_axis: sk.Shard(0)} if self.batch_axis else {})


def randomized(model: nnx.Module, seed: int = 7) -> nnx.Module:
    """Every parameter and statistic a random f64 number (biases aren't zero, scales not one, variances positive)."""
    rng = np.random.default_rng(seed)
    parameters, statistics = nnx.state(model, nnx.Param), nnx.state(model, nnx.BatchStat)
    nnx.update(model, jax.tree.map(lambda a: jnp.asarray(rng.normal(0.1, 0.3, a.shape), F64), parameters))
    nnx.update(model, jax.tree.map(lambda a: jnp.asarray(rng.uniform(0.5, 1.5, a.shape), F64), statistics))
    return model


def outcome(model: nnx.Module, x: Any, cotangent: Any):
    """(output, parameter gradients, input gradient, statistics afterwards) of one jitted pass, and its program."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def forward(params, x):
        merged = nnx.merge(graph, params, jax.tree.map(lambda a: a, rest))  # Variables of this trace, not the outer one
        y = merged(x)
        return y, nnx.state(merged, nnx.BatchStat)

    @jax.jit
    def run(params, x, cotangent):
        y, pull, statistics = jax.vjp(forward, params, x, has_aux=True)
        return y, *pull(cotangent), statistics

    compiled = run.lower(params, x, cotangent).compile()
    return compiled(params, x, cotangent), compiled.as_text()


def assert_close(got: Any, want: Any, tolerance: float = 1e-9) -> None:
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(1, np.abs(want).max()))


def assert_placed(case: LayerCase, mesh: Any, *results: Any) -> None:
    """A Padded each, placed as the input."""
    # On an axis of one device the compiler may call the same array replicated.
    several = [n > 1 for n in mesh.devices.shape]
    placed = sk.Layout(mesh, case.placements()).placements
    for result in results:
        assert isinstance(result, sk.Padded)
        assert list(itertools.compress(sk.placements(result), several)) == list(itertools.compress(placed, several))


def assert_little_travels(case: LayerCase, program: str, mesh: Any, parameters: Any) -> None:
    """Halos, and sums of statistics and of the gradients of ``parameters``; no activation is gathered."""
    report = read_collectives(program, mesh)
    gathered = [shape for e in report if e.kind == "all_gather" for _, shape in e.shapes]
    assert case.placed_parameters or not gathered, str(report)
    # Of parameters, no activation: they have no batch dim, or a short one.
    assert all(len(shape) < len(case.shape) or shape[0] == 1 < case.shape[0] for shape in gathered), str(report)
    assert report.count("all_to_all") == 0, str(report)
    # The only sums are those of parameter gradients and of statistics (two numbers a feature and image).
    statistics = 2 * case.statistics * case.shape[0] * case.shape[-1] * 8
    limit = statistics + sum(a.nbytes for a in jax.tree.leaves(parameters))  # they may be joined
    assert all(e.result_bytes <= limit for e in report if e.kind == "all_reduce"), str(report)


def _maker(name: str) -> Callable[..., Make]:
    return lambda *arguments, **keywords: Make(name, arguments, {**keywords, "param_dtype": F64})


conv, up = _maker("Conv"), _maker("ConvTranspose")
batch_norm, group_norm, instance_norm = _maker("BatchNorm"), _maker("GroupNorm"), _maker("InstanceNorm")
layer_norm, rms_norm = _maker("LayerNorm"), _maker("RMSNorm")


def dropout(rate: float, **keywords: Any) -> Make:
    return Make("Dropout", (rate,), keywords, told=False)


SPACE = {"reduction_axes": (1, 2, 3), "feature_axes": (1, 2, 3)}
SP2, SP8, DPSP, GRID = (("sp", 2),), (("sp", 8),), (("dp", 2), ("sp", 4)), (("sh", 2), ("sw", 4))
HW = (("sh", "H"), ("sw", "W"))

LAYERS = {
    # Every spelling of padding that Flax has.
    "conv SAME": LayerCase(conv(2, 3, (3, 3)), (2, 4, 13, 2)),
    "conv VALID": LayerCase(conv(2, 3, 3, padding="VALID"), (2, 13, 2), SP8),
    "conv CIRCULAR, even kernel": LayerCase(conv(2, 3, (3, 4), padding="CIRCULAR"), (2, 4, 13, 2)),
    "conv CIRCULAR, dilated": LayerCase(conv(2, 3, 3, padding="CIRCULAR", kernel_dilation=2), (2, 5, 2)),
    "conv REFLECT": LayerCase(conv(2, 3, 4, padding="REFLECT"), (2, 13, 2)),
    "conv REFLECT, as wide as it may be": LayerCase(conv(2, 3, 9, padding="REFLECT"), (2, 5, 2)),
    "conv CAUSAL": LayerCase(conv(2, 3, 3, padding="CAUSAL", kernel_dilation=2), (2, 13, 2)),
    "conv int padding": LayerCase(conv(2, 3, (3, 3), padding=2), (2, 3, 13, 2)),
    "conv padding, an int a dim": LayerCase(conv(2, 3, (3, 3), padding=[0, 2]), (2, 3, 13, 2)),
    "conv pairs": LayerCase(conv(2, 3, (3, 3), padding=[(0, 1), (3, 0)]), (2, 3, 13, 2)),
    # The rest of a convolution.
    "conv strides": LayerCase(conv(2, 3, (3, 4), strides=(1, 3)), (2, 4, 13, 2)),
    "conv one stride for all": LayerCase(conv(2, 3, (4, 4), strides=2, padding="VALID"), (2, 4, 29, 2)),
    "conv groups": LayerCase(conv(4, 6, 3, feature_group_count=2), (2, 13, 4), DPSP, batch_axis="dp"),
    "conv input dilation": LayerCase(conv(2, 3, 3, input_dilation=2, padding=2), (2, 13, 2)),
    "conv mask, no bias": LayerCase(
        conv(2, 3, 3, mask=jnp.arange(18.0).reshape(3, 2, 3) % 2, use_bias=False), (2, 13, 2)
    ),
    "conv several batch dims": LayerCase(conv(2, 3, 3), (2, 3, 13, 2)),
    "conv no batch dim": LayerCase(conv(2, 3, (3, 3)), (4, 13, 2)),
    "conv padded batch dim among several": LayerCase(conv(2, 3, 3), (3, 2, 13, 2), DPSP, batch_axis="dp"),
    "conv H and W": LayerCase(conv(2, 3, (3, 3)), (2, 5, 13, 2), GRID, HW),
    "conv volume": LayerCase(conv(2, 3, (3, 1, 2)), (1, 5, 2, 13, 2), GRID, (("sh", "D"), ("sw", "W"))),
    # Transposed ones.
    "up SAME": LayerCase(up(2, 3, (2, 2), strides=2), (2, 3, 13, 2)),
    "up VALID": LayerCase(up(2, 3, 5, strides=3, padding="VALID"), (2, 13, 2)),
    "up VALID, two devices": LayerCase(up(2, 3, 3, padding="VALID"), (2, 5, 2), SP2),
    "up int padding": LayerCase(up(2, 3, (3, 3), strides=(1, 2), padding=1), (2, 3, 13, 2)),
    "up pairs": LayerCase(up(2, 3, 3, strides=2, padding=[(2, 0)]), (2, 13, 2)),
    "up CIRCULAR, odd kernel": LayerCase(up(2, 3, 3, strides=2, padding="CIRCULAR"), (2, 13, 2)),
    "up CIRCULAR, even kernel": LayerCase(up(2, 3, (2, 4), strides=(1, 2), padding="CIRCULAR"), (2, 3, 13, 2)),
    "up CIRCULAR, transposed even kernel": LayerCase(
        up(2, 3, 4, strides=3, padding="CIRCULAR", transpose_kernel=True), (2, 13, 2)
    ),
    "up CIRCULAR, kernel longer than the circle": LayerCase(
        up(2, 3, 4, strides=1, padding="CIRCULAR", kernel_dilation=2), (2, 5, 2)
    ),
    "up transposed kernel, mask": LayerCase(
        up(2, 3, 4, strides=2, transpose_kernel=True, mask=jnp.arange(24.0).reshape(4, 3, 2) % 3), (2, 13, 2)
    ),
    "up dilated, no bias": LayerCase(up(2, 3, 3, strides=2, kernel_dilation=2, use_bias=False), (2, 13, 2)),
    "up several batch dims": LayerCase(up(2, 3, 3, strides=2), (2, 3, 13, 2)),
    "up no batch dim, H and W": LayerCase(up(2, 3, (3, 2), strides=2), (5, 13, 2), GRID, HW),
    # Norms.
    "batch norm": LayerCase(batch_norm(2), (4, 3, 13, 2), DPSP, batch_axis="dp"),
    "batch norm, exact variance": LayerCase(batch_norm(2, use_fast_variance=False, momentum=0.5), (2, 3, 13, 2)),
    "batch norm, frozen": LayerCase(batch_norm(2, use_running_average=True), (2, 3, 13, 2)),
    "batch norm, neither scale nor bias": LayerCase(batch_norm(2, use_scale=False, use_bias=False), (2, 13, 2), SP8),
    "batch norm, H and W": LayerCase(batch_norm(2), (2, 5, 13, 2), GRID, HW),
    "batch norm, padded batch": LayerCase(batch_norm(2, use_fast_variance=False), (3, 13, 2), DPSP, batch_axis="dp"),
    "group norm": LayerCase(group_norm(4, num_groups=2), (2, 3, 13, 4)),
    "group norm, group size, exact variance": LayerCase(
        group_norm(6, num_groups=None, group_size=2, use_fast_variance=False), (4, 13, 6), DPSP, batch_axis="dp"
    ),
    "group norm, H and W, no scale": LayerCase(group_norm(4, num_groups=2, use_scale=False), (2, 5, 13, 4), GRID, HW),
    "group norm, padded batch": LayerCase(group_norm(4, num_groups=2), (3, 13, 4), DPSP, batch_axis="dp"),
    "instance norm": LayerCase(instance_norm(3), (4, 3, 13, 3), DPSP, batch_axis="dp"),
    "instance norm, exact variance": LayerCase(
        instance_norm(3, use_fast_variance=False, use_bias=False), (2, 13, 3), SP2
    ),
    "layer norm": LayerCase(layer_norm(4), (4, 3, 13, 4), DPSP, batch_axis="dp"),
    "layer norm, exact variance, padded batch": LayerCase(
        layer_norm(4, use_fast_variance=False), (3, 13, 4), DPSP, batch_axis="dp"
    ),
    "layer norm, no epsilon": LayerCase(layer_norm(4, epsilon=0.0), (2, 13, 4)),
    "layer norm of the image": LayerCase(layer_norm(3 * 13 * 2, **SPACE), (2, 3, 13, 2), placed_parameters=True),
    "layer norm of the image, exact variance, H and W": LayerCase(
        layer_norm(5 * 13 * 2, use_fast_variance=False, **SPACE), (2, 5, 13, 2), GRID, HW, placed_parameters=True
    ),
    "layer norm of the image, scale over features, padded batch": LayerCase(
        layer_norm(2, reduction_axes=(1, -2, -1)), (3, 3, 13, 2), DPSP, batch_axis="dp"
    ),
    "layer norm over features, scale over space": LayerCase(
        layer_norm(13 * 4, feature_axes=(-2, -1), use_bias=False), (2, 13, 4), SP8, placed_parameters=True
    ),
    "layer norm of H, W is cut": LayerCase(
        layer_norm(5 * 13, reduction_axes=1, feature_axes=(1, 2)), (2, 5, 13, 2), GRID, HW, placed_parameters=True
    ),
    "layer norm of the batch": LayerCase(
        layer_norm(2, reduction_axes=(0, 1, 2), use_scale=False), (3, 13, 2), DPSP, batch_axis="dp"
    ),
    "rms norm": LayerCase(rms_norm(4), (4, 3, 13, 4), DPSP, batch_axis="dp"),
    "rms norm, no epsilon, padded batch": LayerCase(rms_norm(4, epsilon=0.0), (3, 13, 4), DPSP, batch_axis="dp"),
    "rms norm of the image": LayerCase(rms_norm(3 * 13 * 2, **SPACE), (2, 3, 13, 2), placed_parameters=True),
    "rms norm of the image, H and W, no scale": LayerCase(
        rms_norm(2, reduction_axes=(1, 2, 3), use_scale=False), (2, 5, 13, 2), GRID, HW
    ),
    # Element by element.
    "dropout": LayerCase(dropout(0.5), (4, 3, 13, 2), DPSP, batch_axis="dp"),
    "dropout of whole channels": LayerCase(dropout(0.5, broadcast_dims=(1, 2)), (3, 3, 13, 8), DPSP, batch_axis="dp"),
    "dropout, evaluation": LayerCase(dropout(0.5, deterministic=True), (2, 13, 2)),
    "prelu": LayerCase(Make("PReLU", (), {"param_dtype": F64}, told=False), (4, 3, 13, 2), DPSP, batch_axis="dp"),
}
