"""Trying the forms of one convolution, and using what was found. Which form is fastest is never asserted."""

from __future__ import annotations

import dataclasses
import importlib.util

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.spatial.convolution import region, tuning
from shardkit.spatial.convolution.method import form_of
from shardkit.spatial.convolution.table import Form
from shardkit.spatial.convolution.tuned import Trial, best_of

NUMBERS = {"dimension_numbers": ("NWC", "WIO", "NWC")}
CALL = {**NUMBERS, "spatial_axes": {"sp": "W"}}
X, K = (2, 32, 2), (3, 2, 2)
BLOCKS2 = Form("blocks", 2)


def shapes(x=X, kernel=K, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(x, dtype), jax.ShapeDtypeStruct(kernel, dtype)


@pytest.fixture
def chosen(monkeypatch):
    """The forms that convolutions were traced in, in order."""
    forms, real = [], region.choose_form

    def spy(*arguments):
        conv = real(*arguments)
        forms.append(str(form_of(conv)))
        return conv

    monkeypatch.setattr(region, "choose_form", spy)
    return forms


def judged(monkeypatch, *arguments, **keywords):
    """tune_conv as for devices that aren't here, which takes no timing."""
    monkeypatch.setattr(tuning, "holds_arrays", lambda mesh: False)
    return sk.spatial.tune_conv(*arguments, **keywords)


def found_best(found, form: Form):
    """The same result with a winner of our choice."""
    trials = [dataclasses.replace(t, temporaries=1 if t.form == form else 9) for t in found.trials]
    return dataclasses.replace(found, trials=tuple(trials), by="temporaries")


# --- which is best -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("by", "trials", "best"),
    [
        ("cycles", {"concat": (9e6, 1), "overlap": (3e6, 9)}, "overlap"),
        ("cycles", {"concat": (3.01e6, 8), "overlap": (3e6, 9)}, "concat"),  # as fast, keeps less
        ("cycles", {"concat": (3.01e6, 9), "overlap": (3e6, 8)}, "overlap"),
        ("seconds", {"concat": (1.04, 9), "blocks": (1.0, 9)}, "concat"),  # no better: the plainer
        ("seconds", {"concat": (1.04, 9), "blocks": (1.0, 1)}, "concat"),
        ("seconds", {"concat": (1.06, 9), "blocks": (1.0, 9)}, "blocks"),
        ("temporaries", {"concat": (None, 2), "overlap": (None, 1)}, "overlap"),
        ("cycles", {"concat": (None, 1), "blocks": (5e6, 9)}, "blocks"),  # no figure: a loop hides its cycles
    ],
)
def test_the_best(by, trials, best):
    rows = [
        Trial(Form(m), **{"temporaries": t, **({} if by == "temporaries" else {by: v})}) for m, (v, t) in trials.items()
    ]
    assert best_of(rows, by).form.method == best


def test_none_is_best_without_figures():
    with pytest.raises(ValueError, match="no form of this convolution has a figure for 'cycles'"):
        best_of([Trial(Form("concat"), reason="no")], "cycles")


# --- trying ------------------------------------------------------------------------------------------------


def test_forms_are_timed_in_turns():
    asked = []

    def progress(forms):
        asked.extend(forms)
        return forms

    found = sk.spatial.tune_conv(
        *shapes(),
        (1,),
        "SAME",
        **CALL,
        mesh=sk.make_mesh({"sp": 4}),
        candidates=["concat", "blocks 2 major", "blocks 7", "concat"],
        rounds=1,
        progress=progress,
    )
    assert [str(t.form) for t in found.trials] == [str(f) for f in asked] == ["concat", "blocks 2 major", "blocks 7"]
    assert found.by == "seconds" and found.auto == Form("concat")
    for trial in found.trials[:2]:
        assert trial.seconds > 0 and trial.temporaries > 0 and trial.cycles is None and trial.reason is None
    assert found.best in [t.form for t in found.trials[:2]]
    assert found.trials[2].reason.startswith("blocks of 8 inputs and 8 outputs in spatial dim 0 don't divide into 7")
    page = str(found)
    assert page.splitlines()[0] == (
        "convolution of 2 x 32 x 2 by 3 x 2 x 2, float32, twice, and gradients, on 4 devices (cpu)"
    )
    assert "wall, ms" in page and "blocks 7          can't run: blocks of 8" in page
    assert page.count("best") == 1 and page.count("auto") == 1


