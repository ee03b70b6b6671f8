"""Stage 3: when sharded parameters are put together, and what that leaves in memory. Used by ``optimizer.py``.

Eight square layers of 2048 features, one after another in the program or in a ``lax.scan``; compiled, never run.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from described import mesh_for
from jax.sharding import NamedSharding, PartitionSpec

import shardkit as sk

LAYERS, FEATURES, ROWS = 8, 2048, 512
HEADINGS = ("target", "layers", "gathered", "all-gathers (in the loop)", "temporaries, MB")
CASES = [("one after another", "step"), ("one after another", "use"), ("in a scan", "step"), ("in a scan", "layer")]


def measure(target: str, form: str, gather: str) -> list[str]:
    """One row of the table."""
    mesh = mesh_for(target, {"dp": 8})
    stacked = form == "in a scan"

    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w)

    one = sk.gather_on_use(layer) if gather == "layer" else layer

    def loss(params: Any, x: jax.Array) -> jax.Array:
        if stacked:
            x, _ = jax.lax.scan(lambda x, w: (one(w, x), None), x, params)
        else:
            for w in params:
                x = one(w, x)
        return jnp.mean(x**2)

    def described(*shape: int, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    square = (FEATURES, FEATURES)
    params: Any = [described(*square, spec=PartitionSpec("dp"))] * LAYERS
    if stacked:
        params = described(LAYERS, *square, spec=PartitionSpec(None, "dp"))
    places = jax.tree.map(lambda p: p.sharding, params)

    def step(params: Any, x: jax.Array) -> Any:
        run = sk.value_and_grad(loss, batch_axes="dp", mesh=mesh, gather=gather, param_placements=places)
        value, grads = run(params, x)
        return value, sk.reduce_gradients(grads, axis="dp")

    compiled = jax.jit(step).lower(params, described(ROWS, FEATURES, spec=PartitionSpec("dp"))).compile()
    gathers = [e for e in sk.collectives(compiled, mesh=mesh) if e.kind == "all_gather"]
    count = f"{sum(not e.in_loop for e in gathers)} ({sum(e.in_loop for e in gathers)})"
    return [target, form, f'"{gather}"', count, f"{sk.memory(compiled).temporaries / 1e6:,.0f}"]


def table(targets: list[str]) -> list[list[str]]:
    """All rows."""
    return [measure(target, *case) for target in targets for case in CASES]
