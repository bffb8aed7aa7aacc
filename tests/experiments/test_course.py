"""The pages of the course: each has its parts, fits on a page and is a notebook."""

import ast
import json
import re

import pytest

from experiments.course import charts
from experiments.course.__main__ import cells, main, pages, trouble, write_notebooks
from experiments.course.page import found, in_bytes, planned, quartiles, run, simulated, spread

PARTS = (
    "## Predict",
    "## Run",
    "in words",
    "## The answer",
    "## Change one thing",
    "## If the num",
)
PAGES = [pytest.param(path, id=path.stem) for path in pages().values()]


def test_the_pages_are_numbered_from_one():
    assert list(pages()) == list(range(1, len(pages()) + 1))


@pytest.mark.parametrize("path", PAGES)
def test_a_page_has_all_parts_in_order(path):
    text = "\n".join(cell.source for cell in cells(path) if cell.is_text)
    places = [text.index(part) for part in PARTS]
    assert places == sorted(places)
    assert text.startswith(f"# {int(path.stem[2:4])}. ")
    for word in ("busy", "core", "git"):
        assert word in trouble(path), f"nothing is said about {word}"


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_one_page(path):
    """A screen of text, and code that a student reads in a minute."""
    text = [cell.source for cell in cells(path) if cell.is_text]
    code = [cell.source for cell in cells(path) if not cell.is_text]
    assert len(" ".join(text).split()) <= 600
    assert sum(len(each.splitlines()) for each in code) <= 70


@pytest.mark.parametrize("path", PAGES)
def test_a_page_uses_the_public_face_alone(path):
    """The exercises are users' tests: they must survive a rebuild of the package."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            assert not [name.name for name in node.names if name.name.startswith("gpipe_hpc")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gpipe_hpc"):
            assert node.module == "gpipe_hpc"


def test_pages_are_written_as_notebooks(tmp_path, monkeypatch):
    pytest.importorskip("nbformat")
    monkeypatch.setattr("experiments.course.__main__.OUT", tmp_path)
    monkeypatch.setattr("experiments.course.__main__.ROOT", tmp_path)
    write_notebooks()
    written = sorted(tmp_path.glob("*.ipynb"))
    assert len(written) == len(pages())
    first = json.loads(written[0].read_text("utf-8"))
    path = pages()[1]
    assert [cell["cell_type"] for cell in first["cells"]] == [
        "markdown" if cell.is_text else "code" for cell in cells(path)
    ]
    assert "".join(first["cells"][0]["source"]).startswith("# 1. ")


def test_an_unknown_exercise_is_refused(capsys):
    assert main(["77"]) == 2
    assert "no exercise 77" in capsys.readouterr().err


def test_numbers_are_read_from_what_commands_print():
    text = "B= backward; makespan 28.5, bubble 15.8% (idle)\nlive activations (x), peaks 4 3"
    assert simulated(text) == (28.5, 0.158, (4.0, 3.0))
    with pytest.raises(ValueError, match="no makespan"):
        simulated("nothing")
    plan = "rank  stages  activations  sum\n   0  0           67.4 MB  87 MB\n\nmore"
    assert planned(plan) == [{"rank": 0, "stages": 0, "activations": 67.4e6, "sum": 87e6}]
    assert in_bytes("445,696") == 445_696
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert quartiles([1, 2, 3, 4, 5]) == (2, 3, 4)
    assert spread([1, 2, 3, 4, 5], "ms", 1e3) == "3e+03 ms (quartiles 2e+03 and 4e+03, 5 rounds)"
    assert found(r"^step (\d+)", "a\nstep 7\n") == "7"
    with pytest.raises(ValueError, match="found no"):
        found("(x)", "y")


def test_a_command_that_fails_shows_its_output(capsys):
    with pytest.raises(RuntimeError, match="exit code 2"):
        run("experiments.course 77")
    assert "no exercise 77" in run("experiments.course 77", may_fail=True)
    assert "$ python -m experiments.course 77" in capsys.readouterr().out


@pytest.mark.parametrize(
    "svg",
    [
        charts.bars("A & B", "ms", {"one": 1.0, "two": (2.0, 3.0, 4.0)}),
        charts.lines("A & B", "x", "y", {"one": [(1, 2), (10, 20)], "two": [(1, 3)]}, log=True),
        charts.lines("A & B", "x", "y", {"one": [(0, 2), (4, 5)]}, dots=["one"]),
    ],
)
def test_charts_follow_the_mode_of_the_reader_and_have_a_description(svg):
    assert "prefers-color-scheme:dark" in svg
    assert "<title>A &amp; B</title>" in svg
    assert re.search(r"<desc>[^<]*one: ", svg)
    assert "nan" not in svg
