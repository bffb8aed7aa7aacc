"""Plan layouts and run them: how far are step time and memory from what was planned?

    python -m experiments.plan [--write] [--steps N] [--only NAME] [--noise N] [--out DIR]

Every layout is planned from layers that are measured here, with prices that a preflight measured on
as many ranks, and is trained through torchrun, one thread a rank, between two plans. The first
layout of each model is run `--noise` times. A layout that fails is told in the table.
"""

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Final

import torch

from experiments.plan.figures import done, draw, errors, named, noise, summary, table
from experiments.plan.layouts import MODELS, layouts
from experiments.plan.running import FailedRunError, Result, prices, try_layout

_HERE: Final = Path(__file__).parent
_MARKS: Final = ("<!-- figures -->", "<!-- end -->")


def measured(only: str, steps: int, num_noise: int, out: Path) -> list[Result]:
    """Plan and run the layouts whose name begins so; print each as it comes."""
    out.mkdir(parents=True, exist_ok=True)
    for stale in out.glob("*.yaml"):  # of an earlier time, maybe of other code
        stale.unlink()
    torch.set_num_threads(1)
    chosen = layouts(only)
    files = {}
    for ranks in sorted({each.ranks for each in chosen}):
        try:
            files[ranks] = prices(out, ranks)
        except FailedRunError as error:
            print(f"prices of {ranks} ranks: {error}", flush=True)
    repeated = {next((e.name for e in chosen if e.name.startswith(m)), "") for m in MODELS}
    results = []
    for layout in chosen:
        if layout.ranks not in files:
            results.append(Result(layout.name, failed="no prices were measured"))
            continue
        num_runs = num_noise if layout.name in repeated else 1
        results.append(try_layout(layout, files[layout.ranks], steps, num_runs, out))
        print(table(results[-1:]).splitlines()[-1], results[-1].parts, flush=True)
    return results


def write(results: list[Result]) -> None:
    """Write figures.json, plan.svg, and the table of README.md."""
    found, floor = errors([each for each in results if not each.crowded]), noise(results)
    told = {
        "results": [asdict(each) for each in results],
        "a_core_for_each_rank": found and named(found),
        "noise": floor and named(floor),
    }
    (_HERE / "figures.json").write_text(json.dumps(told, indent=1) + "\n", "utf-8")
    if done(results):
        (_HERE / "plan.svg").write_text(draw(results), "utf-8")
    page = _HERE / "README.md"
    before, _, rest = page.read_text("utf-8").partition(_MARKS[0])
    behind = rest.partition(_MARKS[1])[2]
    body = f"{_MARKS[0]}\n```text\n{summary(results)}\n\n{table(results)}\n```\n{_MARKS[1]}"
    page.write_text(before + body + behind, "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.plan")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--steps", type=int, default=20, help="behind twelve that do not count")
    parser.add_argument("--only", default="")
    parser.add_argument("--noise", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = (args.out or Path(folder)).absolute()
        results = measured(args.only, args.steps, max(1, args.noise), out)
    print(f"\n{table(results)}\n\n{summary(results)}")
    if args.write:
        write(results)


if __name__ == "__main__":
    main()
