"""jaxDecomp's ``halo_exchange`` beside ``sk.halo_exchange``, in one process and one jax, in turns.

jaxDecomp is given blocks padded beforehand, as it wants them, and overwrites the padding ("exchange"); to come from
the same blocks to the same result it needs the padding too ("pad, exchange"). Prints one line of JSON.

    PYTHONPATH=. python benchmarks/peer_programs/halos.py 15
"""

from __future__ import annotations

import functools
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 4)

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax.numpy as jnp  # noqa: E402
import jaxdecomp  # noqa: E402
import numpy as np  # noqa: E402
from cases import close, said  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402
from tables import in_turns  # noqa: E402

import shardkit as sk  # noqa: E402

SHAPE = (128, 128, 128)
SPEC = PartitionSpec("z", "y")
CASES = [(mesh, width, periodic) for mesh in [(4, 1), (1, 4), (2, 2)] for width in [1, 8] for periodic in [True, False]]


def widths(mesh: tuple[int, int], width: int) -> tuple[int, int]:
    return width * (mesh[0] > 1), width * (mesh[1] > 1)


def reference(mesh: tuple[int, int], width: int, periodic: bool, x: Any) -> Any:
    """Every block with its neighbours' edges, side by side, by indexing on one device."""
    for dim, (n, h) in enumerate(zip(mesh, widths(mesh, width), strict=True)):
        block = SHAPE[dim] // n
        index = np.concatenate([np.arange(i * block - h, (i + 1) * block + h) for i in range(n)])
        inside = ((index >= 0) & (index < SHAPE[dim])) | periodic
        x = jnp.take(x, jnp.asarray(index % SHAPE[dim]), axis=dim)
        x = x * jnp.asarray(inside, x.dtype).reshape([-1 if d == dim else 1 for d in range(3)])
    return x


def programs(mesh: Any, width: int, periodic: bool) -> dict[str, Any]:
    """What each does with the blocks."""
    extents = widths((mesh.shape["z"], mesh.shape["y"]), width)
    local = functools.partial(jax.shard_map, mesh=mesh, in_specs=SPEC, out_specs=SPEC)
    mode = "circular" if periodic else "zeros"

    def ours(block: Any) -> Any:
        for dim, (axis, h) in enumerate(zip("zy", extents, strict=True)):
            block = sk.halo_exchange(block, axis, dim, h, h, mode=mode) if h else block
        return block

    pad = local(lambda block: jnp.pad(block, [*((h, h) for h in extents), (0, 0)]))
    exchange = functools.partial(jaxdecomp.halo_exchange, halo_extents=extents, halo_periods=(periodic, periodic))
    return {"ours": local(ours), "pad, exchange": lambda x: exchange(pad(x)), "exchange": exchange, "pad": pad}


def gradient(run: Any, x: Any, cotangent: Any, wanted: Any) -> str:
    try:
        found = jax.jit(lambda x: jax.vjp(run, x)[1](cotangent)[0])(x)
    except Exception as error:
        return f"raises: {said(error)}"
    return "right" if close(found, wanted) else "wrong gradient"


def measure(shape: tuple[int, int], width: int, periodic: bool, rounds: int) -> dict[str, Any]:
    mesh = jax.make_mesh(shape, ("z", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    value = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    x = jax.device_put(value, NamedSharding(mesh, SPEC))
    whole = functools.partial(reference, shape, width, periodic)
    wanted, back = jax.vjp(whole, value)
    cotangent = np.random.default_rng(1).normal(size=wanted.shape).astype(np.float32)
    (wanted_gradient,) = back(jnp.asarray(cotangent))
    cotangent = jax.device_put(cotangent, NamedSharding(mesh, SPEC))
    runs = programs(mesh, width, periodic)
    padded = jax.jit(runs.pop("pad"))(x)
    given = {"ours": x, "pad, exchange": x, "exchange": padded}
    row: dict[str, Any] = {"mesh": f"{shape[0]} x {shape[1]}", "width": width, "periodic": periodic}
    compiled = {name: jax.jit(run).lower(given[name]).compile() for name, run in runs.items()}
    wall = in_turns({name: functools.partial(compiled[name], given[name]) for name in runs}, rounds)
    for name, run in runs.items():
        report = sk.collectives(compiled[name], mesh=mesh)
        right = close(compiled[name](given[name]), wanted)
        row[name] = {
            "values": "right" if right else "wrong values",
            "gradient": gradient(run, x, cotangent, wanted_gradient) if name != "exchange" else None,
            "collectives": dict(report.by_kind()),
            "bytes": report.bytes(),
            "wall_ms": wall[name] if right else None,
        }
    return row


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    rows = [measure(*case, int(sys.argv[1])) for case in CASES]
    where = f"jaxdecomp {version('jaxdecomp')}, jax {jax.__version__}"
    print(json.dumps({"versions": where, "rows": rows}), file=out, flush=True)


if __name__ == "__main__":
    main()
