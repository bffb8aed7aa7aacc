"""Compare algorithms of collectives, and models of the all-reduce of libraries.

    python -m experiments.outer.collectives measure
    python -m experiments.outer.collectives predict --ranks 16,64 --latency 5e-6 --bandwidth 10e9
    python -m experiments.outer.collectives point_to_point
    python -m experiments.outer.collectives profiles
    python -m experiments.outer.collectives ladder

Each has --help. README.md has the results.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from experiments.outer.collectives import comparing, ladder, point_to_point, profiles

Command = tuple[
    str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], None]
]
COMMANDS: Final[Mapping[str, Command]] = MappingProxyType(
    {
        "measure": (
            "time all algorithms on this machine and fit the link",
            comparing.add_measure_options,
            comparing.measure,
        ),
        "predict": (
            "closed forms and crossovers over a given link; nothing is measured",
            comparing.add_predict_options,
            comparing.predict,
        ),
        "point_to_point": (
            "latency and bandwidth between two processes, staged and direct",
            point_to_point.add_options,
            point_to_point.run,
        ),
        "profiles": (
            "models of the all-reduce of seven libraries; nothing is measured",
            profiles.add_options,
            profiles.run,
        ),
        "ladder": (
            "S-Caffe's blocking and overlapped designs, simulated and measured",
            ladder.add_command_options,
            ladder.run,
        ),
    }
)
"""Description, options and function of each command."""


def main(words: Sequence[str] | None = None) -> int:
    """Run a command."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.outer.collectives",
        description="Compare algorithms of collectives.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (what, add_options, _) in COMMANDS.items():
        add_options(commands.add_parser(name, help=what, description=what))
    args = parser.parse_args(words)
    COMMANDS[args.command][2](args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
