"""Drawing who holds what of an array: in a notebook, in a terminal, and as plain data."""

from shardkit.inspect.drawing.drawing import Drawing
from shardkit.inspect.drawing.show import show

__all__ = ["Drawing", "show"]
