"""The drawing as text, in colour, and as a picture."""

import base64
import html.parser
import io
import re
import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import pytest
import rich.console

import shardkit as sk
from shardkit.inspect.drawing import show
from shardkit.inspect.drawing.blocks import even_cut
from shardkit.inspect.drawing.plane import Plane, choose_plane, elided

S, SVG = sk.Shard, "{http://www.w3.org/2000/svg}"


def mesh(**axes):
    return jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))


def picture(drawing):
    return ElementTree.fromstring(drawing.svg)


def groups(drawing, kind):
    return [g for g in picture(drawing).iter(f"{SVG}g") if g.get("class") == kind]


def titles(drawing, kind):
    return [g.findtext(f"{SVG}title") or "" for g in groups(drawing, kind)]


DRAWN = {
    "rank 0": (show({}, mesh(dp=2, sp=4), shape=()), 1),
    "rank 1": (show({"sp": S(0)}, mesh(dp=2, sp=4), shape=(8,)), 4),
    "rank 2": (show({"dp": S(0), "sp": S(1)}, mesh(dp=2, sp=4), shape=(8, 8)), 8),
    "rank 3": (show([S(0), S(1), S(2)], mesh(a=2, b=3, c=2), shape=(6, 6, 6)), 12),
    "rank 5": (show([S(0), S(1), S(2), S(4)], mesh(a=2, b=2, c=2, d=2), shape=(2, 2, 2, 2, 2)), 16),
    "whole": (show({}, mesh(dp=2), shape=(2, 3, 4)), 1),
    "empty": (show({"dp": S(0)}, mesh(dp=2), shape=(0, 4)), 2),
    "schematic": (show({"dp": S(0)}, mesh(dp=2)), 2),
    "partial": (show({"dp": S(0), "mp": sk.Partial()}, mesh(dp=2, mp=4), shape=(8, 8)), 2),
    "64 devices": (show([S(0), S(1)], mesh(a=8, b=8), shape=(64, 64)), 64),
    "256 devices": (show([S(0), S(1)], mesh(a=16, b=16), shape=(64, 64)), 256),
    "a long strip": (show([S(0)], mesh(a=512), shape=(512,)), 63),
    "halo": (show([S(0), S(1)], mesh(a=2, b=2), shape=(8, 8), halo={0: (1, 1), 1: (1, 1)}), 4),
}


@pytest.mark.parametrize(("drawing", "cells"), DRAWN.values(), ids=DRAWN)
def test_a_cell_a_block(drawing, cells):
    assert len(groups(drawing, "cell")) == cells
    assert len(set(titles(drawing, "cell"))) == cells


@pytest.mark.parametrize("drawing", [d for d, _ in DRAWN.values()], ids=DRAWN)
def test_all_is_inside_the_picture(drawing):
    root = picture(drawing)
    width, height = float(root.get("width")), float(root.get("height"))  # type: ignore[arg-type]

    def visit(element, x, y):
        shift = re.match(r"translate\((\S+) (\S+)\)", element.get("transform", ""))
        if shift:
            x, y = x + float(shift[1]), y + float(shift[2])
        if element.tag == f"{SVG}rect":
            left, top = x + float(element.get("x")), y + float(element.get("y"))
            assert left >= -0.1 and left + float(element.get("width")) <= width + 0.1
            assert top >= -0.1 and top + float(element.get("height")) <= height + 0.1
        for child in element:
            visit(child, x, y)

    visit(root, 0, 0)


@pytest.mark.parametrize("drawing", [d for d, _ in DRAWN.values()], ids=DRAWN)
def test_html_is_well_formed_and_needs_nothing_from_outside(drawing):
    class Balanced(html.parser.HTMLParser):
        def __init__(self):
            super().__init__()
            self.open = []

        def handle_starttag(self, tag, attrs):
            given = dict(attrs)
            source = given.pop("src", None)
            assert not {"href", "id", "onclick"} & {*given}
            # Sanitizers take <svg> out of HTML; images that carry their data stay.
            assert (tag == "img") == (source is not None) and tag != "svg"
            if source is None:
                self.open.append(tag)
                return
            kind, _, data = source.partition(",")
            assert kind == "data:image/svg+xml;base64"
            picture = ElementTree.fromstring(base64.b64decode(data))
            assert picture.tag == f"{SVG}svg" and picture.get("color") and given["alt"]
            assert not {"src", "href", "id", "onclick"} & {name for x in picture.iter() for name in x.attrib}

        def handle_endtag(self, tag):
            assert self.open.pop() == tag

    parser = Balanced()
    parser.feed(drawing._repr_html_())
    assert parser.open == [] and "<script" not in drawing._repr_html_()


@pytest.mark.parametrize("drawing", [d for d, _ in DRAWN.values()], ids=DRAWN)
def test_lines_of_a_grid_are_equally_long(drawing):
    lines = str(drawing).splitlines()
    drawn = [len(line) for line in lines if line.endswith(("│", "┐", "┤", "┘"))]
    assert drawn and max(drawn) <= 100
    ends = [i for i, line in enumerate(lines) if line.endswith("┘")]
    start = 0
    for end in ends:
        assert len({len(x) for x in lines[start : end + 1] if x.endswith(("│", "┐", "┤", "┘"))}) == 1
        start = end + 1


