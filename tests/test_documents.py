"""Consistency of the documentation: code excerpts, list of packages, index, README's picture."""

import ast
import re
import textwrap
from pathlib import Path

import pytest

from gpipe_hpc.config import compose_config
from gpipe_hpc.draw import draw

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
ARCHITECTURE = (DOCS / "explanation" / "architecture.md").read_text("utf-8")
EXCERPTS = re.findall(r"^```python\n# (\S+): (\S+)\n(.*?)^```", ARCHITECTURE, re.S | re.M)


def source_of(path, name):
    """Return the lines of a function or method in a file, without indentation."""
    text = (ROOT / path).read_text("utf-8")
    body = ast.parse(text).body
    for part in name.split("."):
        (node,) = [each for each in body if getattr(each, "name", None) == part]
        body = node.body
    return [line.strip() for line in (ast.get_source_segment(text, node) or "").splitlines()]


@pytest.mark.parametrize(("path", "name", "excerpt"), EXCERPTS, ids=lambda text: text[:50])
def test_an_excerpt_is_in_the_code(path, name, excerpt):
    """The code contains the excerpt's lines in this order; `...` stands for omitted lines."""
    lines = iter(source_of(path, name))
    for line in textwrap.dedent(excerpt).splitlines():
        if line.strip() != "...":
            assert line.strip() in lines, f"{name} has no {line.strip()!r} there"


def test_the_path_of_a_micro_batch_has_its_excerpts():
    assert len(EXCERPTS) == 8
    with pytest.raises(AssertionError, match="has no"):
        test_an_excerpt_is_in_the_code("gpipe_hpc/pipeline.py", "Pipeline.step", "no such line\n")


def test_the_picture_has_every_room():
    picture = re.findall(r"^```text\n(.*?)^```", ARCHITECTURE, re.S | re.M)[0]
    package = ROOT / "gpipe_hpc"
    rooms = {p.stem for p in package.glob("*.py") if not p.stem.startswith("_")}
    rooms |= {path.parent.name for path in package.glob("*/__init__.py")}
    *lines, last = picture.splitlines()
    shown = {word for line in [*lines, f"{last}  "] for word in line.partition("   ")[0].split()}
    assert rooms - shown == set()


def test_the_index_links_every_page():
    targets = re.findall(r"\]\(([^)#]+)", (DOCS / "index.md").read_text("utf-8"))
    linked = {(DOCS / target).resolve() for target in targets}
    assert {page for page in DOCS.rglob("*.md") if page.name != "index.md"} - linked == set()


def test_the_picture_of_the_readme_is_what_its_command_draws():
    readme = (ROOT / "README.md").read_text("utf-8")
    (name,) = re.findall(r"!\[[^\]]*\]\((docs/\w+\.svg)\)", readme)
    (words,) = re.findall(r"^python -m gpipe_hpc\.draw (.*)$", readme, re.M)
    picture = draw(compose_config([*words.split(), "draw.format=svg", "draw.width=900"]))
    assert (ROOT / name).read_text("utf-8") == picture
