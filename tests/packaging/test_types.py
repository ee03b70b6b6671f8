"""Types as a user's checker sees them: every public name has one, none is private by accident."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYRIGHT = shutil.which("pyright", path=str(Path(sys.executable).parent))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYRIGHT is None, reason="pyright is in the extra 'dev'"),
]

USER = """
import jax, shardkit as sk
from shardkit import Layout, ring_conv, parallelize, restore, plans

def halved(x: sk.Padded, mesh: jax.sharding.Mesh) -> jax.Array:
    region = sk.spatial.region(lambda x: x / 2, spatial_axes={"sp": 1}, mesh=mesh)
    layout: Layout = Layout(mesh, {"sp": sk.Shard(1)})
    sk.plans.unet, ring_conv, parallelize, restore, plans, layout
    reveal_type(x.value)
    return region(x.value)

sk.ring_convolution
"""


def pyright(*arguments, cwd):
    """Its report, in an environment where ``shardkit`` stands as an installed package does."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path}
    done = subprocess.run([PYRIGHT, "--outputjson", *arguments], cwd=cwd, env=env, capture_output=True, text=True)
    return json.loads(done.stdout)


def test_every_public_name_has_a_type(tmp_path):
    report = pyright("--verifytypes", "shardkit", "--ignoreexternal", cwd=tmp_path)
    symbols = report["typeCompleteness"]["symbols"]
    assert len(symbols) > 1000
    unknown = {s["name"] for s in symbols if s["isExported"] and not s["isTypeKnown"] and not s["isTypeAmbiguous"]}
    # Within rooms: JAX's decorators give no type, orbax's base class has none.
    unknown -= {"shardkit.attention.region.attend", "shardkit.spatial.pooling.global_pool.extreme"}
    unknown -= {"shardkit.checkpoint.writing.Handler"}
    assert sorted(unknown) == []


def test_a_program_that_uses_them(tmp_path):
    (tmp_path / "user.py").write_text(USER)
    found = pyright("user.py", cwd=tmp_path)["generalDiagnostics"]
    said = [(d["severity"], d["message"]) for d in found if d.get("rule") != "reportUnusedExpression"]
    assert [text for severity, text in said if severity == "information"] == ['Type of "x.value" is "Array"']
    errors = [text for severity, text in said if severity == "error"]
    assert len(errors) == 1, errors
    assert '"ring_convolution" is not a known attribute' in errors[0]
