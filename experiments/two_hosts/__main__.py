"""Measure a link between two hosts, or run a command on both.

    python -m experiments.two_hosts --rate 100e6 --delay 0.005 [--ranks N -- WORDS...]

Without WORDS, the link is measured. With WORDS, `python WORDS` runs as N ranks on each host, with
the environment that torchrun would set; the output of rank 0 and the traffic over the link are
printed.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from experiments.two_hosts import LackingError, TwoHosts, measure, start_ranks


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.two_hosts", description=__doc__)
    parser.add_argument("--rate", type=float, default=100e6, help="bits a second each way")
    parser.add_argument("--delay", type=float, default=0.005, help="seconds each way")
    parser.add_argument("--ranks", type=int, default=1, help="on each host")
    parser.add_argument("words", nargs="*", help="words of the command, after --")
    args = parser.parse_args(words)
    if args.rate <= 0 or args.delay < 0 or args.ranks < 1:
        parser.error("expected --rate above 0, --delay 0 or more, --ranks 1 or more")
    return args


def main() -> None:
    """Run the command."""
    args = parsed()
    try:
        with TwoHosts(args.rate, args.delay) as pair:
            if args.words:
                sys.exit(run(pair, args.ranks, args.words))
            print(measure(pair).text())
    except LackingError as error:
        sys.exit(f"two hosts: this machine does not allow them ({error})")


def run(pair: TwoHosts, per_host: int, words: list[str]) -> int:
    """Run a command as ranks on both hosts; return the first exit code that is not 0."""
    places = [list(range(per_host)), list(range(per_host, 2 * per_host))]
    with tempfile.TemporaryDirectory(prefix="two_hosts_") as folder:
        ranks = start_ranks(pair, places, words, folder=Path.cwd(), logs=Path(folder))
        shown = 0
        try:
            while None in ranks.codes or shown < len(ranks.outputs[0]):
                text = ranks.outputs[0]
                print(text[shown:], end="", flush=True)
                shown = len(text)
                time.sleep(0.2)
        finally:
            ranks.end()
        codes = ranks.wait(10.0)
    for name, way in zip(("there", "back"), pair.link.counts(), strict=True):
        print(f"{name}: {way.passed_bytes / 1e6:.2f} MB, {way.lost_packets} packets lost")
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    main()
