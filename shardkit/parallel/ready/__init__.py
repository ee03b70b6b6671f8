"""Plans for whole models, guessed by the kinds of their layers: ``sk.plans``."""

from shardkit.parallel.ready.fsdp import fsdp
from shardkit.parallel.ready.guessing import Choice, Found, ReadyPlan
from shardkit.parallel.ready.transformer import transformer
from shardkit.parallel.ready.unet import unet

__all__ = ["Choice", "Found", "ReadyPlan", "fsdp", "transformer", "unet"]
