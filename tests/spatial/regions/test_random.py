"""Random functions of 1-6 layers in regions, against themselves on one device: values and all gradients."""

from __future__ import annotations

import jax
import pytest

from tests.spatial.regions.programs import check_program, draw

CI_SEEDS = [101, 25, 12]
FULL_SWEEP = 300


@pytest.mark.parametrize("seed", CI_SEEDS)
def test_random_programs(seed):
    check_program(draw(seed), "explicit" if seed % 4 == 1 else "auto")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FULL_SWEEP))
def test_random_programs_in_full(seed):
    check_program(draw(seed), "explicit" if seed % 4 == 3 else "auto")
    if seed % 32 == 31:
        jax.clear_caches()
