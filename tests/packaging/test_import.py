"""What ``import shardkit`` brings in, and that every public name is there."""

import os
import subprocess
import sys
from pathlib import Path

import shardkit as sk

ROOT = Path(__file__).parents[2]
# Of extras, of tests, and of rooms that come when they're used.
LATER = [
    "matplotlib",
    "skimage",
    "sklearn",
    "tqdm",
    "grain",
    "IPython",
    "ipykernel",
    "jupytext",
    "nbclient",
    "mkdocs",
    "libtpu",
    "jax_plugins",
    "pytest",
    "hypothesis",
    "torch",
    "flax.nnx",
    "treescope",
    "orbax.checkpoint",
    "shardkit.parallel",
    "shardkit.checkpoint",
    "shardkit.cli",
    "shardkit.testing",
]


def test_optional_parts_are_imported_when_used():
    code = f"import sys, shardkit; print([name for name in {LATER} if name in sys.modules])"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there():
    assert len(set(sk.__all__)) == len(sk.__all__)
    assert set(sk.__all__) <= set(dir(sk))
    assert [name for name in sk.__all__ if not hasattr(sk, name)] == []
    rooms = ("shardkit.checkpoint", "shardkit.parallel")
    later = {name for name in sk.__all__ if getattr(getattr(sk, name), "__module__", "").startswith(rooms)}
    assert later == {name for names in sk._LATER.values() for name in names}
    assert sk.plans.__name__ == "shardkit.parallel.ready"
    assert sk.checkpoint.save is sk.save


def test_other_names_are_not():
    assert not hasattr(sk, "ring_convolution")
