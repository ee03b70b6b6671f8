"""Oracles for tests of sharded programs: the same as on one device, in values, placements and communication.

The assertions that this library's own tests are made of, for yours. Nothing here needs pytest, and all of it works
with it: a ``conftest.py`` calls ``simulate_devices(8)``, tests are parametrized over ``meshes(("dp", "sp"))``.

From numbers to programs: ``held`` (what each device holds), ``closeness`` and ``blame`` (how far off, and where),
``values``; ``devices`` (simulated ones, meshes), ``one_device``; ``same``, ``gradients``, ``adjoint``, ``placed`` and
``programs`` are the assertions.
"""

from shardkit.inspect import assert_collectives
from shardkit.testing.adjoint import assert_adjoint
from shardkit.testing.devices import entered, mesh_id, meshes, simulate_devices
from shardkit.testing.gradients import assert_same_gradients
from shardkit.testing.one_device import on_one_device
from shardkit.testing.placed import assert_placements
from shardkit.testing.programs import assert_same_collectives
from shardkit.testing.same import assert_same_as_one_device
from shardkit.testing.values import assert_same_values

__all__ = [
    "assert_same_as_one_device",
    "assert_same_gradients",
    "assert_placements",
    "assert_collectives",
    "assert_same_collectives",
    "assert_same_values",
    "assert_adjoint",
    "on_one_device",
    "simulate_devices",
    "meshes",
    "mesh_id",
    "entered",
]
