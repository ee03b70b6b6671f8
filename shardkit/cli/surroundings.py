"""The variables of the environment that JAX and XLA read, and which of them can't be meant as they are."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from shardkit.cli.findings import NOTE, PROBLEM, Finding

_SHOWN = (
    "XLA_FLAGS",
    "PJRT_NPROC",
    "NPROC",
    "LIBTPU_INIT_ARGS",
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
)
_PREFIXES = ("JAX_", "TPU_", "XLA_PYTHON_CLIENT_", "NCCL_", "MEGASCALE_")
_SET_BY_JAX = ("TPU_SKIP_MDS_QUERY",)  # as it's imported, where there's no TPU
_SEEN = "seen here on jaxlib 0.10.2 and 0.12.0.1"


def relevant(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter, by name.

    Example:
      >>> relevant({"HOME": "/root", "JAX_PLATFORMS": "cpu"})
      {'JAX_PLATFORMS': 'cpu'}
    """
    return {name: env[name] for name in sorted(env) if _matters(name)}


def _matters(name: str) -> bool:
    return name in _SHOWN or (name.startswith(_PREFIXES) and name not in _SET_BY_JAX)


def check_environment(env: Mapping[str, str], versions: Mapping[str, str]) -> list[Finding]:
    """What is wrong or contradictory in it. Whether XLA knows a flag only XLA can say, as it starts (``devices``).

    Args:
      env: the environment.
      versions: of the installed packages, of accelerators too.

    Example:
      >>> env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_NUM_CPU_DEVICES": "4"}
      >>> [f.name for f in check_environment(env, {})]
      ['two numbers of CPU devices']
    """
    return [*_flags(env), *_cpu_devices(env), *_platforms(env, versions), *_accelerators(env, versions)]


def _words(env: Mapping[str, str]) -> list[str]:
    text = env.get("XLA_FLAGS", "")
    try:
        return shlex.split(text)
    except ValueError:  # an open quote
        return text.split()


def _flags(env: Mapping[str, str]) -> list[Finding]:
    findings = []
    values: dict[str, str] = {}
    # XLA takes a first word without dashes for the name of a file of flags, and has an error if there's none.
    for word in _words(env):
        if not word.startswith("--"):
            what = f"{word!r} in XLA_FLAGS doesn't begin with two dashes; XLA ends the process"
            findings.append(
                Finding(PROBLEM, "XLA_FLAGS", what, "write flags as --name=value", f"jax-ml/jax#13148; {_SEEN}")
            )
            continue
        name, _, value = word.partition("=")
        if values.get(name, value) != value:
            what = f"{name} is given as {values[name]!r} and as {value!r}; the last one counts"
            findings.append(Finding(PROBLEM, "XLA_FLAGS", what, "leave out one of the two", _SEEN))
        values[name] = value
        if name.startswith("--xla_tpu_"):
            what = f"{name} is a flag of the TPU's compiler, which XLA_FLAGS doesn't know; XLA ends the process"
            findings.append(Finding(PROBLEM, "XLA_FLAGS", what, "put it in LIBTPU_INIT_ARGS", _SEEN))
    return findings


def _cpu_devices(env: Mapping[str, str]) -> list[Finding]:
    number = env.get("JAX_NUM_CPU_DEVICES")
    if number is None:
        return []
    if not (number.isdigit() and int(number) > 0):
        what = f"{number!r} is no positive number; `import jax` fails, or no devices are simulated"
        return [Finding(PROBLEM, "JAX_NUM_CPU_DEVICES", what, "set it to a number such as 8, or unset it", _SEEN)]
    flag = "--xla_force_host_platform_device_count="
    forced = [word.removeprefix(flag) for word in _words(env) if word.startswith(flag)]
    if not forced or forced[-1] == number:
        return []
    what = f"JAX_NUM_CPU_DEVICES={number} and {flag}{forced[-1]} in XLA_FLAGS; there will be {number}"
    return [
        Finding(PROBLEM, "two numbers of CPU devices", what, "leave out the one in XLA_FLAGS, the older way", _SEEN)
    ]


def _platforms(env: Mapping[str, str], versions: Mapping[str, str]) -> list[Finding]:
    findings = []
    gpu = [name for name in versions if name.startswith(("jax-cuda", "jax-rocm"))]
    for name in env.get("JAX_PLATFORMS", "").lower().split(","):
        if name in ("cuda", "gpu", "rocm") and not gpu:
            what, todo = "no GPU plugin is installed", "pip install 'jax[cuda12]' (or cuda13), or unset it"
        elif name == "tpu" and "libtpu" not in versions and "TPU_LIBRARY_PATH" not in env:
            what, todo = "libtpu isn't installed", "pip install 'jax[tpu]', or unset it"
        else:
            continue
        what = f"it asks for {name}, but {what}: JAX fails as it starts"
        findings.append(Finding(PROBLEM, "JAX_PLATFORMS", what, todo, _SEEN))
    return findings


def _accelerators(env: Mapping[str, str], versions: Mapping[str, str]) -> list[Finding]:
    findings = []
    if env.get("CUDA_VISIBLE_DEVICES") in ("", "-1") and any(name.startswith("jax-cuda") for name in versions):
        what = "CUDA_VISIBLE_DEVICES hides all GPUs, though a CUDA plugin is installed"
        findings.append(Finding(NOTE, "CUDA_VISIBLE_DEVICES", what, "unset it to use them"))
    if "LIBTPU_INIT_ARGS" in env and "libtpu" not in versions:
        what = "LIBTPU_INIT_ARGS is set, but libtpu isn't installed: nothing reads it"
        findings.append(Finding(NOTE, "LIBTPU_INIT_ARGS", what, "pip install 'jax[tpu]', or unset it"))
    return findings
