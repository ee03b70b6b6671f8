"""Gradients and optimizers: Partial gradients, their reduction all together, norms over leaves of any placement.

``value_and_grad`` runs a loss on each device's part of a batch (``batch`` says what a part is). ``targets`` and
``buckets`` decide in placements and sizes where each gradient goes and what travels together; ``reduce`` does it;
``norms`` is for trees whose leaves live in different ways.
"""

from shardkit.optim.norms import all_finite, clip_by_global_norm, global_norm
from shardkit.optim.reduce import reduce_gradients
from shardkit.optim.value_and_grad import value_and_grad

__all__ = ["all_finite", "clip_by_global_norm", "global_norm", "reduce_gradients", "value_and_grad"]
