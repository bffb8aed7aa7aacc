"""Step time with and without overlap of the reductions, over the same slow link in one run.

python -m experiments.outer.slow_link.overlap --rounds 10 --out build/overlap

Two pipelines of two stages, one on each host. Each bucket of gradients crosses the link.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from experiments.outer.slow_link.overlap_ranks import Facts, Step
from experiments.two_hosts import LackingError, TwoHosts, start_ranks

_PLACES = ((0, 1), (2, 3))
_LIMIT_S = 1200.0


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.outer.slow_link.overlap")
    parser.add_argument("--rounds", type=int, default=10, help="steps of each")
    parser.add_argument("--rate", type=float, default=100e6, help="bits a second each way")
    parser.add_argument("--delay", type=float, default=0.005, help="seconds each way")
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--samples", type=int, default=128, help="of the global batch")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--bucket-bytes", type=float, default=250e3)
    parser.add_argument("--out", type=Path, help="folder for the figures and two timelines")
    return parser.parse_args(words)


def main() -> None:
    """Measure and print the table."""
    args = parsed()
    try:
        with tempfile.TemporaryDirectory(prefix="overlap_") as folder:
            steps = measured(args, Path(folder) if args.out is None else args.out)
    except LackingError as error:
        sys.exit(f"overlap: this machine does not allow two hosts ({error})")
    print(table(steps, bucket_s(args.bucket_bytes, args.rate, args.delay)))


def measured(args: argparse.Namespace, out: Path) -> list[Step]:
    """Run both on two hosts; return their steps."""
    out.mkdir(parents=True, exist_ok=True)
    facts = Facts(
        rounds=args.rounds,
        microbatches=args.microbatches,
        samples=args.samples,
        width=args.width,
        seq_len=args.seq_len,
        bucket_bytes=args.bucket_bytes,
        pictures=str(out.absolute()),
    )
    words = ["-m", "experiments.outer.slow_link.overlap_ranks", json.dumps(facts._asdict())]
    with (
        tempfile.TemporaryDirectory(prefix="overlap_") as logs,
        TwoHosts(args.rate, args.delay) as pair,
    ):
        ranks = start_ranks(pair, _PLACES, words, folder=out, logs=Path(logs))
        try:
            codes = ranks.wait(_LIMIT_S)
        finally:
            ranks.end()
        said = ranks.outputs
    if any(codes):
        sys.exit("overlap: ranks failed:\n" + "\n".join(said))
    steps = [Step(**json.loads(line)) for line in said[0].splitlines() if line.startswith("{")]
    (out / "overlap.json").write_text(json.dumps([each._asdict() for each in steps]) + "\n")
    return steps


def table(steps: Sequence[Step], last_bucket_s: float) -> str:
    """Return medians of the steps with and without overlap, one below the other.

    `last_bucket_s`: what a bucket takes over the link alone, by its bytes and the link's delay.
    """
    lines = [
        "| overlap | steps | step, s | ± | compute, s | of it the drain, s | a rank reduces, s "
        "| behind compute, s | beyond one bucket's own time, of the step |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for overlap in (True, False):
        own = [step for step in steps if step.overlap is overlap]
        times_s = sorted(step.step_s for step in own)
        quarter = len(times_s) // 4
        figures = [
            statistics.median(times_s),
            (times_s[-1 - quarter] - times_s[quarter]) / 2,
            statistics.median(step.compute_s for step in own),
            statistics.median(step.drain_s for step in own),
            statistics.median(step.reduction_s for step in own),
            statistics.median(step.step_s - step.compute_s for step in own),
        ]
        beyond = [(step.step_s - step.compute_s - last_bucket_s) / step.step_s for step in own]
        cells = ["yes" if overlap else "no", str(len(own)), *(f"{each:.3f}" for each in figures)]
        lines.append(f"| {' | '.join(cells)} | {statistics.median(beyond):.1%} |")
    return "\n".join(lines)


def bucket_s(bucket_bytes: float, rate: float, delay_s: float) -> float:
    """Return what an allreduce of a bucket by two ranks takes: a ring of one step each way."""
    return 8 * bucket_bytes / rate + 2 * delay_s


if __name__ == "__main__":
    main()
