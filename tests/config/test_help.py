"""Help texts, the list of commands, and output to a closed pipe."""

import re
import subprocess
import sys

import pytest

from gpipe_hpc.config import list_of_commands
from gpipe_hpc.config.errors import GROUPS
from gpipe_hpc.config.help import COMMANDS, help_of
from gpipe_hpc.settings import Config, Level, settings_of


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lists_the_settings_of_a_command_with_descriptions(name):
    text, sections = help_of(name, ["all"]), COMMANDS[name].sections.split()
    assert set(sections) <= {each.name.partition(".")[0] for each in settings_of(Config)}
    for each in settings_of(Config):
        section = each.name.partition(".")[0]
        if section in GROUPS:
            continue
        assert (f"\n  {each.name}=" in text) is (section in sections), each.name
        assert section not in sections or each.meaning in " ".join(text.split()), each.name
    assert "example: " in text and ("model=NAME, one of alexnet" in text) is ("model" in sections)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_describes_the_command_and_its_sections(name):
    command = COMMANDS[name]
    assert f"gpipe_hpc.{name}" in command.example
    assert re.fullmatch(r"[A-Z][^\n]*\.", command.about)
    text = " ".join(help_of(name, ["all"]).split())
    for section in set(command.sections.split()) - set(GROUPS):
        kind = type(getattr(Config(), section))
        about = "" if kind is dict else (kind.__doc__ or "").split("\n\n")[0]
        assert " ".join(f"{section}: {about}".split()).rstrip(": ") in text, section


def test_default_help_omits_expert_settings():
    """Regression: the help had 400 lines, of which most users need a tenth."""
    text = help_of("train", [])
    for each in settings_of(Config):
        if each.name.partition(".")[0] in ("train", "pipeline", "comm"):
            assert (f"\n  {each.name}=" in text) is (each.level is not Level.EXPERT), each.name


def test_help_begins_with_the_most_used_settings():
    """Regression: `plan --help` listed its own settings at the end of 200 lines."""
    for name, first in (("train", "train"), ("plan", "plan"), ("draw", "draw")):
        sections = re.findall(r"^  (\w+)[.=]", help_of(name, []), re.MULTILINE)
        assert sections[0] == first
        assert "pipeline" in list(dict.fromkeys(sections))[:3]


def test_help_of_one_section_shows_only_that_section():
    text = help_of("train", ["--help", "checkpoint"])
    assert "\n  checkpoint.every=" in text and "\n  train." not in text
    assert "\n  checkpoint.neighbour_dir=null" in text, "settings for experts are missing"
    assert len(text.splitlines()) < 50


def test_help_shows_settings_of_the_chosen_presets():
    assert "data.root" in help_of("train", [])
    chosen = help_of("train", ["data=tokens", "--help"])
    assert "data.root" not in chosen and "  data.paths=[]" in chosen
    assert "data.vocab_size=50257" in chosen and "read as one text" in " ".join(chosen.split())
    assert "outer.every=64" in help_of("train", ["outer=diloco"])
    assert "model.num_layers=48" in help_of("train", ["model=gpt2_xl"])


def test_package_without_arguments_lists_the_commands():
    done = subprocess.run(
        [sys.executable, "-m", "gpipe_hpc"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == list_of_commands()
    assert all(f"gpipe_hpc.{name}" in done.stdout for name in COMMANDS)


def test_closed_output_pipe_is_no_error():
    """Regression: `plan | head` ended with the traceback of a BrokenPipeError."""
    command = [sys.executable, "-m", "gpipe_hpc.draw", "draw.format=table"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.wait(60) == 0
    assert process.stderr.read() == ""
