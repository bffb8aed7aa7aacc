"""Finished rooms (packages) follow the structural rules; other rooms gain no upward imports."""

from pathlib import Path

import pytest

from tests.house.rooms import room, sources, upward_imports
from tests.house.rules import CTYPES, broken, files_with_ctypes, unusual_imports

# Rooms that must follow all rules. Add rooms, but remove none.
FINISHED_ROOMS = ("config", "data_parallel", "engine", "settings")
UPWARD = Path(__file__).parent / "house" / "upward.txt"
FILES = sources()


def test_finished_rooms_keep_the_rules():
    assert broken(FILES, FINISHED_ROOMS) == []


def test_no_import_between_rooms_runs_upwards_but_those_listed():
    """Imports may only be removed from upward.txt, and must be once they are gone."""
    found = {" -> ".join(pair) for pair in upward_imports(FILES)}
    listed = set(UPWARD.read_text("utf-8").splitlines())
    assert sorted(found - listed) == [], "new imports that run upwards"
    assert sorted(listed - found) == [], "gone: remove these lines from tests/house/upward.txt"


def test_no_import_is_relative_or_of_the_face_of_users():
    assert unusual_imports(FILES) == []


def test_each_listed_use_of_ctypes_is_there():
    assert set(CTYPES) <= set(files_with_ctypes(FILES))


# A package that follows the rules, with four finished rooms, and faults that break one rule each.
LONG = "\n" * 61
GOOD = {
    "gpipe_hpc/__init__.py": "from gpipe_hpc.engine import Step",
    "gpipe_hpc/errors.py": "class Error(Exception): pass" + LONG,
    "gpipe_hpc/device/__init__.py": "from gpipe_hpc.device.cpu import Cpu",
    "gpipe_hpc/device/cpu.py": "import ctypes\nclass Cpu: pass" + LONG,
    "gpipe_hpc/models/__init__.py": "",
    "gpipe_hpc/engine/__init__.py": "from gpipe_hpc.engine.step import Step\n__all__ = ['Step']",
    "gpipe_hpc/engine/step.py": "from gpipe_hpc.device import Cpu\n"
    "from gpipe_hpc.engine.rng import draw\nclass Step: pass" + LONG,
    "gpipe_hpc/engine/loss.py": "from gpipe_hpc.engine.rng import draw",
    "gpipe_hpc/engine/rng.py": "import os, sys, torch\nfrom gpipe_hpc.errors import Error\n"
    "sys.excepthook = draw\nown = torch.ones(1)\nown.x = 1",
    "gpipe_hpc/trainer/loop.py": "from gpipe_hpc.engine import Step\nclass Step: pass",
}
FINISHED = ("errors", "device", "models", "engine")
FAULTS = {
    "past the face": ("trainer/loop.py", "from gpipe_hpc.engine.step import Step", "the face"),
    "a module of the face": ("trainer/loop.py", "from gpipe_hpc.engine import rng", "the face"),
    "from below": ("models/net.py", "from gpipe_hpc.engine import Step", "imports upwards"),
    "an unfinished room from below": (
        "comm/net.py",
        "from gpipe_hpc.engine import Step",
        "comm imports upwards",
    ),
    "a cycle": (
        "engine/rng.py",
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from gpipe_hpc.engine.step import Step",
        "import each other: gpipe_hpc/engine/rng.py, gpipe_hpc/engine/step.py",
    ),
    "its own face": ("engine/rng.py", "from gpipe_hpc.engine import Step", "import each other"),
    "a name twice": ("device/cpu.py", "class _Step: pass", "class Step is defined 2 times"),
    "a small file": ("engine/step.py", "import gpipe_hpc.engine.small", "small.py: 1 lines"),
    "ctypes": ("engine/rng.py", "import ctypes", "ctypes belongs in"),
    "a patch": ("engine/rng.py", "torch.nn.Linear.forward = draw", "patches torch"),
    "a patch by name": ("engine/rng.py", "setattr(torch.nn, 'x', 1)", "patches torch"),
    "a large face": (
        "engine/__init__.py",
        f"__all__ = {[f'n{i}' for i in range(26)]}",
        "exports 26 names",
    ),
    "a large face by imports": (
        "device/__init__.py",
        f"from gpipe_hpc.device.cpu import {', '.join(f'n{i}' for i in range(26))}",
        "exports 27 names",
    ),
}


def test_a_tree_that_keeps_the_rules_breaks_none():
    assert broken(GOOD, FINISHED) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_each_rule_sees_what_it_forbids(fault):
    name, line, expected = FAULTS[fault]
    path = f"gpipe_hpc/{name}"
    tree = GOOD | {path: f"{GOOD.get(path, '')}\n{line}"}
    if fault == "a large face":
        tree[path] = line
    if fault == "a small file":
        tree["gpipe_hpc/engine/small.py"] = "x = 1"
    found = broken(tree, FINISHED)
    assert len(found) == 1 and expected in found[0]
    assert broken(tree, ()) == []


def test_what_is_not_small():
    """These are exempt: a leaf folder, a long file, a file with two importers or only a face."""
    tree = GOOD | {
        "gpipe_hpc/engine/callbacks/leaf.py": "x = 1",
        "gpipe_hpc/engine/long.py": "x = 1\n" * 61,
        "gpipe_hpc/engine/more.py": "import gpipe_hpc.engine.callbacks.leaf\n"
        "import gpipe_hpc.engine.long",
    }
    assert broken(tree, FINISHED) == []


def test_an_upward_import_is_found_in_any_room():
    assert upward_imports(GOOD) == set()
    bad = GOOD | {"gpipe_hpc/comm/net.py": "def f():\n    from gpipe_hpc.trainer import loop"}
    assert upward_imports(bad) == {("gpipe_hpc/comm/net.py", "gpipe_hpc/trainer/loop.py")}


def test_an_unusual_import_is_found():
    assert unusual_imports(GOOD) == []
    for line in ("from .step import Step", "def f():\n    from gpipe_hpc import Pipeline"):
        assert len(unusual_imports({"gpipe_hpc/engine/rng.py": line})) == 1
    usual = "import gpipe_hpc\nfrom gpipe_hpc import __version__, engine"
    assert unusual_imports(GOOD | {"gpipe_hpc/engine/rng.py": usual}) == []


def test_a_file_without_a_room_is_refused():
    with pytest.raises(SystemExit, match="add a rule to ROOMS"):
        room("gpipe_hpc/attic.py")
