"""Combinations that are known not to work, or not as one expects: data, each with how we know.

"Seen here" is on a Linux CPU machine in November 2026, with the versions named.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping

from shardkit.cli.findings import NOTE, PROBLEM, Finding
from shardkit.cli.versions import allows


@dataclasses.dataclass(frozen=True)
class Setup:
    """What predicates may ask.

    Attributes:
      versions: of the installed packages.
      platforms: of the devices found ("cpu", "gpu", "tpu"); empty if it isn't known.
      env: the environment.
      several: whether this is one of several processes.
      machine: such as "Linux-x86_64".
      cpu_devices: of one process.
      cores: of this machine.
    """

    versions: Mapping[str, str]
    platforms: frozenset[str] = frozenset()
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    several: bool = False
    machine: str = ""
    cpu_devices: int = 0
    cores: int = 0

    def has(self, **ranges: str) -> bool:
        """Whether each package (dashes as underscores) is there, in this range."""
        names = {name.replace("_", "-"): specifiers for name, specifiers in ranges.items()}
        return all(name in self.versions and allows(specs, self.versions[name]) for name, specs in names.items())


@dataclasses.dataclass(frozen=True)
class KnownBad:
    """One combination: see ``Finding`` for the texts."""

    name: str
    applies: Callable[[Setup], bool]
    level: str
    happens: str
    todo: str
    source: str


def _other_cuda(setup: Setup) -> bool:
    """The rule of jaxlib.plugin_support: plugin and jaxlib are of one version."""
    parts = (f"jax-cuda{major}-{part}" for major in (12, 13) for part in ("plugin", "pjrt"))
    found = [setup.versions[name] for name in parts if name in setup.versions]
    jaxlib = setup.versions.get("jaxlib")
    return jaxlib is not None and any(_base(version) != _base(jaxlib) for version in found)


def _few_threads(setup: Setup) -> bool:
    """XLA's threads are those that a variable asks for, else one a core, and at least one a device."""
    asked = setup.env.get("PJRT_NPROC") or setup.env.get("NPROC") or ""
    threads = int(asked) if asked.isdecimal() else setup.cores
    return setup.cpu_devices > 1 and threads < 2 * setup.cpu_devices


