"""The table that method="auto" reads: its file, what the file may say, and what is made of it."""

from __future__ import annotations

import copy
import importlib
import importlib.resources
import json
import math
import sys
from pathlib import Path

import pytest

from shardkit.spatial.convolution.table import (
    PLATFORMS,
    Form,
    Row,
    parse_form,
    read_table,
    shipped_data,
    shipped_table,
)

ROOT = Path(__file__).parents[3]
FEW, MANY = {"images": 7, "form": "blocks 8"}, {"images": None, "form": "blocks 2 major"}
GOOD = {
    "least_elements": 16,
    "least_features": 2,
    "platforms": {
        "cpu": {"rows": [{"images": None, "form": "concat"}]},
        "gpu": {"rows": [{"images": None, "form": "overlap"}]},
        "tpu": {"rows": [FEW, MANY]},
    },
}


@pytest.fixture
def tune(monkeypatch):
    """benchmarks/tune.py, and nothing of it left afterwards."""
    names = ("tune", "described", "tables")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("tune")
    for name in names:
        sys.modules.pop(name, None)


# --- the file that is shipped ------------------------------------------------------------------------------


def test_the_file_is_in_the_package_and_is_well_formed():
    assert importlib.resources.files("shardkit.spatial.convolution").joinpath("forms.json").is_file()
    table = read_table(shipped_data())
    assert table == shipped_table()
    assert set(table.rows) == set(PLATFORMS)
    assert all(rows[-1].images == math.inf for rows in table.rows.values())


def test_the_file_says_what_it_was_filled_with():
    for name, entry in shipped_data()["platforms"].items():
        assert set(entry["filled"]) == set(entry["figures"]), name
        for versions in entry["filled"].values():
            assert {"date", "jax", "jaxlib"} <= set(versions)


def test_the_rows_follow_from_the_stored_figures(tune):
    stored = list(tune.stored().values())
    assert {row.target for row in stored} == {t for e in shipped_data()["platforms"].values() for t in e["figures"]}
    assert tune.fill(stored, {}) == shipped_data()
    assert tune.as_text(shipped_data()) == tune.TABLE.read_text()


# --- reading ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "images", "form"),
    [
        ("tpu", 1, Form("blocks", 8)),
        ("tpu", 7, Form("blocks", 8)),
        ("tpu", 8, Form("blocks", 2, True)),
        ("gpu", 10**6, Form("overlap")),
        ("cpu", 1, Form("concat")),
        ("METAL", 1, Form("concat")),  # nothing is known of it
    ],
)
def test_the_first_row_that_fits(platform, images, form):
    assert read_table(GOOD).form(platform, images) == form


def changed(path: str, value):
    """GOOD with one entry set, or taken out where ``value`` is ``...``."""
    data = copy.deepcopy(GOOD)
    *there, last = path.split(".")
    at = data
    for key in there:
        at = at[int(key) if key.isdigit() else key]
    if value is ...:
        del at[last]
    else:
        at[int(last) if last.isdigit() else last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("least_elements", ..., "lacks 'least_elements'"),
        ("least_features", -1, "least_features is -1; write an integer of at least 0"),
        ("least_features", True, "least_features is True"),
        ("platforms", [], r"platforms is \[\]; write an object"),
        ("platforms.tpu", ..., r"platforms has \['cpu', 'gpu'\]; write each of \('cpu', 'gpu', 'tpu'\), and no other"),
        ("platforms.tpuu", {}, "platforms has .*'tpuu'"),
        ("platforms.gpu.rows", ..., "platforms.gpu lacks 'rows'"),
        ("platforms.gpu.rows", [], r"platforms.gpu.rows is \[\]; write a list of rows"),
        ("platforms.tpu.rows.0.form", "bloks 8", r"tpu.rows\[0\].form: 'bloks 8' is no form .*'blocks N major'"),
        ("platforms.tpu.rows.0.form", "blocks 8 major", r"rows\[0\].form is blocks 8 major; the first row can't be"),
        ("platforms.tpu.rows.0.images", None, r"rows\[0\].images is None; the last row has null"),
        ("platforms.tpu.rows.1.images", 9, r"rows\[1\].images is 9; the last row has null"),
        ("platforms.tpu.rows", [FEW, FEW, MANY], r"rows\[1\].images is 7; bounds grow"),
    ],
)
def test_a_malformed_file(path, value, message):
    assert read_table(GOOD).rows["tpu"] == (Row(7, Form("blocks", 8)), Row(math.inf, Form("blocks", 2, True)))
    with pytest.raises(ValueError, match=f"^forms.json.*{message}.*tune.py --write makes the file"):
        read_table(changed(path, value))


@pytest.mark.parametrize("name", ["concat", "overlap", "blocks 2", "blocks 16 major"])
def test_names_of_forms(name):
    assert str(parse_form(name)) == name
    assert parse_form(parse_form(name)) == parse_form(name)


@pytest.mark.parametrize("name", ["auto", "blocks", "blocks 1", "blocks 8 minor", "Blocks 8", 8, None])
def test_no_name_of_a_form(name):
    with pytest.raises(ValueError, match="is no form of a convolution; write 'concat', 'overlap', 'blocks N'"):
        parse_form(name)


# --- filling ---------------------------------------------------------------------------------------------


def test_filling(tune):
    """From made-up figures: by what decides on a platform, from its first target; others that disagree are named."""

    def row(target, images, form, **figures):
        return tune.Row(target, (images, 1, 1), form, {"date": "2026-01-01"}, **figures)

    rows = [
        row("tpu:v5e:2x4", 1, "concat", mega_cycles=9.0, temporaries_mb=1.0),
        row("tpu:v5e:2x4", 1, "blocks 8", mega_cycles=3.0, temporaries_mb=9.0),
        row("tpu:v5e:2x4", 8, "blocks 2 major", mega_cycles=3.0, temporaries_mb=2.0),
        row("tpu:v5e:2x4", 8, "blocks 8", mega_cycles=3.01, temporaries_mb=3.0),
        row("tpu:v6e:2x4", 1, "concat", mega_cycles=1.0, temporaries_mb=1.0),
        row("tpu:v6e:2x4", 1, "blocks 8", reason="no"),
        row("cpu", 1, "concat", wall_ms=10.0, temporaries_mb=1.0),
        row("cpu", 1, "overlap", wall_ms=9.9, temporaries_mb=1.0),  # no better than noise
    ]
    data = tune.fill(rows, {"platforms": GOOD["platforms"]})
    found = data["platforms"]
    assert found["tpu"]["rows"] == [FEW, MANY]
    assert tune.disagreeing(rows) == {"tpu:v6e:2x4": [{"images": None, "form": "concat"}]}
    assert found["tpu"]["figures"]["tpu:v6e:2x4"]["1 x 1 x 1"]["blocks 8"] == {"reason": "no"}
    assert found["cpu"]["rows"] == [{"images": None, "form": "concat"}]
    assert found["gpu"] == GOOD["platforms"]["gpu"]  # not measured
    assert json.loads(tune.as_text(data)) == data


def test_a_target_that_is_not_known(tune, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tune.py", "--targets", "cpu,tpu:v99:2x4", "--dry"])
    with pytest.raises(SystemExit):
        tune.main()
    assert "'v99' is unknown; known are tpu:v2:AxB" in capsys.readouterr().err
