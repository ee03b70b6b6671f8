"""What leaves the layout: still right, and named."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from shardkit.spatial.regions import region
from tests.spatial.regions.programs import check, conv, kernels_of, plan_of, same

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 2, 16, 2))
K = kernels_of(RNG, (3, 3, 2, 2))[0]
W = {"sp": "W"}


@pytest.mark.not_smoke
def test_dims_that_are_mixed(mesh_for):
    def mixed(x, k):
        y = conv(x, k)
        flat = y.reshape(y.shape[0], -1)
        return flat @ jnp.ones((flat.shape[1], 3)), jnp.sort(y, 2), conv(y, k)

    found = check(mixed, X, K, mesh=mesh_for({"sp": 4}), axes=W)
    assert [(s.node.name, s.note) for s in found.plan.left] == [
        ("reshape", "mixes blocked dims [2]"),
        ("sort", "mixes blocked dims [2]"),
    ]
    assert found.report.count("all_gather") + found.report.count("all_reduce") >= 1


@pytest.mark.not_smoke
def test_no_rule(mesh_for):
    def scattered(x, k):
        return conv(conv(x, k).at[:, :, 3].set(0), k)

    (left,) = check(scattered, X, K, mesh=mesh_for({"sp": 4}), axes=W).plan.left
    assert left.note == "no rule for 'scatter' on blocked dims [2]"
    assert left.node.source.startswith("test_left.py:")


# Of an image in blocks of its dim 2: what stays, and what doesn't.
STAYS = {
    "transpose": lambda x: jnp.swapaxes(x, 1, 2),
    "split features": lambda x: x.reshape(2, 2, 16, 2, 1),
    "merge the first two": lambda x: x.reshape(4, 16, 2),
    "new dim": lambda x: x[..., None, :],
    "stack": lambda x: jnp.stack([x, 2 * x], 1),
    "tile": lambda x: jnp.tile(x, (1, 2, 1, 1)),
    "split": lambda x: jnp.split(x, 2, -1),
    "running sum": lambda x: jnp.cumsum(x, 1),
    "order of features": lambda x: jnp.argsort(x, -1),
    "best feature": lambda x: (jnp.argmax(x, -1), jax.lax.top_k(x, 1)),
    "take rows": lambda x: jnp.take(x, jnp.array([1, 0, 1]), 1),
    "dense": lambda x: x @ jnp.ones((2, 3)),
    "a matrix a position": lambda x: jnp.einsum("nhwc,wcd->nhwd", x, jnp.arange(64.0).reshape(16, 2, 2)),
    "every second": lambda x: x[:, ::2, ::2],
    "inner": lambda x: x[:, 1:, 1:-1],
    "rim": lambda x: jnp.pad(x, ((0, 0), (1, 1), (1, 0), (0, 0))),
    "turned": lambda x: x[:, ::-1, ::-1],
    "norm of features": lambda x: jnp.linalg.norm(x, axis=-1),
    "logsumexp": lambda x: jax.nn.logsumexp(x, axis=(1, 2)),
    "mirrored": lambda x: x[:, ::-1] + x[..., ::-1],
}


@pytest.fixture(scope="module")
def all_of_them():
    """Compiled together, once."""
    return jax.jit(lambda x: {name: fun(x) for name, fun in STAYS.items()})(X)


def test_what_stays(all_of_them, mesh_for):
    made = region(lambda x: {n: f(x) for n, f in STAYS.items()}, spatial_axes=W, mesh=mesh_for({"sp": 4}))
    assert [(s.node.name, s.note) for s in plan_of(made, X).left] == []
    same(jax.jit(made)(X), all_of_them)


def test_results_as_they_come(mesh_for):
    """Arguments handed through, constants, numbers."""

    def given(x, k):
        return {"x": x, "k": k, "three": 3.0, "ones": jnp.ones(3), "one": x[:, :, 5:6], "column": x[:, :, 5]}

    made = region(given, spatial_axes=W, mesh=mesh_for({"sp": 4}))
    same(jax.jit(made)(X, K), given(X, K))
