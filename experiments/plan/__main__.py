"""Plan layouts and run them: compare planned and measured step time and memory.

    python -m experiments.plan [--write] [--steps N] [--only NAME] [--noise N] [--out DIR]

Every layout is planned with measured layer times and with prices that a preflight measured on the
same number of ranks, trained through torchrun with one thread per rank, and planned again. The
first layout of each model is run `--noise` times. The table shows the reason of a layout that
fails.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Final

import torch

from experiments.plan.figures import summary, table
from experiments.plan.layouts import layouts
from experiments.plan.running import Bench, FailedRunError, Result, prices, try_layout

_PAGE: Final = Path(__file__).parent / "README.md"
_BEGIN: Final = "<!-- results -->"
_END: Final = "<!-- end of results -->"


def measured(bench: Bench, only: str, num_noise: int) -> list[Result]:
    """Plan and run the layouts with a given name prefix; print each result."""
    bench.out.mkdir(parents=True, exist_ok=True)
    for stale in bench.out.glob("*.yaml"):  # calibrations of an earlier run
        stale.unlink()
    chosen = layouts(only)
    files = {}
    for ranks in sorted({each.ranks for each in chosen}):
        try:
            files[ranks] = prices(bench, ranks)
        except FailedRunError as error:
            print(f"prices of {ranks} ranks: {error}", flush=True)
    repeated = {each.model: each.name for each in reversed(chosen)}
    results = []
    for layout in chosen:
        file = files.get(layout.ranks)
        if file is None:
            results.append(Result(layout.name, failed="no prices were measured"))
            continue
        num_runs = num_noise if layout.name == repeated[layout.model] else 1
        results.append(try_layout(bench, layout, file, num_runs))
        print(table(results[-1:]).splitlines()[-1], results[-1].parts, flush=True)
    return results


def write(results: list[Result], page: Path = _PAGE) -> None:
    """Write the results into README.md, between two marks."""
    before, _, rest = page.read_text("utf-8").partition(_BEGIN)
    after = rest.partition(_END)[2]
    body = f"{_BEGIN}\n```text\n{summary(results)}\n\n{table(results)}\n```\n{_END}"
    page.write_text(before + body + after, "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.plan")
    parser.add_argument("--write", action="store_true", help="write the results into README.md")
    parser.add_argument("--steps", type=int, default=20, help="steps of a run after the first 12")
    parser.add_argument("--only", default="", help="run only layouts whose names begin with this")
    parser.add_argument("--noise", type=int, default=3, help="runs of each model's first layout")
    parser.add_argument("--out", type=Path, default=None, help="folder for the runs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.set_num_threads(1)
        bench = Bench(args.steps, (args.out or Path(folder)).absolute())
        results = measured(bench, args.only, max(1, args.noise))
    print(f"\n{table(results)}\n\n{summary(results)}")
    if args.write:
        write(results)


if __name__ == "__main__":
    main()
