"""What is installed, and whether it fits: in this library's range, each with the others, and for the extras."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import pathlib
import tomllib
from collections.abc import Callable, Mapping, Sequence

from shardkit.cli.findings import NOTE, PROBLEM, Finding
from shardkit.cli.versions import Requirement, allows, key, normal, parse_requirement

# What its tests have run with; newer may work. (The requirements have no upper end, so that pip can install it.)
TESTED_BELOW = {"jax": "0.13"}

# Those whose requirements are compared with what is installed, and the prefixes of those that only an extra names.
LOOKED_AT = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "shardkit")
ACCELERATORS = (
    "libtpu",
    "jax-cuda12-plugin",
    "jax-cuda12-pjrt",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "jax-rocm7-plugin",
)


@dataclasses.dataclass(frozen=True)
class Own:
    """What this library asks for.

    Attributes:
      version: its own.
      python: the range of Python.
      requires: its requirements, those of extras too.
      install: what pip is given: "shardkit", or the folder of the sources.
    """

    version: str
    python: str
    requires: tuple[str, ...]
    install: str


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table of versions."""

    name: str
    version: str
    supported: str
    fits: bool


def installed(name: str) -> str | None:
    """The version of an installed package; None if it isn't.

    Example:
      >>> installed("surely-not-a-package") is None
      True
    """
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements_of(name: str) -> tuple[str, ...]:
    """What an installed package says that it requires."""
    try:
        return tuple(importlib.metadata.requires(name) or ())
    except importlib.metadata.PackageNotFoundError:
        return ()


def read_own() -> Own:
    """From the installed package's metadata, or the sources' ``pyproject.toml`` where it isn't installed."""
    try:
        found = importlib.metadata.metadata("shardkit")
        requires = tuple(found.get_all("Requires-Dist") or ())
        python = str(found.json.get("requires_python", ""))
        return Own(found["Version"], python, requires, "shardkit")
    except importlib.metadata.PackageNotFoundError:
        root = pathlib.Path(__file__).resolve().parents[2]
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    except (OSError, KeyError):
        return Own("unknown", "", (), "shardkit")
    extras = project.get("optional-dependencies", {})
    named = [f'{line}; extra == "{extra}"' for extra, lines in extras.items() for line in lines]
    return Own("unknown (not installed)", project["requires-python"], (*project["dependencies"], *named), str(root))


def check_ranges(own: Own, python: str, version_of: Callable[[str], str | None]) -> tuple[list[Row], list[Finding]]:
    """Whether Python and each required package are in the range that this library supports.

    Args:
      own: what it asks for.
      python: the version of Python.
      version_of: a package's installed version, or None.

    Returns:
      A row each for the table, and what is wrong.

    Example:
      >>> own = Own("0.1.0", ">=3.11,<3.14", ("numpy>=2.0",), "shardkit")
      >>> rows, findings = check_ranges(own, "3.10.1", {"numpy": "1.26.4", "jaxlib": "0.10.2"}.get)
      >>> [(f.level, f.name) for f in findings]
      [('problem', 'Python 3.10.1'), ('problem', 'numpy 1.26.4')]
    """
    fits = allows(own.python, python)
    rows = [Row("python", python, own.python or "any", fits), Row("shardkit", own.version, "", True)]
    findings = [] if fits else [_outside("Python", python, own.python, f"use a Python {own.python}")]
    parsed = [parse_requirement(line, python) for line in own.requires]
    needed = [r for r in parsed if r is not None and r.extra is None and r.name != "shardkit"]
    # jaxlib comes with jax, which says which one it needs.
    names = [*needed, Requirement("jaxlib", (), "", None)] if all(r.name != "jaxlib" for r in needed) else needed
    for requirement in sorted(names, key=lambda r: LOOKED_AT.index(r.name) if r.name in LOOKED_AT else 99):
        row, found = _check_one(requirement, version_of(requirement.name))
        rows.append(row)
        findings += found
    return rows, findings


def _check_one(requirement: Requirement, version: str | None) -> tuple[Row, list[Finding]]:
    name, wanted = requirement.name, requirement.specifiers
    if version is None:
        missing = Finding(PROBLEM, f"{name} missing", f"{name} isn't installed", f"pip install '{name}{wanted}'")
        return Row(name, "missing", wanted, False), [missing]
    tested = TESTED_BELOW.get(name)
    said = wanted + (f",<{tested}" if tested else "")
    said = said or ("as jax says" if name == "jaxlib" else "any")
    if not allows(wanted, version):
        return Row(name, version, said, False), [_outside(name, version, wanted, f"pip install '{name}{wanted}'")]
    if tested is not None and key(version) >= key(tested):
        newer = f"newer than what this library is tested with (below {tested}); it may work"
        note = Finding(NOTE, f"{name} {version}", newer, f"if it doesn't: pip install '{name}{wanted},<{tested}'")
        return Row(name, version, said, True), [note]
    return Row(name, version, said, True), []


