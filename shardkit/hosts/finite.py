"""`check_finite`: one NaN anywhere stops all processes, with the same words."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from shardkit.hosts.agreeing import exchange
from shardkit.hosts.leaves import array_of, leaves, logical_shape
from shardkit.meshes import no_ambient_mesh

_MOST = 8  # lines, of each process


def check_finite(tree: Any, what: str = "values", step: int | None = None) -> None:
    """Stops all processes if a number of theirs is a NaN or infinite, in all with the same error.

    Every process must call it. Each looks at the parts that its own devices hold, on these devices, and at its own
    NumPy arrays and floats; then they tell each other through the coordination service: no collective. It waits for the
    values to be computed, and for all processes: once in a few steps is enough. Integers are skipped, and so is the
    padding of ``sk.Padded``; of ``sk.PartialArray`` the contributions are looked at as they are.

    Args:
      tree: any pytree: a loss, gradients, parameters.
      what: its name in the error. Processes that give different names wait for each other in vain.
      step: for the error.

    Raises:
      FloatingPointError: it names the leaf, the step, how many NaNs and infinities, and the processes and devices that
        hold them.
      MissingProcessError: a process didn't call it.
      TypeError: called within jit.

    Example:
      >>> import jax.numpy as jnp
      >>> from shardkit.hosts import check_finite
      >>> check_finite({"loss": jnp.ones(())}, "the loss", step=3)
    """
    found = _bad(leaves(tree), what)
    said = exchange(f"check_finite/{what}", found)
    lines = [f"  process {process}, {line}" for process, lines in enumerate(said) for line in lines]
    if lines:
        at = "" if step is None else f" at step {step}"
        raise FloatingPointError(f"{what}{at}: not all are finite:\n" + "\n".join(lines))


def _bad(found: list[tuple[str, Any]], what: str) -> list[str]:
    """A line for each part that this process holds in which something isn't finite."""
    lines: list[str] = []
    devices: dict[Any, list[tuple[str, Any, tuple[int, ...]]]] = {}
    for path, leaf in found:
        array = array_of(leaf)
        if isinstance(array, Tracer):
            raise TypeError(
                f"check_finite({what!r}) was called within jit or another transformation: call it outside; within jit, "
                "sk.all_finite"
            )
        if isinstance(array, jax.Array):
            if jnp.issubdtype(array.dtype, jnp.inexact):
                for shard in array.addressable_shards:
                    sizes = _inside(shard.index, array.shape, logical_shape(leaf))
                    devices.setdefault(shard.device, []).append((path, shard.data, sizes))
        elif isinstance(array, np.ndarray | np.generic | float | complex) and jnp.issubdtype(
            np.asarray(array).dtype, jnp.inexact
        ):
            lines += _line(f"{path} (host)", np.asarray(array))
    # All are started before the first is waited for.
    with no_ambient_mesh():
        started = {
            device: _all_finite([data for _, data, _ in parts], tuple(sizes for _, _, sizes in parts))
            for device, parts in devices.items()
        }
    for device, finite in started.items():
        for good, (path, data, sizes) in zip(np.asarray(finite), devices[device], strict=True):
            if not good:
                part = np.asarray(data)[tuple(slice(size) for size in sizes)]
                lines += _line(f"{path} (device {device.id})", part)
    return lines[:_MOST] + ([f"and {len(lines) - _MOST} more parts"] if len(lines) > _MOST else [])


@functools.partial(jax.jit, static_argnums=1)
def _all_finite(parts: list[jax.Array], sizes: tuple[tuple[int, ...], ...]) -> jax.Array:
    """Of the parts of one device: whether each is finite within its sizes."""
    inside = [part[tuple(slice(n) for n in size)] for part, size in zip(parts, sizes, strict=True)]
    return jnp.stack([jnp.isfinite(part).all() for part in inside])


def _inside(index: tuple[slice, ...], shape: tuple[int, ...], logical: tuple[int, ...]) -> tuple[int, ...]:
    """How much of a part, from its start in each dim, is within the sizes that count."""
    ranges = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    return tuple(max(0, min(stop, n) - start) for (start, stop, _), n in zip(ranges, logical, strict=True))


def _line(where: str, part: np.ndarray) -> list[str]:
    """What's wrong with a part; no line if nothing is."""
    finite = np.isfinite(part)
    if finite.all():
        return []
    nans = int(np.isnan(part).sum())
    infinite = int(part.size - finite.sum()) - nans
    counts = [f"{number} {name}" for number, name in ((nans, "NaN"), (infinite, "infinite")) if number]
    return [f"{where}: {' and '.join(counts)} of {part.size} elements"]