def _base(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", re.split(r"[^\d.]", version)[0]))


KNOWN_BAD: tuple[KnownBad, ...] = (
    KnownBad(
        "flax older than jax",
        lambda s: s.has(flax="<0.12.10", jax=">=0.11.2"),
        PROBLEM,
        "`import flax.nnx`, and so `sk.parallelize` and checkpoints, fails: module 'jax.experimental.hijax' has no "
        "attribute 'HiPrimitive'",
        "pip install 'flax>=0.12.10,!=0.12.11'",
        "jax-md/jax-md#423, google/flax#5596 (jax 0.11.2 with flax 0.12.9; jax 0.11.0 is fine); seen here: flax 0.12.8 "
        "and 0.12.9 fail with jax 0.12.0.1, 0.12.10 works",
    ),
    KnownBad(
        "flax 0.12.11",
        lambda s: s.has(flax="==0.12.11"),
        NOTE,
        "this release was taken back: 'traverse utils bug'",
        "pip install 'flax>=0.12.10,!=0.12.11'",
        "the reason that PyPI gives for the yanked release",
    ),
    KnownBad(
        "CUDA plugin of another version than jaxlib",
        _other_cuda,
        PROBLEM,
        "jaxlib doesn't use the plugin's kernels (\"not compatible with the installed jaxlib version\"), so that "
        "linear algebra and FFI calls fail; with plugins newer than JAX even CPU programs may crash at the first array",
        "pip install --upgrade 'jax[cuda12]' (or cuda13), with the version of jax that you want",
        "jaxlib.plugin_support; ma-gilles/recovar#64 (plugin 0.9.2, jaxlib 0.9.0.1), jax-ml/jax#24901 (the crash)",
    ),
    KnownBad(
        "slow float32 scatter-add on GPU",
        lambda s: "gpu" in s.platforms and s.has(jaxlib=">=0.10.2,<=0.11.0"),
        NOTE,
        "`x.at[i].add(y)`, segment sums and gradients of embeddings are up to 2000 times slower where indices repeat "
        "(a compare-and-swap loop in place of an atomic add)",
        "use a jaxlib above 0.11.0, or 0.10.1",
        "jax-ml/jax#38806, openxla/xla#46225",
    ),
    KnownBad(
        "CPU crash on products of rank 7 and 8",
        lambda s: s.machine == "Linux-x86_64" and "cpu" in s.platforms and s.has(jaxlib=">=0.10.2,<=0.11.0"),
        NOTE,
        "a broadcast, multiply and reduce of arrays of 7 or 8 dims may crash or hang",
        "use another jaxlib, or fewer dims",
        "jax-ml/jax#39257 (fixed in XNNPACK in July 2026)",
    ),
    KnownBad(
        "partly manual shard_map without Shardy",
        lambda s: (
            s.env.get("JAX_USE_SHARDY_PARTITIONER", "").lower() in ("0", "false", "f", "no", "off")
            and s.has(jax=">=0.11.0.dev0,<0.12")
        ),
        PROBLEM,
        "a shard_map over some of the mesh's axes fails with an AssertionError if its out_specs name one",
        "unset JAX_USE_SHARDY_PARTITIONER",
        "jax-ml/jax#38845; seen here: 0.10.2 and 0.12.0.1 are fine",
    ),
    KnownBad(
        "reduce-scatter between CPU processes",
        lambda s: s.several and "cpu" in s.platforms and s.has(jaxlib=">=0.10,<0.13"),
        NOTE,
        "over gloo it gives up when one process comes 30 s later than another, whatever timeout is set; large ones "
        "were reported to have wrong elements",
        "start processes together, and use CPU processes for tests, not for results",
        "jax-ml/jax#40831, jax-ml/jax#40830 (both 0.12.0.dev20260920); wrong elements weren't seen here, on 0.10.2 and "
        "0.12.0.1 with 8 devices of one process",
    ),
    KnownBad(
        "many programs under way on simulated devices",
        lambda s: _few_threads(s) and s.has(jaxlib=">=0.10,<0.12"),
        NOTE,
        "with more than 32 programs sent off and not waited for, collectives may hang and end the process ('Expected 8 "
        "threads to join the rendezvous'): launching the next one takes the thread that the one before waits for",
        "set PJRT_NPROC to twice the devices before JAX starts, or wait in every step (`float(loss)`); turning "
        "asynchronous dispatch off doesn't help",
        "seen here on jaxlib 0.10.0, 0.10.2, 0.11.0 and 0.11.2 (40 all-reduces on 8 devices and 2 cores: 6 of 10 runs, "
        "none of 5 with 16 threads), not on 0.12.0.1",
    ),
    KnownBad(
        "all-reduce of maxima on CPU drops NaNs",
        lambda s: "cpu" in s.platforms and s.has(jaxlib=">=0.10,<0.13"),
        NOTE,
        "`lax.pmax` and `lax.pmin` over devices return a number where one of them has a NaN",
        "use sk.reshard of an sk.Partial('max'), which keeps them",
        "seen here on jaxlib 0.10.2 and 0.12.0.1",
    ),
    KnownBad(
        "derivative of nested shard_maps",
        lambda s: s.has(jax=">=0.10,<0.13"),
        NOTE,
        'reverse mode through a shard_map within another, partly manual one fails: "operates on axis which is already '
        'bound by a parent sdy.manual_computation"',
        "make its axes manual in the outer one, too; this library's operators then work on the block they're given",
        "jax-ml/jax#26588; seen here on jax 0.10.2 and 0.12.0.1",
    ),
)


def check_known_bad(setup: Setup) -> list[Finding]:
    """Those that apply.

    Example:
      >>> [f.name for f in check_known_bad(Setup({"jax": "0.12.0", "flax": "0.12.8"}))]
      ['flax older than jax', 'derivative of nested shard_maps']
    """
    return [Finding(k.level, k.name, k.happens, k.todo, k.source) for k in KNOWN_BAD if k.applies(setup)]
