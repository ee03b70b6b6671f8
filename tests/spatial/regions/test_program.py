"""What a region's program says, and how often to exchange by the model."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

import shardkit as sk
from shardkit.spatial.regions.block import CutDim
from shardkit.spatial.regions.choose import choose_every, deepest, seconds
from shardkit.spatial.regions.graph import graph_of
from shardkit.spatial.regions.plan import Setting, plan_graph
from shardkit.spatial.regions.platforms import Platform, platform_figures

NUMBERS = ("NHWC", "HWIO", "NHWC")


def encoder(x, kernels):
    for kernel in kernels:
        x = jax.nn.relu(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=NUMBERS))
    return x


X, KERNELS = jax.ShapeDtypeStruct((2, 8, 32, 4), jnp.float32), [jax.ShapeDtypeStruct((3, 3, 4, 4), jnp.float32)] * 4


def planned(every: int, turns: bool = True, width: int = 32, fun=encoder, kernels=KERNELS):
    x = jax.ShapeDtypeStruct((2, 8, width, 4), jnp.float32)
    graph = graph_of(jax.make_jaxpr(fun)(x, kernels))
    lies = [{}] * len(graph.consts) + [{2: CutDim(("sp",), 4, width)}] + [{}] * len(jax.tree.leaves(kernels))
    return plan_graph(graph, lies, Setting(every, "cpu", turns))


@pytest.mark.parametrize(("every", "exchanges", "first"), [(1, 4, (1, 1)), (2, 2, (2, 2)), (4, 1, (4, 4))])
def test_what_is_fetched(every, exchanges, first):
    made = sk.spatial.region(encoder, spatial_axes={"sp": "W"}, mesh=sk.make_mesh({"sp": 4}), exchange_every=every)
    program = made.program(X, KERNELS)
    assert program.exchanges == exchanges and program.every == every and not program.left
    assert dict(program.lines[0].fetched) == {2: first}
    assert program.lines[0].kind == "window" and program.lines[1].kind == "in place"
    text = str(program)
    assert f"{exchanges} exchanges" in text and f"fetches {first[0]}+{first[1]} of dim 2" in text
    assert "test_program.py" in program.lines[0].source
    assert "<pre" in program._repr_html_() and "&" not in program.lines[0].name


def test_what_leaves_the_layout_is_shown():
    def fun(x):
        return jnp.sort(jnp.sin(x), 2).reshape(x.shape[0], -1)

    program = sk.spatial.region(fun, spatial_axes={"sp": "W"}, mesh=sk.make_mesh({"sp": 4})).program(X)
    assert [line.name for line in program.left] == ["sort"]
    assert "mixes blocked dims [2]" in str(program) and "1 left the layout" in str(program)


def test_loops_are_shown():
    def fun(x, kernel):
        return lax.scan(lambda c, _: (encoder(c, [kernel]), None), x, None, 6)[0]

    made = sk.spatial.region(fun, spatial_axes={"sp": "W"}, mesh=sk.make_mesh({"sp": 4}), exchange_every=3)
    program = made.program(X, KERNELS[0])
    assert program.lines[0].name == "scan" and "3 for each exchange" in program.lines[0].note
    assert [dict(line.fetched) for line in program.lines[1:] if line.fetched] == [{2: (3, 3)}]
    assert program.lines[1].depth == 1


# --- the model ----------------------------------------------------------------------------------------------------


def test_latency_is_saved_and_the_rim_is_paid():
    slow, busy = Platform(1.0, 1e12, 1e15, 1e15), Platform(1e-12, 1e15, 1e3, 1e15)
    times = [seconds(planned(k), slow) for k in (1, 2, 4)]
    np.testing.assert_allclose(times, [8, 4, 2], rtol=1e-3)  # forward and backward
    assert seconds(planned(1), busy) < seconds(planned(2), busy) < seconds(planned(4), busy)


def test_the_cheapest_is_chosen(monkeypatch):
    import shardkit.spatial.regions.choose as choose

    for figures, every in ((Platform(1.0, 1e12, 1e15, 1e15), 4), (Platform(1e-12, 1e15, 1e3, 1e15), 1)):
        monkeypatch.setattr(choose, "platform_figures", lambda mesh, platform, f=figures: f)
        plan = choose_every(planned, None, "cpu")
        assert plan.exchanges == {4: 1, 1: 4}[every]


def test_nothing_to_exchange_is_planned_once():
    calls = []

    def make(every, turns):
        calls.append(every)
        return planned(every, turns, fun=lambda x, k: jnp.sin(x))

    assert choose_every(make, None, "cpu").exchanges == 0 and calls == [1]


def test_how_deep():
    assert deepest(planned(1)) == 4


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu", "unheard of"])
def test_every_platform_has_figures(platform):
    found = platform_figures(sk.make_mesh({"sp": 1}), platform)
    assert min(found.latency, found.link, found.flops, found.memory) > 0
