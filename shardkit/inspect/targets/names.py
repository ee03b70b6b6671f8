"""What a target is called: "tpu:v5e:2x4", "gpu:h100:2x8". No JAX here."""

from __future__ import annotations

import dataclasses
import math
import re

# Name -> (what libtpu calls it, what TPU_ACCELERATOR_TYPE calls it, dims of its torus, devices a chip).
GENERATIONS: dict[str, tuple[str, str, int, int]] = {
    "v2": ("v2", "v2", 2, 2),
    "v3": ("v3", "v3", 2, 2),
    "v4": ("v4", "v4", 3, 2),
    "v5e": ("v5e", "v5litepod", 2, 1),
    "v5p": ("v5p", "v5p", 3, 1),
    "v6e": ("v6e", "v6e", 2, 1),
    "tpu7x": ("tpu7x", "tpu7x", 3, 2),
}
_ALIASES = {"v5litepod": "v5e", "v7x": "tpu7x", "7x": "tpu7x", "ironwood": "tpu7x", "trillium": "v6e"}
CARDS: tuple[str, ...] = ("a100", "h100", "h200", "b200")


@dataclasses.dataclass(frozen=True)
class TargetName:
    """A target, taken apart.

    Attributes:
      platform: "tpu" or "gpu".
      model: a key of `GENERATIONS`, or one of `CARDS`.
      topology: chips along each dim of the torus; or (hosts, cards a host).
    """

    platform: str
    model: str
    topology: tuple[int, ...]

    def __str__(self) -> str:
        sizes = self.topology[1:] if self.platform == "gpu" and self.topology[0] == 1 else self.topology
        return f"{self.platform}:{self.model}:{'x'.join(map(str, sizes))}"

    @property
    def devices(self) -> int:
        """How many devices JAX will count."""
        chips = math.prod(self.topology)
        return chips * GENERATIONS[self.model][3] if self.platform == "tpu" else chips


def known_targets() -> str:
    """The names there are, for messages."""
    tpus = ", ".join(f"tpu:{name}:{'x'.join('AB' if row[2] == 2 else 'ABC')}" for name, row in GENERATIONS.items())
    gpus = ", ".join(f"gpu:{name}:N" for name in CARDS)
    return (
        f"known are {tpus} (chips along each dim of the torus, such as tpu:v5e:2x4), and {gpus} (cards of one host, "
        "such as gpu:h100:8, or hosts x cards, such as gpu:h100:2x8)"
    )


def parse_target(target: str) -> TargetName:
    """Reads a target's name.

    Raises:
      TypeError: it is no string.
      ValueError: it isn't known; the message lists those that are.

    Example:
      >>> parse_target("gpu:h100:2x8").topology
      (2, 8)
    """
    if not isinstance(target, str):
        raise TypeError(f"target must be a string; got {target!r}; {known_targets()}.")
    found = re.fullmatch(r"(tpu|gpu):(\w+):([1-9]\d*(?:x[1-9]\d*)*)", target.strip().lower())
    if found is None:
        raise ValueError(f"target {target!r} is unknown; {known_targets()}.")
    platform, model, size = found.groups()
    topology = tuple(int(n) for n in size.split("x"))
    model = _ALIASES.get(model, model) if platform == "tpu" else model
    if model not in (GENERATIONS if platform == "tpu" else CARDS):
        raise ValueError(f"target {target!r}: {model!r} is unknown; {known_targets()}.")
    if platform == "tpu" and len(topology) != GENERATIONS[model][2]:
        dims = GENERATIONS[model][2]
        raise ValueError(
            f"target {target!r}: {model} chips form a torus of {dims} dims, so write {dims} numbers, such as "
            f'"tpu:{model}:{"x".join(["2"] * dims)}"; {size!r} has {len(topology)}.'
        )
    if platform == "gpu":
        if len(topology) > 2:
            raise ValueError(f'target {target!r}: write "gpu:{model}:<cards>" or "gpu:{model}:<hosts>x<cards a host>".')
        topology = (1, *topology)[-2:]
    return TargetName(platform, model, topology)
