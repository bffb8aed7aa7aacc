"""Which run a folder belongs to: a random name in `run.json`, which its checkpoints repeat.

So a run knows its own checkpoints from others of the same form, and touches no others.
"""

import json
import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpipe_hpc.small_files import read_json

RUN_FILE: Final = "run.json"
STARTS: Final = "starts"
"""The name, in `run.json`, of how far later starts went on from each start of the run.

A start that went back leaves copies of later steps in the memory of hosts that are gone. When one
of them returns, these are of no use: the run has done those steps anew, or is about to.
"""
UNRECORDED: Final = "unrecorded"
"""The name of a run that nobody will go on with, in a folder that goes when it ends."""


_ID: Final = re.compile(r"[0-9a-f]{32}")


class Run(NamedTuple):
    """A start of a run in its folder, as all ranks know it."""

    folder: Path
    name: str
    is_repeated: bool  # a launcher started the same command again
    notes: tuple[str, ...] = ()  # warnings, for the log
    lineage: str = ""  # new where a start does not go on as the one before it would have
    starts: tuple[tuple[str, int], ...] = ()  # the last step of each that a later one went on from


def read_run(run_folder: Path) -> dict[str, Any]:
    """Return what `run.json` says; empty where there is none, or none that can be read.

    A name is what we make: folders are named by it, and removed, so it must not lead elsewhere.
    """
    try:
        told = read_json(run_folder / RUN_FILE)
    except (OSError, ValueError):
        return {}
    name = told.get("id") if isinstance(told, dict) else None
    return told if isinstance(name, str) and _ID.fullmatch(name) else {}


def run_id(run_folder: Path) -> str | None:
    """Return the random name of the run whose folder it is; None where no run has begun."""
    return read_run(run_folder).get("id")


def write_run(run_folder: Path, about: Mapping[str, Any]) -> str:
    """Keep `about` in `run.json`; return the run's name, given once."""
    told = {"id": run_id(run_folder) or uuid.uuid4().hex, **about}
    path = run_folder / RUN_FILE
    aside = path.with_name(path.name + ".part")
    aside.write_text(json.dumps(told, indent=1) + "\n", "utf-8")
    os.replace(aside, path)
    name: str = told["id"]
    return name


def known_starts(told: Mapping[str, Any]) -> dict[str, int]:
    """Return, of what `run.json` says, the last step of each start that a later one went on from.

    Only of those that have been followed by another one.
    """
    starts = told.get(STARTS)
    each = starts.items() if isinstance(starts, dict) else ()
    return {name: step for name, step in each if type(step) is int}


def write_start(run_folder: Path, steps_done: int, name: str | None) -> None:
    """Keep that a start goes on with the run after this step: what others did past it is void.

    `name`: of the start; None if it writes no copies.
    """
    told = read_run(run_folder)
    before = told.get(STARTS)
    each = before.items() if isinstance(before, dict) else ()
    starts = {other: step for other, step in each if step is None or type(step) is int}
    for other, step in starts.items():
        starts[other] = steps_done if step is None else min(step, steps_done)
    own = {} if name is None else {name: None}
    write_run(run_folder, {**told, STARTS: starts | own})
