"""Which inputs one output of a resize reads, and with what weights: the band of the weight matrix of a dim.

Pure NumPy: no JAX. ``jax.image`` multiplies each dim with a dense ``[inputs, outputs]`` matrix, almost all of
it zeros. Here the same weights are kept as a band: for each output the first input it reads, and ``taps``
weights from there on. What a device needs of a dim, and what it multiplies with, follow from it.

The arithmetic is that of ``jax.image.scale_and_translate``, in its dtype and order, so that results agree to
rounding. An output at ``o`` lies at ``s = (o + 1/2) * inverse - shift - 1/2`` in inputs; input ``i`` has weight
``k(|s - i| / width)``, and the weights of an output are divided by their sum.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

# As in jax.image: where the weights of an output sum to less, it reads nothing.
_SMALLEST_SUM = 1000.0 * float(np.finfo(np.float32).eps)

# Weights of this many ulps of 1 are rounding errors of positions that meet exactly; they would make halos wider.
_NOISE = 8


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(0, 1 - x)


def _keys_cubic(x: np.ndarray) -> np.ndarray:
    """Keys 1981, a = -1/2: what Pillow and TensorFlow use, and PyTorch when it antialiases."""
    near = ((1.5 * x - 2.5) * x) * x + 1.0
    far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    return np.where(x >= 2.0, 0.0, np.where(x >= 1.0, far, near))


def _opencv_cubic(x: np.ndarray) -> np.ndarray:
    """Keys' kernel with a = -3/4: OpenCV's, and PyTorch's when it doesn't antialias."""
    a = -0.75
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = ((a * x - 5.0 * a) * x + 8.0 * a) * x - 4.0 * a
    return np.where(x >= 2.0, 0.0, np.where(x >= 1.0, far, near))


def _lanczos(radius: float, x: np.ndarray) -> np.ndarray:
    y = radius * np.sin(np.pi * x) * np.sin(np.pi * x / radius)
    windowed = np.where(x > 1e-3, y / np.where(x != 0, np.pi**2 * x**2, 1), 1)
    return np.where(x > radius, 0.0, windowed)


# Kernel and its radius, in inputs (times the width, where it antialiases).
_KERNELS = {
    "linear": (_triangle, 1),
    "cubic": (_keys_cubic, 2),
    "cubic-pytorch": (_opencv_cubic, 2),
    "lanczos3": (functools.partial(_lanczos, 3.0), 3),
    "lanczos5": (functools.partial(_lanczos, 5.0), 5),
}

METHODS = ("nearest", *_KERNELS, "area")


@dataclasses.dataclass(frozen=True)
class Resampling:
    """One dim of a resize.

    Attributes:
      size, out: inputs and outputs.
      inverse: inputs that one output advances by, 1 / scale; negative mirrors.
      shift: inputs that the outputs are moved by, translation / scale.
      method: one of ``METHODS``. "nearest" reads neither ``inverse`` nor ``shift``.
      antialias: widen the kernel where outputs are further apart than inputs.
      dtype: name of the dtype in which weights are computed.
    """

    size: int
    out: int
    inverse: float
    shift: float = 0.0
    method: str = "linear"
    antialias: bool = True
    dtype: str = "float32"

    @property
    def repeats_edges(self) -> bool:
        """Elements beyond the ends repeat the last one, instead of weighing nothing."""
        return self.method == "cubic-pytorch" and not self.antialias

    @property
    def band(self) -> Band:
        """Its weights."""
        return resize_band(self)

    @property
    def kernel(self) -> str:
        return "cubic" if self.method == "cubic-pytorch" and self.antialias else self.method

    @property
    def width(self) -> float:
        return max(self.inverse, 1.0) if self.antialias else 1.0


@dataclasses.dataclass(frozen=True, eq=False)
class Band:
    """The non-zero part of a weight matrix.

    Attributes:
      starts: ``[out]``, first input that each output reads.
      counts: ``[out]``, how many it reads; 0 for an output of zeros.
      weights: ``[out, taps]``, zeros at and beyond the count.
    """

    starts: np.ndarray
    counts: np.ndarray
    weights: np.ndarray

    @property
    def taps(self) -> int:
        return self.weights.shape[1]


@functools.lru_cache(maxsize=256)
def resize_band(dim: Resampling) -> Band:
    """The band of a dim.

    >>> band = resize_band(Resampling(size=2, out=4, inverse=0.5))
    >>> band.starts.tolist(), band.weights.tolist()
    ([0, 0, 0, 1], [[1.0, 0.0], [0.75, 0.25], [0.25, 0.75], [1.0, 0.0]])
    """
    if dim.method == "nearest":
        return _nearest(dim)
    first, weights = _candidates(dim)
    total = weights.sum(axis=1, keepdims=True)
    weights = np.where(np.abs(total) > _SMALLEST_SUM, weights / np.where(total != 0, total, 1), 0)
    if not dim.repeats_edges:
        sample = _samples(dim)
        weights = np.where(((sample >= -0.5) & (sample <= dim.size - 0.5))[:, None], weights, 0)
    return _trim(first, weights.astype(dim.dtype))


def _nearest(dim: Resampling) -> Band:
    """Output ``o`` takes input ``floor((o + 1/2) * size / out)``, exactly.

    jax.image divides in float32, which XLA may turn into a product with a rounded 1 / out; where
    ``(o + 1/2) * size / out`` is an integer, its answer can then be one less, as the backend has it.
    """
    starts = (2 * np.arange(dim.out, dtype=np.int64) + 1) * dim.size // (2 * dim.out)
    return Band(starts, np.ones(dim.out, np.int64), np.ones((dim.out, 1), dim.dtype))


def _samples(dim: Resampling) -> np.ndarray:
    """Where in the input the centre of each output lies."""
    dtype = np.dtype(dim.dtype)
    return (np.arange(dim.out, dtype=dtype) + dtype.type(0.5)) * dim.inverse - dim.shift - 0.5


def _candidates(dim: Resampling) -> tuple[np.ndarray, np.ndarray]:
    """First input of each output and its unnormalised weights; all that aren't zero are among them."""
    dtype = np.dtype(dim.dtype)
    if dim.method == "area":
        left = np.arange(dim.out, dtype=dtype) * dim.inverse - dim.shift
        right = left + dim.inverse
        lowest, taps, edge = np.floor(np.minimum(left, right)) - 1, math.ceil(abs(dim.inverse)) + 4, 0
    else:
        kernel, radius = _KERNELS[dim.kernel]
        edge = radius if dim.repeats_edges else 0
        sample = _samples(dim)
        lowest, taps = np.floor(sample - radius * dim.width), math.ceil(2 * radius * dim.width) + 3
    taps = min(taps, dim.size + 2 * edge)
    # Clipped as floats: a far translation is no integer of 64 bits.
    lowest = np.clip(lowest, -edge, dim.size + edge - taps).astype(np.int64)
    inputs = lowest[:, None] + np.arange(taps)
    at = inputs.astype(dtype)
    if dim.method == "area":
        # The length that input pixel [i, i + 1) shares with the output pixel.
        shared = np.minimum(right[:, None], at + 1.0) - np.maximum(left[:, None], at)
        return lowest, np.maximum(0.0, shared)
    weights = kernel(np.abs(sample[:, None] - at) / dtype.type(dim.width)).astype(dtype)
    if not edge:
        return lowest, weights
    kept = min(taps, dim.size)
    first = np.clip(lowest, 0, dim.size - kept)
    folded = np.zeros((dim.out, kept), dtype)
    place = np.clip(inputs, 0, dim.size - 1) - first[:, None]
    np.add.at(folded, (np.arange(dim.out)[:, None], place), weights)
    return first, folded


