"""JAX's coordination service: a table of strings that all processes share, beside the devices' own network.

What goes through it doesn't wait for devices, needs no collective, and works from any thread.
"""

from __future__ import annotations

from typing import Any

import jax


def service() -> Any | None:
    """The client of this process; None where there's one process, or none was started.

    Orbax hands it out, which JAX itself doesn't.
    """
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return None
    # Long to import, and not needed in one process.
    from orbax.checkpoint import multihost

    return multihost.get_jax_distributed_client()


def timed_out(error: Exception) -> bool:
    """Whether an error of the service says that what was asked for did not come in time."""
    return "DEADLINE_EXCEEDED" in str(error)
