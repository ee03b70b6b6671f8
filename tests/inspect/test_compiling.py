"""Which mesh is taken, when several could be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shardkit.inspect.compiling import Program, compile_program, find_mesh


def make(sizes, names):
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))


@pytest.fixture(scope="module")
def meshes():
    return make((8,), ("a",)), make((2, 4), ("b", "c")), make((4, 2), ("d", "e"))


def held(mesh):
    return jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P(mesh.axis_names[0])))


def test_arguments_come_before_the_program(meshes):
    first, second, third = meshes

    def f(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(second, P("b")))

    with jax.set_mesh(third):
        program = compile_program(f, (held(first),), {})
        assert find_mesh(program, 8) == (("a", 8),)
        assert find_mesh(program, 8, mesh=third) == (("d", 4), ("e", 2))
        # The traced program, where nothing else tells.
        assert find_mesh(Program(None, program.jaxpr, ((), {})), 8) == (("b", 2), ("c", 4))
        # The context last.
        assert find_mesh(Program(None, None, ((), {})), 8) == (("d", 4), ("e", 2))
    assert find_mesh(Program(program.compiled, None, ((), {})), 8) == (("a", 8),)
    assert find_mesh(Program(None, None, ((), {})), 8) is None


def test_keyword_arguments_and_pytrees(meshes):
    program = compile_program(lambda *, tree: tree["x"][0] + 1, (), {"tree": {"x": [held(meshes[1])]}})
    assert find_mesh(program, 8) == (("b", 2), ("c", 4))


def test_meshes_inside_nested_functions(meshes):
    second = meshes[1]

    @jax.jit
    def inner(x):
        body = jax.shard_map(lambda x: x * 2, mesh=second, in_specs=P("b"), out_specs=P("b"))
        return jax.lax.scan(lambda c, _: (body(c), None), x, None, length=2)[0]

    def f(x):
        return jax.lax.cond(x[0, 0] > 0, inner, lambda x: x, x)

    program = compile_program(f, (np.ones((8, 8)),), {})
    assert find_mesh(Program(None, program.jaxpr, ((), {})), 8) == (("b", 2), ("c", 4))


def test_a_mesh_of_another_size_is_passed_over(meshes):
    small = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    program = Program(None, None, ((held(small), held(meshes[2])), {}))
    assert find_mesh(program, 8) == (("d", 4), ("e", 2))


def test_a_given_mesh_for_a_program_of_one_device(meshes):
    program = compile_program(lambda x: x + 1, (np.ones(3),), {})
    assert find_mesh(program, 1, mesh=meshes[1]) == (("b", 2), ("c", 4))