def _trim(first: np.ndarray, weights: np.ndarray) -> Band:
    """Without the zeros on either side of what each output reads."""
    real = np.abs(weights) > _NOISE * float(np.finfo(weights.dtype).eps)
    some = real.any(axis=1)
    lo = np.where(some, real.argmax(axis=1), 0)
    hi = np.where(some, real.shape[1] - real[:, ::-1].argmax(axis=1), 0)
    counts = hi - lo
    taps = max(1, int(counts.max()))
    tap = np.arange(taps)
    index = np.minimum(lo[:, None] + tap, weights.shape[1] - 1)
    kept = np.where(tap < counts[:, None], np.take_along_axis(weights, index, axis=1), 0)
    return Band(np.where(some, first + lo, 0), counts, kept.astype(weights.dtype))


def dense(starts: np.ndarray, weights: np.ndarray, size: int) -> np.ndarray:
    """The matrix ``[..., size, out]`` of a band: ``weights[..., o, t]`` stands in row ``starts[..., o] + t``.

    Rows at and beyond ``size`` are left out; they must be of zeros.
    """
    taps = weights.shape[-1]
    tap = np.arange(size)[:, None] - starts[..., None, :]
    inside = (tap >= 0) & (tap < taps)
    by_tap = np.swapaxes(weights, -1, -2)
    return np.where(inside, np.take_along_axis(by_tap, np.clip(tap, 0, taps - 1), axis=-2), 0)