def _outside(name: str, version: str, wanted: str, todo: str) -> Finding:
    return Finding(
        PROBLEM, f"{name} {version}", f"outside the supported range {wanted}", todo, "shardkit's requirements"
    )


def check_each_other(versions: Mapping[str, str], requires: Mapping[str, Sequence[str]], python: str) -> list[Finding]:
    """Whether the installed packages have each other in the versions that they say they need.

    pip checks this for what it installs together, not for what it leaves as it was.

    Args:
      versions: those installed.
      requires: of each, its requirements. Of extras, those are checked that name an accelerator's package.
      python: the version of Python.

    Example:
      >>> found = check_each_other({"jax": "0.10.2", "jaxlib": "0.11.0"}, {"jax": ["jaxlib<=0.10.2,>=0.10.1"]}, "3.11")
      >>> found[0].happens
      'jax 0.10.2 needs jaxlib<=0.10.2,>=0.10.1, but jaxlib 0.11.0 is installed'
    """
    findings, seen = [], set()
    for owner, lines in requires.items():
        for line in lines:
            requirement = parse_requirement(line, python)
            if requirement is None or requirement.name not in versions or owner not in versions:
                continue
            name = requirement.name
            # Of other extras ("minimum-jaxlib", "testing") it isn't known whether they were asked for.
            if requirement.extra is not None and name not in ACCELERATORS:
                continue
            if allows(requirement.specifiers, versions[name]) or (owner, name) in seen:
                continue
            seen.add((owner, name))
            ours, theirs = f"{owner} {versions[owner]}", f"{name}{requirement.specifiers}"
            what = f"{ours} needs {theirs}, but {name} {versions[name]} is installed"
            todo = f"pip install '{owner}=={versions[owner]}' '{theirs}', or other versions of both"
            findings.append(Finding(PROBLEM, f"{owner} and {name}", what, todo, f"the metadata of {ours}"))
    return findings


@dataclasses.dataclass(frozen=True)
class Extra:
    """An optional extra of this library.

    Attributes:
      missing: what isn't there, or is in another version, such as "tqdm>=4.66".
      command: what installs it.
    """

    name: str
    missing: tuple[str, ...]
    command: str


def read_extras(
    own: Own,
    python: str,
    version_of: Callable[[str], str | None],
    requires_of: Callable[[str], Sequence[str]] = requirements_of,
) -> list[Extra]:
    """Which extras are complete, and what the others lack.

    Example:
      >>> own = Own("0.1.0", "", ('tqdm>=4.66; extra == "examples"',), "shardkit")
      >>> read_extras(own, "3.11", {}.get)
      [Extra(name='examples', missing=('tqdm>=4.66',), command="pip install 'shardkit[examples]'")]
    """
    parsed = [r for line in own.requires if (r := parse_requirement(line, python)) is not None]
    extras = list(dict.fromkeys(r.extra for r in parsed if r.extra is not None))
    found = []
    for extra in extras:
        wanted = _needed(extra, parsed, python, requires_of, frozenset())
        missing = []
        for requirement in wanted:
            version = version_of(requirement.name)
            if version is None or not allows(requirement.specifiers, version):
                missing.append(requirement.name + requirement.specifiers)
        found.append(Extra(extra, tuple(dict.fromkeys(missing)), f"pip install '{own.install}[{extra}]'"))
    return found


def _needed(
    extra: str,
    parsed: list[Requirement],
    python: str,
    requires_of: Callable[[str], Sequence[str]],
    seen: frozenset[tuple[str, str]],
) -> list[Requirement]:
    """An extra's requirements, with those of the extras that it names in turn (``shardkit[test]``, ``jax[tpu]``)."""
    found = []
    for requirement in (r for r in parsed if r.extra == extra):
        if requirement.name != "shardkit":
            found.append(requirement)
        for inner in requirement.extras:
            if (requirement.name, inner) in seen:
                continue
            lines = () if requirement.name == "shardkit" else requires_of(requirement.name)
            others = [r for line in lines if (r := parse_requirement(line, python)) is not None]
            others = parsed if requirement.name == "shardkit" else others
            found += _needed(inner, others, python, requires_of, seen | {(requirement.name, inner)})
    return found


def versions_of(names: Sequence[str], version_of: Callable[[str], str | None]) -> dict[str, str]:
    """Of those that are installed."""
    return {normal(name): version for name in names if (version := version_of(name)) is not None}
