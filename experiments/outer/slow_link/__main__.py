"""Train over a slow link with several methods and layouts; print a table.

python -m experiments.outer.slow_link --seconds 120 --out build/slow_link
python -m experiments.outer.slow_link --rows plain,diloco --seconds 60
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from experiments.outer.slow_link.report import table
from experiments.outer.slow_link.rows import ROWS
from experiments.outer.slow_link.running import RowError, RowResult, run_row
from experiments.two_hosts import LackingError, TwoHosts, measure

_FIRST_PORT = 29_500


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.outer.slow_link")
    parser.add_argument("--seconds", type=float, default=120.0, help="seconds of training per row")
    parser.add_argument("--rate", type=float, default=100e6, help="bits per second each way")
    parser.add_argument("--delay", type=float, default=0.005, help="seconds each way")
    parser.add_argument("--rows", default=",".join(ROWS), help="comma-separated names")
    parser.add_argument("--out", type=Path, help="folder for figures.json and table.md")
    parser.add_argument("overrides", nargs="*", help="settings of all rows, NAME=VALUE")
    args = parser.parse_args(words)
    unknown = set(args.rows.split(",")) - set(ROWS)
    if unknown:
        parser.error(f"--rows: expected some of {', '.join(ROWS)}, got {', '.join(unknown)}")
    return args


def main() -> None:
    """Measure all rows."""
    args = parsed()
    try:
        found = measured(args)
    except LackingError as error:
        sys.exit(f"slow link: this machine does not allow two hosts ({error})")
    print(table(found))


def measured(args: argparse.Namespace) -> dict[str, RowResult]:
    """Run the rows one after the other, each on a new pair of hosts."""
    found: dict[str, RowResult] = {}
    accuracy = ""
    with tempfile.TemporaryDirectory(prefix="slow_link_") as folder:
        for number, name in enumerate(args.rows.split(",")):
            with TwoHosts(args.rate, args.delay) as pair:
                if not accuracy:
                    accuracy = measure(pair).text()
                    print(accuracy, flush=True)
                try:
                    found[name] = run_row(
                        pair,
                        ROWS[name],
                        args.seconds,
                        Path(folder),
                        _FIRST_PORT + number,
                        args.overrides,
                    )
                except RowError as error:
                    sys.exit(f"slow link: row {name} failed: {error}")
            each = found[name]
            print(
                f"{name}: {each.steps} steps in {each.seconds:.0f} s, "
                f"{each.step_bytes / 1e6:.3f} MB a step, {each.lost_packets} packets lost, "
                f"99 of 100 at most {1e3 * each.late_s:.1f} ms late",
                flush=True,
            )
            if args.out is not None:
                write(args.out, found, accuracy)
    return found


def write(out: Path, found: dict[str, RowResult], accuracy: str) -> None:
    """Write the results and the table."""
    out.mkdir(parents=True, exist_ok=True)
    figures = {name: each._asdict() for name, each in found.items()}
    (out / "figures.json").write_text(json.dumps(figures) + "\n")
    (out / "table.md").write_text(f"{accuracy}\n\n{table(found)}\n")


if __name__ == "__main__":
    main()
