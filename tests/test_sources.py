import sysconfig
from pathlib import Path

import pytest

import shardkit.inspect
from shardkit.sources import Frame, short_location, user_frame

USER = Frame("/home/user/model.py", 12)
OUTER = Frame("/home/user/train.py", 3)
FLAX = Frame("/env/lib/python3.11/site-packages/flax/linen.py", 99)
JAX = Frame("/env/lib/python3.11/site-packages/jax/_src/lax.py", 7)
OWN = Frame(str(Path(shardkit.inspect.__file__).parents[1] / "spatial" / "conv.py"), 5)
PYTHON = Frame(sysconfig.get_paths()["stdlib"] + "/functools.py", 1)


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        ([USER, OUTER], USER),
        ([JAX, OWN, FLAX, PYTHON, USER, OUTER], USER),
        ([JAX, OWN, FLAX], FLAX),
        ([OWN, JAX], OWN),
        ([Frame("", 0), Frame("<frozen runpy>", 1), OUTER], OUTER),
        ([], None),
    ],
)
def test_the_users_line_is_preferred(stack, expected):
    assert user_frame(stack) == expected


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (USER, "model.py:12"),
        (Frame("C:\\work\\model.py", 4), "model.py:4"),
        (Frame("/tmp/ipykernel_4711/1638745621.py", 4), "cell:4"),
        (None, ""),
        (Frame("", 0), ""),
    ],
)
def test_short_location(frame, text):
    assert short_location(frame) == text
