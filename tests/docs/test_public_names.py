"""Every public name has an example, stands in the reference, and is what a page says it is."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pages import ROOT, pages, python_blocks, read, references

import shardkit as sk
import shardkit.hosts
import shardkit.launch
import shardkit.testing
from shardkit import plans, spatial

ROOMS = {
    "shardkit.spatial": spatial,
    "shardkit.plans": plans,
    "shardkit.testing": shardkit.testing,
    "shardkit.launch": shardkit.launch,
    "shardkit.hosts": shardkit.hosts,
}


def public():
    """Public objects by the name that is written for them: "sk.Shard", "sk.plans.unet", "shardkit.hosts.watch"."""
    found = {f"sk.{name}": getattr(sk, name) for name in sk.__all__}
    found = {name: value for name, value in found.items() if not inspect.ismodule(value)}
    known = {id(value) for value in found.values()}
    for room, module in ROOMS.items():
        for name in module.__all__:
            value = getattr(module, name)
            if id(value) not in known:
                short = room.replace("shardkit.", "sk.") if room in ("shardkit.spatial", "shardkit.plans") else room
                found[f"{short}.{name}"] = value
    return found


PUBLIC = public()


@cache
def code():
    """All names and attributes in the blocks that run, and in the examples of docstrings that use others."""
    found = set()
    for page in pages():
        for block in python_blocks(page):
            for node in ast.walk(ast.parse(block.text)):
                if isinstance(node, ast.Attribute):
                    found.add(node.attr)
                elif isinstance(node, ast.Name):
                    found.add(node.id)
    return found


def test_finds_the_names():
    assert {"sk.ring_conv", "sk.Shard", "sk.plans.unet", "sk.spatial.region", "shardkit.hosts.watch"} <= set(PUBLIC)
    assert len(PUBLIC) > 130


@pytest.mark.parametrize("name", PUBLIC)
def test_has_an_example(name):
    text = inspect.getdoc(PUBLIC[name]) or ""
    assert text, "no docstring"
    assert re.search(r"(?m)^(Example:\n|>>> )", text) or name.rpartition(".")[2] in code()


@pytest.mark.parametrize("name", PUBLIC)
def test_stands_in_the_reference(name):
    page, path = references()[name]
    module, _, attribute = path.rpartition(".")
    assert getattr(importlib.import_module(module), attribute) is PUBLIC[name], page


def test_the_reference_has_each_object_once():
    paths = [path for page in pages() for path in re.findall(r"(?m)^::: (\S+)$", read(page))]
    assert sorted(paths) == sorted(set(paths))
    assert len(paths) == len(references())


def mentioned(page):
    """Names such as sk.reshard or shardkit.hosts.watch in the text of a page."""
    prose = re.sub(r"(?m)^::: .*$", "", read(page))
    return sorted(set(re.findall(r"(?<![\w/.])((?:sk|shardkit)(?:\.[A-Za-z_]\w*)+)(?![\w*])", prose)))


def resolve(name):
    """The object of a dotted name; a room that isn't loaded yet is."""
    value: object = sk
    path = "shardkit"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        value = getattr(value, part) if hasattr(value, part) else importlib.import_module(path)
    return value


@pytest.mark.parametrize("page", pages())
def test_names_in_the_text_are_there(page):
    for name in mentioned(page):
        try:
            resolve(name)
        except ImportError as error:
            raise AssertionError(f"{page} speaks of {name}") from error


@pytest.mark.parametrize("page", pages())
def test_arguments_in_the_text_are_there(page):
    """Calls in prose such as ``sk.value_and_grad(..., microbatches=n)`` name arguments that exist."""
    for name, inside in re.findall(r"`(sk(?:\.\w+)+)\(([^`]*?)\)`", read(page)):
        value = resolve(name)
        if not callable(value):
            continue
        try:
            parameters = inspect.signature(value).parameters
        except (TypeError, ValueError):  # of some exceptions
            continue
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            continue
        outer = re.sub(r"\([^()]*\)|\{[^{}]*\}|\[[^\[\]]*\]", "", inside)
        for keyword in re.findall(r"(?:^|, *)(\w+)=", outer):
            assert keyword in parameters, f"{page}: {name}({keyword}=)"


def test_files_of_docs_are_in_the_navigation():
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in pages():
        assert page == "README.md" or page.removeprefix("docs/") in listed, page
