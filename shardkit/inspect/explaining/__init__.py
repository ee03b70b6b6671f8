"""One page on what a program will do, on the machine it is meant for."""

from shardkit.inspect.explaining.explain import explain
from shardkit.inspect.explaining.explained import Explained
from shardkit.inspect.explaining.page import Explanation
from shardkit.inspect.explaining.purposes import PURPOSES

__all__ = ["PURPOSES", "Explained", "Explanation", "explain"]
