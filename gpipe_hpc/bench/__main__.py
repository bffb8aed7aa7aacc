"""The entry point of `python -m gpipe_hpc.bench`."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpipe_hpc.bench.collectives.workload import check, time_collectives
from gpipe_hpc.bench.figures import Measured, table
from gpipe_hpc.bench.plot import draw
from gpipe_hpc.bench.running import measure
from gpipe_hpc.bench.sweep import Point, points
from gpipe_hpc.comm.saying import say
from gpipe_hpc.config import Config
from gpipe_hpc.config.checks import check_ranges
from gpipe_hpc.config.commands import DONE_EXIT_CODE, FAILED_EXIT_CODE, Job, run_jobs, say_error
from gpipe_hpc.config.refusal import refuse
from gpipe_hpc.config.spelling import suggestion
from gpipe_hpc.errors import GpipeError

_STEPS: Final = "steps"
_COLLECTIVES: Final = "collectives"


def main() -> None:
    """Compose the settings from the command line, measure every point, and exit.

    Exit codes: 0 done, 1 no point could be measured, 2 settings that cannot work.
    """
    sys.exit(run_jobs(_task, "bench", unshared="bench.out"))


def _task(job: Job) -> int:
    config = job.config
    try:
        check_ranges(config)
        workloads = _workloads(config)
        wanted = points(config) if _STEPS in workloads else []
        if _COLLECTIVES in workloads:
            check(config)
    except GpipeError as error:
        return say_error(error)
    done = []
    try:
        if _STEPS in workloads:
            done.append(_time_steps(wanted, job))
        if _COLLECTIVES in workloads:
            done.append(time_collectives(config, job.words))
    except OSError as error:
        say(f"gpipe_hpc: bench.out: {error}")
        return FAILED_EXIT_CODE
    return DONE_EXIT_CODE if all(done) else FAILED_EXIT_CODE


def _workloads(config: Config) -> list[str]:
    known = (_STEPS, _COLLECTIVES)
    names = config.bench.workloads
    for name in names or [""]:
        if name not in known:
            remedy = f"{suggestion(name, known)}choose among them"
            raise refuse("bench.workloads", f"any of {', '.join(known)}", name, remedy)
    return names


def _time_steps(wanted: Sequence[Point], job: Job) -> bool:
    """Measure the steps of every point; say whether any could be measured."""
    found = []
    for number, point in enumerate(wanted, 1):
        say(f"{number}/{len(wanted)}: {point.named()}")
        found.append(measure(point, job.words, job.config.bench.limit_s))
        if found[-1].failed:
            say(f"  {found[-1].failed}")
    print(table(found))
    if job.config.bench.out is not None:
        _keep(found, Path(job.config.bench.out))
    return any(each.steps_s for each in found)


def _keep(found: list[Measured], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    told = [each.told() for each in found]
    (folder / "bench.json").write_text(json.dumps(told, indent=1) + "\n")
    (folder / "bench.md").write_text(table(found) + "\n")
    if not draw(found, folder / "bench.svg"):
        print("no plot: nothing varies, or matplotlib is missing (pip install '.[plots]')")


if __name__ == "__main__":
    main()
