"""Several processes compute what one does: to rounding, and for what only moves bytes to the bit."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from shardkit import launch

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def one_process():
    """What this process finds on as many devices."""
    sys.path.insert(0, str(HERE))
    try:
        import results
    finally:
        sys.path.remove(str(HERE))
    found = {}

    def of(count):
        if count not in found:
            found[count] = results.results(jax.devices()[:count])
        return found[count]

    return of


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.not_smoke
def test_several_processes_find_the_same(one_process, tmp_path, processes):
    file = tmp_path / "found.npz"
    job = launch.run(
        [HERE / "results.py", file],
        processes=processes,
        devices_per_process=2,
        env={"PYTHONPATH": str(HERE.parents[1])},
        timeout=500,
        capture=True,
    )
    job.check()
    expected, found = one_process(2 * processes), np.load(file)
    assert sorted(found.files) == sorted(expected)
    assert len(found.files) > 170
    for name, wanted in expected.items():
        if name.startswith("reshard") and "Partial" not in name:
            np.testing.assert_array_equal(found[name], wanted, err_msg=name)
        else:
            np.testing.assert_allclose(found[name], wanted, rtol=1e-12, atol=1e-13, err_msg=name)