@pytest.mark.not_smoke
def test_devices_that_are_not_here_are_judged_by_temporaries(monkeypatch):
    mesh = sk.make_mesh({"sp": 4}, axis_types="explicit")
    x, kernel = shapes((1, 31, 2), dtype=jnp.bfloat16)  # uneven: laid out as a Padded
    found = judged(
        monkeypatch, x, kernel, (1,), "SAME", **CALL, mesh=mesh, candidates=["blocks 7", "blocks 2 major", "blocks 2"]
    )
    assert found.by == "temporaries"
    # With one image the order of chunks and images is the same thing.
    assert [str(t.form) for t in found.trials] == ["blocks 7", "blocks 2"]
    assert found.trials[0].reason is not None and found.trials[0].temporaries is None
    assert found.trials[1].seconds is None and found.trials[1].temporaries > 0
    assert "bfloat16, twice, and gradients, on 4 described devices" in str(found) and "wall" not in str(found)


def test_cycles_are_those_of_the_entry_computation():
    text = 'x {\n "estimated_cycles":"7"\n}\n\nENTRY y {\n a "estimated_cycles":"30",\n b "estimated_cycles":"12"\n}\n'
    assert tuning._estimated_cycles(text) == 42
    assert tuning._estimated_cycles(text.replace(" a ", " a while(")) is None
    assert tuning._estimated_cycles("no estimates") is None


def test_a_convolution_that_does_not_fit_on_itself_or_has_no_gradient(monkeypatch):
    mesh = sk.make_mesh({"sp": 2})
    strided = judged(monkeypatch, *shapes(), (2,), "SAME", **CALL, mesh=mesh, candidates=["concat"])
    assert "twice" not in str(strided) and "and gradients" in str(strided)
    whole = shapes(dtype=jnp.int32)
    integers = judged(monkeypatch, *whole, (1,), "SAME", **CALL, mesh=mesh, candidates=["concat"])
    assert "twice" in str(integers) and "gradients" not in str(integers)


def test_a_form_that_the_compiler_refuses_is_reported(monkeypatch):
    real = tuning._Program.compiled

    def compiled(program, form):
        if form.method == "overlap":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 20.1G of 15.7G\nhere is the heap")
        return real(program, form)

    monkeypatch.setattr(tuning._Program, "compiled", compiled)
    mesh = sk.make_mesh({"sp": 1})
    found = judged(monkeypatch, *shapes(), (2,), "SAME", **CALL, mesh=mesh, candidates=["overlap", "concat"])
    assert found.trials[0].reason == "the compiler refuses: RESOURCE_EXHAUSTED: 20.1G of 15.7G"
    assert found.best == Form("concat")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra tpu-target")
def test_a_described_tpu_is_judged_by_cycles():
    mesh = sk.target_mesh("tpu:v5e:2x4", {"sp": 8})
    x, kernel = shapes((1, 32, 512, 128), (3, 3, 128, 128), jnp.bfloat16)
    call = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "spatial_axes": {"sp": "W"}, "mesh": mesh}
    found = sk.spatial.tune_conv(x, kernel, (1, 1), "SAME", **call, candidates=["concat", "blocks 8"])
    assert found.by == "cycles" and all(t.cycles > 0 and t.temporaries is not None for t in found.trials)


# --- using -------------------------------------------------------------------------------------------------


def operands():
    rng = np.random.default_rng(0)
    return rng.normal(size=X), rng.normal(size=K)


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
def test_what_was_found_is_used(axis_types, monkeypatch, chosen):
    """By its own layer alone, with the same values, placement and traffic; and only within the context."""
    mesh = sk.make_mesh({"sp": 4}, axis_types=axis_types)
    call = {**CALL, "mesh": mesh}
    found = judged(monkeypatch, *shapes(), (1,), "SAME", **call, candidates=["blocks 2"])
    x, kernel = operands()
    placed = sk.shard_tensor(x, {"sp": sk.Shard(1)}, mesh), sk.shard_tensor(kernel, {}, mesh)

    @jax.jit
    def twice(x, kernel):
        y = sk.ring_conv(x, kernel, (1,), "SAME", **call)
        return sk.ring_conv(y, kernel[:1], (1,), "SAME", **call)

    chosen.clear()
    twice.lower(*placed)
    with sk.spatial.forms(found_best(found, BLOCKS2)):
        compiled = twice.lower(*placed).compile()
    twice.lower(*placed)
    # Traced once without and once with it; the last found what the first had traced.
    assert chosen == ["concat", "concat", "blocks 2", "concat"]
    want = lax.conv_general_dilated(x, kernel, (1,), "SAME", **NUMBERS)
    want = lax.conv_general_dilated(want, kernel[:1], (1,), "SAME", **NUMBERS)
    got = compiled(*placed)
    np.testing.assert_allclose(np.asarray(got), want, atol=1e-10)
    assert sk.placements(got) == (sk.Shard(1),)
    assert sk.collectives(compiled, mesh=mesh).by_kind() == {"collective_permute": 2}


