"""What states and plain values are as JSON, from which they come back the same, types and all."""

import collections
import json

import jax.numpy as jnp
import numpy as np
import pytest

from shardkit.checkpoint.json_values import from_json, to_json

VALUES = [
    None,
    True,
    2**100,
    0.1,
    float("inf"),
    1 + 2j,
    "é\n",
    b"\x00\xff",
    [1, (2, [3])],
    {"a": (1, {2: b"c"})},
    {0: 1, (1, "x"): 2},
    {"is": "bytes", "of": "text that only looks like ours"},
    np.int64(3),
    np.float32(2.5),
    np.arange(6.0).reshape(2, 3).T,
    np.arange(3, dtype=">i4"),
    np.zeros((0, 2), np.uint8),
    np.arange(3).astype(jnp.bfloat16),
]


@pytest.mark.parametrize("value", VALUES, ids=[type(x).__name__ for x in VALUES])
def test_comes_back_the_same(value):
    found = from_json(json.loads(json.dumps(to_json(value))))
    assert type(found) is type(value)
    assert repr(found) == repr(value)
    if isinstance(value, np.ndarray):
        assert found.dtype == value.dtype
        assert found.flags.writeable


def test_the_state_of_a_generator_of_numpy():
    here, there = np.random.RandomState(3), np.random.RandomState(4)
    there.set_state(from_json(json.loads(json.dumps(to_json(here.get_state())))))
    assert here.rand() == there.rand()


Pair = collections.namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, [Pair(1, 2)], {"a": np.array(["x"])}, jnp.zeros(2)], ids=map(str, range(5))
)
def test_what_would_not_come_back_is_refused(value):
    with pytest.raises(TypeError, match=r"^an? [A-Za-z]"):
        to_json(value)
