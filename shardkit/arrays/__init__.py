"""Types and views of arrays on a mesh; nothing here moves data."""

from shardkit.arrays.local import from_local, to_local
from shardkit.arrays.local_map import local_map
from shardkit.arrays.padded import Padded, crop_to, pad_to
from shardkit.arrays.partial import PartialArray, is_whole
from shardkit.arrays.unreduced import from_unreduced, is_unreduced, to_unreduced

__all__ = [
    "PartialArray",
    "Padded",
    "from_local",
    "to_local",
    "local_map",
    "to_unreduced",
    "from_unreduced",
    "is_unreduced",
    "is_whole",
    "crop_to",
    "pad_to",
]
