"""Plan layouts and run them: compare planned and measured step time and memory.

    python -m experiments.plan [--write] [--steps N] [--only NAME] [--noise N] [--out DIR]
    python -m experiments.plan --device cuda ...    # layouts of one rank, on an accelerator
    python -m experiments.plan --read FILE --write  # of an earlier time, its DIR/results.json

Every layout is planned from layers that are measured here, with prices that a preflight measured on
as many ranks, and is trained through torchrun, CPUs with one thread a rank, between two plans. The
first layout of each model is run `--noise` times. A layout that fails is told in the table.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Final

import torch

from experiments.plan.figures import done, draw, errors, named, noise, summary, table
from experiments.plan.layouts import layouts
from experiments.plan.running import (
    Bench,
    FailedRunError,
    Result,
    load,
    prices,
    save,
    try_layout,
)

_HERE: Final = Path(__file__).parent


def measured(bench: Bench, only: str, num_noise: int) -> list[Result]:
    """Plan and run the layouts with a given name prefix; print each result."""
    bench.out.mkdir(parents=True, exist_ok=True)
    for stale in bench.out.glob("*.yaml"):  # of an earlier time, maybe of other code
        stale.unlink()
    chosen = layouts(only, bench.device)
    files = {}
    for ranks, precision in sorted({(each.ranks, each.precision) for each in chosen}):
        try:
            files[ranks, precision] = prices(bench, ranks, precision)
        except FailedRunError as error:
            print(f"prices of {ranks} ranks, {precision}: {error}", flush=True)
    repeated = {each.model: each.name for each in reversed(chosen)}
    results = []
    for layout in chosen:
        file = files.get((layout.ranks, layout.precision))
        if file is None:
            results.append(Result(layout.name, failed="no prices were measured"))
            continue
        num_runs = num_noise if layout.name == repeated[layout.model] else 1
        results.append(try_layout(bench, layout, file, num_runs))
        print(table(results[-1:]).splitlines()[-1], results[-1].parts, flush=True)
        save(bench.out / "results.json", bench.device, results)
    return results


def write(results: list[Result], device: str, folder: Path = _HERE) -> None:
    """Write the results for CPUs or an accelerator, the plot, and the table of README.md."""
    stem = "cpu" if device == "cpu" else "accelerator"
    found, floor = errors([each for each in results if not each.crowded]), noise(results)
    told = {"not_crowded": found and named(found), "noise": floor and named(floor)}
    save(folder / f"{stem}.json", device, results, **told)
    if done(results):
        (folder / f"{stem}.svg").write_text(draw(results), "utf-8")
    page = folder / "README.md"
    begin, end = f"<!-- {stem} -->", f"<!-- end of {stem} -->"
    before, _, rest = page.read_text("utf-8").partition(begin)
    behind = rest.partition(end)[2]
    body = f"{begin}\n```text\n{summary(results)}\n\n{table(results)}\n```\n{end}"
    page.write_text(before + body + behind, "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.plan")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--device", default="cpu", help="an accelerator: layouts of one rank")
    parser.add_argument("--steps", type=int, default=20, help="behind some that do not count")
    parser.add_argument("--only", default="")
    parser.add_argument("--noise", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--read", type=Path, default=None, help="results.json; nothing is run")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = (args.out or Path(folder)).absolute()
        bench = Bench(args.device, args.steps, out)
        torch.set_num_threads(1)
        device = args.device
        if args.read:
            device, results = load(args.read)
        else:
            results = measured(bench, args.only, max(1, args.noise))
    print(f"\n{table(results)}\n\n{summary(results)}")
    if args.write:
        write(results, device)


if __name__ == "__main__":
    main()
