"""``python -m shardkit explain``: the page, its forms and exit statuses, and what it says of what it can't explain."""

import json

import pytest

from shardkit.cli.explain import read_argument, read_mesh
from shardkit.cli.main import main

JOB = """
import jax, jax.numpy as jnp, shardkit as sk

def job(mesh):
    def step(w, x):
        return jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    def array(shape, placements):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sk.to_named_sharding(placements, mesh))

    return step, array((64, 64), {}), array((32, 64), {"dp": sk.Shard(0)})

def plain(x):
    return (x @ x.T).sum()

def gathers(x, kernel):  # as XLA does for a convolution in groups
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=2)

def wrong(mesh):
    return 7

@jax.jit
def jitted(x):
    return x + 1

def broken(mesh):
    raise TypeError("a builder's own mistake")
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "some_job.py"
    path.write_text(JOB)
    return path


def test_a_job_is_explained(file, capsys):
    assert main(["explain", f"{file}:job", "--mesh", "dp=2,sp=4", "--strict"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("step on 8 x cpu, mesh dp=2, sp=4")
    assert "gradient reduction  all_reduce  dp" in out


def test_a_function_is_explained_for_types(file, capsys, tmp_path):
    page = tmp_path / "page.html"
    words = [
        "explain",
        f"{file}:plain",
        "--mesh",
        "dp=8",
        "--arg",
        "float32[8,64]@[dp,-]",
        "--json",
        "--html",
        str(page),
    ]
    assert main(words) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["name"], data["mesh"], data["inputs"][0]["where"]) == ("plain", {"dp": 8}, "[dp, -]")
    assert "<table>" in page.read_text()


def test_strict_fails_where_nobody_asked_for_a_collective(file, capsys):
    types = ["--arg", "float32[8,8,64,8]@[-,-,dp,-]", "--arg", "float32[3,3,4,16]"]
    words = ["explain", f"{file}:gathers", "--mesh", "dp=8", *types]
    assert main(words) == 0
    assert "unexplained" in capsys.readouterr().out
    assert main([*words, "--strict"]) == 1


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("some_job.py", (), "names no function; write module:function or path/to/file.py:function"),
        ("some_job.py:nothing", (), "has no 'nothing'; it has broken, gathers, jitted, job, plain, wrong"),
        ("no_file.py:job", (), "there is no file"),
        ("some_job.py:wrong", (), "returned int, but what it returns must be what to explain and its arguments"),
        ("some_job.py:gathers", (), "takes x, kernel, but the function named is called with the mesh and returns what"),
        (
            "some_job.py:plain",
            (),
            "doesn't take a mesh, but the function named is called with the mesh and returns what",
        ),
        (
            "some_job.py:jitted",
            (),
            "to explain the function itself, give types with --arg. It says: Error interpreting",
        ),
        ("some_job.py:broken", (), "shardkit explain: a builder's own mistake\n"),
        ("some_job.py:job", ("--target", "tpu:v9:2x2"), "'v9' is unknown; known are tpu:v2:AxB"),
        ("some_job.py:job", ("--mesh", "dp=1024"), "needs 1024 devices, but there are 8"),
    ],
)
def test_what_cannot_be_explained(file, capsys, name, words, message):
    assert main(["explain", str(file.parent / name), "--mesh", "dp=2", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_module_that_does_not_exist(capsys):
    assert main(["explain", "surely.no_module:job", "--mesh", "dp=2"]) == 2
    assert "No module named 'surely'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["m:f", "--mesh", "dp"], "'dp' is no mesh such as dp=2,sp=4"),
        (["m:f", "--mesh", "dp=x"], "'dp=x' is no mesh such as dp=2,sp=4"),
        (["m:f"], "--mesh"),
        (["m:f", "--mesh", "dp=2", "--arg", "8x8"], "'8x8' is no type such as 'float32[8,64]@[dp,-]'"),
        (["m:f", "--mesh", "dp=2", "--arg", "f32[8]@[dp,sp]"], "has 2 placements for 1 dims"),
    ],
)
def test_wrong_usage(capsys, words, message):
    with pytest.raises(SystemExit) as stop:
        main(["explain", *words])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_words_are_read():
    assert read_mesh("dp=2, sp=-1") == {"dp": 2, "sp": -1}
    assert read_argument("int32[]") == ("int32", (), ())
    assert read_argument("bfloat16[8,4,2]@[dp*sp,-,tp]") == ("bfloat16", (8, 4, 2), (("dp", "sp"), (), ("tp",)))
