"""Plan objects: what a user says should happen to a layer. Static, hashable, without JAX arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from shardkit.parallel.plans.base import LayerPlan


@dataclasses.dataclass(frozen=True, init=False)
class ConvParallel(LayerPlan):
    """Run convolutions, norms and elementwise layers with the input sharded in space.

    Args:
      axis: mesh axis, e.g. "sp"; or a mapping of mesh axis to dim for several,
        ``{"sh": "H", "sw": "W"}`` (then ``dim`` is left out; the mapping may be given as ``dim`` too).
      dim: the spatial dim it cuts: "D", "H" or "W" of a channels-last array, or a number. None: "W".

    Raises:
      ValueError: no axis, an unknown dim, dims named by both arguments.
      TypeError: an axis that is no name or tuple of names.

    On a module of nnx that holds such layers: all of it runs as one ``sk.spatial.region``, its values in blocks from
    its first layer to its last, or layer by layer where that can't be, which it says. On layers of nnx and linen:
    ``Conv``, ``ConvTranspose``, ``BatchNorm``, ``GroupNorm``, ``InstanceNorm``, ``LayerNorm``, ``RMSNorm``, ``Dropout``
    and ``PReLU``. A layer given a ``sk.Padded`` returns one; elsewhere ``LayerNorm`` and ``RMSNorm`` over features,
    ``Dropout`` and ``PReLU`` run Flax's own code. ``WeightNorm`` and ``SpectralNorm`` stay as they are; the layer they
    wrap may be sharded.

    Example:
      >>> import jax, jax.numpy as jnp, shardkit as sk
      >>> from flax import nnx
      >>> conv, n = nnx.Conv(3, 4, (3, 3), rngs=nnx.Rngs(0)), jax.device_count()
      >>> conv = sk.parallelize(conv, {"": sk.ConvParallel("sp", dim="W")}, sk.make_mesh({"sp": n}))
      >>> y = conv(jnp.ones((2, 8, 8 * n, 3)))
      >>> y.sharding.shard_shape(y.shape)  # a device's block
      (2, 8, 8, 4)
    """

    part: ClassVar[str] = "weight"

    dims: tuple[tuple[Any, Any], ...]

    def __init__(self, axis: Any = "sp", dim: Any = None):
        if isinstance(axis, Mapping):
            if dim is not None:
                raise ValueError(f"ConvParallel: axis={dict(axis)!r} already names the dims; leave dim={dim!r} out")
            pairs = tuple(axis.items())
        elif isinstance(dim, Mapping):
            if axis != "sp" and axis not in dim:
                raise ValueError(
                    f"ConvParallel: dim={dict(dim)!r} maps mesh axes to dims, but doesn't name axis={axis!r}"
                )
            pairs = tuple(dim.items())
        else:
            pairs = ((axis, "W" if dim is None else dim),)
        if not pairs:
            raise ValueError("ConvParallel needs at least one mesh axis")
        for name, where in pairs:
            if not isinstance(name, str) and not (isinstance(name, tuple) and all(isinstance(n, str) for n in name)):
                raise TypeError(f"ConvParallel: a mesh axis is a name or a tuple of names, got {name!r}")
            if where not in ("D", "H", "W") and (isinstance(where, bool) or not isinstance(where, int | np.integer)):
                raise ValueError(f'ConvParallel: dim={where!r} is unknown; use "D", "H", "W" or a number')
        object.__setattr__(self, "dims", tuple((a, w if isinstance(w, str) else int(w)) for a, w in pairs))

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """Every mesh axis the plan uses."""
        return tuple(n for axis, _ in self.dims for n in ((axis,) if isinstance(axis, str) else axis))

    def spatial_axes(self, ndim: int) -> dict[Any, int]:
        """The dims it cuts of a channels-last array.

        Args:
          ndim: dims of the array, batch and features included.

        Returns:
          ``{mesh axis: array dim}``, dims counted from the front.
        """
        found = {}
        for axis, where in self.dims:
            dim = ndim - 2 - "WHD".index(where) if isinstance(where, str) else where
            found[axis] = dim % ndim if -ndim <= dim < ndim else dim
        return found

    def problem(self, spatial: int) -> str | None:
        """Why it doesn't fit a layer.

        Args:
          spatial: how many spatial dims the layer has.

        Returns:
          The end of a sentence about the layer; None where it fits.
        """
        dim = self.missing_dim(spatial)
        if dim is None:
            return None
        return f"convolves over {spatial} spatial dims, so it has no dim {dim!r} for {self.dims} to cut"

    def missing_dim(self, spatial: int) -> str | None:
        """The first named dim that a layer doesn't have.

        Args:
          spatial: how many spatial dims the layer has.

        Returns:
          "D", "H" or "W"; None where it has all of them.
        """
        for _, where in self.dims:
            if isinstance(where, str) and "WHD".index(where) >= spatial:
                return where
        return None
