"""``forms``: for a while, ``method="auto"`` runs what tuning found, before it asks the table."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Generator

import jax

from shardkit.spatial.convolution.layers import Layer
from shardkit.spatial.convolution.table import Form, parse_form
from shardkit.spatial.convolution.tuned import Tuned

# JAX keeps what it traced of a jitted function; a form is part of that, so what was set is part of the cache's key.
_trace = jax.make_user_context(None)


@dataclasses.dataclass(frozen=True)
class _Set:
    """What is set: by layer, the first that fits; else one form for every layer that can run it."""

    by_layer: tuple[tuple[Layer, Form], ...] = ()
    everywhere: Form | None = None


_current: contextvars.ContextVar[_Set | None] = contextvars.ContextVar("shardkit_forms", default=None)


def found_form(layer: Layer) -> Form | None:
    """The form set for a layer; None where none is."""
    current = _current.get()
    if current is None:
        return None
    return next((form for known, form in current.by_layer if known == layer), current.everywhere)


@contextlib.contextmanager
def forms(*found: Tuned | Form | str) -> Generator[None]:
    """A context in which convolutions with ``method="auto"`` run in the forms given; all others go by the table.

    It holds where functions are traced, so put it around the call that compiles (and the later ones: JAX compiles a
    function once for each set of forms). A convolution asked to run in a form of its own isn't concerned. Contexts
    nest: the inner one is asked first.

    Args:
      *found: results of ``sk.spatial.tune_conv``, each for its own layer: the same window, sizes, cut and mode of every
        spatial dim, images on a device, order of dims and fewest features. At most one name of a form ("concat",
        "overlap", "blocks 8", "blocks 2 major") may be among them: for all other layers, of any size, that can run it.

    Returns:
      A context manager: ``with sk.spatial.forms(...):``.

    Raises:
      ValueError: on entering, a name that is no form, or more than one name.
      TypeError: neither a result nor a name.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> x, k = jnp.ones((1, 8, 9, 3)), jnp.ones((3, 3, 3, 4))
      >>> call = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "spatial_axes": {"sp": "W"}}
      >>> with sk.spatial.forms("overlap"):
      ...     sk.ring_conv(x, k, (1, 1), "SAME", **call, mesh=sk.make_mesh({"sp": 1})).shape
      (1, 8, 9, 4)
    """
    by_layer: list[tuple[Layer, Form]] = []
    names: list[Form] = []
    for one in found:
        if isinstance(one, Tuned):
            by_layer += [(layer, one.best) for layer in one.layers]
        elif isinstance(one, str | Form):
            names.append(parse_form(one))
        else:
            raise TypeError(f"forms takes results of tune_conv and names of forms, got {one!r}")
    if len(names) > 1:
        raise ValueError(
            f"forms takes one name, for every layer that no result is for; got {[str(n) for n in names]}. Tune the "
            "layers that want another (sk.spatial.tune_conv)"
        )
    outer = _current.get() or _Set()
    new = _Set((*by_layer, *outer.by_layer), names[0] if names else outer.everywhere)
    token = _current.set(new)
    try:
        with _trace(new):
            yield
    finally:
        _current.reset(token)
