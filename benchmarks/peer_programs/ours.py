"""shardkit's side: ``ring_conv`` over n devices of one process, or of n processes over gloo.

Started by groups.py with ``{"devices": n, "processes": 1 or n, "rank": i, "address": "127.0.0.1:port"}``; with
``"alone": true`` it's lax' own convolution on one device instead.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from typing import Any

import jax
import numpy as np
from cases import CASES, Case, close, gradients, serve, verdict
from jax.sharding import NamedSharding

GIVEN = json.loads(sys.argv[1])
RING = not GIVEN.get("alone")
jax.config.update("jax_num_cpu_devices", GIVEN["devices"] // GIVEN["processes"])
if GIVEN["processes"] > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(GIVEN["address"], GIVEN["processes"], GIVEN["rank"])

import shardkit as sk  # noqa: E402

NUMBERS = ("NHWC", "HWIO", "NHWC")
MESH = sk.make_mesh({"sp": GIVEN["devices"]})


def layer(case: Case, ring: bool, x: Any, kernel: Any) -> Any:
    """One convolution, by shardkit or (the reference, on one device) by lax."""
    where: dict[str, Any] = {"spatial_axes": {"sp": case.cut}, "mesh": MESH} if ring else {}
    if case.transposed:
        run = sk.ring_conv_transpose if ring else jax.lax.conv_transpose
        around = case.dilation * (case.kernel - 1) - case.padding
        return run(x, kernel, (case.stride,) * 2, [(around,) * 2] * 2, dimension_numbers=NUMBERS, **where)
    run = sk.ring_conv if ring else jax.lax.conv_general_dilated
    return run(
        x,
        kernel,
        (case.stride,) * 2,
        [(case.padding,) * 2] * 2,
        rhs_dilation=(case.dilation,) * 2,
        dimension_numbers=NUMBERS,
        feature_group_count=case.groups,
        **where,
    )


def forward(case: Case, ring: bool, x: Any, kernels: Any) -> Any:
    for number, kernel in enumerate(kernels):
        x = layer(case, ring, jax.nn.relu(x) if number else x, kernel)
    return x


def both(case: Case, ring: bool, x: Any, kernels: Any, cotangent: Any) -> Any:
    y, back = jax.vjp(functools.partial(forward, case, ring), x, kernels)
    return y, back(cotangent)


def operands(case: Case) -> tuple[Any, list[Any], Any]:
    """Channels last; a transposed convolution's kernel as lax has it, turned round."""
    x, kernels, cotangent = case.operands()
    order = (2, 3, 0, 1) if case.transposed else (2, 3, 1, 0)
    kernels = [(k[:, :, ::-1, ::-1] if case.transposed else k).transpose(order) for k in kernels]
    return x.transpose(0, 2, 3, 1), [np.ascontiguousarray(k) for k in kernels], cotangent.transpose(0, 2, 3, 1)


def placed(value: np.ndarray, dim: int | None) -> Any:
    sharding = NamedSharding(MESH, sk.to_partition_spec({} if dim is None else {"sp": sk.Shard(dim)}, MESH))
    return jax.make_array_from_callback(value.shape, sharding, lambda index: np.ascontiguousarray(value[index]))


@functools.cache
def prepared(name: str) -> tuple[Any, Any, tuple]:
    """Both programs, and their arguments where they shall be."""
    case = CASES[name]
    x, kernels, cotangent = operands(case)
    dim = case.dim - 1
    arguments = placed(x, dim), [placed(k, None) for k in kernels], placed(cotangent, dim)
    return (
        jax.jit(functools.partial(forward, case, RING)),
        jax.jit(functools.partial(both, case, RING)),
        jax.block_until_ready(arguments),
    )


def equal(array: jax.Array, wanted: Any) -> bool:
    wanted = np.asarray(wanted)
    return array.shape == wanted.shape and all(close(s.data, wanted[s.index]) for s in array.addressable_shards)


def check(case: str) -> dict[str, Any]:
    """Is it right? Every process looks at the blocks it holds."""
    run, run_both, arguments = prepared(case)
    x, kernels, cotangent = operands(CASES[case])
    wanted, wanted_gradients = jax.jit(functools.partial(both, CASES[case], False))(x, kernels, cotangent)
    y = run(*arguments[:2])
    _, (of_input, of_kernels) = run_both(*arguments)
    wanted_label = str(sk.Shard(CASES[case].dim - 1))
    right = all(equal(a, b) for a, b in zip(of_kernels, wanted_gradients[1], strict=True))
    return {
        "forward": verdict(equal(y, wanted), str(sk.placements(y)[0]), wanted_label),
        "backward": gradients(equal(of_input, wanted_gradients[0]), right),
        "square": float(np.mean(np.square(np.asarray(wanted, np.float64)))),
    }


@functools.cache
def meeting() -> Any:
    """What no process leaves before all have come."""
    ones = placed(np.ones((GIVEN["devices"],), np.float32), 0)
    together = jax.jit(lambda a: a.sum())
    return lambda: together(ones).block_until_ready()


def clock(case: str, backward: bool, repeat: int) -> list[float]:
    """Seconds of each run, after one that isn't counted."""
    run, run_both, arguments = prepared(case)
    seconds = []
    for _ in range(repeat + 1):
        meeting()()
        start = time.perf_counter()
        jax.block_until_ready(run_both(*arguments) if backward else run(*arguments[:2]))
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


if __name__ == "__main__":
    serve({"check": check, "time": clock}, {"versions": f"jax {jax.__version__}, shardkit {sk.__version__}"})
