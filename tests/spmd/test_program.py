"""The program as text, HTML and data."""

import html.parser
import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import shardkit as sk

R, S = sk.Replicate(), sk.Shard
MESH = jax.sharding.AbstractMesh((2, 4), ("dp", "tp"))


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.fixture(scope="module")
def program():
    def fun(params, x):
        def layer(h, _):
            return h + jax.nn.relu(h @ params["up"]) @ params["down"], None

        return lax.scan(layer, x, None, length=3)[0].sum()

    places = ({"up": {"tp": S(1)}, "down": {"tp": S(0)}}, {"dp": S(0)})
    return sk.partition(fun, places, mesh=MESH).program({"up": f32(16, 32), "down": f32(32, 16)}, f32(8, 16))


def test_steps(program):
    assert [s.name for s in program.steps if s.kind == "input" and s.depth == 0] == [
        "params['down']",
        "params['up']",
        "x",
    ]
    loop = next(s for s in program.steps if s.op == "scan")
    assert (loop.shape, loop.local_shape, loop.placements) == ((8, 16), (4, 16), (S(0), R))
    inner = [s for s in program.steps if s.depth == 1 and s.kind == "op"]
    assert [s.op for s in inner if s.op == "dot_general"] == ["dot_general"] * 2
    assert all(s.times == 3 for s in inner)
    assert {s.source.split(":")[0] for s in inner} == {"test_program.py"}


def test_reshards(program):
    first, last = program.reshards
    assert (first.collectives, first.times, first.bytes) == (("all_reduce",), 3, 2 * 4 * 16 * 4 * 3 // 4)
    assert first.made_by["tp"].startswith("dot_general at test_program.py:")
    assert first.plan.bytes_per_device == first.bytes_per_device
    assert (last.src, last.dst) == ((sk.Partial(), R), (R, R))
    assert program.bytes_per_device == 3 * first.bytes + last.bytes
    assert program.collectives == 4


def test_text_is_aligned(program):
    text = str(program)
    assert "x 3" in text  # a reshard in a loop says how often
    after = text.split("after:")[1].strip("\n").splitlines()
    where = {line.index("float32[") for line in after if "float32[" in line}
    assert len(where) == 1


def test_html(program):
    class Checker(html.parser.HTMLParser):
        def __init__(self):
            super().__init__()
            self.open, self.rows = [], 0

        def handle_starttag(self, tag, attrs):
            self.open.append(tag)
            self.rows += tag == "tr"

        def handle_endtag(self, tag):
            assert self.open.pop() == tag

    checker = Checker()
    checker.feed(program._repr_html_())
    assert checker.open == [] and checker.rows == len(program.steps) + 1


def test_data(program):
    data = json.loads(json.dumps(program.to_dict()))
    assert data["bytes_per_device"] == program.bytes_per_device and data["mesh"] == {"dp": 2, "tp": 4}
    assert len(data["steps"]) == len(program.steps)
    reshard = next(s for s in data["steps"] if s["kind"] == "reshard")
    assert reshard["before"] == ["Shard(dim=0)", "Partial(reduce='sum')"] and "psum" in reshard["steps"][0]


def test_lines_of_what_jax_keeps_traced():
    # JAX traces relu once; the second call's line is its own.
    def fun(x):
        y = jax.nn.relu(x)
        return jax.nn.relu(y - 1)

    program = sk.partition(fun, {"dp": S(0)}, mesh=MESH).program(f32(8))
    lines = [int(s.source.split(":")[1]) for s in program.steps if s.op == "max"]
    assert len(set(lines)) == 2
