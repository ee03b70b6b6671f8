"""What each device really holds of an array, read to the host."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardkit.arrays import Padded, PartialArray, from_unreduced
from shardkit.arrays.unreduced import is_unreduced
from shardkit.placements import Layout


@dataclasses.dataclass(frozen=True)
class Block:
    """The part that one device holds.

    Attributes:
      device: where the device is in the mesh, such as "dp=0, sp=1"; its own name without a mesh, "" on the host.
      index: the part of the whole array (of its logical shape) that this is.
      data: its elements; those of random keys have one more dim.
    """

    device: str
    index: tuple[slice, ...]
    data: np.ndarray


@dataclasses.dataclass(frozen=True)
class Held:
    """One array as its devices hold it.

    Attributes:
      shape: the logical one.
      dtype: name of the element type; that of the implementation for random keys.
      blocks: of the devices that this process can read, copies too.
      layout: where it lives, if on a mesh.
      complete: whether this process can read all of it.
    """

    shape: tuple[int, ...]
    dtype: str
    blocks: tuple[Block, ...]
    layout: Layout | None = None
    complete: bool = True

    def assembled(self) -> np.ndarray:
        """The whole array, from the first copy of each block.

        Raises:
          ValueError: some of it is on other processes' devices.
        """
        if not self.complete:
            raise ValueError(
                f"this process can read only a part of the array of shape {self.shape}, whose other blocks are on "
                "devices of other processes; sk.unshard it first"
            )
        if len(self.blocks) == 1:
            return self.blocks[0].data
        first = self.blocks[0].data
        whole = np.empty((*self.shape, *first.shape[len(self.shape) :]), first.dtype)
        for block in reversed(self.blocks):
            whole[block.index] = block.data
        return whole


def is_array(x: Any) -> bool:
    """Whether it's compared as numbers (or keys), and not with ``==``."""
    return isinstance(x, Padded | PartialArray | jax.Array | np.ndarray | np.generic | bool | int | float | complex)


def reduced(x: Any) -> Any:
    """Without contributions that wait for their reduction."""
    x = from_unreduced(x) if is_unreduced(x) else x
    return x.reduce() if isinstance(x, PartialArray) else x


def read(x: Any) -> Held:
    """All that this process can see of an array: Partial ones are reduced, padding is left out.

    Example:
      >>> import jax.numpy as jnp
      >>> read(jnp.arange(3)).assembled().tolist()
      [0, 1, 2]
    """
    x = reduced(x)
    shape = tuple(x.shape) if hasattr(x, "shape") else np.shape(x)
    array = x.array if isinstance(x, Padded) else x
    if not isinstance(array, jax.Array):
        data = np.asarray(array)
        return Held(shape, data.dtype.name, (Block("", (slice(None),) * len(shape), data),))
    names = _places(array.sharding)
    blocks = []
    for shard in array.addressable_shards:
        data, index = _data(shard.data), []
        for dim, (part, size) in enumerate(zip(shard.index, shape, strict=False)):  # a key's has a dim more
            start, stop, _ = part.indices(array.shape[dim])
            index.append(slice(min(start, size), min(stop, size)))
        inside = tuple(slice(0, part.stop - part.start) for part in index)
        blocks.append(Block(names.get(shard.device, str(shard.device)), tuple(index), data[inside]))
    layout = Layout(array.sharding.mesh, array.sharding) if isinstance(array.sharding, NamedSharding) else None
    complete = array.is_fully_addressable or array.is_fully_replicated
    return Held(shape, str(array.dtype), tuple(blocks), layout, complete)


def _data(x: jax.Array) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def _places(sharding: Any) -> dict[Any, str]:
    if not isinstance(sharding, NamedSharding):
        return {}
    mesh = sharding.mesh
    return {
        device: ", ".join(f"{name}={i}" for name, i in zip(mesh.axis_names, index, strict=True))
        for index, device in np.ndenumerate(mesh.devices)
    }
