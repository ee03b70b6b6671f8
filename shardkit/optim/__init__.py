"""Gradients and optimizers: reducing Partial gradients once, norms over leaves of any placement.

``targets`` and ``buckets`` decide in placements and sizes where each gradient goes and what travels together;
``reduce`` does it; ``norms`` is for trees whose leaves live in different ways.
"""

from shardkit.optim.norms import all_finite, clip_by_global_norm, global_norm
from shardkit.optim.reduce import reduce_gradients

__all__ = ["all_finite", "clip_by_global_norm", "global_norm", "reduce_gradients"]
