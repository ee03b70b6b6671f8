"""The table of all benchmarks: made-up results, and that those that are stored can be read."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch):
    """Imports a script, which imports others beside it, and forgets them afterwards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("all", "summary", "tables"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in ("all", "summary", "tables"):
        sys.modules.pop(name, None)


@pytest.fixture
def summary(scripts):
    return scripts("summary")


def reshard_row(number: int, wall: float, received: tuple[int, int], device_put: float | None = None) -> dict:
    return {
        "transition": f"t{number}",
        "mesh": "8",
        "received": received[0],
        "received_xla": received[1],
        "wall_ms": wall,
        "wall_xla_ms": 1.0,
        "eager_ms": 3.0,
        "device_put_ms": device_put,
    }


@pytest.fixture
def reshard_results() -> dict:
    walls = (0.5, 1.0, 1.05, 1.2, 1.3, 2.0, 3.0)
    rows = [reshard_row(i, wall, (0, 0) if i else (8, 0)) for i, wall in enumerate(walls)]
    rows[1]["device_put_ms"] = 4.0
    return {"versions": "jax 9.9, Python 3.13, 2026-01-02; medians of 3 rounds", "rows": rows}


def test_wins_ties_and_losses_are_counted(summary, reshard_results):
    inside, eager = summary.reshard(reshard_results)
    assert summary.cell(list(inside.ratios("wall").values())) == "1 / 2 / 4, **1.20**, 3.00"
    assert summary.cell(list(eager.ratios("wall").values())) == "1 / 0 / 0, **0.75**, 0.75"
    assert summary.cell(list(eager.ratios("bytes").values())) == "-"


def test_something_where_theirs_is_nothing_is_a_loss(summary, reshard_results):
    inside, _ = summary.reshard(reshard_results)
    assert inside.ratios("bytes")["t0 on 8"] == math.inf
    assert summary.cell(list(inside.ratios("bytes").values())) == "0 / 6 / 1, **1.00**, from none"
    assert summary.lost(inside)[1] == "  - bytes: from none t0 on 8"


def test_the_worst_are_named_and_the_others_counted(summary, reshard_results):
    inside, eager = summary.reshard(reshard_results)
    assert summary.lost(inside)[0] == "  - wall: 3.00 t6 on 8; 2.00 t5 on 8; 1.30 t4 on 8; 1 more"
    assert summary.lost(eager) == []
    said = summary.lines([inside, eager])
    assert said[-1] == f"Nothing lost in: {summary.title(eager)}."
    assert sum(line.startswith("| reshard |") for line in said) == 2


def test_a_missing_measure_is_no_ratio(summary):
    assert summary.ratios(wall=(1.0, None), bytes=(2, 4), cycles=(None, None)) == {"bytes": 0.5}


def test_forms_that_are_not_chosen_do_not_count(summary):
    def row(form: str, cycles: float | None) -> dict:
        figures = {"mega_cycles": cycles, "temporaries_mb": 2.0, "received_kb": 1.0}
        return {"target": "tpu:v5e:2x4", "program": "stack", "form": form, **figures}

    data = {"versions": "", "rows": [row("XLA's partitioner", 4.0), row("auto", 1.0), row("concat", 9.0)]}
    (found,) = summary.ring_conv_targets(data)
    assert found.rows == {"stack": {"cycles": 0.25, "temporaries": 1.0, "bytes": 1.0}}


def test_a_peer_is_timed_only_where_it_is_right(summary):
    results = {"Peer": {"forward": "right", "backward": "wrong values", "forward_ms": 4.0, "ours_forward_ms": 2.0}}
    data = {
        "peers": {"Peer": {"versions": "peer 1", "date": "2026-01-02"}},
        "rows": [{"case": "3x3", "processes": 2, "results": results}],
    }
    (found,) = summary.peers(data)
    assert found.rows == {"3x3, 2 processes, forward": {"wall": 0.5}}
    assert "right in 0 of 1" in found.compared
    assert summary.cells(found)[-1] == "2026-01-02: peer 1"


def test_results_that_are_absent_broken_or_unknown_are_noted(summary, tmp_path, reshard_results):
    (tmp_path / "reshard.json").write_text(json.dumps(reshard_results))
    (tmp_path / "partition.json").write_text('{"rows": [{}]}')
    (tmp_path / "ring_conv.json").write_text("{")
    (tmp_path / "other.json").write_text("{}")
    found, notes = summary.read(tmp_path)
    assert {c.benchmark for c in found} == {"reshard"}
    text = "\n".join(notes)
    assert "partition.json can't be read: KeyError" in text
    assert "ring_conv.json can't be read: JSONDecodeError" in text
    assert "No stored results of optimizer." in text
    assert "Not in this table: other.json." in text


def test_the_stored_results_can_be_read(summary):
    found, notes = summary.read(FOLDER / "results")
    assert notes == []
    assert {c.benchmark.split()[0] for c in found} == set(summary.READERS) - {"ring_conv_targets"}
    assert all(
        (math.isfinite(value) and value > 0) or value == 0
        for c in found
        for r in c.rows.values()
        for value in r.values()
    )
    assert all(len(summary.cells(c)) == len(summary.HEADINGS) for c in found)


def test_what_needs_an_absent_compiler_is_kept(scripts):
    bench = scripts("all")
    todo, kept = bench.planned(bench.RUNS, {"gpu"})
    assert [str(run) for run in todo if run.script in ("optimizer", "scaling")] == [
        "optimizer.py --only cpu",
        "scaling.py",
    ]
    assert len(kept) == 4 and all("gpu-target" in line for line in kept)
    everything, kept = bench.planned(bench.RUNS, set())
    assert list(everything) == list(bench.RUNS) and kept == []
    assert all((FOLDER / f"{run.script}.py").exists() for run in bench.RUNS)


def test_one_that_fails_does_not_stop_the_others(scripts, tmp_path):
    bench = scripts("all")
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    (tmp_path / "good.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    console = bench.Console(quiet=True)
    failed = bench.run_all([bench.Run("bad"), bench.Run("good", ("x",))], console, tmp_path)
    assert failed == ["bad.py: exit status 3; stored rows kept"]
    assert (tmp_path / "ran").exists()
