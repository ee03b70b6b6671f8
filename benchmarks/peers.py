"""Sharded convolutions beside those of PyTorch, and halos beside jaxDecomp's: what is right, and how long it takes.

    python benchmarks/peers.py --install          # makes .venv-torch, .venv-torch-2.11, .venv-jaxdecomp and
                                                  # .venv-physicsnemo, then measures
    python benchmarks/peers.py                    # measures what is there, keeps the stored rows of what isn't
    python benchmarks/peers.py --torch-python A B # DTensor of two versions of torch
    python benchmarks/peers.py --rewrite          # writes the tables again from the stored results

The peers can't share our environment: each runs in child processes of its own interpreter (``--torch-python``,
``--jaxdecomp-python``, ``--physicsnemo-python``; or SHARDKIT_TORCH_PYTHON ..., paths with colons between).
First each is checked against the unsharded convolution of its own framework, whose results must agree with each other.
Only what is right is timed: all processes of all peers live side by side, waiting on a pipe, and are asked in turns,
each round the other way round; a time is the slowest process', from a barrier on.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import track
from tables import HERE, between, counts, markdown, versions

sys.path.insert(0, str(HERE / "peer_programs"))

from cases import CASES
from groups import Failure, Group

ROOT = HERE.parent
STORED = HERE / "results" / "peers.json"
LONGEST = 10.0  # seconds for the rounds of one program, after the third
CPU = ("--index-url", "https://download.pytorch.org/whl/cpu")
RECIPES: dict[str, list[tuple[str, ...]]] = {
    "torch": [("torch==2.13.0", *CPU), ("numpy",)],
    "jaxdecomp": [("jaxdecomp", "packaging", "flax", "optax", "orbax-checkpoint", "rich")],
    "physicsnemo": [
        ("torch==2.13.0", *CPU),
        ("--no-deps", "torchvision==0.28.0", *CPU),
        ("--no-deps", "nvidia-physicsnemo", "timm"),
        ("numpy", "psutil", "requests", "tqdm"),
        ("cftime", "einops", "gitpython", "h5py", "huggingface_hub", "hydra-core", "importlib-metadata", "jaxtyping"),
        ("nvtx", "onnx", "pandas", "pillow", "s3fs", "safetensors", "tensordict", "termcolor", "treelib", "warp-lang"),
    ],
}
# The last that cut a convolution in W rightly.
OLDER = {"torch-2.11": [("torch==2.11.0", *CPU), ("numpy",)]}
OURS, ONE = "shardkit, n processes", "shardkit, 1 process"
ALONE = ("lax, one device", "torch, one process")


@dataclasses.dataclass
class Peer:
    """A column: whose processes, started how."""

    name: str
    python: str
    program: str
    alone: bool = False  # one process whatever n is, and nothing to check
    one_process: bool = False
    given: dict[str, Any] = dataclasses.field(default_factory=dict)

    def group(self, n: int) -> Group:
        devices = 1 if self.alone else n
        return Group(self.python, self.program, 1 if self.one_process else devices, devices=devices, **self.given)


def pythons(name: str, given: list[str] | None) -> list[str]:
    """The interpreters of a peer: as asked for, from the environment, or of an environment in the root."""
    if given:
        return given
    named = os.environ.get(f"SHARDKIT_{name.upper()}_PYTHON")
    if named:
        return named.split(":")
    return [str(path / "bin" / "python") for path in sorted(ROOT.glob(f".venv-{name}*"))]


def lacking(python: str, module: str) -> str | None:
    """Why an interpreter can't be used, or None."""
    run = [python, "-c", f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"]
    try:
        done = subprocess.run(run, capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python}: {error}"
    return None if done.returncode == 0 else f"{python} has no {module}"


def usable(name: str, given: list[str] | None, console: Console) -> list[str]:
    """The interpreters that have the peer; says what isn't measured and why."""
    found = pythons(name, given)
    reasons = {python: lacking(python, name) for python in found}
    why = [reason for reason in reasons.values() if reason]
    if not found:
        why = [f"no interpreter given and no .venv-{name}"]
    for reason in why:
        steps = " && ".join("pip install " + " ".join(step) for step in RECIPES[name])
        console.print(f"{name} not measured: {reason}. `--install` makes one by: {steps}. Stored rows are kept.")
    return [python for python, reason in reasons.items() if reason is None]


def install(console: Console) -> None:
    """Make the environments that aren't there."""
    for name, steps in (RECIPES | OLDER).items():
        where = ROOT / f".venv-{name}"
        if where.exists():
            continue
        console.print(f"installing {where.name}")
        subprocess.run([sys.executable, "-m", "venv", str(where)], check=True)
        for step in steps:
            if subprocess.run([str(where / "bin" / "python"), "-m", "pip", "install", "--quiet", *step]).returncode:
                console.print(f"{where.name} not made: pip install {' '.join(step)} failed")
                shutil.rmtree(where)
                break


def torch_version(python: str) -> str:
    run = [python, "-c", "import importlib.metadata as m; print(m.version('torch').split('+')[0])"]
    return subprocess.run(run, capture_output=True, text=True, timeout=60).stdout.strip()


def columns(torches: list[str], physics: list[str]) -> list[Peer]:
    """Ours, then the peers."""
    found = [
        Peer(OURS, sys.executable, "ours.py"),
        Peer(ONE, sys.executable, "ours.py", one_process=True),
        Peer(ALONE[0], sys.executable, "ours.py", alone=True, given={"alone": True}),
    ]
    for number, python in enumerate(torches):
        found.append(
            Peer(f"DTensor, torch {torch_version(python)}", python, "with_torch.py", given={"kind": "DTensor"})
        )
        if number == 0:
            given = {"kind": "DTensor through the batch"}
            found.append(Peer("DTensor through the batch", python, "with_torch.py", given=given))
            found.append(Peer(ALONE[1], python, "with_torch.py", alone=True, given={"kind": "alone"}))
    if physics:
        found.append(Peer("PhysicsNeMo ShardTensor", physics[0], "with_torch.py", given={"kind": "ShardTensor"}))
    return found


def worst(said: list[str]) -> str:
    """What the processes say, together."""
    parts = [part for words in said if words != "right" for part in words.split(", ")]
    return ", ".join(sorted(set(parts), reverse=True)) or "right"


def check(peer: Peer, group: Group, case: str) -> dict[str, Any]:
    """Right or not, forward and backward (and, of a peer's result, the loss)."""
    if peer.alone:
        return {"forward": "right", "backward": "right"}
    result: dict[str, Any] = {}
    try:
        if peer.program == "ours.py":
            replies = group.ask("check", case=case)
            result["backward"] = worst([reply["backward"] for reply in replies])
        else:
            replies = group.ask("forward", case=case)
        result["forward"] = worst([reply["forward"] for reply in replies])
        result["square"] = replies[0]["square"]
    except Failure as failure:
        return {question: str(failure) for question in ("forward", "backward", "loss")}
    for question in () if peer.program == "ours.py" else ("backward", "loss"):
        try:
            result[question] = worst(group.ask(question, case=case, limit=90))
        except Failure as failure:
            result[question] = str(failure)
    # Gradients of a wrong result aren't right, whatever their values.
    if result["forward"] != "right" and result.get("backward") == "right":
        result["backward"] = "right, of a wrong result"
    return result


def clock(groups: dict[str, Group], case: str, backward: bool, rounds: int) -> tuple[dict[str, float], int]:
    """Median of each in ms, in turns, and of how many rounds."""
    wall: dict[str, list[float]] = {name: [] for name in groups}
    begun = time.monotonic()
    for number in range(rounds):
        for name in list(groups) if number % 2 else list(groups)[::-1]:
            replies = groups[name].ask("time", case=case, backward=backward, repeat=2)
            wall[name] += [max(together) for together in zip(*replies, strict=True)]
        if number >= 2 and time.monotonic() - begun > LONGEST:
            break
    return {name: statistics.median(times) * 1e3 for name, times in wall.items()}, number + 1


def measure(peers: list[Peer], groups: dict[str, Group], case: str, rounds: int) -> dict[str, dict[str, Any]]:
    """One case, of all."""
    results = {peer.name: check(peer, groups[peer.name], case) for peer in peers}
    squares = [result["square"] for result in results.values() if "square" in result]
    if max(squares) - min(squares) > 1e-4 * max(squares):
        raise AssertionError(f"{case}: the frameworks' references differ: {squares}")
    for direction in ("forward", "backward"):
        right = {name: groups[name] for name, result in results.items() if result.get(direction) == "right"}
        wall, done = clock(right, case, direction == "backward", rounds)
        for name, ms in wall.items():
            results[name] |= {f"{direction}_ms": ms, f"{direction}_rounds": done, f"ours_{direction}_ms": wall[OURS]}
    return results


def measure_all(
    peers: list[Peer], processes: list[int], cases: list[str], rounds: int, console: Console
) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """A row a case, and what versions the peers say they are."""
    said = {}
    for n in processes:
        groups = {peer.name: peer.group(n) for peer in peers}
        try:
            for name, group in groups.items():
                said[name] = group.start()
            for case in track(cases, description=f"{n} processes", console=console):
                results = measure(peers, groups, case, rounds)
                for name, result in results.items():
                    console.print(f"{n} | {case} | {name}: {result}", highlight=False, markup=False)
                yield {"case": case, "processes": n, "results": results}, said
        finally:
            for group in groups.values():
                group.stop()


def measure_halos(python: str, rounds: int) -> dict[str, Any]:
    """jaxDecomp's halos beside ours, in its interpreter."""
    run = [python, str(HERE / "peer_programs" / "halos.py"), str(rounds)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    try:
        done = subprocess.run(run, capture_output=True, text=True, timeout=600, env=environment)
    except subprocess.TimeoutExpired:
        return {"failure": "no answer in 600 s, killed"}
    if done.returncode:
        return {"failure": (done.stderr.strip().splitlines() or ["no words"])[-1]}
    return json.loads(done.stdout.splitlines()[-1]) | {"date": datetime.date.today().isoformat(), "rounds": rounds}


def merged(stored: dict[str, Any], row: dict[str, Any], said: dict[str, str]) -> dict[str, Any]:
    """The new results, and of what wasn't measured the stored ones."""
    today = datetime.date.today().isoformat()
    stored.setdefault("peers", {}).update({name: {"versions": v, "date": today} for name, v in said.items()})
    old = {(row["case"], row["processes"]): row["results"] for row in stored.get("rows", [])}
    new = {(row["case"], row["processes"]): row["results"]}
    keys = sorted({*old, *new}, key=lambda key: (key[1], list(CASES).index(key[0]) if key[0] in CASES else -1))
    stored["rows"] = [
        {"case": case, "processes": n, "results": old.get((case, n), {}) | new.get((case, n), {})} for case, n in keys
    ]
    return stored


class Notes:
    """Errors, told once under the table."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def mark(self, text: str) -> str:
        kind, _, words = text.partition(": ")
        if kind not in ("raises", "dies", "hangs"):
            return text
        if words not in self.texts:
            self.texts.append(words)
        return f"{kind} ({self.texts.index(words) + 1})"


def cell(result: dict[str, Any] | None, ratio: bool, notes: Notes) -> str:
    """ "12 / 40 ms", a peer's with ours over it; or what is wrong, forward and then backward."""
    if result is None:
        return "-"
    parts, ratios = [], []
    for direction in ("forward", "backward"):
        ms = result.get(f"{direction}_ms")
        parts.append(notes.mark(result[direction]) if ms is None else f"{ms:.0f}")
        ratios.append("-" if ms is None else f"**{result[f'ours_{direction}_ms'] / ms:.2f}**")
    both = " / ".join(parts) if len(set(parts)) > 1 or parts[0].isdigit() else parts[0]
    return f"{both} = {' / '.join(ratios)}" if ratio and ratios != ["-", "-"] else both


def summary(name: str, data: dict[str, Any]) -> str:
    """A peer in one line: how much of it is right, and its times."""
    results = [row["results"][name] for row in data["rows"] if name in row["results"]]
    words = [f"{name} ({data['peers'][name]['versions']}, {data['peers'][name]['date']})"]
    if name not in ALONE:
        asked = [key for key in ("forward", "backward", "loss") if any(key in result for result in results)]
        right = [f"{key} {sum(result.get(key) == 'right' for result in results)}" for key in asked]
        words.append(f"right of {len(results)}: {', '.join(right)}")
    for direction in ("forward", "backward"):
        ratios = [r[f"ours_{direction}_ms"] / r[f"{direction}_ms"] for r in results if f"{direction}_ms" in r]
        if ratios and name != OURS:
            spread = f"median {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}"
            words.append(f"{'forward + ' if direction == 'backward' else ''}{direction}, ours over it: {spread}")
    return "- " + "; ".join(words)


def convolution_lines(data: dict[str, Any]) -> list[str]:
    """The table of convolutions and what its errors say."""
    if not data.get("rows"):
        return ["Convolutions: not measured."]
    notes = Notes()
    first = [OURS, ONE, *ALONE]
    names = [name for name in first if name in data["peers"]] + [name for name in data["peers"] if name not in first]
    rows = []
    for row in data["rows"]:
        cells = [cell(row["results"].get(name), name not in (OURS, ONE, *ALONE), notes) for name in names]
        rows.append([row["case"], str(row["processes"]), *cells])
    lines = markdown(["case", "n", *names], rows)
    if notes.texts:
        lines += ["", *(f"({number}) `{text}`  " for number, text in enumerate(notes.texts, 1))]
    return [*(summary(name, data) for name in names), "", *lines]


HALO_HEADINGS = (
    "mesh",
    "width",
    "edges",
    "collectives: ours / jaxDecomp",
    "received, kB a device: ours / jaxDecomp",
    "wall, ms: ours / pad and exchange / exchange of padded blocks",
    "gradient: ours / jaxDecomp",
)


def halo_cells(row: dict[str, Any]) -> list[str]:
    ours, both, exchange = row["ours"], row["pad, exchange"], row["exchange"]

    def wall(program: dict[str, Any]) -> str:
        ms = program["wall_ms"]
        return program["values"] if ms is None else f"{ms:.2f} = **{ours['wall_ms'] / ms:.2f}**"

    return [
        row["mesh"],
        str(row["width"]),
        "periodic" if row["periodic"] else "zeros",
        f"{counts(ours['collectives'])} / {counts(both['collectives'])}",
        f"{ours['bytes'] / 1e3:,.0f} / {both['bytes'] / 1e3:,.0f}",
        f"{ours['wall_ms']:.2f} / {wall(both)} / {wall(exchange)}",
        f"{ours['gradient']} / {both['gradient']}",
    ]


def halo_lines(halos: dict[str, Any] | None) -> list[str]:
    if not halos:
        return ["jaxDecomp: not measured."]
    if "failure" in halos:
        return [f"jaxDecomp: fails: `{halos['failure']}`"]
    note = f"Halos: {halos['versions']}, {halos['date']}; medians of {halos['rounds']} interleaved rounds."
    return [note, "", *markdown(HALO_HEADINGS, [halo_cells(row) for row in halos["rows"]])]


def write(data: dict[str, Any]) -> None:
    """The figures as JSON, the tables in benchmarks/README.md."""
    STORED.parent.mkdir(exist_ok=True)
    STORED.write_text(json.dumps(data, indent=1) + "\n")
    note = (
        f"{data['versions']}; at most {data['rounds']} rounds in turns, two runs each (fewer, at least 3, where they "
        f"take over {LONGEST:.0f} s). Cells: ms forward / forward + backward; of a peer with our time, n processes, "
        "over its, so below 1 ours is faster."
    )
    lines = [note, "", *convolution_lines(data), "", *halo_lines(data.get("halos"))]
    between(HERE / "README.md", "peers", lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in RECIPES:
        parser.add_argument(f"--{name}-python", nargs="+", help=f"interpreter with {name} (default: .venv-{name})")
    parser.add_argument("--install", action="store_true", help="make the environments that aren't there by pip first")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--dry", action="store_true", help="don't write the results")
    parser.add_argument("--rewrite", action="store_true", help="write the tables again from the stored results")
    arguments = parser.parse_args()
    console = Console(soft_wrap=True)
    data = json.loads(STORED.read_text()) if STORED.exists() else {}
    if arguments.rewrite:
        write(data)
        return
    if arguments.install:
        install(console)
    found = {name: usable(name, getattr(arguments, f"{name}_python"), console) for name in RECIPES}
    if not any(found.values()):
        console.print("Nothing to measure; the stored rows stay as they are.")
        return
    if found["jaxdecomp"]:
        data["halos"] = measure_halos(found["jaxdecomp"][0], 2 * arguments.rounds + 1)
        console.print("\n".join(halo_lines(data["halos"])), markup=False)
        data = {"versions": versions(), "rounds": arguments.rounds} | data
        if not arguments.dry:
            write(data)
    if found["torch"] or found["physicsnemo"]:
        peers = columns(found["torch"], found["physicsnemo"])
        data |= {"versions": versions(), "rounds": arguments.rounds}
        for row, said in measure_all(peers, arguments.processes, arguments.cases, arguments.rounds, console):
            data = merged(data, row, said)
            if not arguments.dry:
                write(data)
        console.print("\n".join(convolution_lines(data)), markup=False)


if __name__ == "__main__":
    main()
