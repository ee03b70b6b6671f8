"""What a collective costs: bytes that one device receives. Integers only."""

from __future__ import annotations


def wire_bytes(kind: str, result_bytes: int, group_size: int) -> int:
    """Bytes that one device receives over the wire in one run of a collective.

    With `R` the bytes of the result on one device and `n` the devices of a group, the bandwidth-optimal
    (ring) algorithms receive

    | kind                                  | bytes            |
    |---------------------------------------|------------------|
    | all_gather                            | `R (n - 1) / n`  |
    | reduce_scatter                        | `R (n - 1)`      |
    | all_reduce                            | `2 R (n - 1) / n`|
    | all_to_all, ragged_all_to_all         | `R (n - 1) / n`  |
    | collective_permute, ..._broadcast     | `R`              |

    (R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in
    MPICH", IJHPCA 19(1), 2005; the same factors as NCCL's "bus bandwidth".) A ragged all-to-all is taken
    to fill its result evenly. The result is rounded down.

    Example:
      >>> wire_bytes("all_reduce", 1024, 4), wire_bytes("reduce_scatter", 256, 4)
      (1536, 768)
    """
    if kind in ("all_gather", "all_to_all", "ragged_all_to_all"):
        return result_bytes * (group_size - 1) // group_size
    if kind == "reduce_scatter":
        return result_bytes * (group_size - 1)
    if kind == "all_reduce":
        return 2 * result_bytes * (group_size - 1) // group_size
    return result_bytes
