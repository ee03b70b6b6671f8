"""Which devices JAX finds, asked for in a process of their own: XLA ends the process where flags are wrong."""

from __future__ import annotations

import dataclasses
import glob
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from shardkit.cli.findings import NOTE, PROBLEM, Finding

_MARK = "shardkit-devices:"

# Run by the child, which needs JAX alone.
_ASK = f"""
import json, traceback
try:
    import jax
    found = []
    for d in jax.devices():
        try:
            stats = d.memory_stats() if d.process_index == jax.process_index() else None
        except Exception:
            stats = None
        found.append({{
            "platform": d.platform, "kind": d.device_kind, "process": d.process_index,
            "slice": getattr(d, "slice_index", None), "memory": (stats or {{}}).get("bytes_limit"),
        }})
    out = {{"devices": found, "processes": jax.process_count(), "index": jax.process_index()}}
except Exception as err:
    last = traceback.extract_tb(err.__traceback__)[-1]
    said = str(err) or f"without a message, in {{last.name}} of {{last.filename}}"
    out = {{"error": f"{{type(err).__name__}}: {{said}}"}}
print({_MARK!r} + json.dumps(out))
"""


@dataclasses.dataclass(frozen=True)
class Group:
    """Devices of one kind.

    Attributes:
      memory: bytes that one device has for arrays; None if not known.
    """

    platform: str
    kind: str
    count: int
    memory: int | None


@dataclasses.dataclass(frozen=True)
class Devices:
    """What was found.

    Attributes:
      groups: the devices by platform and kind.
      processes, index: of JAX's processes, and which one this is.
      hosts: number of processes (or slices) that devices belong to.
      error: why there are none.
    """

    groups: tuple[Group, ...] = ()
    processes: int = 1
    index: int = 0
    hosts: int = 1
    error: str = ""

    @property
    def count(self) -> int:
        """Of all devices."""
        return sum(group.count for group in self.groups)

    @property
    def platforms(self) -> frozenset[str]:
        """As ``jax.Device.platform`` names them."""
        return frozenset(group.platform for group in self.groups)

    @property
    def simulated(self) -> int:
        """CPU devices of one process."""
        return sum(group.count for group in self.groups if group.platform == "cpu") // self.processes


def ask(env: Mapping[str, str], timeout: float) -> Devices:
    """Starts JAX in another process, and waits for so many seconds for what it finds."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK], env=dict(env), capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired as err:
        return Devices(error=_too_long(timeout, _text(err.stderr)))
    except OSError as err:
        return Devices(error=f"a Python process couldn't be started: {err}")
    return read_answer(done.stdout, done.stderr, done.returncode)


def _text(raw: Any) -> str:
    return raw.decode(errors="replace") if isinstance(raw, bytes) else raw or ""


def _too_long(timeout: float, stderr: str) -> str:
    said = f" Its last words: {_last(stderr)}" if stderr.strip() else ""
    return (
        f"JAX didn't start within {timeout:g} s: it may wait for other processes or hosts (of a TPU pod, say), or for "
        f"a device that another process holds.{said}"
    )


def read_answer(stdout: str, stderr: str, status: int) -> Devices:
    """What the child said, or died of.

    Example:
      >>> read_answer("", "F0101 parse_flags_from_env.cc] Unknown flag in XLA_FLAGS: --xla_x=1", -6).error
      'JAX ended with status -6: F0101 parse_flags_from_env.cc] Unknown flag in XLA_FLAGS: --xla_x=1'
    """
    lines = [line for line in stdout.splitlines() if line.startswith(_MARK)]
    if not lines:
        return Devices(error=f"JAX ended with status {status}: {_last(stderr) or 'it said nothing'}")
    answer = json.loads(lines[-1].removeprefix(_MARK))
    if "error" in answer:
        return Devices(error=answer["error"].strip())
    found = answer["devices"]
    kinds = list(dict.fromkeys((d["platform"], d["kind"]) for d in found))
    groups = []
    for platform, kind in kinds:
        same = [d for d in found if (d["platform"], d["kind"]) == (platform, kind)]
        known = [d["memory"] for d in same if d["memory"]]
        groups.append(Group(platform, kind, len(same), min(known) if known else None))
    hosts = len({(d["slice"], d["process"]) for d in found}) or 1
    return Devices(tuple(groups), answer["processes"], answer["index"], hosts)


def _last(stderr: str) -> str:
    """The line that says why: a fatal one, else the last."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    fatal = [line for line in lines if line.startswith("F") and line[1:5].isdigit()]
    return (fatal or lines or [""])[-1]


