"""Random norms, sharded in space through ConvParallel, against Flax's own on one device."""

from __future__ import annotations

import collections
import random

import jax
import pytest

from tests.parallel.layer_cases import LayerCase, batch_norm, group_norm, instance_norm, layer_norm, rms_norm
from tests.parallel.test_layers import check

CI_SLICE, FULL_SWEEP = 10, 80
MESHES = (
    (("sp", 1),),
    (("sp", 2),),
    (("sp", 4),),
    (("sp", 8),),
    (("dp", 2), ("sp", 4)),
    (("sq", 2), ("sp", 4)),
    (("dp", 2), ("sp", 2), ("sq", 2)),
)
KINDS = ("batch", "group", "instance", "layer", "rms", "layer of the image", "rms of the image")


def draw(rng: random.Random, kind: str) -> LayerCase:
    """One random norm of the kind; spatial dims of any size, cut or not, and a batch that its axis divides or not."""
    count = rng.choice((1, 2, 2, 3))
    letters = "DHW"[-count:]
    mesh = rng.choice(MESHES)
    space = [axis for axis, _ in mesh if axis != "dp"]
    dims = tuple(zip(space, rng.sample(letters, min(len(space), count)), strict=False))
    sizes = tuple(rng.randint(1, 7 if count > 2 else 15) for _ in letters)
    groups = rng.choice((1, 2, 3))
    features = groups * rng.choice((1, 2, 4))
    shape = (rng.choice((2, 3, 3, 4, 5)), *sizes, features)
    keywords = {
        "use_scale": rng.random() < 0.8,
        "epsilon": rng.choice((1e-6, 1e-3, 0.1)),
        "use_fast_variance": rng.random() < 0.5,
    }
    if kind.startswith("rms"):
        del keywords["use_fast_variance"]
    else:
        keywords["use_bias"] = rng.random() < 0.8
    if kind == "batch":
        make = batch_norm(features, momentum=rng.choice((0.9, 0.5)), **keywords)
    elif kind == "group":
        by = {"num_groups": groups} if rng.random() < 0.5 else {"num_groups": None, "group_size": features // groups}
        make = group_norm(features, **by, **keywords)
    elif kind == "instance":
        make = instance_norm(features, **keywords)
    else:
        norm = rms_norm if kind.startswith("rms") else layer_norm
        axes = tuple(range(1, len(shape))) if kind.endswith("image") else -1
        make = norm(features, reduction_axes=axes, **keywords)
    batch_axis = "dp" if mesh[0][0] == "dp" and rng.random() < 0.7 else None
    return LayerCase(make, shape, mesh, dims, batch_axis)


def sweep(count: int, seed: int) -> list[LayerCase]:
    rng = random.Random(seed)
    return [draw(rng, KINDS[number % len(KINDS)]) for number in range(count)]


@pytest.mark.parametrize("number", range(CI_SLICE))
@pytest.mark.every(3)
def test_random_norms(number):
    """Values, gradients of image, scale and bias, running statistics, collectives; every fourth Explicit."""
    check(sweep(CI_SLICE, seed=2026)[number], "explicit" if number % 4 == 3 else "auto", tolerance=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(FULL_SWEEP))
def test_random_norms_in_full(number):
    check(sweep(FULL_SWEEP, seed=11)[number], "explicit" if number % 4 == 3 else "auto", tolerance=1e-10)
    if number % 32 == 31:
        jax.clear_caches()


def test_the_sweep_reaches_what_it_should():
    seen = collections.Counter()
    for case in sweep(FULL_SWEEP, seed=11):
        shards = {dim: dict(case.mesh)[axis] for axis, dim in case.dims}
        sizes = dict(zip("DHW"[-(len(case.shape) - 2) :], case.shape[1:-1], strict=True))
        seen["uneven"] += any(sizes[dim] % n for dim, n in shards.items())
        seen["a device without elements"] += any(
            -(-sizes[dim] // n) * (n - 1) >= sizes[dim] for dim, n in shards.items()
        )
        seen["several dims cut"] += len(shards) > 1
        seen["padded batch"] += case.batch_axis is not None and case.shape[0] % 2 == 1
        seen[f"{len(sizes)}-D"] += 1
    assert len(seen) == 7
    assert min(seen.values()) >= 5, seen
