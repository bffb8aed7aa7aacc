"""Compare algorithms of collectives, and what libraries make of them.

    python -m experiments.outer.collectives measure
    python -m experiments.outer.collectives broadcast
    python -m experiments.outer.collectives predict --ranks 16,64 --latency 5e-6 --bandwidth 10e9
    python -m experiments.outer.collectives point_to_point
    python -m experiments.outer.collectives profiles
    python -m experiments.outer.collectives ladder

Each has --help. README.md says what they gave.
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
            "time all algorithms on this machine, fit the link, and mark crossovers",
            comparing.add_measure_options,
            comparing.measure,
        ),
        "broadcast": (
            "the same for broadcasts alone",
            comparing.add_broadcast_options,
            comparing.measure,
        ),
        "predict": (
            "closed forms and crossovers over a link that you name; nothing is measured",
            comparing.add_predict_options,
            comparing.predict,
        ),
        "point_to_point": (
            "latency and bandwidth between two processes, staged against direct",
            point_to_point.add_command_options,
            point_to_point.run,
        ),
        "profiles": (
            "what libraries make of an all-reduce: models with their sources, not measurements",
            profiles.add_options,
            profiles.run,
        ),
        "ladder": (
            "S-Caffe's blocking and overlapped designs, simulated beside a measured run",
            ladder.add_command_options,
            ladder.run,
        ),
    }
)
"""By name: what it does, its options, and how it runs."""


def main(words: Sequence[str] | None = None) -> int:
    """Run a command."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.outer.collectives",
        description="Compare algorithms of collectives, and what libraries make of them.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (what, add_options, _) in COMMANDS.items():
        add_options(commands.add_parser(name, help=what, description=what))
    args = parser.parse_args(words)
    COMMANDS[args.command][2](args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
