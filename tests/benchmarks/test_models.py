"""The benchmark of whole models, at a small size: that what it compares is the same but for how it's written."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import shardkit as sk

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = ("models", "flax_models", "described", "summary", "tables")


@pytest.fixture
def scripts(monkeypatch):
    """Imports a script, which imports others beside it, and forgets them afterwards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in SCRIPTS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in SCRIPTS:
        sys.modules.pop(name, None)


@pytest.fixture
def models(scripts, monkeypatch):
    found = scripts("models")
    small = found.Sizes(layers=1, width=32, heads=8, context=16, vocabulary=64, batch=8)
    monkeypatch.setattr(found.Job, "sizes", small)
    return found


def trimmed(spec) -> tuple:
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)


def test_parameters_are_where_the_plan_puts_them(models):
    job = models.Job("cpu", "GPT", "dp x tp", models.XLA)
    mesh = sk.make_mesh(job.axes)
    config = {"dp": {"axis": "dp"}, "mp": {"plan": sk.plans.transformer("tp", verbose=False)}}
    make = lambda: models.Gpt(job.sizes, None, models.flax_models.nothing, nnx.Rngs(0))  # noqa: E731
    params = nnx.state(sk.parallelize(make, config=config, mesh=mesh))
    said = [trimmed(x.sharding.spec) for x in jax.tree.leaves(models.placed(params, mesh))]
    assert said == [trimmed(x.sharding.spec) for x in jax.tree.leaves(params)]
    assert sum(map(bool, said)) == 12  # ten of the block, the embedding and the head


@pytest.mark.not_smoke
def test_both_compute_the_same_loss_and_gradients(models):
    jobs = [models.Job("cpu", "GPT", "tp + sequence", form) for form in (models.XLA, models.PARALLEL)]
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 64, (8, 16)).astype(np.int32)
    results, values = [], None
    for job in jobs:
        mesh = models.mesh_for(job.target, job.axes)
        step, (described, *_) = models.gpt(job, mesh)
        values = values or [rng.normal(size=x.shape, scale=0.1).astype(x.dtype) for x in jax.tree.leaves(described)]
        leaves, tree = jax.tree.flatten(described)
        params = [jax.device_put(v, x.sharding) for v, x in zip(values, leaves, strict=True)]
        results.append(jax.tree.leaves(jax.jit(step)(jax.tree.unflatten(tree, params), ids, ids)))
    for got, want in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-5)


def test_every_row_has_its_other(models):
    jobs = models.jobs(["cpu", *models.TARGETS])
    assert len(set(jobs)) == len(jobs)
    for job in jobs:
        assert models.dataclasses.replace(job, form=models.XLA) in jobs


def test_rows_become_ratios(models, scripts):
    def row(form, received):
        job = models.Job("gpu:h100:8", "GPT", "tp", form)
        return models.Row(job, {"all_reduce": 2}, 0, received, 4.0, None)

    rows = [row(models.XLA, 8.0), row(models.PARALLEL, 2.0)]
    assert models.cells(rows[1], rows)[3:] == ["2 = **0.25**", "4 = **1.00**", "-", "2 all-reduce"]
    data = {"versions": "", "rows": [models.dataclasses.asdict(r) for r in rows]}
    (found,) = scripts("summary").models(data)
    assert found.rows == {"GPT, tp, loss_parallel": {"bytes": 0.25, "temporaries": 1.0}}
