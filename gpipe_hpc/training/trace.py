"""Measured timelines of a run, as files that `python -m gpipe_hpc.draw` reads."""

import json
from pathlib import Path

from gpipe_hpc.errors import DataError, os_remedy
from gpipe_hpc.schedule import Event, Timeline, parse_action

FOLDER = "trace"


def write_trace(timeline: Timeline, run_folder: Path, step: int) -> Path:
    """Keep the timeline of a step in a file of its own."""
    path = run_folder / FOLDER / f"step_{step:08d}.json"
    path.parent.mkdir(exist_ok=True)
    content = {
        "name": timeline.name,
        "num_stages": timeline.num_stages,
        "num_microbatches": timeline.num_microbatches,
        "skips": timeline.skips,
        "ranks": [
            [[str(e.action), e.start_s - timeline.start_s, e.end_s - timeline.start_s] for e in row]
            for row in timeline.events
        ],
    }
    path.write_text(json.dumps(content))
    return path


def read_trace(path: Path) -> Timeline:
    """Read a timeline back; seconds since its first event."""
    try:
        content = json.loads(path.read_text())
        rows = tuple(
            tuple(Event(rank, parse_action(text), start, end) for text, start, end in row)
            for rank, row in enumerate(content["ranks"])
        )
        size = content["num_stages"], content["num_microbatches"]
        skips = tuple((source, destination) for source, destination in content.get("skips", ()))
        return Timeline(rows, *size, content["name"], skips)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"trace {path}: expected a timeline written by gpipe_hpc, got {error}; "
            f"{os_remedy(error) or 'run with trace.steps=1'}"
        ) from error


def newest_trace(run_folder: Path) -> Path:
    """Return the last step's trace of a run folder; DataError if there is none."""
    found = sorted((run_folder / FOLDER).glob("step_*.json"))
    if not found:
        raise DataError(
            f"run {run_folder}: expected a measured timeline under {FOLDER}/, got none; run with "
            f"trace.steps=1 or more"
        )
    return found[-1]
