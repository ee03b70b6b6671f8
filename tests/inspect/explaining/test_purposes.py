"""What a collective is for: every way a program can say it, on described collectives."""

import dataclasses

import pytest

from shardkit.inspect.explaining import PURPOSES
from shardkit.inspect.explaining.purposes import Facts, Parameter, op_names, primitive, reason
from shardkit.inspect.report import KINDS, Collective

W = Parameter("params['w']", (64, 32), (64, 8))
FACTS = Facts((W,), frozenset({"dp"}))
BACKWARD = "jit(step)/transpose(jvp(Net))/"


def collective(kind, op_name, *, dims=(64, 32), axes=("dp",), size=4, in_loop=False, name="c", shapes=None):
    return Collective(
        kind=kind,
        axes=axes,
        shapes=shapes or (("f32", dims),),
        result_bytes=1,
        bytes=1,
        group_size=size,
        groups=((0, 1, 2, 3),),
        in_loop=in_loop,
        trip_count=1,
        reduction="add" if kind in ("all_reduce", "reduce_scatter") else None,
        op_name=op_name,
        source="",
        name=name,
    )


@pytest.mark.parametrize(
    ("dims", "op_name", "in_loop", "axes", "purpose"),
    [
        ((16, 32), BACKWARD + "conv_general_dilated", True, ("dp",), "gradient reduction"),  # a part of four of W
        ((16, 31), BACKWARD + "conv_general_dilated", True, ("dp",), "halo"),
        ((16, 32), BACKWARD + "conv_general_dilated", True, ("sp",), "halo"),  # where all see the same examples
        ((16, 32), BACKWARD + "conv_general_dilated", False, ("dp",), "halo"),
        ((16, 32), "jit(f)/jvp(Net)/conv_general_dilated", True, ("dp",), "halo"),
        ((64, 32), BACKWARD + "conv_general_dilated", True, ("dp",), "halo"),
    ],
)
def test_a_kernels_gradient_that_is_passed_on_in_parts(dims, op_name, in_loop, axes, purpose):
    """As the compiler for a v5e sums small ones over the batch."""
    one = collective("collective_permute", op_name, dims=dims, axes=axes, in_loop=in_loop)
    assert reason(one, FACTS).purpose == purpose


@pytest.mark.parametrize(
    ("kind", "op_name", "purpose"),
    [
        # Ours say so, under any transformation.
        ("collective_permute", "jit(f)/sk.halo/ppermute", "halo"),
        ("collective_permute", BACKWARD + "shard_map/transpose(sk.halo)/ppermute", "halo"),
        ("all_reduce", "jit(f)/shard_map/sk.gradients/psum", "gradient reduction"),
        ("reduce_scatter", "jit(f)/sk.gradients/sk.reshard/psum_scatter", "gradient reduction"),
        ("all_gather", "jit(f)/sk.parameters/all_gather", "parameter gather"),
        ("reduce_scatter", BACKWARD + "sk.parameters/reduce_scatter", "gradient reduction"),
        ("all_reduce", "jit(f)/jvp()/sk.reduction/psum", "reduction"),
        ("all_to_all", "jit(f)/sk.reshard/all_to_all", "reshard"),
        ("all_reduce", "jit(f)/jvp()/sk.reshard/psum", "reduction"),
        ("all_reduce", "jit(f)/transpose(jvp(sk.reshard))/psum", "gradient reduction"),
        # What the user wrote.
        ("all_to_all", "jit(f)/shard_map/all_to_all", "reshard"),
        ("collective_permute", "jit(f)/shard_map/ppermute", "reshard"),
        ("all_reduce", "jit(f)/jvp()/shard_map/psum_invariant", "reduction"),
        ("all_reduce", "jit(f)/shard_map/psum", "gradient reduction"),  # after the derivative
        ("all_reduce", BACKWARD + "shard_map/psum_invariant", "gradient reduction"),
        # What XLA inserted.
        ("collective_permute", "jit(f)/conv_general_dilated", "halo"),
        ("collective_permute", "jit(f)/reduce_window_max", "halo"),
        ("collective_permute", "jit(f)/dot_general", "unexplained"),
        ("all_reduce", BACKWARD + "dot_general", "gradient reduction"),
        ("reduce_scatter", BACKWARD + "dot_general", "reduction"),  # the result is four times less than what is summed
        ("all_reduce", "jit(f)/dot_general", "reduction"),
        ("collective_permute", "jit(f)/concatenate", "reshard"),
        ("all_gather", "jit(f)/shard_map", "reshard"),
        ("all_gather", "x", "parameter gather"),  # the name of an input is no operation's
        ("all_reduce", "jit(f)/reduce_max[axes=(0,)]", "reduction"),
        ("all_gather", "jit(f)/sharding_constraint", "reshard"),
        ("all_to_all", "jit(f)/reshard", "reshard"),
        ("all_gather", "jit(f)/jvp()/conv_general_dilated", "unexplained"),
        ("all_to_all", "jit(f)/dot_general", "unexplained"),
        ("all_gather", "", "parameter gather"),  # as large as a parameter, and outside of the derivative
    ],
)
def test_names(kind, op_name, purpose):
    assert reason(collective(kind, op_name), FACTS).purpose == purpose
    assert purpose in PURPOSES


