"""Plans for whole models."""

from shardkit.parallel.parallelize import parallelize
from shardkit.parallel.plans import ConvParallel

__all__ = ["ConvParallel", "parallelize"]
