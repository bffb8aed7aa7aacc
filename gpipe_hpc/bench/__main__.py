"""The entry point of `python -m gpipe_hpc.bench`: the short form, against the figures kept."""

import sys
import tempfile
from pathlib import Path
from typing import Final

from gpipe_hpc.bench.cells import CONTESTANTS, Cell, short_blocks
from gpipe_hpc.bench.comparison import report
from gpipe_hpc.bench.figures import load_figures
from gpipe_hpc.bench.rounds import Conductor
from gpipe_hpc.bench.run import new_figures, run_blocks
from gpipe_hpc.config import BenchConfig
from gpipe_hpc.config.checks import BENCH_SIZES
from gpipe_hpc.config.commands import DONE_EXIT_CODE, Job, run_jobs, say_error
from gpipe_hpc.config.refusal import refuse
from gpipe_hpc.errors import ConfigError, GpipeError

# Of a checkout: where a relative bench.kept is, whatever the working directory.
_CHECKOUT: Final = Path(__file__).resolve().parents[2]


def main() -> None:
    """Compose the settings from Hydra's command line, measure, and exit.

    Exit codes: 0 done, 1 failed, 2 settings that cannot work. Of a sweep (-m) the first that is
    not 0.
    """
    sys.exit(run_jobs(_task, unshared="bench.out"))


def _task(job: Job) -> int:
    try:
        bench(job.config.bench)
    except (GpipeError, OSError) as error:
        return say_error(error)
    return DONE_EXIT_CODE


def bench(config: BenchConfig) -> None:
    """Measure the short form, print its tables, and say what moved since the figures kept."""
    blocks = [block for block in short_blocks() if block.workload in config.workloads]
    if not blocks or config.budget_s <= 0:
        raise ConfigError(
            f"bench: nothing to measure, expected workloads of A, B, C, T and a budget_s above 0, "
            f"got {list(config.workloads)} and {config.budget_s}; correct bench.workloads or "
            f"bench.budget_s"
        )
    if config.size not in BENCH_SIZES:
        raise refuse(
            "bench.size", f"one of {', '.join(BENCH_SIZES)}", config.size, "choose one of them"
        )
    cells: list[Cell] = [cell for block in blocks for cell in block.cells]
    named = {cell.contestant for cell in cells}
    figures = new_figures()
    with tempfile.TemporaryDirectory(prefix="gpipe_bench_") as folder:
        conductor = Conductor(
            [each for each in CONTESTANTS if each.name in named], Path(folder), size=config.size
        )
        try:
            run_blocks(
                conductor, blocks, figures, budget_s=config.budget_s, done=lambda figures: None
            )
        finally:
            conductor.close()
    if config.out:
        figures.save(Path(config.out))
    kept = find_kept(config.kept)
    if kept is None:
        print(f"\nno figures to compare with: {config.kept} is not there")
        return
    print("\n" + report(figures, load_figures(kept)))


def find_kept(path: str, checkout: Path = _CHECKOUT) -> Path | None:
    """Return a file from the working directory, or else the checkout's; None if neither is."""
    return next((each for each in (Path(path), checkout / path) if each.exists()), None)


if __name__ == "__main__":
    main()