def test_a_gradient_is_as_large_as_a_parameter():
    name = BACKWARD + "dot_general"
    for dims in ((64, 32), (32, 64), (2048,), (64, 8)):  # whole, turned, flat, a block
        assert reason(collective("all_reduce", name, dims=dims), FACTS).purpose == "gradient reduction"
    assert reason(collective("all_reduce", name, dims=(64, 33)), FACTS).purpose == "reduction"
    assert reason(collective("reduce_scatter", name, dims=(16, 32)), FACTS).purpose == "gradient reduction"
    halves = (("f32", (64, 16)), ("f32", (64, 16)), ("f32", ()))  # of two groups of a convolution, with the loss
    assert reason(collective("all_reduce", name, shapes=halves), FACTS).purpose == "gradient reduction"


def test_in_a_loop_it_is_as_large_as_a_layer():
    stacked = Facts((Parameter("layers", (12, 64, 32), (12, 64, 8)),), frozenset({"dp"}))
    name = BACKWARD + "while/body/dot_general"
    assert reason(collective("all_reduce", name, in_loop=True), stacked).purpose == "gradient reduction"
    assert reason(collective("all_reduce", name, in_loop=False), stacked).purpose == "reduction"


def test_gradients_of_activations_are_summed_over_axes_that_no_data_is_cut_by():
    name = BACKWARD + "dot_general"
    assert reason(collective("all_reduce", name, axes=("tp",)), FACTS).purpose == "reduction"
    assert reason(collective("all_reduce", name, axes=("dp", "tp")), FACTS).purpose == "gradient reduction"
    unknown = dataclasses.replace(FACTS, data_axes=())
    assert reason(collective("all_reduce", name, axes=("tp",)), unknown).purpose == "gradient reduction"


def test_inputs_put_together():
    gather = collective("all_gather", "jit(f)/jvp()/dot_general", name="g")
    moved = dataclasses.replace(FACTS, inputs={"g": "params['w']"})
    found = reason(gather, moved)
    assert (found.purpose, found.what) == ("parameter gather", "params['w']")
    # An activation that the program was given cut, and that XLA puts together: nobody asked for it.
    found = reason(gather, dataclasses.replace(FACTS, inputs={"g": "x"}))
    assert (found.purpose, found.what) == ("unexplained", "XLA, for dot_general: moves input x")


def test_a_name_that_was_dropped_is_that_of_the_operands():
    lost = collective("all_reduce", "", name="lost", dims=(4096,))
    made = {"lost": [(BACKWARD + "dot_general", 2048), (BACKWARD + "dot_general", 2048), ("", 7)]}
    found = reason(lost, dataclasses.replace(FACTS, makers=made))
    assert (found.purpose, found.what) == ("gradient reduction", "as large as params['w']")
    found = reason(lost, dataclasses.replace(FACTS, makers={"lost": [("jit(f)/jvp()/tanh", 5)]}))
    assert found.purpose == "reduction"
    assert "dropped its name" in found.what
    assert reason(lost, FACTS).purpose == "unexplained"


def test_what_several_combined_are_for_is_what_most_of_its_bytes_are_for():
    names = f"jit(f)/(jvp()/reduce_sum:{BACKWARD}dot_general)"
    both = collective("all_reduce", names, shapes=(("f32", ()), ("f32", (64, 32))))
    found = reason(both, FACTS)
    assert (found.purpose, found.what) == ("gradient reduction", "as large as params['w'] (with it: reduction)")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("jit(f)/cos", ["jit(f)/cos"]),
        ("jit(f)/jvp()/(a)", ["jit(f)/jvp()/a"]),
        ("jit(f)/(transpose(jvp(x))/psum:jvp(y)/cos)", ["jit(f)/transpose(jvp(x))/psum", "jit(f)/jvp(y)/cos"]),
        ("(reverse:jit(f)/transpose(jvp())/conv)", ["reverse", "jit(f)/transpose(jvp())/conv"]),
    ],
)
def test_names_of_what_was_combined(text, names):
    assert op_names(text) == names


def test_primitives():
    assert primitive("jit(f)/while/body/dot_general[dimension_numbers=((1,), (0,))]") == "dot_general"
    assert primitive("") == ""


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_without_a_word_is_unexplained(kind):
    nameless = collective(kind, "", dims=(3, 5))
    assert reason(nameless, Facts()).purpose == "unexplained"
