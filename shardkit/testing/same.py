"""``assert_same_as_one_device``: a function gives on many devices what it gives on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardkit.testing.devices import entered
from shardkit.testing.one_device import on_one_device, the_mesh
from shardkit.testing.placed import assert_placements
from shardkit.testing.values import assert_same_values


def assert_same_as_one_device(
    fun: Callable[..., Any],
    *args: Any,
    reference: Callable[..., Any] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    placements: Any = None,
) -> Any:
    """Checks that a function of sharded arguments gives what it gives on one device, for whole arrays.

    Args:
      fun: eager, ``jax.jit``ted or ``sk.partition``ed. Run as it is, on the arguments as they are; arguments on an
        Explicit mesh have it set (``jax.set_mesh``) if none is.
      *args: its arguments: pytrees of arrays, placed (``sk.shard_tensor``). For keyword arguments use
        ``functools.partial``.
      reference: the same for one device: given plain whole arrays, without a mesh. None: ``fun`` itself, on a mesh of
        the same axes whose only device is one (of an ``sk.partition``ed function, the function itself).
      rtol, atol: as of ``assert_same_values``.
      placements: if given, where the results must be: as of ``assert_placements``.

    Returns:
      What ``fun`` returned, for more checks.

    Raises:
      AssertionError: results differ in structure, shape, dtype, elements (says which leaf, how much, where, and on
        which devices) or placement.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> from shardkit import testing
      >>> x = sk.shard_tensor(jnp.arange(8.0), {"dp": sk.Shard(0)}, sk.make_mesh({"dp": 1}))
      >>> float(testing.assert_same_as_one_device(jnp.sum, x))
      28.0
    """
    # First, as fun may donate its arguments.
    wanted = on_one_device(fun if reference is None else reference, keep_axes=reference is None)(*args)
    with entered(the_mesh(args)):
        got = fun(*args)
        assert_same_values(got, wanted, rtol=rtol, atol=atol, what="the results on many devices and on one")
    if placements is not None:
        assert_placements(got, placements)
    return got
