"""Help on the screen, and output whose reader has gone."""

import re
import subprocess
import sys

import pytest

from gpipe_hpc.config import conf_dir
from gpipe_hpc.config.explained import sections_of
from gpipe_hpc.config.help import COMMANDS, help_of, list_of_commands


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_the_settings_of_a_command_with_their_meanings(name):
    text = help_of(name, conf_dir(), [])
    for section in sections_of(conf_dir() / "config.yaml"):
        shown = section.name not in COMMANDS[name].without
        for each in section.settings:
            line = f"\n  {each.name}={each.default}"
            assert (line in text) is shown, each.name
            meaning = " ".join(each.meaning.split())
            assert not shown or meaning in " ".join(text.split()), each.name
    assert "example: " in text and "model=NAME, one of alexnet" in text


def test_help_begins_with_what_is_used_most():
    """`plan --help` had its own settings at the end of 200 lines."""
    for name, first in (("train", "train"), ("plan", "plan"), ("draw", "draw")):
        text = help_of(name, conf_dir(), [])
        sections = re.findall(r"^  (\w+)[.=]", text, re.MULTILINE)
        assert sections[0] == first
        assert "pipeline" in list(dict.fromkeys(sections))[:3]


def test_help_of_one_section_is_that_section_alone():
    text = help_of("train", conf_dir(), ["--help", "checkpoint"])
    assert "\n  checkpoint.every=" in text and "\n  train." not in text
    assert len(text.splitlines()) < 50


def test_help_shows_the_settings_of_the_presets_that_are_chosen():
    assert "data.root" in help_of("train", conf_dir(), [])
    chosen = help_of("train", conf_dir(), ["data=tokens", "--help"])
    assert "data.root" not in chosen and "  data.paths=[]" in chosen
    assert "read as one text" in " ".join(chosen.split())


def test_every_setting_has_a_meaning():
    for section in sections_of(conf_dir() / "config.yaml"):
        for each in section.settings:
            assert each.meaning or section.name == "draw", each.name


def test_commands_are_listed():
    done = subprocess.run(
        [sys.executable, "-m", "gpipe_hpc"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == list_of_commands()
    assert all(f"gpipe_hpc.{name}" in done.stdout for name in COMMANDS)


def test_a_reader_that_leaves_early_is_no_error():
    """`plan | head` ended in a traceback of BrokenPipeError."""
    command = [sys.executable, "-m", "gpipe_hpc.draw", "draw.format=table"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.wait(60) == 0
    assert process.stderr.read() == ""
