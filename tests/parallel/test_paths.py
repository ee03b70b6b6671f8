"""Path patterns: strings only, no model."""

from __future__ import annotations

import re

import pytest

from shardkit.parallel.paths import join_path, matches, nearest, takes_everything


@pytest.mark.parametrize(
    ("pattern", "named", "others"),
    [
        ("conv", ["conv"], ["", "conv1", "a/conv", "conv/a"]),
        ("enc/0/conv", ["enc/0/conv"], ["enc/1/conv", "enc/0/conv/x", "x/enc/0/conv"]),
        # * is one level, or a part of one.
        ("*", ["conv", "0"], ["", "enc/conv"]),
        ("enc/*/conv", ["enc/0/conv", "enc/down/conv"], ["enc/conv", "enc/0/1/conv", "dec/0/conv"]),
        ("down*", ["down", "down1", "down_12"], ["updown", "down/1"]),
        ("*/conv*2", ["enc/conv2", "enc/conv_x2"], ["enc/conv", "conv2", "a/b/conv2"]),
        # ** is any number of levels, none included.
        ("**", ["", "conv", "enc/0/conv"], []),
        ("enc/**", ["enc", "enc/conv", "enc/0/conv"], ["", "encoder", "encoder/conv", "x/enc"]),
        ("**/conv", ["conv", "enc/conv", "enc/0/conv"], ["", "myconv", "enc/myconv", "conv/0"]),
        ("enc/**/conv", ["enc/conv", "enc/0/conv", "enc/0/1/conv"], ["conv", "dec/conv", "enc"]),
        ("**/down*/*", ["down1/conv", "a/b/down/norm"], ["down1", "down1/a/b"]),
        # The model itself.
        ("", [""], ["conv", "a/b"]),
        # Letters that mean something to a regex mean themselves.
        ("a.b", ["a.b"], ["axb"]),
        ("a+(b)", ["a+(b)"], ["aab"]),
        # A regex names whole paths.
        (
            re.compile(r"(enc|dec)/\d+/conv"),
            ["enc/0/conv", "dec/12/conv"],
            ["enc/x/conv", "enc/0/conv/b", "mid/0/conv"],
        ),
        (re.compile("conv"), ["conv"], ["conv1", "a/conv"]),
        (re.compile("(?i)CONV"), ["conv"], ["norm"]),
    ],
)
def test_what_a_pattern_names(pattern, named, others):
    assert [p for p in [*named, *others] if matches(pattern, p)] == named


def test_only_a_last_double_star_takes_whatever_it_can():
    assert takes_everything("**")
    assert takes_everything("enc/**")
    assert not any(takes_everything(p) for p in ("*", "**/conv", "enc/*", "", "enc", re.compile(".*"), "a**"))


@pytest.mark.parametrize("bad", [3, None, b"conv", ("enc", "conv")])
def test_a_pattern_is_a_string_or_a_regex(bad):
    with pytest.raises(TypeError, match=r"path patterns .strings. or compiled regexes, got"):
        matches(bad, "conv")


def test_nearest_paths_come_first():
    paths = ["", "enc/0/conv", "enc/1/conv", "dec/0/conv", "head", "enc/0/norm"]
    assert nearest("enc/0/cnov", paths)[0] == "enc/0/conv"
    assert nearest("hed", paths, count=1) == ["head"]
    assert nearest(re.compile("head2"), paths, count=1) == ["head"]
    assert "" not in nearest("x", paths)
    assert len(nearest("enc", [f"enc{i}" for i in range(20)])) == 5
    assert nearest("anything", []) == nearest("anything", [""]) == []


def test_paths_are_joined_with_slashes():
    assert join_path(("enc", 0, "conv")) == "enc/0/conv"
    assert join_path(()) == ""
