"""JAX's coordination service: a table of strings that all processes share, beside the devices' own network.

What goes through it doesn't wait for devices, needs no collective, and works from any thread.
"""

from __future__ import annotations

from typing import Any

import jax


def service() -> Any | None:
    """The client of this process; None where there's one process, or none was started."""
    return client_of(jax.process_count()) if jax.distributed.is_initialized() else None


def client_of(processes: int) -> Any | None:
    """The same where the number of processes is known; JAX would have to start its devices to say it.

    Orbax hands the client out, which JAX itself doesn't.
    """
    if not jax.distributed.is_initialized() or processes == 1:
        return None
    # Long to import, and not needed in one process.
    from orbax.checkpoint import multihost

    return multihost.get_jax_distributed_client()


def timed_out(error: Exception) -> bool:
    """Whether an error of the service says that what was asked for did not come in time."""
    return "DEADLINE_EXCEEDED" in str(error)
