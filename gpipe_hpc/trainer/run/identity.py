"""Identity of a run: a random id in `run.json`, which is stored in its checkpoints.

A run uses the id to recognize its own checkpoints, and modifies no others.
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
"""Key, in `run.json`, of the step of each start from which a later start resumed.

If a start returns to an earlier step, in-memory checkpoints of later steps may remain on hosts that
have left. When such a host rejoins, they must be ignored, as those steps are computed again."""
UNRECORDED: Final = "unrecorded"
"""Id of a run that is never resumed, in a folder that is removed when it ends."""


_ID: Final = re.compile(r"[0-9a-f]{32}")


class RunIdentity(NamedTuple):
    """A start of a run in its folder, as known to all ranks."""

    folder: Path
    name: str
    is_repeated: bool  # a launcher started the same command again
    notes: tuple[str, ...] = ()  # warnings for the log
    lineage: str = ""  # changes if a start does not continue the previous one
    starts: tuple[tuple[str, int], ...] = ()  # see `known_starts`


def read_run(run_folder: Path) -> dict[str, Any]:
    """Return the content of `run.json`; empty if it does not exist or is invalid.

    The run's id is validated, because folders with this name are removed.
    """
    try:
        told = read_json(run_folder / RUN_FILE)
    except (OSError, ValueError):
        return {}
    name = told.get("id") if isinstance(told, dict) else None
    return told if isinstance(name, str) and _ID.fullmatch(name) else {}


def run_id(run_folder: Path) -> str | None:
    """Return the id of the run in a folder; None if there is none."""
    return read_run(run_folder).get("id")


def write_run(run_folder: Path, about: Mapping[str, Any]) -> str:
    """Write `about` to `run.json`, keeping an existing id; return the id."""
    told = {"id": run_id(run_folder) or uuid.uuid4().hex, **about}
    path = run_folder / RUN_FILE
    aside = path.with_name(path.name + ".part")
    aside.write_text(json.dumps(told, indent=1) + "\n", "utf-8")
    os.replace(aside, path)
    name: str = told["id"]
    return name


def known_starts(told: Mapping[str, Any]) -> dict[str, int]:
    """Return, for each earlier start, the step from which a later start resumed.

    `told` is the content of `run.json`. A start after which none has resumed is left out.
    """
    starts = told.get(STARTS)
    each = starts.items() if isinstance(starts, dict) else ()
    return {name: step for name, step in each if type(step) is int}


def write_start(run_folder: Path, steps_done: int, name: str | None) -> None:
    """Record that a start resumes from `steps_done`; later steps of earlier starts become invalid.

    `name` identifies the start; None if it writes no in-memory checkpoints.
    """
    told = read_run(run_folder)
    before = told.get(STARTS)
    each = before.items() if isinstance(before, dict) else ()
    starts = {other: step for other, step in each if step is None or type(step) is int}
    for other, step in starts.items():
        starts[other] = steps_done if step is None else min(step, steps_done)
    own = {} if name is None else {name: None}
    write_run(run_folder, {**told, STARTS: starts | own})