@pytest.mark.not_smoke
def test_a_batch_that_value_and_grad_cuts(monkeypatch, chosen):
    """Tuned with the batch over "dp" left to the compiler, found again where "dp" is manual."""
    mesh = sk.make_mesh({"dp": 2, "sp": 4})
    x, kernel = shapes()
    x = x.update(sharding=NamedSharding(mesh, P("dp")))
    found = found_best(judged(monkeypatch, x, kernel, (1,), "SAME", **CALL, candidates=["blocks 2"]), BLOCKS2)
    assert [(layer.regime.images, layer.regime.images_known) for layer in found.layers] == [(2, False), (1, True)]

    def loss(kernel, x):
        return jnp.mean(sk.ring_conv(x, kernel, (1,), "SAME", **CALL) ** 2)

    x, kernel = operands()
    placed = sk.shard_tensor(x, {"dp": sk.Shard(0), "sp": sk.Shard(1)}, mesh)
    chosen.clear()
    step = jax.jit(sk.value_and_grad(loss, batch_axes="dp", mesh=mesh))
    with jax.set_mesh(mesh):
        step.lower(jnp.asarray(kernel), placed)
        with sk.spatial.forms(found):
            step.lower(jnp.asarray(kernel), placed)
    assert list(dict.fromkeys(chosen)) == ["concat", "blocks 2"]


def test_one_form_for_all_that_can_run_it(chosen):
    mesh = sk.make_mesh({"sp": 4})
    x, kernel = shapes()

    def run(x, kernel):
        call = {**CALL, "mesh": mesh}
        sk.ring_conv(x, kernel, (1,), "SAME", **call)
        sk.ring_conv(x, kernel, (1,), ((1, 1),), padding_mode="reflect", **call)  # "overlap" can't
        sk.ring_conv(x, kernel, (1,), "SAME", method="blocks", **call)  # the caller's own choice
        with sk.spatial.forms("blocks 4"):
            sk.ring_conv(x, kernel, (1,), "SAME", **call)

    with sk.spatial.forms("overlap"):
        jax.eval_shape(run, x, kernel)
    assert chosen == ["overlap", "concat", "blocks 8", "blocks 4"]


# --- bad input ---------------------------------------------------------------------------------------------


def test_bad_forms():
    with pytest.raises(ValueError, match="'bloks 8' is no form of a convolution"), sk.spatial.forms("bloks 8"):
        pass
    with pytest.raises(ValueError, match=r"takes one name.*got \['concat', 'overlap'\]"):
        sk.spatial.forms("concat", "overlap").__enter__()
    with pytest.raises(TypeError, match="takes results of tune_conv and names of forms, got 8"):
        sk.spatial.forms(8).__enter__()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"candidates": ["bloks 8"]}, "'bloks 8' is no form of a convolution"),
        ({"candidates": []}, "give at least one of each"),
        ({"rounds": 0}, "rounds=0: give at least one of each"),
        ({"candidates": ["blocks 7"]}, "no form can run: blocks 7: blocks of 4 inputs"),
        ({"mesh": None}, "tune_conv found no mesh"),
        ({"spatial_axes": {"sq": "W"}}, "sq"),
        ({"padding_mode": "mirror"}, "mirror"),
    ],
)
def test_bad_arguments(changes, message):
    keywords = {**CALL, "mesh": sk.make_mesh({"sp": 4})} | changes
    with pytest.raises(ValueError, match=message):
        sk.spatial.tune_conv(*shapes((2, 16, 2)), (1,), "SAME", **keywords)


def test_not_where_nothing_can_be_run(monkeypatch):
    mesh = sk.make_mesh({"sp": 4})

    def tune(x, kernel):
        sk.spatial.tune_conv(x, kernel, (1,), "SAME", **CALL, mesh=mesh)

    with pytest.raises(ValueError, match="call it outside of jit and of manual regions"):
        jax.eval_shape(tune, *shapes())
    with pytest.raises(ValueError, match="has no devices; give a mesh that has"):
        sk.spatial.tune_conv(*shapes(), (1,), "SAME", **CALL, mesh=mesh.abstract_mesh)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(ValueError, match="the mesh has devices of other processes, each of which"):
        sk.spatial.tune_conv(*shapes(), (1,), "SAME", **CALL, mesh=mesh)
