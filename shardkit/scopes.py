"""Names that our collectives carry into the compiled program, so that reports can say what each is for.

They are JAX's named scopes, part of an operation's name ("jit(step)/transpose(jvp(sk.halo))/ppermute"), and free.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

import jax

HALO = "sk.halo"  # edges of neighbours' blocks
GRADIENTS = "sk.gradients"  # sums of gradients over a spread batch
PARAMETERS = "sk.parameters"  # parameters, or their updates, that are cut and put together for use
RESHARD = "sk.reshard"  # from one placement to another
REDUCTION = "sk.reduction"  # means, norms, sums of statistics, totals
ATTENTION = "sk.attention"  # keys and values of other devices, and their gradients

_SCOPE = re.compile(r"\bsk\.(?:halo|gradients|parameters|reshard|reduction|attention)\b")


def scope(name: str) -> contextlib.AbstractContextManager[Any]:
    """Operations in it carry ``name``, one of this file's."""
    return jax.named_scope(name)


def scope_of(op_name: str) -> str | None:
    """The outermost of these names in an operation's name: what the collective serves, not how it's done.

    Example:
      >>> scope_of("jit(f)/transpose(jvp(sk.gradients))/sk.reshard/psum")
      'sk.gradients'
    """
    found = _SCOPE.search(op_name)
    return found[0] if found else None
