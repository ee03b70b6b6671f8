"""Processes that run one program: what they tell each other, and how one that fails ends the job."""

from shardkit.hosts.agreeing import MissingProcessError, ProcessMismatchError, agree, exchange
from shardkit.hosts.finite import check_finite
from shardkit.hosts.marks import progress
from shardkit.hosts.same import check_same
from shardkit.hosts.watching import Watch, watch

__all__ = [
    "MissingProcessError",
    "ProcessMismatchError",
    "Watch",
    "agree",
    "check_finite",
    "check_same",
    "exchange",
    "progress",
    "watch",
]
