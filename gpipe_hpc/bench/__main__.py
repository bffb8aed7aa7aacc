"""The entry point of `python -m gpipe_hpc.bench`: the short form, against the figures kept."""

import sys
import tempfile
from pathlib import Path

import hydra
from omegaconf import DictConfig

from gpipe_hpc.bench.cells import CONTESTANTS, Cell, short_blocks
from gpipe_hpc.bench.comparison import report
from gpipe_hpc.bench.figures import load_figures
from gpipe_hpc.bench.rounds import Conductor
from gpipe_hpc.bench.run import new_figures, run_blocks
from gpipe_hpc.config import BenchConfig, conf_dir, load_config, register_schemas
from gpipe_hpc.errors import ConfigError, GpipeError


def main() -> None:
    """Compose the settings from Hydra's command line and measure."""
    register_schemas()
    hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(_task)()


def _task(composed: DictConfig) -> None:
    try:
        bench(load_config(composed).bench)
    except (GpipeError, OSError) as error:
        sys.exit(f"gpipe_hpc: {error}")


def bench(config: BenchConfig) -> None:
    """Measure the short form, print its tables, and say what moved since the figures kept."""
    blocks = [block for block in short_blocks() if block.workload in config.workloads]
    if not blocks or config.budget_s <= 0:
        raise ConfigError(
            f"bench: nothing to measure, expected workloads of A, B, C, T and a budget_s above 0, "
            f"got {list(config.workloads)} and {config.budget_s}; correct bench.workloads or "
            f"bench.budget_s"
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
    kept = Path(config.kept)
    if not kept.exists():
        print(f"\nno figures to compare with: {kept} is not there")
        return
    print("\n" + report(figures, load_figures(kept)))


if __name__ == "__main__":
    main()
