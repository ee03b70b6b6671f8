"""Bad input: one error that says what was given and what is allowed."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import shardkit as sk
from shardkit.spatial.regions import region

X = np.ones((1, 2, 8, 2))
K = np.ones((3, 3, 2, 2))
W = {"sp": "W"}


@pytest.mark.parametrize("every", [0, -1])
def test_too_few_layers(every):
    with pytest.raises(ValueError, match=f"region: exchange_every={every} must be at least 1"):
        region(jnp.sin, spatial_axes=W, exchange_every=every)


@pytest.mark.parametrize("every", ["x", 1.5, True, None])
def test_layers_that_are_no_number(every):
    with pytest.raises(ValueError, match=f'exchange_every={every!r} is unknown; use a number of layers, or "auto"'):
        region(jnp.sin, spatial_axes=W, exchange_every=every)


@pytest.mark.parametrize(
    ("axes", "error", "message"),
    [
        ({"nope": "W"}, ValueError, r"names mesh axis 'nope', but the mesh has \('sp',\)"),
        ({"sp": "Q"}, ValueError, "names dim 'Q', but the dims are"),
        ({"sp": 9}, ValueError, "no argument has the dims of spatial_axes={'sp': 9}"),
        ({"sp": True}, TypeError, "a number or a letter, got True"),
        ({}, ValueError, "maps mesh axes to array dims"),
        ("sp", ValueError, "or is a sequence of such mappings, one an argument; got 'sp'"),
        (None, ValueError, "one an argument; got None"),
        ((W, None), ValueError, "names 2 arguments, but 1 were given by position"),
        ((None,), ValueError, "no argument has the dims of spatial_axes"),
    ],
)
def test_axes(axes, error, message, mesh_for):
    with pytest.raises(error, match=f"region.*{message}"):
        region(jnp.sin, spatial_axes=axes, mesh=mesh_for({"sp": 4}))(X)


def test_no_argument_has_the_dims(mesh_for):
    with pytest.raises(ValueError, match="region: no argument has the dims"):
        region(jnp.sin, spatial_axes=W, mesh=mesh_for({"sp": 4}))(3.0)
    with pytest.raises(ValueError, match="names 1 arguments, but 0 were given by position"):
        region(jnp.sin, spatial_axes=W, mesh=mesh_for({"sp": 4}))(x=X)


def test_no_mesh():
    with pytest.raises(ValueError, match="region found no mesh"):
        region(jnp.sin, spatial_axes=W)(X)


def printed(x):
    jax.debug.print("{}", x)
    return x * 2


def called(x):
    return jax.pure_callback(np.sin, x, x)


@pytest.mark.parametrize(("fun", "name"), [(printed, "debug_"), (called, "pure_callback")])
def test_callbacks(fun, name, mesh_for):
    with pytest.raises(NotImplementedError, match=rf"region: {name}\w* at test_refusals.py:\d+ calls back to the host"):
        region(fun, spatial_axes=W, mesh=mesh_for({"sp": 4}))(X)


def test_a_ring_conv_inside(mesh_for):
    mesh = mesh_for({"sp": 4})

    def twice(x, k):
        numbers = ("NHWC", "HWIO", "NHWC")
        return sk.ring_conv(x, k, (1, 1), "SAME", dimension_numbers=numbers, spatial_axes=W, mesh=mesh)

    with pytest.raises(NotImplementedError, match=r"region: shard_map at \S+:\d+ \(a sk.ring_\* function"):
        region(twice, spatial_axes=W, mesh=mesh)(X, K)
