"""The examples in docstrings run as a user sees them: 32-bit, and on any number of devices."""

import doctest
import importlib
import pkgutil

import jax
import pytest

import shardkit

MODULES = [m.name for m in pkgutil.walk_packages(shardkit.__path__, "shardkit.")]


def test_finds_the_modules():
    assert {"shardkit.placements", "shardkit.spatial.windows"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    module = importlib.import_module(name)
    report = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    with jax.enable_x64(False):
        for example in doctest.DocTestFinder().find(module, name):
            runner.run(example, out=report.append, clear_globs=False)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)
