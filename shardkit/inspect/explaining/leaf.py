"""An array that goes into a program or comes out, and which of them are parameters. No JAX here."""

from __future__ import annotations

import collections
import dataclasses

from shardkit.inspect.explaining.purposes import Parameter


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array that goes in or comes out.

    Attributes:
      name: its path, such as "params['w']".
      dtype, shape: of the whole.
      local_shape: of one device's block.
      where: the axes that cut each dim, "[dp, -]"; "?" where the compiler doesn't say; "not used" of an
        input that was dropped.
      bytes: of one device's block, without the padding of tiled layouts.
      axes: every mesh axis that cuts it.
      inexact: its elements are floating-point (or complex) numbers.
      used: the compiled program has it; of an input.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    where: str
    bytes: int
    axes: tuple[str, ...] = ()
    inexact: bool = True
    used: bool = True


def parameters_of(inputs: tuple[Leaf, ...], outputs: tuple[Leaf, ...]) -> tuple[Parameter, ...]:
    """The inputs that come out again in shape and dtype: parameters and state, or parameters and their gradients.

    As many of a shape as come out, the first ones: batches come after what is trained.
    """
    left = collections.Counter((leaf.shape, leaf.dtype) for leaf in outputs)
    found = []
    for leaf in inputs:
        if leaf.inexact and left[leaf.shape, leaf.dtype] > 0:
            left[leaf.shape, leaf.dtype] -= 1
            found.append(Parameter(leaf.name, leaf.shape, leaf.local_shape))
    return tuple(found)


def data_axes_of(inputs: tuple[Leaf, ...], parameters: tuple[Parameter, ...]) -> frozenset[str]:
    """The mesh axes that cut an input that is no parameter: along those devices see different examples or parts."""
    names = {parameter.name for parameter in parameters}
    return frozenset(axis for leaf in inputs if leaf.name not in names for axis in leaf.axes)


def root_of(name: str) -> str:
    """The argument that a path begins with.

    Example:
      >>> root_of("state['w'].value"), root_of("args[0].states[1]")
      ('state', 'args[0]')
    """
    if name.startswith(("args[", "kwargs[")):
        return name.split("]", 1)[0] + "]"
    return name.replace(".", "[").split("[", 1)[0]
