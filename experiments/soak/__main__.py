"""Inject random faults into runs, and compare their results with runs without faults.

    python -m experiments.soak faults=100 seed=0
    python -m experiments.soak faults=100 seed=0 only=37       # that fault alone, in a new run
    python -m experiments.soak faults=100 seed=0 first=50      # the runs from that fault on

faults: number of faults; seed: seed of the draw; ranks: largest number of ranks; hosts=false: no
runs on two hosts; out: result file in Markdown, with a JSON file next to it; keep=true: keep the
files of failing runs, whose folder is printed.
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

from experiments.soak.execution import Execution, FailedCheckError, RunEnd
from experiments.soak.hosts import OwnServer, SimulatedHosts, this_machine
from experiments.soak.own_disks import make_own_disks
from experiments.soak.plan import Run, draw
from experiments.soak.results import Results
from experiments.two_hosts import LackingError

DISK_SIZE = "96m"


@dataclass(frozen=True)
class Options:
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


def parsed(words: Sequence[str]) -> Options:
    """Parse NAME=VALUE arguments."""
    known = get_type_hints(Options)
    given: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if name not in known or not equals:
            sys.exit(
                f"soak: expected words like {', '.join(f'{n}=...' for n in known)}, got {word}"
            )
        given[name] = value == "true" if known[name] is bool else known[name](value)
    return replace(Options(), **given)


def chosen(options: Options) -> list[Run]:
    """Return the runs of the soak test; with `only`, one run with one fault."""
    runs = draw(options.seed, options.faults, options.ranks, options.hosts)
    if options.only < 0:
        return [run for run in runs if run.faults[0].number >= options.first]
    return [
        replace(run, faults=(fault,))
        for run in runs
        for fault in run.faults
        if fault.number == options.only
    ]


def execute(run: Run, execution: Execution, results: Results) -> None:
    """Inject the faults of a run, compare its result, and record the outcome."""
    injected = 0
    try:
        for verdict in execution.verdicts():
            results.add(verdict)
            injected += 1
        results.add_end(execution.end())
        execution.clean()
    except FailedCheckError as problem:
        why = f"the run could not continue: {problem}"
        if injected < len(run.faults):
            results.leave_out(run.faults[injected:], why[:300])
        else:
            results.add_end(RunEnd(run.number, problems=[why]))
    finally:
        execution.close()


def main() -> None:
    """Run the command; exit code 1 if a check failed."""
    options = parsed(sys.argv[1:])
    # SIGTERM to the soak must also end its ranks.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    work = Path(tempfile.mkdtemp(prefix="soak_"))
    disk = work / "disk"
    disk.mkdir()
    refused = make_own_disks(disk, DISK_SIZE)
    results = Results(sys.argv[1:], Path(options.out) if options.out else None, refused)
    with ExitStack() as stack:
        server = OwnServer()
        stack.callback(server.close)
        here = this_machine(server, is_private=refused is None)
        for run in chosen(options):
            folder = work / f"run_{run.number}"
            try:
                hosts = SimulatedHosts(work / f"hosts_{run.number}") if run.on_hosts else here
            except LackingError as error:
                results.leave_out(run.faults, f"no two hosts here: {error}")
                continue
            execution = Execution(
                run, hosts, folder, disk, pace_s=options.pace_s, can_fill=refused is None
            )
            execute(run, execution, results)
            hosts.close()
    if options.keep:
        print(f"output of the ranks: {work}")
    else:
        # The small disk is unmounted when this process ends; its folder cannot be removed earlier.
        shutil.rmtree(work, ignore_errors=True)
    sys.exit(results.exit_code)


if __name__ == "__main__":
    main()