def environment_to_ask_in(env: Mapping[str, str], has_chips: bool) -> dict[str, str]:
    """The environment for it. Where there's no TPU, libtpu mustn't ask the network for one, which takes minutes.

    Example:
      >>> environment_to_ask_in({}, has_chips=False)
      {'TPU_SKIP_MDS_QUERY': '1'}
    """
    quiet = {} if has_chips or any(name.startswith("TPU_") for name in env) else {"TPU_SKIP_MDS_QUERY": "1"}
    return {**env, **quiet}


def has_tpu_chips() -> bool:
    """Whether this machine has what looks like TPU chips: their device files."""
    return bool(glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*"))


def check_devices(devices: Devices) -> list[Finding]:
    """What is wrong with them, and how to have more.

    Example:
      >>> [f.name for f in check_devices(Devices((Group("cpu", "cpu", 1, None),)))]
      ['one CPU device']
    """
    if devices.error:
        return [Finding(PROBLEM, "JAX doesn't start", devices.error, _todo(devices.error))]
    if devices.platforms == frozenset({"cpu"}) and devices.count == 1:
        what = "there's one CPU device; meshes need several, which JAX can simulate"
        todo = 'jax.config.update("jax_num_cpu_devices", 8) before JAX is used, or JAX_NUM_CPU_DEVICES=8'
        return [Finding(NOTE, "one CPU device", what, todo)]
    return []


def _todo(error: str) -> str:
    if "XLA_FLAGS" in error:
        return "take the flag out of XLA_FLAGS: this jaxlib doesn't know it"
    if "Unable to initialize backend" in error or error.startswith("AssertionError"):
        return "unset JAX_PLATFORMS to let JAX take what there is, or JAX_PLATFORMS=cpu to go on without"
    if "ModuleNotFoundError" in error or "ImportError" in error or "incompatible" in error:
        return "pip install --upgrade jax jaxlib"
    return ""


def suggest_meshes(count: int, hosts: int = 1) -> list[tuple[dict[str, int], str]]:
    """Meshes that so many devices are good for, and for what.

    Args:
      count: of devices.
      hosts: that they belong to, each having as many. Their axis is the outermost: traffic within a host is cheap.

    Example:
      >>> [axes for axes, _ in suggest_meshes(8)]
      [{'dp': 8}, {'dp': 4, 'sp': 2}, {'dp': 2, 'tp': 4}]
    """
    found: list[tuple[dict[str, int], str]] = [({"dp": count}, "the batch over all devices")]
    if hosts > 1 and count % hosts == 0 and count > hosts:
        local = count // hosts
        found.append(({"dp": hosts, "tp": local}, "the batch over hosts, layers within a host"))
        found.append(({"dp": hosts, "sp": local}, "the batch over hosts, images or sequences within a host"))
        divisors = [d for d in range(2, math.isqrt(local) + 1) if local % d == 0]
        if divisors:
            axes = {"dp": hosts, "sp": divisors[0], "tp": local // divisors[0]}
            found.append((axes, "the batch over hosts, images (or sequences) and layers within a host"))
        return found
    divisors = [d for d in range(2, count) if count % d == 0]
    if divisors:
        small, large = divisors[0], max(d for d in divisors if d <= max(8, divisors[0]))
        found.append(({"dp": count // small, "sp": small}, "the batch, and images (or sequences) in parts"))
        found.append(({"dp": count // large, "tp": large}, "the batch, and layers in parts"))
    elif count > 1:
        found.append(({"sp": count}, "images (or sequences) in parts"))
    return found


def mesh_line(axes: Mapping[str, int]) -> str:
    """The line of code that makes it.

    Example:
      >>> mesh_line({"dp": 4, "sp": 2})
      'sk.make_mesh({"dp": 4, "sp": 2})'
    """
    return f"sk.make_mesh({json.dumps(dict(axes))})"


def to_ask(timeout: float, env: Mapping[str, str] | None = None) -> Devices:
    """The devices of this machine, as JAX would find them in this environment."""
    return ask(environment_to_ask_in(os.environ if env is None else env, has_tpu_chips()), timeout)


def kinds_of(devices: Devices) -> Sequence[str]:
    """Of each group, how many there are of what."""
    return [f"{group.count} x {group.platform} ({group.kind})" for group in devices.groups]
