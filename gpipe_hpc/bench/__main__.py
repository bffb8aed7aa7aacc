"""Entry point of `python -m gpipe_hpc.bench`."""

import json
import sys
from collections.abc import Mapping, Sequence
from glob import glob
from os.path import expanduser
from pathlib import Path

from gpipe_hpc.bench.figures import PointResult, table
from gpipe_hpc.bench.plot import draw
from gpipe_hpc.bench.running import code_of, measure, refusal
from gpipe_hpc.bench.sweep import Point, at_point, points
from gpipe_hpc.comm.watchdog.output_streams import print_line
from gpipe_hpc.config import CommandJob, ExitCode, check_config, check_timing, print_error, run_jobs
from gpipe_hpc.data.paths import expand
from gpipe_hpc.errors import GpipeError, is_users_mistake
from gpipe_hpc.preflight.layout import plan_layout
from gpipe_hpc.settings import Config


def main() -> None:
    """Compose the settings from the command line, measure every point, and exit.

    Exit codes: 0 done, 1 no point could be measured, 2 settings that cannot work.
    """
    sys.exit(run_jobs(_task, "bench", unshared="bench.out"))


def _task(job: CommandJob) -> int:
    config = job.config
    try:
        check_timing(config)
        wanted = points(config)
    except GpipeError as error:
        return print_error(error)
    refused = {point: why for point in wanted if (why := _refusal(config, point)) is not None}
    if len(refused) == len(wanted):
        return print_error(refused[wanted[0]])
    try:
        return _time_steps(wanted, refused, job)
    except OSError as error:
        print_line(f"gpipe_hpc: bench.out: {error}")
        return ExitCode.FAILED


def _refusal(config: Config, point: Point) -> GpipeError | None:
    """Return the error if the settings of a point cannot work, None if they may; nothing is run."""
    try:
        own = at_point(config, point)
        check_config(own, point.ranks)
        _check_files(own)
        plan_layout(own, point.ranks)
    except GpipeError as error:
        return error if is_users_mistake(error) else None
    except Exception:
        return None  # the ranks of the point will report the error
    return None


def _check_files(config: Config) -> None:
    """Raise MissingDataError for text or JSON-lines files that do not exist."""
    for name in ("paths", "validation_paths"):
        patterns = getattr(config.data, name, None) or ()
        expand([each for each in patterns if not glob(expanduser(each), recursive=True)])


def _time_steps(
    wanted: Sequence[Point], refused: Mapping[Point, GpipeError], job: CommandJob
) -> int:
    """Measure all points whose settings may work; return the exit code, 0 if any was measured."""
    found = []
    for number, point in enumerate(wanted, 1):
        print_line(f"{number}/{len(wanted)}: {point.named()}")
        found.append(
            PointResult(point, failed=refusal(refused[point]))
            if point in refused
            else measure(point, job.words)
        )
        if found[-1].failed:
            print_line(f"  {found[-1].failed}")
    print(table(found))
    if job.config.bench.out is not None:
        _keep(found, Path(job.config.bench.out))
    return code_of(any(each.steps_s for each in found), [each.failed for each in found])


def _keep(found: list[PointResult], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    told = [each.as_dict() for each in found]
    (folder / "bench.json").write_text(json.dumps(told, indent=1) + "\n")
    (folder / "bench.md").write_text(table(found) + "\n")
    if not draw(found, folder / "bench.svg"):
        print("no plot: nothing varies, or matplotlib is missing (pip install '.[plots]')")


if __name__ == "__main__":
    main()
