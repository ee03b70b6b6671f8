"""The structure of a batch in words, and back."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardkit.data.skeleton import from_words, to_words


def test_there_and_back():
    batch = {"x": np.zeros((8, 3), np.float32), "y": [(np.ones(8, bool), None), jnp.ones(8, jnp.bfloat16)], "n": 3}
    found = from_words(json.loads(json.dumps(to_words(batch))))
    assert jax.tree.structure(found) == jax.tree.structure(batch)
    for array, like in zip(jax.tree.leaves(found), jax.tree.leaves(batch), strict=True):
        like = np.asarray(like)
        assert (array.dtype, array.ndim, array.shape[1:]) == (like.dtype, like.ndim, like.shape[1:])
        assert array.shape[:1] in ((), (0,))


class Other(tuple):
    __slots__ = ()


@pytest.mark.parametrize("node", [object(), {"x": [object()]}, {(1, 2): 3}, {1.5: 3}, np.array, Other()])
def test_what_has_no_words(node):
    assert to_words(node) is None
