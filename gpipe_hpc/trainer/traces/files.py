"""Read and write traces, the timelines of steps; `python -m gpipe_hpc.draw` displays them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpipe_hpc.errors import ConfigError, DataError, os_remedy
from gpipe_hpc.schedule import Event, Timeline, parse_action
from gpipe_hpc.small_files import parse_json, read_bytes, read_json

FOLDER: Final = "trace"
PLANNED: Final = "planned.json"
_MOST_BYTES: Final = 2**30  # enough for thousands of ranks
_MOST_VALUES: Final = 100_000_000
_STEPS: Final = "step_*.json"


class OutsideActivity(NamedTuple):
    """An activity of a rank outside the pipeline, such as clipping; host times in seconds."""

    name: str
    start_s: float
    end_s: float


class ReadStep(NamedTuple):
    """A step read from a trace file; times are in seconds since its first event.

    Args:
        step: its number; None for a planned step.
        replicas: the timeline of each replica.
        around: activities of each rank outside the pipeline; empty if unknown.
    """

    step: int | None
    replicas: list[Timeline]
    around: tuple[tuple[OutsideActivity, ...], ...]


def trace_name(step: int) -> str:
    """Return the path of a step's trace within the run folder."""
    return f"{FOLDER}/step_{step:08d}.json"


def write_trace(
    replicas: list[Timeline],
    run_folder: Path,
    step: int,
    *,
    is_median: bool = True,
    around: Sequence[Sequence[OutsideActivity]] = (),
) -> Path:
    """Write the timelines of all replicas for a step into a file; return its path.

    `around` lists the activities of each rank outside the pipeline, on the same clock.
    """
    about = {"step": step, "is_median": is_median}
    start_s = _start_s(replicas)
    told = [[[name, s - start_s, e - start_s] for name, s, e in row] for row in around]
    return _write(run_folder / trace_name(step), replicas, {**about, "around": told})


def write_planned(timeline: Timeline, run_folder: Path) -> Path:
    """Write the timeline of a step as it was simulated before the run."""
    return _write(run_folder / FOLDER / PLANNED, [timeline], {})


def _write(path: Path, replicas: list[Timeline], more: dict[str, Any]) -> Path:
    """Write the events of all ranks as JSON, in seconds since the first one; return the path."""
    first = replicas[0]
    start_s = _start_s(replicas)
    content = {
        **more,
        "name": first.name,
        "num_stages": first.num_stages,
        "num_microbatches": first.num_microbatches,
        "num_replicas": len(replicas),
        "microbatches_of_replicas": [each.num_microbatches for each in replicas],
        "skips": first.skips,
        "ranks": [
            [[str(e.action), e.start_s - start_s, e.end_s - start_s] for e in row]
            for timeline in replicas
            for row in timeline.events
        ],
    }
    path.parent.mkdir(exist_ok=True)
    aside = path.with_name(path.name + ".part")
    aside.write_text(json.dumps(content))
    aside.replace(path)
    return path


def _start_s(replicas: Sequence[Timeline]) -> float:
    """Return the time of the first event of all replicas."""
    return min((each.start_s for each in replicas if any(each.events)), default=0.0)


def read_trace(path: Path) -> Timeline:
    """Read the timeline of the first replica, in seconds since the first event of the step."""
    return read_replicas(path)[0]


def read_replicas(path: Path) -> list[Timeline]:
    """Read the timeline of each replica; raise DataError if the file is not a trace."""
    return read_step(path).replicas


def read_step(path: Path) -> ReadStep:
    """Read all replicas of a step; raise DataError if the file is not a trace."""
    try:
        content = _content(path)
        rows = content["ranks"]
        num_replicas = content.get("num_replicas", 1)
        per_replica = len(rows) // num_replicas
        counts = [content["num_microbatches"]] * num_replicas
        counts = content.get("microbatches_of_replicas", counts)
        skips = tuple((source, destination) for source, destination in content.get("skips", ()))
        replicas = [
            Timeline(
                tuple(
                    tuple(
                        Event(rank, parse_action(str(text)), float(start), float(end))
                        for text, start, end in row
                    )
                    for rank, row in enumerate(rows[first : first + per_replica])
                ),
                content["num_stages"],
                count,
                content["name"],
                skips,
            )
            for first, count in zip(range(0, len(rows), per_replica), counts, strict=True)
        ]
        around = tuple(
            tuple(OutsideActivity(str(name), float(start), float(end)) for name, start, end in row)
            for row in content.get("around", ())
        )
        return ReadStep(content.get("step"), replicas, around)
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise DataError(
            f"trace {path}: cannot be read as a timeline of gpipe_hpc: {error}; "
            f"{os_remedy(error) or 'run with trace.steps=1'}"
        ) from error


def typical_trace(run_folder: Path) -> Path:
    """Return the path of the trace of the newest start's median step, else of the last step.

    Raises DataError if there is no trace, ConfigError if the folder does not exist.
    """
    if not run_folder.is_dir():
        raise ConfigError(
            f"config: bad run.dir: {str(run_folder)!r} "
            f"{'is not a folder' if run_folder.exists() else 'does not exist'}; correct it, or "
            f"look in runs/"
        )
    found = sorted((run_folder / FOLDER).glob(_STEPS))
    if not found:
        raise DataError(
            f"run {run_folder}: no measured timeline under {FOLDER}/: {_why_untraced(run_folder)}"
        )
    return next((path for path in reversed(found) if _is_median(path)), found[-1])


def _why_untraced(run_folder: Path) -> str:
    """Return why a run has no trace, according to its summary, and the remedy."""
    try:
        summary = read_json(run_folder / "summary.json")
        outcome, last = str(summary["outcome"]), int(summary["last_step"])
    except (OSError, ValueError, KeyError, TypeError):
        outcome, last = "", 0
    if outcome == "failed":
        return (
            f"it failed after step {last}, and only successful runs write timelines: start it "
            f"again, it resumes from its newest checkpoint"
        )
    if outcome == "running":
        return (
            f"it is still running, or was killed after step {last}: a run writes timelines when it "
            f"ends; wait for it, or stop it with Ctrl-C or SIGTERM"
        )
    return "run with trace.steps=1 or more"


def _content(path: Path) -> Any:
    return parse_json(read_bytes(path, _MOST_BYTES), _MOST_VALUES)


def _is_median(path: Path) -> bool:
    try:
        return bool(_content(path).get("is_median"))
    except (OSError, ValueError, AttributeError):
        return False  # reading it later reports the error


def forget_later_traces(run_folder: Path, last_step: int) -> None:
    """Remove traces of steps after `last_step`, which an earlier, abandoned start has left."""
    for path in (run_folder / FOLDER).glob(_STEPS):
        number = path.stem.removeprefix("step_")
        if number.isdecimal() and int(number) > last_step:
            path.unlink(missing_ok=True)
