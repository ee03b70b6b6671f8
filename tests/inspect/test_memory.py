import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shardkit.inspect import MemoryReport, memory

KNOWN = MemoryReport(arguments=4096, outputs=2048, temporaries=1000, aliased=2048, generated_code=10, peak=5000)


def sharded(shape, *spec, sizes=(2, 4)):
    mesh = jax.make_mesh(sizes, ("dp", "sp"), axis_types=(AxisType.Auto,) * 2)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))


def test_one_device_holds_its_share():
    report = memory(lambda x: x * 2, sharded((64, 64), "dp", "sp"))
    assert report.arguments == report.outputs == 64 * 64 * 4 // 8
    assert report.aliased == 0
    assert report.total == report.arguments + report.outputs + report.temporaries + report.generated_code


def test_replicated_arguments_are_held_whole():
    assert memory(lambda x: x * 2, sharded((64, 64))).arguments == 64 * 64 * 4


def test_a_gathered_temporary():
    def f(x):
        whole = jax.lax.with_sharding_constraint(x, NamedSharding(x_struct.sharding.mesh, P()))
        return jnp.sort(whole, axis=0).sum()

    x_struct = sharded((256, 64), "dp", "sp")
    assert memory(f, x_struct).temporaries >= 256 * 64 * 4


def test_donation_shows_as_aliased():
    f = jax.jit(lambda x: x + 1, donate_argnums=0)
    report = memory(f, sharded((64, 64), "dp"))
    assert report.aliased == report.outputs == 64 * 64 * 4 // 2
    assert report.total == report.arguments + report.temporaries + report.generated_code


def test_forms_of_programs():
    f, x = jax.jit(lambda x, *, y: x + y), np.ones((8, 8))
    reports = [memory(f, x, y=x), memory(f.lower(x, y=x)), memory(f.lower(x, y=x).compile())]
    assert {report.arguments for report in reports} == {2 * 512}


def test_what_is_no_program():
    with pytest.raises(TypeError, match="got int"):
        memory(3)


class NoAnalysis:
    """A jitted function of a backend that cannot tell."""

    def __init__(self, answer):
        self.answer = answer

    def __call__(self):
        raise AssertionError("nothing is run")

    def lower(self):
        return self

    def compile(self):
        return self

    def memory_analysis(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize("answer", [None, NotImplementedError("no"), jax.errors.JaxRuntimeError("UNIMPLEMENTED")])
def test_a_backend_without_the_analysis(answer):
    with pytest.raises(RuntimeError, match="the backend 'cpu' gives no memory analysis"):
        memory(NoAnalysis(answer))


TEXT = """\
Memory on one device
  part                size   bytes  meaning
  arguments        4.0 KiB   4,096  inputs
  outputs          2.0 KiB   2,048  results
  temporaries       1000 B   1,000  alive only while it runs
  generated code      10 B      10  the program itself
  aliased         -2.0 KiB  -2,048  outputs in the memory of donated inputs
  total            5.0 KiB   5,106  sum of the above
  peak             4.9 KiB   5,000  most in use at any moment"""


def test_shown():
    assert str(KNOWN) == TEXT
    assert "5,106" in KNOWN._repr_html_()
    stream = io.StringIO()
    rich.console.Console(file=stream, width=100, color_system=None).print(KNOWN)
    assert "5,106" in stream.getvalue()
    assert "peak" not in str(MemoryReport(1, 2, 3, 0, 0))


def test_dict():
    assert json.loads(json.dumps(KNOWN.to_dict())) == {
        "arguments": 4096,
        "outputs": 2048,
        "temporaries": 1000,
        "aliased": 2048,
        "generated_code": 10,
        "peak": 5000,
        "total": 5106,
    }
