"""Compare gpipe_hpc with its peers and write the tables of the results.

    python -m benchmarks.peers.run

Takes about two and a half hours; `--budget-s` limits it. Results are saved after each block, so a
run that was killed can be continued with `--resume`.
"""

import argparse
import time
from collections.abc import Callable, Collection
from pathlib import Path

from benchmarks.blocks import new_figures, run_blocks
from benchmarks.cells import Block, Contestant
from benchmarks.figures import Figures, load_figures
from benchmarks.peers import grid, report
from benchmarks.peers.environment import NoEnvironmentError, peer_python
from benchmarks.rounds import Conductor

HERE = Path(__file__).resolve().parent
OUT = HERE / "out"
# Share of the time for the blocks that the claims are about.
FIRST_SHARE = 0.7
WEIGHED = ("A", "B", "C")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget-s", type=float, default=9000.0, help="seconds for all blocks")
    parser.add_argument("--resume", action="store_true", help="keep the results of earlier runs")
    parser.add_argument(
        "--again",
        action="store_true",
        help="with --resume: measure selected blocks even if they have results",
    )
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--to", type=Path, default=HERE, help="folder of figures.json and README")
    parser.add_argument(
        "--parts",
        default="memory,first,rest",
        help="memory (of tensors), first (blocks that the claims are about), rest (all others)",
    )
    parser.add_argument("--blocks", default="", help="measure only these, for example A:4,C:16")
    parser.add_argument(
        "--sittings",
        type=int,
        choices=(1, 2, 3),
        default=2,
        help="how often cells of the first part are opened; 1 if time is short",
    )
    parser.add_argument("--without", default="", help="contestants to leave out: deepspeed,...")
    return parser.parse_args()


def chosen(blocks: list[Block], wanted: str, there: Collection[str]) -> list[Block]:
    """Return the selected blocks that have no results yet."""
    pairs = [pair.split(":") for pair in wanted.split(",") if pair]
    return [
        block
        for block in blocks
        if block.name not in there
        and (not pairs or [block.workload, str(block.microbatches)] in pairs)
    ]


def contestants(without: list[str]) -> tuple[list[Contestant], dict[str, str]]:
    """Return the available contestants, and the reasons why others are not."""
    python, absent = None, {}
    needing = {"deepspeed", "torchgpipe"} - set(without)
    if needing:
        try:
            python = peer_python(OUT / "venv")
        except NoEnvironmentError as error:
            absent = dict.fromkeys(needing, f"cannot be installed here: {error}")
    return [each for each in grid.contestants(python) if each.name not in without], absent


def weigh(
    conductor: Conductor,
    blocks: list[Block],
    wanted: str,
    figures: Figures,
    keep: Callable[[Figures], None],
) -> None:
    """Measure the tensors of cells that share processes with gpipe_hpc, if not done yet."""
    crew = conductor.contestants["ours"].crew
    names = {each.name for each in conductor.contestants.values() if each.crew == crew}
    weighed = figures.extras.setdefault("tensors", {})
    for block in chosen(blocks, wanted, weighed):
        if block.workload in WEIGHED:
            found = conductor.weigh(block.of(names))
            if found:
                weighed[block.name] = found
                keep(figures)


def main() -> None:
    args = parsed()
    parts = args.parts.split(",")
    kept = args.to / "figures.json"
    figures = load_figures(kept) if args.resume and kept.exists() else new_figures()
    there: Collection[str] = figures.blocks
    if args.again:
        fresh = new_figures()
        figures.machine, figures.date, there = fresh.machine, fresh.date, ()
    who, absent = contestants(args.without.split(","))
    end_s = time.monotonic() + args.budget_s

    def keep(figures: Figures) -> None:
        figures.save(kept)
        rounded = load_figures(kept)  # as rounded in the file
        report.write(rounded, args.to)

    first, rest = grid.blocks()
    conductor = Conductor(who, OUT, size=args.size)
    conductor.absent |= absent
    named = {*(each.name for each in who), *absent}
    try:
        if "memory" in parts:
            weigh(conductor, first, args.blocks, figures, keep)
        first_share = FIRST_SHARE if "rest" in parts else 1.0
        for part, blocks, share in (("first", first, first_share), ("rest", rest, 1.0)):
            if part in parts:
                asked = chosen(blocks, args.blocks, there)
                todo = [each.of(named) for each in asked]
                left_s = share * (end_s - time.monotonic())
                run_blocks(
                    conductor,
                    todo,
                    figures,
                    budget_s=left_s,
                    done=keep,
                    num_sittings=args.sittings if part == "first" else 1,
                )
    finally:
        conductor.close()
    print(f"\n{report.write(figures, args.to)}\nin {args.to}: figures.json, README.md")


if __name__ == "__main__":
    main()
