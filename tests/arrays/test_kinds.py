"""The reduce kinds as arithmetic: identities leave every value as it is, dtypes are kept or refused."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from shardkit.arrays.kinds import check_dtype, identity, reduce_stack

NUMBERS = ["int8", "uint16", "int64", "bfloat16", "float16", "float32", "float64", "complex64"]
FLOATS = ["bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"]


def values(dtype):
    if dtype == "bool":
        return np.array([True, False, True])
    found = np.array([-3, 0, 2]) if "uint" not in dtype else np.array([3, 0, 2])
    return np.asarray(jnp.asarray(found, dtype))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((k, d) for k in ("sum", "prod") for d in NUMBERS),
        *((k, d) for k in ("max", "min") for d in [*NUMBERS[:-1], *FLOATS, "bool"]),
        *((k, "bool") for k in ("any", "all")),
    ],
)
def test_identity_changes_nothing(kind, dtype):
    x = values(dtype)
    neutral = identity(kind, dtype)
    assert neutral.dtype == x.dtype
    out = reduce_stack(kind, jnp.stack([jnp.full(x.shape, neutral, x.dtype), jnp.asarray(x)]), (0,))
    assert out.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(out).astype("complex64"), x.astype("complex64"))


@pytest.mark.parametrize(
    ("kind", "dtype", "value"),
    [
        ("max", "float32", -np.inf),
        ("min", "bfloat16", np.inf),
        ("max", "float8_e4m3fn", -448.0),  # it has no infinity
        ("min", "float8_e5m2", np.inf),
        ("max", "int8", -128),
        ("min", "uint16", 65535),
        ("max", "bool", False),
        ("min", "bool", True),
        ("all", "bool", True),
    ],
)
def test_identity_values(kind, dtype, value):
    assert identity(kind, dtype).astype("float32") == np.float32(value)


@pytest.mark.parametrize("kind", ["sum", "mean", "max", "min", "prod"])
def test_reduce_stack_over_two_axes(kind):
    x = np.random.default_rng(0).normal(size=(2, 3, 4))
    np.testing.assert_allclose(reduce_stack(kind, jnp.asarray(x), (0, 1)), getattr(np, kind)(x, (0, 1)), rtol=1e-14)


def test_reduce_stack_keeps_small_dtypes():
    assert reduce_stack("sum", jnp.ones((2, 3), "int8"), (0,)).dtype == jnp.int8
    assert reduce_stack("prod", jnp.ones((2, 3), "uint8"), (0,)).dtype == jnp.uint8
    assert reduce_stack("mean", jnp.ones((2, 3), "bfloat16"), (0,)).dtype == jnp.bfloat16
    assert reduce_stack("any", jnp.array([[True], [False]]), (0,)).dtype == jnp.bool_


@pytest.mark.parametrize(
    ("kind", "dtype", "message"),
    [
        ("sum", "bool", "me: Partial('sum') of dtype bool isn't defined; this dtype can wait for "
         "['max', 'min', 'any', 'all']; use Partial(\"any\"), or cast to an integer to count"),
        ("prod", "bool", 'use Partial("all")'),
        ("mean", "int32", "an integer mean isn't exact: cast to float first"),
        ("mean", "bool", "cast to float first"),
        ("max", "complex64", "can wait for ['sum', 'mean', 'prod']; complex numbers have no order"),
        ("min", "complex128", "complex numbers have no order"),
        ("any", "float32", "can wait for ['sum', 'mean', 'max', 'min', 'prod']"),
        ("all", "int32", "can wait for ['sum', 'max', 'min', 'prod']"),
    ],
)  # fmt: skip
def test_refused_dtypes(kind, dtype, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        check_dtype(kind, dtype, "me")
    with pytest.raises((TypeError, ValueError)):
        identity(kind, dtype)


def test_a_mean_has_no_identity():
    with pytest.raises(ValueError, match='Partial\\("mean"\\) has no identity'):
        identity("mean", "float32")


def test_unknown_kind():
    with pytest.raises(ValueError, match="me: reduce kind 'avg' is unknown; use one of"):
        check_dtype("avg", "float32", "me")
