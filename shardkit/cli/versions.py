"""Versions and requirements, as packages state them; read by `packaging`, which is what pip reads them by."""

from __future__ import annotations

import dataclasses
import re

from packaging import requirements, specifiers, utils
from packaging import version as versions


def key(version: str) -> versions.Version:
    """What versions are sorted by; a local part ("+cuda12") doesn't count.

    Example:
      >>> key("0.12.0.dev1") < key("0.12.0rc1") < key("0.12") == key("0.12.0+local") < key("0.12.0.1")
      True

    Raises:
      ValueError: not a version.
    """
    try:
        return versions.Version(versions.Version(version).public)
    except versions.InvalidVersion as error:
        raise ValueError(f"{version!r} is not a version such as 0.12.0") from error


def allows(wanted: str, version: str) -> bool:
    """Whether a version, early ones too, is in a range such as ">=0.10,<0.13" ("" allows all).

    Example:
      >>> allows(">=0.10.0, <0.13", "0.12.0.1"), allows("==0.0.42.*", "0.0.42.1"), allows("~=1.4", "2.0")
      (True, True, False)
    """
    return specifiers.SpecifierSet(wanted).contains(key(version), prereleases=True)


@dataclasses.dataclass(frozen=True)
class Requirement:
    """One line of a package's requirements.

    Attributes:
      name: of the package, in lower case with dashes.
      extras: of that package.
      specifiers: the range of versions, "" for any.
      extra: only required with this extra; None: always.
    """

    name: str
    extras: tuple[str, ...]
    specifiers: str
    extra: str | None


def normal(name: str) -> str:
    """A package's name as the index writes it.

    Example:
      >>> normal("ml_dtypes")
      'ml-dtypes'
    """
    return str(utils.canonicalize_name(name))


def parse_requirement(line: str, python: str) -> Requirement | None:
    """The requirement; None where its marker says that it isn't meant for this Python or machine.

    Args:
      line: such as ``jax-cuda12-plugin[with-cuda]<=0.10.2; extra == "cuda12"``.
      python: the version of Python.

    Raises:
      ValueError: not a requirement.

    Example:
      >>> parse_requirement('libtpu==0.0.42.*; extra == "tpu"', "3.11.4")
      Requirement(name='libtpu', extras=(), specifiers='==0.0.42.*', extra='tpu')
    """
    try:
        found = requirements.Requirement(line)
    except requirements.InvalidRequirement as error:
        raise ValueError(f"{line!r} is no requirement such as 'jax>=0.10.0'") from error
    named = re.search(r"""extra == ['"]([^'"]+)['"]""", str(found.marker))
    extra = named[1] if named else ""
    here = {"python_version": ".".join(python.split(".")[:2]), "python_full_version": python, "extra": extra}
    if found.marker is not None and not found.marker.evaluate(here):
        return None
    extras = tuple(normal(e) for e in sorted(found.extras))
    return Requirement(normal(found.name), extras, str(found.specifier), normal(extra) or None)
