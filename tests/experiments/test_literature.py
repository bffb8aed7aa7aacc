"""The table of the literature and the list of experiments: commands run, and print what they say.

What takes long is not run: its words are held against the command's own help.
"""

import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from gpipe_hpc.config import compose_config
from gpipe_hpc.schedule import schedule_names

pytestmark = pytest.mark.filterwarnings("ignore:.*found in sys.modules")
ROOT = Path(__file__).resolve().parents[2]
LITERATURE = ROOT / "experiments" / "literature.md"
LIST = ROOT / "experiments" / "README.md"
PAPERS = (ROOT / "experiments" / "papers" / "README.md").read_text("utf-8")
MEASURING = ("ladder", "point_to_point")  # parts that take a while
RUN = (
    "gpipe_hpc.draw",
    "gpipe_hpc.plan",
    "gpipe_hpc.verify",
    "experiments.large_images",
    "experiments.outer.collectives",
)


class Line(NamedTuple):
    """A line of a table: its cells, the command, and what it is said to print."""

    cells: list[str]
    command: list[str]
    printed: list[str]


def lines_of(page, command_at, printed_at=None):
    for line in page.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if not line.startswith("| ") or len(cells) <= command_at or "`" not in cells[command_at]:
            continue
        (command,) = re.findall(r"`([^`]*)`", cells[command_at])
        said = re.findall(r"`([^`]*)`", cells[printed_at]) if printed_at is not None else []
        yield Line(cells, shlex.split(command), [each for each in said if "=" not in each])


LINES = list(lines_of(LITERATURE, 2, 3))
OTHERS = [*lines_of(LIST, 2), *lines_of(LIST, 4)]


def module_of(command):
    return command[command.index("-m") + 1] if "-m" in command else None


def output_of(module, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [module, *words])
    capsys.readouterr()
    code = 0
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    return code or 0, capsys.readouterr().out


def name_of(line):
    return re.sub(r"\W+", "-", line.cells[0])[:40]


RUNNING = [
    line
    for line in LINES
    if module_of(line.command) in RUN and not set(MEASURING) & set(line.command)
]


@pytest.mark.parametrize("line", RUNNING, ids=name_of)
def test_a_command_prints_the_figures_of_its_line(line, monkeypatch, capsys, tmp_path):
    module = module_of(line.command)
    words = line.command[line.command.index(module) + 1 :]
    code, text = output_of(module, words, monkeypatch, capsys)
    assert code == 0
    for figure in line.printed:
        assert figure in text, f"{figure} is not printed"


@pytest.mark.parametrize("line", [line for line in LINES if line not in RUNNING], ids=name_of)
def test_figures_of_papers_are_those_of_the_page(line):
    """What the others print is not known here; `experiments.papers` has its page."""
    if module_of(line.command) == "experiments.papers":
        assert line.printed
        for figure in line.printed:
            assert f"| {figure} |" in PAPERS
    else:
        assert not line.printed, "a figure in code is one that a test has seen"


def test_every_line_has_six_cells_and_a_link_to_an_experiment():
    targets = dict(re.findall(r"^\[([\w-]+)\]: (\S+)$", LITERATURE.read_text("utf-8"), re.M))
    assert len(LINES) > 40
    for line in LINES:
        assert len(line.cells) == 6, line.cells
        names = re.findall(r"\]\[([\w-]+)\]", line.cells[0])
        assert names, line.cells[0]
        for name in names:
            path = LITERATURE.parent / targets[name].partition("#")[0]
            assert path.resolve().is_relative_to(ROOT / "experiments") and path.is_file()


def test_every_schedule_has_a_line():
    chosen = {
        word.removeprefix("pipeline.schedule=")
        for line in LINES
        for word in line.command
        if word.startswith("pipeline.schedule=")
    }
    assert set(schedule_names()) - {"file", "auto"} <= chosen


def test_every_experiment_is_listed():
    listed = set(re.findall(r"\]\(([\w/]+)/README\.md\)", LIST.read_text("utf-8")))
    there = {
        path.parent.relative_to(LIST.parent).as_posix()
        for path in LIST.parent.rglob("README.md")
        if path.parent != LIST.parent and "out" not in path.parts
    }
    assert listed == there


@pytest.mark.parametrize(
    "command",
    {" ".join(line.command): line.command for line in [*LINES, *OTHERS]}.values(),
    ids=lambda command: re.sub(r"\W+", "-", " ".join(command))[:60],
)
def test_the_words_of_a_command_are_known(command, monkeypatch, capsys):
    module = module_of(command)
    if command[0] == "make":
        assert re.search(rf"^{command[1]}:", (ROOT / "Makefile").read_text("utf-8"), re.M)
        return
    if module is None:
        (script,) = [word for word in command if word.endswith(".py")]
        assert (ROOT / script).is_file()
        return
    words = command[command.index(module) + 1 :]
    if module.startswith("gpipe_hpc."):
        compose_config([word for word in words if "=" in word])
        return
    path = ROOT / module.replace(".", "/")
    assert (path / "__main__.py").is_file() or path.with_suffix(".py").is_file()
    options = [word for word in words if word.startswith("--")]
    if options:
        part = [word for word in words[:1] if word.isidentifier()]
        _, text = output_of(module, [*part, "--help"], monkeypatch, capsys)
        assert set(options) <= set(re.findall(r"--[\w-]+", text))