def test_names_are_escaped():
    drawing = show({"<b>&": S(0)}, jax.sharding.AbstractMesh((2,), ("<b>&",)), shape=(4,))
    assert "<b>&" not in drawing._repr_html_().replace("<b>shape", "")
    assert "&lt;b&gt;&amp;=0" in drawing.svg
    assert len(groups(drawing, "cell")) == 2


def test_text_of_a_grid(mesh_for):
    assert str(show({"dp": S(0), "sp": S(2)}, mesh_for({"dp": 2, "sp": 4}), shape=(4, 3, 16))) == (
        """\
shape [4, 3, 16] on mesh dp=2 sp=4 (cpu)
  dim 0: 0:4, cut over dp into 2 parts of 2 (rows)
  dim 1: 0:3, whole everywhere
  dim 2: 0:16, cut over sp into 4 parts of 4 (columns)
  in the cells: device ids

rows: dim 0, columns: dim 2
       0:4     4:8     8:12   12:16
    ┌───────┬───────┬───────┬───────┐
0:2 │   0   │   1   │   2   │   3   │
    ├───────┼───────┼───────┼───────┤
2:4 │   4   │   5   │   6   │   7   │
    └───────┴───────┴───────┴───────┘"""
    )


def test_further_dims_are_small_multiples():
    drawn, _ = DRAWN["rank 3"]
    assert "\ndim 0: 0:3\n" in str(drawn) and "\ndim 0: 3:6\n" in str(drawn)


def test_big_meshes_are_cut_short_and_say_so():
    drawing = show([S(0), S(1)], mesh(a=64, b=64), shape=(64, 64))
    assert len(str(drawing).splitlines()) < 60
    assert re.search(r"… \d+ of 64 columns are left out", str(drawing))
    assert "… 49 of 64 rows are left out" in str(drawing)
    assert len(drawing.to_dict()["devices"]) == 4096
    assert len(drawing.svg) < 1_500_000
    assert len(groups(drawing, "cell")) <= 1024
    many = show([S(0), S(1), S(2)], mesh(a=32, b=2, c=2), shape=(32, 2, 2))
    assert "… 25 more grids …" in str(many) and "… 17 more …" in many.svg


def test_narrow_text():
    drawn, _ = DRAWN["rank 2"]
    assert max(map(len, drawn.to_text(40).splitlines()[5:])) <= 40


def test_padding_is_hatched():
    x = sk.shard_tensor(jnp.zeros((5, 4)), {"sp": S(0)}, sk.make_mesh({"sp": 4}), uneven="pad")
    hatched = [cell for cell in groups(show(x), "cell") if cell.find(f"{SVG}path") is not None]
    assert len(hatched) == 2
    assert "holds only padding" in titles(show(x), "cell")[3]


def test_contributions_are_stacked():
    drawn, _ = DRAWN["partial"]
    assert [len(cell.findall(f"{SVG}rect")) for cell in groups(drawn, "cell")] == [4, 4]
    assert "sum over mp of 4 contributions" in titles(drawn, "cell")[0]
    assert "contributions that are still to be reduced" in drawn._repr_html_()


def test_halos_are_margins_that_name_their_source():
    drawn, _ = DRAWN["halo"]
    assert len(groups(drawn, "halo")) == 4 * 3
    assert "dim 1 4:5 from a=0 b=1" in titles(drawn, "halo")
    assert "dim 0 4:5 x dim 1 4:5 from a=1 b=1" in titles(drawn, "halo")
    assert "what each device receives" in drawn._repr_html_()


def test_rich():
    drawn, _ = DRAWN["rank 2"]
    file = io.StringIO()
    console = rich.console.Console(file=file, width=100, force_terminal=True, color_system="truecolor")
    console.print(drawn)
    assert "\x1b[30;48;2;" in file.getvalue()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue())
    assert [x.rstrip() for x in plain.splitlines()] == str(drawn).splitlines()


def test_the_repr_is_the_drawing():
    drawn, _ = DRAWN["rank 1"]
    assert repr(drawn) == str(drawn) == drawn.to_text()


@pytest.mark.parametrize(
    ("parts", "first", "plane"),
    [
        ((), (), Plane(None, None)),
        ((4,), (), Plane(None, 0)),
        ((1, 1), (), Plane(0, 1)),
        ((1, 1, 1), (), Plane(None, None)),
        ((1, 4, 1), (), Plane(None, 1)),
        ((2, 1, 4, 1), (), Plane(0, 2)),
        ((2, 2, 2, 2), (), Plane(2, 3, (0, 1))),
        ((2, 2, 2, 2), (0,), Plane(0, 3, (1, 2))),
    ],
)
def test_which_dims_make_the_plane(parts, first, plane):
    assert choose_plane([even_cut(4, 4, p) for p in parts], first) == plane


def test_elided_keeps_both_ends():
    for count in range(1, 20):
        for limit in range(3, 20):
            shown = elided(count, limit)
            assert len(shown) <= limit and shown[0] == 0 and shown[-1] == count - 1
            assert shown.count(None) == (count > limit)
