"""The entry point of `python -m gpipe_hpc.bench`."""

import json
import sys
from pathlib import Path

from gpipe_hpc.bench.figures import Measured, table
from gpipe_hpc.bench.plot import draw
from gpipe_hpc.bench.running import measure
from gpipe_hpc.bench.sweep import points
from gpipe_hpc.config.checks import check_ranges
from gpipe_hpc.config.commands import DONE_EXIT_CODE, FAILED_EXIT_CODE, Job, run_jobs, say_error
from gpipe_hpc.errors import GpipeError


def main() -> None:
    """Compose the settings from the command line, measure every point, and exit.

    Exit codes: 0 done, 1 no point could be measured, 2 settings that cannot work.
    """
    sys.exit(run_jobs(_task, "bench", unshared="bench.out"))


def _task(job: Job) -> int:
    config = job.config
    try:
        check_ranges(config)
        wanted = points(config)
    except GpipeError as error:
        return say_error(error)
    found = []
    for number, point in enumerate(wanted, 1):
        print(f"{number}/{len(wanted)}: {point.named()}", file=sys.stderr, flush=True)
        found.append(measure(point, job.words, config.bench.limit_s))
        if found[-1].failed:
            print(f"  {found[-1].failed}", file=sys.stderr, flush=True)
    print(table(found))
    if config.bench.out is not None:
        try:
            _keep(found, Path(config.bench.out))
        except OSError as error:
            print(f"gpipe_hpc: bench.out: {error}", file=sys.stderr)
            return FAILED_EXIT_CODE
    return DONE_EXIT_CODE if any(each.steps_s for each in found) else FAILED_EXIT_CODE


def _keep(found: list[Measured], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    told = [each.told() for each in found]
    (folder / "bench.json").write_text(json.dumps(told, indent=1) + "\n")
    (folder / "bench.md").write_text(table(found) + "\n")
    if not draw(found, folder / "bench.svg"):
        print("no plot: nothing varies, or matplotlib is missing (pip install '.[plots]')")


if __name__ == "__main__":
    main()
