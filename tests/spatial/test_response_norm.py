"""Local response normalization against its formula on one device."""

from __future__ import annotations

import contextlib
import re

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.inspect.collectives import read_collectives
from shardkit.spatial.pooling.response_norm import ring_local_response_norm

DPSP, HW = {"dp": 2, "sp": 4}, {"sq": 2, "sp": 4}
SETTINGS = {"alpha": 0.7, "beta": 0.75, "k": 0.5}


def formula(x, size, axis=(-1,), alpha=1e-4, beta=0.75, k=1.0):
    """As torch.nn.LocalResponseNorm writes it: pad, slide, divide by the window's size."""
    dims = [d % x.ndim for d in axis]
    window = [size if d in dims else 1 for d in range(x.ndim)]
    pads = [(size // 2, (size - 1) // 2) if d in dims else (0, 0) for d in range(x.ndim)]
    total = lax.reduce_window(x * x, 0.0, lax.add, window, (1,) * x.ndim, pads)
    return x / (k + alpha * total / size ** len(dims)) ** beta


CASES = {
    # mesh, spatial_axes, placements, shape, size, axis, permutes of the gradient
    "channels": (DPSP, {"sp": "W"}, {"dp": 0, "sp": 2}, (2, 3, 13, 6), 5, (-1,), 0),
    "even size, 5 over 4": (DPSP, {"sp": "W"}, {"sp": 1}, (2, 5, 6), 4, (-1,), 0),
    "within W": (DPSP, {"sp": "W"}, {"dp": 0, "sp": 2}, (2, 3, 14, 2), 3, (2,), 4),
    "within H and W, even size": (HW, {"sq": "H", "sp": "W"}, {"sq": 1, "sp": 2}, (1, 5, 14, 2), 4, (1, 2), None),
    "size of one": (DPSP, {"sp": "W"}, {"sp": 1}, (2, 13, 2), 1, (-1,), 0),
}


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(2)
def test_equals_the_formula(name, axis_types):
    mesh_shape, spatial, placed, shape, size, axis, permutes = CASES[name]
    mesh = sk.make_mesh(mesh_shape, axis_types=axis_types)
    x, ct = np.random.default_rng(0).normal(size=(2, *shape))
    on = lambda a: sk.shard_tensor(a, {k: sk.Shard(d) for k, d in placed.items()}, mesh, uneven="pad")  # noqa: E731
    clean = on(x)
    inside = np.zeros(clean.array.shape, bool)
    inside[tuple(slice(0, n) for n in shape)] = True
    dirty = sk.Padded(jax.device_put(np.where(inside, np.asarray(clean.array), np.nan), clean.array.sharding), shape)

    def norm(x):
        return ring_local_response_norm(x, size, **SETTINGS, axis=axis, spatial_axes=spatial, mesh=mesh)

    def run(x, ct):
        out, pull = jax.vjp(norm, x)
        return out, pull(ct)[0]

    args = (dirty, on(ct))
    with jax.set_mesh(mesh) if axis_types == "explicit" else contextlib.nullcontext():
        compiled = jax.jit(run).lower(*args).compile()
        out, grad = compiled(*args)
    want, pull = jax.vjp(lambda x: formula(x, size, axis, **SETTINGS), x)
    assert isinstance(out, sk.Padded)
    assert sk.placements(out) == sk.placements(grad) == sk.placements(clean)
    np.testing.assert_allclose(np.asarray(out), want, atol=1e-10)
    np.testing.assert_allclose(np.asarray(grad), pull(ct)[0], atol=1e-10)
    assert not np.asarray(grad.array)[~inside].any()
    report = read_collectives(compiled.as_text(), mesh)
    assert set(report.by_kind()) <= {"collective_permute"}, str(report)
    assert permutes is None or report.count() == permutes


def test_no_nan_without_k():
    """In a padded tail nothing is above and nothing below the line: its derivative must not reach neighbours."""
    mesh = sk.make_mesh({"sp": 4})
    x = 1 + np.arange(13.0).reshape(1, 13, 1)
    padded = sk.shard_tensor(x, {"sp": sk.Shard(1)}, mesh, uneven="pad")
    run = lambda x: ring_local_response_norm(x, 3, 1.0, k=0.0, axis=1, spatial_axes={"sp": "W"})  # noqa: E731
    grad = jax.jit(jax.grad(lambda x: jnp.sum(run(x).value)))(padded)
    want = jax.jit(jax.grad(lambda x: formula(x, 3, (1,), 1.0, k=0.0).sum()))(x)
    np.testing.assert_allclose(np.asarray(grad), want, atol=1e-10)


@pytest.mark.not_smoke
def test_plain_arrays_defaults_and_manual_regions():
    mesh = sk.make_mesh({"sp": 4})
    x = np.random.default_rng(0).normal(size=(2, 16, 5)).astype(np.float32)
    out = ring_local_response_norm(x, 5, spatial_axes={"sp": "W"}, mesh=mesh)
    assert isinstance(out, jax.Array)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, formula(x, 5), rtol=1e-6)
    local = lambda b: ring_local_response_norm(b, 3, axis=(1, 2), spatial_axes={"sp": 1})  # noqa: E731
    spec = P(None, "sp")
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))
    np.testing.assert_allclose(run(x), formula(x, 3, (1, 2)), rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"size": 0}, ValueError, "size=0 must be at least 1"),
        ({"size": 2.5}, ValueError, "size=2.5 must be an integer"),
        ({"axis": 4}, ValueError, "axis=4 must name dims of an array with 4 dims"),
        ({"axis": (1, -3)}, ValueError, "names a dim twice"),
        ({"x": np.ones((2, 3, 8, 2), np.int32)}, TypeError, "x holds int32; cast it to a floating dtype"),
        ({"x": np.ones((2, 3, 8, 0))}, ValueError, "dim 3 is empty"),
        ({"spatial_axes": {"sp": "D"}}, ValueError, "names dim 'D', but the dims are ['C', 'H', 'N', 'W']"),
    ],
)
def test_bad_input_is_named(changes, error, message):
    arguments = {"x": np.ones((2, 3, 8, 2)), "size": 3, "spatial_axes": {"sp": "W"}} | changes
    with pytest.raises(error, match=re.escape(message)):
        ring_local_response_norm(**arguments, mesh=sk.make_mesh({"sp": 4}))
