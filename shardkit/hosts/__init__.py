"""Processes that run one program: what they tell each other, and how one that fails ends the job."""

from shardkit.hosts.agreeing import MissingProcessError, ProcessMismatchError, agree, exchange

__all__ = ["MissingProcessError", "ProcessMismatchError", "agree", "exchange"]
