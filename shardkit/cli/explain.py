"""``python -m shardkit explain module:function --mesh dp=2,sp=4 --target tpu:v5e:2x4``: one page on a program.

Exit status: 0; 1 with ``--strict`` where a collective is unexplained or memory doesn't suffice; 2 for what can't be
explained (no such function, a mesh that doesn't fit).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import inspect
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

_DESCRIPTION = """Compiles a function for a machine, which need not be here, and says what it will do there: placements,
every collective and what it is for, memory, and work. Nothing is run. The function is called with the mesh (if it takes
an argument) and returns what to explain and its arguments: (step, state, batch), arrays or jax.ShapeDtypeStructs with
placements on the mesh. With --arg the function itself is explained, for arguments of these types."""

_ARGUMENT = re.compile(r"(\w+)\[([\d,\s]*)\](?:@\[([^\]]*)\])?$")


def add_parser(subparsers: Any) -> None:
    """Adds ``explain`` to the subcommands."""
    parser = subparsers.add_parser(
        "explain", help="what a program will do on a machine that needn't be here", description=_DESCRIPTION
    )
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="or path/to/file.py:function")
    parser.add_argument("--mesh", type=read_mesh, required=True, metavar="dp=2,sp=4", help="axes and sizes")
    parser.add_argument("--target", metavar="tpu:v5e:2x4", help="the machine; without it, simulated CPU devices")
    parser.add_argument(
        "--arg",
        action="append",
        type=read_argument,
        metavar="'float32[8,64]@[dp,-]'",
        help="an argument: its type, and the axes that cut each dim (a*b for two); may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="for tools")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the page there, too")
    parser.add_argument(
        "--strict", action="store_true", help="exit with 1 if a collective is unexplained or memory full"
    )


def read_mesh(text: str) -> dict[str, int]:
    """Axes and sizes.

    Example:
      >>> read_mesh("dp=2,sp=-1")
      {'dp': 2, 'sp': -1}
    """
    try:
        sizes = {name.strip(): int(size) for name, size in (part.split("=") for part in text.split(","))}
    except ValueError:
        sizes = {}
    if not sizes or not all(sizes) or len(sizes) != len(text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is no mesh such as dp=2,sp=4")
    return sizes


def read_argument(text: str) -> tuple[str, tuple[int, ...], tuple[tuple[str, ...], ...]]:
    """Type, shape, and the axes that cut each dim.

    Example:
      >>> read_argument("bfloat16[8,64]@[dp,-]")
      ('bfloat16', (8, 64), (('dp',), ()))
    """
    found = _ARGUMENT.match(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no type such as 'float32[8,64]@[dp,-]'")
    dtype, sizes, places = found.groups()
    shape = tuple(int(size) for size in sizes.split(",") if size.strip())
    cuts = tuple(
        () if place.strip() in ("-", "") else tuple(axis.strip() for axis in place.split("*"))
        for place in (places.split(",") if places else [])
    )
    if len(cuts) > len(shape):
        raise argparse.ArgumentTypeError(f"{text!r} has {len(cuts)} placements for {len(shape)} dims")
    return dtype, shape, cuts


def run(args: argparse.Namespace) -> int:
    """Explains, prints, and returns the exit status."""
    from rich.console import Console

    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        try:
            page = _page(args)
        except (ValueError, TypeError, ImportError, NotImplementedError) as error:
            sys.stderr.write(f"shardkit explain: {error}\n")
            return 2
    if args.html is not None:
        args.html.write_text(f"<!doctype html><meta charset='utf-8'><title>{page.name}</title>{page._repr_html_()}")
    if args.json:
        json.dump(page.to_dict(), sys.stdout, indent=2)
        sys.stdout.write("\n")
    elif sys.stdout.isatty():
        Console().print(page)
    else:  # tables as wide as they are
        sys.stdout.write(f"{page}\n")
    return 1 if args.strict and (page.unexplained or page.fits is False) else 0


def _page(args: argparse.Namespace) -> Any:
    if args.target is None:
        _simulate(args.mesh)
    import shardkit as sk

    function = _load(args.function)
    mesh = sk.make_mesh(args.mesh) if args.target is None else sk.target_mesh(args.target, args.mesh)
    if args.arg:
        return sk.explain(function, *(_described(given, mesh) for given in args.arg), mesh=mesh)
    job = _called(args.function, function, mesh)
    if not isinstance(job, tuple) or not job or not callable(job[0]):
        raise TypeError(
            f"{args.function} returned {type(job).__name__}, but what it returns must be what to explain and its "
            "arguments, (step, state, batch); to explain the function itself, give types with --arg"
        )
    return sk.explain(*job, mesh=mesh)


def _called(name: str, function: Any, mesh: Any) -> Any:
    """What a function returns that is called with the mesh, if it takes one.

    Raises:
      TypeError: it's none that can be called so: it is what's to be explained itself, as a step is.
    """
    parameters = inspect.signature(function).parameters.values()
    needed = [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    rule = (
        "but the function named is called with the mesh and returns what to explain and its arguments, (step, state, "
        "batch); to explain the function itself, give types with --arg"
    )
    if len(needed) > 1:
        raise TypeError(f"{name} takes {', '.join(needed)}, {rule}")
    try:
        return function(mesh) if parameters else function()
    except (TypeError, AttributeError) as error:
        if "Mesh'" not in str(error):
            raise
        raise TypeError(f"{name} doesn't take a mesh, {rule}. It says: {str(error).splitlines()[0]}") from error


def _simulate(mesh: dict[str, int]) -> None:
    """Enough CPU devices for the mesh, before JAX is first used; what the user set stays."""
    import jax

    needed = math.prod(size for size in mesh.values() if size > 0)
    named = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not named and jax.config.jax_num_cpu_devices < needed:  # type: ignore[attr-defined]
        with contextlib.suppress(RuntimeError):  # JAX has started: its devices are what they are
            jax.config.update("jax_num_cpu_devices", needed)


def _described(given: tuple[str, tuple[int, ...], tuple[tuple[str, ...], ...]], mesh: Any) -> Any:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    dtype, shape, cuts = given
    spec = PartitionSpec(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in cuts))
    return jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype), sharding=NamedSharding(mesh, spec))


def _load(name: str) -> Any:
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute:
        raise ValueError(f"{name!r} names no function; write module:function or path/to/file.py:function")
    if where.endswith(".py"):
        path = Path(where)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if not path.exists() or spec is None or spec.loader is None:
            raise ValueError(f"{name!r}: there is no file {where}")
        sys.path.insert(0, str(path.parent))  # as for python path/to/file.py
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, "")  # as for python -m
        module = importlib.import_module(where)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = ", ".join(sorted(n for n in vars(module) if callable(getattr(module, n)) and not n.startswith("_")))
            raise ValueError(f"{where} has no {attribute!r}; it has {names}")
        found = getattr(found, part)
    return found
