"""The commands `measure` and `predict`: algorithms as measured here, and by closed forms."""

import argparse
import json
from pathlib import Path
from typing import Final

from experiments.outer.collectives import measuring
from experiments.outer.collectives.costs import FORMS, Link
from experiments.outer.collectives.figures import (
    Measurement,
    advice,
    markdown,
    size_text,
    table,
)
from experiments.outer.collectives.lists import names_of, numbers
from experiments.outer.collectives.running import run_ranks
from experiments.outer.collectives.tuning import crossovers, predicted

_MODULE: Final = "experiments.outer.collectives.measuring"
_LEAST, _MOST = 256, 256 * 1024**2


def add_measure_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `measure`."""
    measuring.add_options(parser)
    parser.add_argument("--ranks", type=numbers(2), default=[2, 4], metavar="N,...")
    parser.add_argument("--backend", default="gloo", help="gloo (default), mpi, nccl")
    parser.add_argument("--limit-s", type=float, default=600.0, help="for each number of ranks")
    parser.add_argument("--out", type=Path, help="folder for times.json and table.md")


def measure(args: argparse.Namespace) -> None:
    """Time each number of ranks in its own processes; print and store the results."""
    found = []
    for ranks in args.ranks:
        print(f"collectives: {ranks} ranks", flush=True)
        words = measuring.as_words(args)
        read = run_ranks(_MODULE, ranks, words, backend=args.backend, limit_s=args.limit_s)
        found.append(Measurement.of(read))
    text = f"{table(found)}\n\n{advice(found)}\n"
    print(text)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        kept = json.dumps([each.as_json() for each in found], indent=1)
        (args.out / "times.json").write_text(kept + "\n", encoding="utf-8")
        (args.out / "table.md").write_text(text, encoding="utf-8")


def add_predict_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `predict`."""
    add = parser.add_argument
    add("--collectives", type=names_of(FORMS), default=["all_reduce", "broadcast"])
    add("--ranks", type=numbers(2), default=[16, 64], metavar="N,...")
    add("--group", type=int, default=8, help="ranks per host, for algorithms with two levels")
    add("--latency", type=float, default=5e-6, help="alpha: seconds of an empty message")
    add("--bandwidth", type=float, default=10e9, help="1 / beta: bytes per second")
    add("--adding", type=float, default=0.0, help="gamma: seconds to add one byte")


def predict(args: argparse.Namespace) -> None:
    """Print the closed forms for each size, and the sizes from which another algorithm is best."""
    link = Link(args.latency, 1 / args.bandwidth, args.adding)
    sizes = [_LEAST * 4**power for power in range(11)]
    for collective in args.collectives:
        for ranks in args.ranks:
            rows = []
            for name in FORMS[collective]:
                took = [predicted(collective, name, link, ranks, b, args.group) for b in sizes]
                rows.append([name, *(f"{1e3 * each.seconds:.3g}" for each in took)])
            print(f"\n{collective} on {ranks} ranks, {args.group} a host: ms by closed form\n")
            print(markdown(["algorithm", *map(size_text, sizes)], rows))
            for cross in crossovers(collective, link, ranks, (_LEAST, _MOST), g=args.group):
                print(f"- from {size_text(cross.num_bytes)} on: {cross.after}")
