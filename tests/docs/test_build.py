"""The site builds without a warning: links, anchors, navigation and the reference."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pages import ROOT, pages, references

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings_handlers.python")
pytest.importorskip("material")


def build(folder, *options, cwd=ROOT):
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder, *options]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=600, env=environment)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    return build(folder), folder


@pytest.mark.not_smoke
def test_builds_without_a_warning(site):
    done, folder = site
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    for page in pages():
        if page != "README.md":
            assert (folder / page.removeprefix("docs/")).with_suffix(".html").is_file()
    assert not list(folder.rglob("*.py"))


@pytest.mark.not_smoke
def test_the_reference_shows_each_name_with_its_docstring(site):
    _, folder = site
    for name, (page, path) in references().items():
        html = (folder / page.removeprefix("docs/")).with_suffix(".html").read_text(encoding="utf-8")
        entry = re.search(rf'<h[34] id="{re.escape(path)}".*?(?=<h[234] |\Z)', html, re.DOTALL)
        assert entry, f"{name} on {page}"
        assert "doc-contents" in entry[0], name


@pytest.mark.not_smoke
def test_examples_in_docstrings_are_shown_as_code(site):
    _, folder = site
    html = (folder / "rooms" / "spatial.html").read_text(encoding="utf-8")
    assert "Examples:" in html
    assert "&gt;&gt;&gt; </span><span" in html
    assert "window_strides, padding, lhs_dilation, rhs_dilation" in html  # names that go on on another line


@pytest.mark.not_smoke
def test_a_dead_link_fails(tmp_path):
    (tmp_path / "docs").mkdir()
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    before, after = text.index("\nnav:"), text.index("\n# Whatever doesn't resolve")
    (tmp_path / "mkdocs.yml").write_text(text[:before] + text[after:])
    (tmp_path / "docs" / "_docstrings.py").write_text((ROOT / "docs" / "_docstrings.py").read_text())
    index = tmp_path / "docs" / "index.md"
    for wrong in ("[there](nowhere.md)", "[there](#nowhere)"):
        index.write_text(f"# A page\n\n{wrong}\n")
        assert build(tmp_path / "site", cwd=tmp_path).returncode == 1
    index.write_text("# A page\n\n[there](#a-page)\n")
    assert build(tmp_path / "site", cwd=tmp_path).returncode == 0
