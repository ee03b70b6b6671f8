"""How much arithmetic a traced program asks for: contractions and convolutions, which nearly all of it is.

Compilers count what they compiled, a loop's body once; a trace knows how often loops run.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.extend.core as jex_core

from shardkit._compat import made_manual
from shardkit.inspect.compiling import functions_in


@dataclasses.dataclass(frozen=True)
class Flops:
    """Floating-point operations of all devices together; a multiply and an add are two.

    Attributes:
      total: of the whole program.
      exact: no loop in it runs an unknown number of times (those count once), no branch was chosen for (the dearest
        counts).
    """

    total: float
    exact: bool

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.total + other.total, self.exact and other.exact)

    def times(self, count: int) -> Flops:
        """The same, so often."""
        return Flops(self.total * count, self.exact)


_NONE = Flops(0.0, True)


def count_flops(jaxpr: Any) -> Flops:
    """Of a traced program.

    Args:
      jaxpr: a jaxpr, closed or open.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> count_flops(jax.make_jaxpr(lambda a, b: jnp.cos(a @ b))(jnp.ones((4, 8)), jnp.ones((8, 2)))).total
      128.0
    """
    if isinstance(jaxpr, jex_core.ClosedJaxpr):
        jaxpr = jaxpr.jaxpr
    total = _NONE
    for equation in jaxpr.eqns:
        total += _of(equation)
    return total


def _of(equation: Any) -> Flops:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return Flops(_dot(equation), True)
    if name == "conv_general_dilated":
        return Flops(_conv(equation), True)
    if name == "scan":
        return count_flops(params["jaxpr"]).times(params["length"])
    if name == "while":
        inside = count_flops(params["body_jaxpr"]) + count_flops(params["cond_jaxpr"])
        return Flops(inside.total, inside.exact and not inside.total)
    if name == "cond":
        branches = [count_flops(branch) for branch in params["branches"]]
        dearest = max(branches, key=lambda b: b.total)
        return Flops(dearest.total, all(b.exact for b in branches) and min(b.total for b in branches) == dearest.total)
    if name == "shard_map":  # what one device does
        sizes = dict(params["mesh"].shape)
        return count_flops(params["jaxpr"]).times(math.prod(sizes[a] for a in made_manual(params)))
    if name.startswith("custom_"):  # the function itself; its derivatives stand beside it
        return next((count_flops(function) for function in functions_in(params)), _NONE)
    total = _NONE
    for function in functions_in(params):
        total += count_flops(function)
    return total


def _dot(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[d] for d in contracted)


def _conv(equation: Any) -> float:
    """Each output element takes its features' window; what lies in padding or a dilated input's holes counts, too."""
    numbers = equation.params["dimension_numbers"]
    kernel, out = equation.invars[1].aval.shape, equation.outvars[0].aval.shape
    holes = math.prod(equation.params["lhs_dilation"])
    window = math.prod(kernel[d] for d in numbers.rhs_spec[1:])  # features of a group, and the spatial dims
    return 2.0 * math.prod(out) * window / holes
