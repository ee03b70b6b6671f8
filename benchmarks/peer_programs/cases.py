"""The convolutions every peer is given, and how a child process answers. Imports neither jax nor torch."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

TOLERANCE = 1e-4  # of the largest value of the reference
LETTERS = {"H": 2, "W": 3}  # dims of N, C, H, W


@dataclasses.dataclass(frozen=True)
class Case:
    """A convolution of 2 x 16 x 128 x 512 float32 (N, C, H, W) to 16 channels; ``layers`` of them, ReLU between."""

    name: str
    kernel: int = 3
    stride: int = 1
    padding: int = 1
    dilation: int = 1
    groups: int = 1
    transposed: bool = False
    layers: int = 1
    cut: str = "W"
    shape: tuple[int, ...] = (2, 16, 128, 512)

    @property
    def dim(self) -> int:
        return LETTERS[self.cut]

    def output_shape(self) -> tuple[int, ...]:
        reach = self.dilation * (self.kernel - 1)

        def size(n: int) -> int:
            if self.transposed:
                return (n - 1) * self.stride - 2 * self.padding + reach + 1
            return (n + 2 * self.padding - reach - 1) // self.stride + 1

        return (*self.shape[:2], *(size(n) for n in self.shape[2:]))

    def operands(self) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
        """The input, the kernels (O, I / groups, H, W; of a transposed one I, O, H, W) and a cotangent."""
        rng = np.random.default_rng(0)
        channels = self.shape[1]
        x = rng.normal(size=self.shape).astype(np.float32)
        shape = (channels, channels // self.groups, self.kernel, self.kernel)
        scale = np.float32(1 / np.sqrt(np.prod(shape[1:])))
        kernels = [rng.normal(size=shape).astype(np.float32) * scale for _ in range(self.layers)]
        return x, kernels, rng.normal(size=self.output_shape()).astype(np.float32)


CASES = {
    case.name: case
    for case in [
        Case("3x3"),
        Case("3x3, cut in H", cut="H"),
        Case("4-layer 3x3 stack", layers=4),
        Case("3x3, stride 2", stride=2),
        Case("5x5", kernel=5, padding=2),
        Case("3x3, dilation 2", padding=2, dilation=2),
        Case("3x3, 4 groups", groups=4),
        Case("3x3, depthwise", groups=16),
        Case("transposed 4x4, stride 2", kernel=4, stride=2, transposed=True),
        Case("transposed 2x2, stride 2", kernel=2, stride=2, padding=0, transposed=True),
        Case("patches 4x4, stride 4, no padding", kernel=4, stride=4, padding=0),
    ]
}


def close(value: Any, wanted: Any) -> bool:
    """Equal shapes, and values within the tolerance."""
    value, wanted = np.asarray(value), np.asarray(wanted)
    return value.shape == wanted.shape and bool(np.abs(value - wanted).max() <= TOLERANCE * np.abs(wanted).max())


def verdict(values: bool, label: str, wanted: str) -> str:
    """ "right", or what isn't."""
    wrong = ([] if values else ["wrong values"]) + ([] if label == wanted else [f"label {label}"])
    return ", ".join(wrong) or "right"


def gradients(of_input: bool, of_kernels: bool) -> str:
    wrong = ([] if of_input else ["input"]) + ([] if of_kernels else ["kernels"])
    return f"wrong gradient of the {' and the '.join(wrong)}" if wrong else "right"


def said(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}".strip()


def serve(answers: dict[str, Callable[..., Any]], hello: dict[str, Any]) -> None:
    """Answer each line of stdin, ``{"do": name, ...}``, by a line of JSON; whatever else is printed goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps(hello), file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            reply = {"value": answers[asked.pop("do")](**asked)}
        except Exception as error:
            traceback.print_exc()
            reply = {"raises": said(error)}
        print(json.dumps(reply), file=out, flush=True)
