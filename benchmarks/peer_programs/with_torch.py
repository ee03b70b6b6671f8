"""PyTorch's side, one process a device over gloo, one thread each: ``F.conv2d`` of a DTensor or a ShardTensor.

Started by groups.py with ``{"kind": ..., "devices": n, "rank": i, "address": "127.0.0.1:port"}``. Kinds: "DTensor"
gives the convolution the tensor as it is cut; "DTensor through the batch" redistributes it to Shard(0) before each
convolution and back after it; "ShardTensor" is NVIDIA PhysicsNeMo's; "alone" is one process with all cores.
"""

from __future__ import annotations

import datetime
import functools
import importlib.util
import json
import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from cases import CASES, Case, close, gradients, serve, verdict
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

GIVEN = json.loads(sys.argv[1])
KIND, RANK, DEVICES = GIVEN["kind"], GIVEN["rank"], GIVEN["devices"]
F = torch.nn.functional
KEPT: list[Any] = []


def declare_vision_operators() -> None:
    """Declare the operators a torchvision that was built for CUDA lacks beside a CPU torch, so that it can be imported.

    PhysicsNeMo imports it (through timm); none of its operators runs here.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    text = Path(spec.origin).with_name("_meta_registrations.py").read_text()
    library = torch.library.Library("torchvision", "DEF")
    for name in sorted({*re.findall(r'register_(?:meta|fake)\("(?:torchvision::)?(\w+)"', text)}):
        library.define(f"{name}(Tensor x) -> Tensor")
    KEPT.append(library)


def shard_tensor_class() -> Any:
    """ShardTensor with its own operators registered, which importing it does only where there is CUDA."""
    try:
        torch.ops.load_library(next(Path(importlib.util.find_spec("torchvision").origin).parent.glob("_C*.so")))
    except Exception:
        declare_vision_operators()
    from physicsnemo import domain_parallel

    domain_parallel.register_custom_ops()
    return domain_parallel.ShardTensor


def connect() -> Any:
    torch.set_num_threads(len(os.sched_getaffinity(0)) if KIND == "alone" else 1)
    where = f"tcp://{GIVEN['address']}"
    limit = datetime.timedelta(seconds=20)
    dist.init_process_group("gloo", init_method=where, rank=RANK, world_size=DEVICES, timeout=limit)
    return init_device_mesh("cpu", (DEVICES,))


MESH = connect()
SHARD_TENSOR = shard_tensor_class() if KIND == "ShardTensor" else None


def block(value: Any, dim: int) -> Any:
    return value.chunk(DEVICES, dim)[RANK].contiguous()


def placed(value: np.ndarray, dim: int | None) -> Any:
    """A leaf, cut in ``dim``; ShardTensor's kernels are plain tensors."""
    tensor = torch.from_numpy(value)
    if KIND == "alone" or (KIND == "ShardTensor" and dim is None):
        return tensor.clone().requires_grad_()
    if KIND == "ShardTensor":
        # Its default way to learn the blocks' shapes, "infer", goes through CUDA memory.
        known = {"sharding_shapes": "chunk", "global_shape": tuple(tensor.shape)}
        return SHARD_TENSOR.from_local(block(tensor, dim), MESH, [Shard(dim)], **known).detach().requires_grad_()
    to = Replicate() if dim is None else Shard(dim)
    return distribute_tensor(tensor, MESH, [to]).detach().requires_grad_()


def layer(case: Case, x: Any, kernel: Any) -> Any:
    options = {"stride": case.stride, "padding": case.padding, "dilation": case.dilation, "groups": case.groups}
    run = F.conv_transpose2d if case.transposed else F.conv2d
    if KIND != "DTensor through the batch" or not isinstance(x, DTensor):
        return run(x, kernel, **options)
    return run(x.redistribute(MESH, [Shard(0)]), kernel, **options).redistribute(MESH, [Shard(case.dim)])


def forward(case: Case, x: Any, kernels: Any) -> Any:
    for number, kernel in enumerate(kernels):
        x = layer(case, F.relu(x) if number else x, kernel)
    return x


def local(value: Any) -> Any:
    """This process' block, arrived."""
    value = value.to_local() if isinstance(value, DTensor) or hasattr(value, "to_local") else value
    return value.wait() if hasattr(value, "wait") else value


def whole(gradient: Any) -> Any:
    """A kernel's gradient, summed over the processes."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def both(case: Case, x: Any, kernels: Any, cotangent: Any) -> Any:
    y = forward(case, x, kernels)
    of_input, *of_kernels = torch.autograd.grad(y, (x, *kernels), cotangent, allow_unused=True)
    return local(y), local(of_input), [whole(g) for g in of_kernels]


@functools.cache
def prepared(name: str) -> tuple:
    case = CASES[name]
    x, kernels, cotangent = case.operands()
    return placed(x, case.dim), [placed(k, None) for k in kernels], placed(cotangent, case.dim).detach()


@functools.cache
def reference(name: str) -> tuple:
    """On one process, by torch."""
    x, kernels, cotangent = CASES[name].operands()
    x, *kernels = [torch.from_numpy(a).requires_grad_() for a in (x, *kernels)]
    y = x
    for number, kernel in enumerate(kernels):
        y = layer(CASES[name], F.relu(y) if number else y, kernel)
    return y.detach(), torch.autograd.grad(y, (x, *kernels), torch.from_numpy(cotangent))


def check_forward(case: str) -> dict[str, Any]:
    x, kernels, _ = prepared(case)
    wanted, dim = reference(case)[0], CASES[case].dim
    y = forward(CASES[case], x, kernels)
    values = close(local(y).detach(), block(wanted, dim)) and tuple(y.shape) == tuple(wanted.shape)
    label = repr(y.placements[0]).replace("dim=", "")
    return {
        "forward": verdict(values, label, f"Shard({dim})"),
        "square": float(wanted.double().square().mean()),
    }


def check_backward(case: str) -> str:
    _, of_input, of_kernels = both(CASES[case], *prepared(case))
    wanted = reference(case)[1]
    if of_input is None:
        return "no gradient of the input (None)"
    right = all(close(a, b) for a, b in zip(of_kernels, wanted[1:], strict=True))
    return gradients(close(of_input, block(wanted[0], CASES[case].dim)), right)


def check_loss(case: str) -> str:
    """What the label does to those who trust it: the mean of squares of the result, and back through it."""
    x, kernels, _ = prepared(case)
    loss = forward(CASES[case], x, kernels).square().mean()
    value = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
    torch.autograd.grad(loss, (x, *kernels))
    return "right" if close(value.detach(), reference(case)[0].square().mean()) else "wrong values"


def clock(case: str, backward: bool, repeat: int) -> list[float]:
    """Seconds of each run, after one that isn't counted."""
    x, kernels, cotangent = prepared(case)
    seconds = []
    for _ in range(repeat + 1):
        dist.barrier()
        start = time.perf_counter()
        if backward:
            both(CASES[case], x, kernels, cotangent)
        else:
            local(forward(CASES[case], x, kernels))
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def versions() -> str:
    physics = ""
    if SHARD_TENSOR is not None:
        import physicsnemo

        physics = f"physicsnemo {physicsnemo.__version__}, "
    return f"{physics}torch {torch.__version__}, Python {platform.python_version()}"


if __name__ == "__main__":
    answers = {"forward": check_forward, "backward": check_backward, "loss": check_loss, "time": clock}
    serve(answers, {"versions": versions()})
