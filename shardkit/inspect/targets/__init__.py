"""Devices described, not owned: their compilers run here, so a program can be judged without hardware."""

from shardkit.inspect.targets.hardware import HARDWARE, Hardware, hardware_of
from shardkit.inspect.targets.mesh import target_mesh

__all__ = ["HARDWARE", "Hardware", "hardware_of", "target_mesh"]
