"""Short benchmark: gpipe_hpc, torch's pipelining and DDP, compared with stored results.

python -m benchmarks                         # five minutes
python -m benchmarks --budget-s 900 --keep   # ten rounds, for the table of README.md
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Final

from benchmarks.blocks import new_figures, run_blocks
from benchmarks.cells import CONTESTANTS, Cell, short_blocks
from benchmarks.comparison import report
from benchmarks.figures import load_figures
from benchmarks.rounds import Conductor
from benchmarks.table import insert, short_table
from gpipe_hpc.errors import GpipeError

HERE: Final = Path(__file__).resolve().parent
KEPT: Final = HERE / "figures.json"
README: Final = HERE.parent / "README.md"
WORKLOADS: Final = "A,B,C,T"


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--workloads", default=WORKLOADS, help="a GPT, convolutions, wide layers, tiny ones"
    )
    parser.add_argument("--budget-s", type=float, default=270.0, help="seconds for all of them")
    parser.add_argument("--size", choices=("full", "tiny"), default="full", help="tiny: a try")
    parser.add_argument("--kept", type=Path, default=KEPT, help="figures to compare with")
    parser.add_argument("--out", type=Path, help="file for the figures of this run")
    parser.add_argument(
        "--keep", action="store_true", help=f"store the figures in {KEPT.name} and in README.md"
    )
    args = parser.parse_args(words)
    if not set(args.workloads.split(",")) <= set(WORKLOADS.split(",")):
        parser.error(f"--workloads: expected some of {WORKLOADS}, got {args.workloads}")
    if args.budget_s <= 0:
        parser.error(f"--budget-s: expected seconds above 0, got {args.budget_s:g}")
    if args.keep and (args.size != "full" or args.workloads != WORKLOADS):
        parser.error("--keep: stores all workloads in full size; leave out --size and --workloads")
    return args


def main() -> None:
    """Run the benchmark, print its tables, and report changes since the stored results."""
    try:
        compare(parsed())
    except (GpipeError, OSError) as error:
        sys.exit(f"benchmarks: {error}")


def compare(args: argparse.Namespace) -> None:
    """Run the short benchmark and compare it with the stored results."""
    blocks = [block for block in short_blocks() if block.workload in args.workloads.split(",")]
    cells: list[Cell] = [cell for block in blocks for cell in block.cells]
    named = {cell.contestant for cell in cells}
    figures = new_figures()
    with tempfile.TemporaryDirectory(prefix="benchmarks_") as folder:
        chosen = [each for each in CONTESTANTS if each.name in named]
        conductor = Conductor(chosen, Path(folder), size=args.size)
        try:
            run_blocks(
                conductor, blocks, figures, budget_s=args.budget_s, done=lambda figures: None
            )
        finally:
            conductor.close()
    if args.out:
        figures.save(args.out)
    if args.keep:
        figures.save(KEPT)
        text = README.read_text("utf-8")
        README.write_text(insert(text, "peers", short_table(load_figures(KEPT))), "utf-8")
    if not args.kept.exists():
        print(f"\nno figures to compare with: {args.kept} is not there")
        return
    print("\n" + report(figures, load_figures(args.kept)))


if __name__ == "__main__":
    main()
