"""Inject random faults into runs, and compare their results with runs without faults.

    python -m experiments.soak faults=100 seed=0
    python -m experiments.soak faults=100 seed=0 only=37       # that fault alone, in a new run
    python -m experiments.soak faults=100 seed=0 first=50      # the runs from that fault on

faults: how many; seed: of the draw; ranks: the most of a run; hosts=false: no runs on two hosts;
out: file of results, in Markdown, beside which the same stands as JSON; keep=true: what failing
runs wrote stays in the folder that is told.
"""

import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from experiments.soak.execution import Problem, RunEnd, RunExecution
from experiments.soak.hosts import NetworkedHosts, OwnServer, this_machine
from experiments.soak.own_disks import make_own_disks
from experiments.soak.plan import Run, draw
from experiments.soak.results import Results
from experiments.two_hosts import LackingError

DISK_SIZE = "96m"


@dataclass(frozen=True)
class Wishes:
    """Options of the command line."""

    faults: int = 100
    seed: int = 0
    first: int = 0
    only: int = -1
    ranks: int = 8
    hosts: bool = True
    pace_s: float = 0.005
    out: str = ""
    keep: bool = False


def parsed(words: Sequence[str]) -> Wishes:
    """Parse NAME=VALUE arguments."""
    known = get_type_hints(Wishes)
    given: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if name not in known or not equals:
            sys.exit(
                f"soak: expected words like {', '.join(f'{n}=...' for n in known)}, got {word}"
            )
        given[name] = value == "true" if known[name] is bool else known[name](value)
    return replace(Wishes(), **given)


def chosen(wishes: Wishes) -> list[Run]:
    """Return the runs of the soak test; with `only`, one run with one fault."""
    runs = draw(wishes.seed, wishes.faults, wishes.ranks, wishes.hosts)
    if wishes.only < 0:
        return [run for run in runs if run.faults[0].number >= wishes.first]
    return [
        replace(run, faults=(fault,))
        for run in runs
        for fault in run.faults
        if fault.number == wishes.only
    ]


def live_through(run: Run, life: RunExecution, results: Results) -> None:
    """Inject the faults of a run, compare its result, and record the outcome."""
    struck = 0
    try:
        for verdict in life.verdicts():
            results.add(verdict)
            struck += 1
        results.add_end(life.end())
        life.clean()
    except Problem as problem:
        why = f"the run could not go on: {problem}"
        if struck < len(run.faults):
            results.leave_out(run.faults[struck:], why[:300])
        else:
            results.add_end(RunEnd(run.number, problems=[why]))
    finally:
        life.close()


def main() -> None:
    """Run the command; exit code 1 if a check failed."""
    wishes = parsed(sys.argv[1:])
    # Whoever ends the soak ends its ranks, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    work = Path(tempfile.mkdtemp(prefix="soak_"))
    disk = work / "disk"
    disk.mkdir()
    refused = make_own_disks(disk, DISK_SIZE)
    results = Results(sys.argv[1:], Path(wishes.out) if wishes.out else None, refused)
    with ExitStack() as stack:
        server = OwnServer()
        stack.callback(server.close)
        here = this_machine(server, is_private=refused is None)
        for run in chosen(wishes):
            folder = work / f"run_{run.number}"
            try:
                ground = NetworkedHosts(work / f"hosts_{run.number}") if run.on_hosts else here
            except LackingError as error:
                results.leave_out(run.faults, f"no two hosts here: {error}")
                continue
            life = RunExecution(
                run, ground, folder, disk, pace_s=wishes.pace_s, can_fill=refused is None
            )
            live_through(run, life, results)
            ground.close()
    if wishes.keep:
        print(f"what the ranks said is in {work}")
    else:
        # The own disk leaves with this process; its folder cannot before.
        shutil.rmtree(work, ignore_errors=True)
    sys.exit(results.exit_code)


if __name__ == "__main__":
    main()
