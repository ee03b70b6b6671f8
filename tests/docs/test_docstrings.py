"""Docstrings of public names say what each argument is, what comes back, and can be read on their own."""

from __future__ import annotations

import ast
import builtins
import doctest
import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pages import references
from test_public_names import PUBLIC

# Nobody builds these: what makes them is told of, in place of their constructors' arguments.
MADE_BY = {
    "sk.DataLoader": "sk.shard_dataloader",
    "sk.Drawing": "sk.show",
    "sk.Partitioned": "sk.partition",
    "sk.Program": "sk.Partitioned.program",
    "sk.plans.ReadyPlan": "sk.plans.transformer",
    "sk.spatial.Region": "sk.spatial.region",
    "shardkit.hosts.Watch": "shardkit.hosts.watch",
    "shardkit.launch.ProcessFailedError": "Result.check",
    "shardkit.launch.RunTimeoutError": "shardkit.launch.run",
}
# JAX calls them, not people.
PROTOCOLS = {"tree_flatten", "tree_flatten_with_keys", "tree_unflatten"}
# How the middle of an explanation begins: "The same for ..." says nothing in help().
FRAGMENT = re.compile(r"(?:The same|Same|As|As above|And|Also|Likewise|Ditto|See)\b")


def described():
    """Public names, and the classes that the reference shows beside them."""
    known = {id(value) for value in PUBLIC.values()}
    found = dict(PUBLIC)
    for _page, path in references().values():
        module, _, name = path.rpartition(".")
        value = getattr(importlib.import_module(module), name)
        if id(value) not in known:
            found[path] = value
    return found


def members(name, owner):
    """Methods and properties of a public class that this library wrote, with the class's name before theirs."""
    for member in dir(owner):
        home = next((base for base in owner.__mro__ if member in vars(base)), None)
        if home is None or not home.__module__.startswith("shardkit"):
            continue
        value = inspect.getattr_static(owner, member)
        wanted = member == "__call__" or not (member.startswith("_") or member in PROTOCOLS)
        if wanted and (inspect.isroutine(value) or isinstance(value, property) or hasattr(value, "attrname")):
            yield f"{name}.{member}", getattr(value, "__func__", value)


DESCRIBED = described()
MEMBERS = {name: value for owner, of in DESCRIBED.items() if inspect.isclass(of) for name, value in members(owner, of)}
ALL = {**DESCRIBED, **MEMBERS}
CALLABLE = {name: value for name, value in ALL.items() if callable(value)}


def section(text, *titles):
    """The indented lines below one of the titles."""
    bodies = re.findall(rf"(?m)^(?:{'|'.join(titles)}):\n((?:(?:[ ]+.*)?(?:\n|\Z))+)", text)
    return "".join(bodies)


def entries(text, *titles):
    """The names that a section explains: "x, y: both", also where they go on on a second line."""
    found = set()
    for names in re.findall(r"(?m)^  ((?:\*{0,2}\w+,\s+)*\*{0,2}\w+):", section(text, *titles)):
        found |= {name.strip("* \n") for name in names.split(",")}
    return found


def parameters(value):
    """The names of its arguments; none where a class has only those of Exception."""
    if inspect.isclass(value) and issubclass(value, Exception) and "__init__" not in vars(value):
        return []
    names = list(inspect.signature(value).parameters)
    return names[1:] if names[:1] == ["self"] else names


def gives_back(value):
    """Whether a call has a result."""
    return not inspect.isclass(value) and inspect.signature(value).return_annotation not in (None, "None")


def unexplained(source):
    """Names that a piece of code uses and neither imports nor makes."""
    made, used = set(dir(builtins)), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else made).add(node.id)
        elif isinstance(node, ast.alias):
            made.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg):
            made.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler) and node.name:
            made.add(node.name)
    return used - made


def test_finds_the_names():
    assert {"sk.ring_conv", "sk.Checkpointer.resume", "sk.PartialArray.dtype", "sk.spatial.Region.__call__"} <= set(ALL)
    assert {"sk.Program.steps", "sk.FullyShard.label"} <= set(ALL)  # cached, inherited
    assert not any(name.rpartition(".")[2].startswith("_") for name in ALL if not name.endswith("__call__"))
    assert set(MADE_BY) <= set(DESCRIBED)


def test_finds_names_from_nowhere():
    assert unexplained("import a.b as c, d.e\nx = [c(i) for i in d]\ndef f(y): return y + x") == set()
    assert unexplained("try:\n  f(len(x))\nexcept E as e: e") == {"f", "x", "E"}


def test_reads_sections():
    text = "Args:\n  x, y,\n    z: all\n      other: no\n  **kwargs: more\n\nReturns:\n  w: it\n"
    assert entries(text, "Args") == {"x", "y", "z", "kwargs"}
    assert entries(text, "Args", "Returns") == {"x", "y", "z", "kwargs", "w"}


@pytest.mark.parametrize("name", ALL)
def test_reads_on_its_own(name):
    text = ALL[name].__doc__
    assert text, "no docstring of its own"
    assert not FRAGMENT.match(text), text.splitlines()[0]


@pytest.mark.parametrize("name", ALL)
def test_example_can_be_copied(name):
    """What it uses it imports: in help() nothing is at hand."""
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(ALL[name]) or "")
    assert not unexplained("".join(example.source for example in examples))


@pytest.mark.parametrize("name", CALLABLE)
def test_explains_every_argument(name):
    text = inspect.getdoc(CALLABLE[name]) or ""
    if name in MADE_BY:
        assert f"``{MADE_BY[name]}" in text, f"doesn't say that {MADE_BY[name]} makes it"
        return
    missing = [each for each in parameters(CALLABLE[name]) if each not in entries(text, "Args", "Attributes")]
    assert not missing


@pytest.mark.parametrize("name", [name for name, value in CALLABLE.items() if not inspect.isclass(value)])
def test_explains_no_argument_that_is_not_there(name):
    text = inspect.getdoc(CALLABLE[name]) or ""
    assert entries(text, "Args") <= set(parameters(CALLABLE[name]))


@pytest.mark.parametrize("name", [name for name, value in CALLABLE.items() if gives_back(value)])
def test_says_what_comes_back(name):
    """Of a method without arguments the first line says it: "Bytes that one device receives."."""
    if name in MEMBERS and not parameters(CALLABLE[name]):
        return
    assert section(inspect.getdoc(CALLABLE[name]) or "", "Returns", "Yields")
