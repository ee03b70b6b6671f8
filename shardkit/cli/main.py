"""The parser, and which module runs which subcommand."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

# A module here offers `add_parser(subparsers)`, which adds a parser of its name, and `run(args) -> int`, the exit
# status. It imports what is heavy (JAX, this library) in `run`, so that the others start where that is broken.
SUBCOMMANDS: dict[str, str] = {"doctor": "shardkit.cli.doctor", "explain": "shardkit.cli.explain"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand.

    Args:
      argv: the words after the program's name. None: those of this process.

    Returns:
      The exit status.

    Example:
      >>> try:
      ...     main(["--help"])
      ... except SystemExit as stop:
      ...     stop.code
      usage: python -m shardkit ...
      0
    """
    parser = argparse.ArgumentParser("python -m shardkit", description="Tools around arrays on many devices.")
    subparsers = parser.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    modules = {name: importlib.import_module(where) for name, where in SUBCOMMANDS.items()}
    for module in modules.values():
        module.add_parser(subparsers)
    args = parser.parse_args(argv)
    return modules[args.subcommand].run(args)
