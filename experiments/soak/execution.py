"""Execution of one run with its faults: inject, check, restart, and compare the final result."""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from experiments.soak.hosts import Process, RunHosts
from experiments.soak.injection import (
    ActiveRun,
    InjectedFault,
    corrupt,
    forget_copies,
    inject,
    patience,
    undo_fault,
)
from experiments.soak.plan import BATCH_SIZE, Fault, Kind, Layout, Run
from experiments.soak.processes import ProcessInfo, families

NAMED_S: Final = 10.0
"""Seconds within which each survivor must name a fault on an idle machine."""
ENDED_S: Final = 30.0
"""Seconds within which all ranks must have ended on an idle machine."""
LEFT_S: Final = 12.0
"""Seconds within which no process may be left."""
EXACT: Final = 1e-10
FORCED: Final = "its watcher ends it now"
ENDED_NOW: Final = "the process ends now"
"""Messages of a rank that is stuck in torch and is therefore killed within `ENDED_S`."""
_STOPPED_CODE: Final = 75
_START_S: Final = 120.0
_LAST_STEPS: Final = 6
_LOOK_S: Final = 0.05
_COMMON: Final = (
    "model=own",
    "model._target_=experiments.soak.model.build",
    "data=synthetic_vectors",
    f"train.batch_size={BATCH_SIZE}",
    "train.steps=100000",
    "train.validate_every=0",
    "lr.warmup_steps=5",
    "pipeline.partition=uniform",
    "checkpoint.every=4",
)


@dataclass
class Verdict:
    """Outcome of a fault; `problems` is empty if all checks passed."""

    fault: Fault
    form: str = ""
    step: int = 0  # last finished step at the time of the fault
    resumed: int = 0  # step from which the next start continued
    named_s: dict[int, float] = field(default_factory=dict)  # by surviving rank
    ended_s: float = 0.0
    num_forced: int = 0  # survivors ended by their watchers
    load: float = 1.0  # runnable processes per processor
    codes: list[int | None] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of the result file."""
        fault = asdict(self.fault)
        layouts = {"layout": str(self.fault.layout), "after": str(self.fault.after)}
        found = {name: value for name, value in asdict(self).items() if name != "fault"}
        return {**fault, "kind": self.fault.kind.value, **layouts, **found}


@dataclass
class RunEnd:
    """Comparison of a run's result with that of a run without faults."""

    run: int
    exact: bool = False  # bit-identical, because the layout stayed the same
    steps: int = 0
    largest_loss: float | None = None
    largest_state: float | None = None
    tensors: int = 0
    problems: list[str] = field(default_factory=list)


class FailedCheckError(Exception):
    """A check of a run failed, and the run cannot continue."""


class Execution:
    """A run in progress; `work` is its working folder, `disk` the location of its run folder."""

    def __init__(
        self, run: Run, hosts: RunHosts, work: Path, disk: Path, *, pace_s: float, can_fill: bool
    ) -> None:
        self._run, self._hosts, self._work = run, hosts, work
        self._pace_s, self._can_fill = pace_s, can_fill
        self._folder = disk / f"run_{run.number}"
        self._whole = disk / f"whole_{run.number}"
        self._lock = self._folder / "LOCK"
        self._order = work / "order.json"
        self._ranks: list[Process] = []
        self._starts, self._stop_at = 0, 0
        work.mkdir(parents=True)

    def verdicts(self) -> Iterator[Verdict]:
        """Inject the faults one after another; yield verdicts until the run cannot continue."""
        first = self._run.faults[0].layout
        self._start(first)
        for fault in self._run.faults:
            verdict = Verdict(fault)
            try:
                self._inject(fault, verdict)
                yield verdict
            except FailedCheckError as problem:
                verdict.problems.append(str(problem))
                yield verdict
                raise

    def _inject(self, fault: Fault, verdict: Verdict) -> None:
        began = self._resumed()
        checkpoints = 2 if fault.kind is Kind.CORRUPTION else 0
        self._await(
            lambda: self._step() >= began + fault.steps and len(self._saved()) >= checkpoints,
            f"step {began + fault.steps}",
        )
        time.sleep(fault.pause_s)
        family = families(rank.process for rank in self._ranks)
        live = ActiveRun(self._hosts, self._ranks, self._folder, self._order, self._can_fill)
        verdict.step, verdict.load = self._step(), patience()
        kept = max((step_of(path) for path in self._saved()), default=0)
        try:
            injected = inject(fault, live)
            verdict.form = injected.form
            self._judge(injected, verdict)
        except TimeoutError as error:
            verdict.problems.append(str(error))
        finally:
            self.close()
            undo_fault(live)
        self._look_for_left(family, verdict)
        expected = ""
        if fault.kind is Kind.CORRUPTION:
            newest = max(self._saved())
            kept, expected = min(step_of(path) for path in self._saved()), newest.name
            verdict.form = f"{corrupt(fault.way, newest, fault.victim)} of {newest.name}"
            forget_copies(place.shared_memory for place in self._hosts.places)
        is_last = fault is self._run.faults[-1]
        self._stop_at = self._step() + _LAST_STEPS
        self._start(fault.after, self._stop_at if is_last else None)
        verdict.resumed = self._resumed()
        said = self._ranks[0].output
        if expected and not re.search(rf"WARNING.*{expected}", said):
            verdict.problems.append(f"the corrupted {expected} is not named: {said}")
        if verdict.resumed < kept:
            verdict.problems.append(
                f"continued from step {verdict.resumed}, but a checkpoint of {kept} exists: {said}"
            )

    def _judge(self, injected: InjectedFault, verdict: Verdict) -> None:
        """Wait for the required consequences; record their times and those that are missing."""
        deadline_s = injected.since_s + 2 * ENDED_S * patience()
        ended_s: dict[int, float] = {}
        while time.time() < deadline_s:
            verdict.load = max(verdict.load, patience())
            for rank, process in enumerate(self._ranks):
                said = process.output
                if (
                    rank not in verdict.named_s
                    and rank in injected.names
                    and all(re.search(pattern, said) for pattern in injected.names[rank])
                ):
                    verdict.named_s[rank] = round(time.time() - injected.since_s, 2)
                if rank not in ended_s and process.code is not None:
                    ended_s[rank] = time.time() - injected.since_s
            if len(ended_s) == len(self._ranks):
                break
            time.sleep(_LOOK_S)
        verdict.codes = [process.code for process in self._ranks]
        verdict.ended_s = round(max(ended_s.values(), default=0.0), 2)
        self._hold_against(injected, verdict)

    def _hold_against(self, injected: InjectedFault, verdict: Verdict) -> None:
        problems = verdict.problems
        for rank, process in enumerate(self._ranks):
            said = process.output
            right = injected.codes.get(rank, frozenset({1}))
            if FORCED in said and rank not in injected.codes:  # a wait in torch did not fail
                right |= {-signal.SIGKILL}
                verdict.num_forced += 1
            if process.code not in right:
                problems.append(
                    f"rank {rank} ended with {process.code}, expected {sorted(right)}: {said}"
                )
            if rank in injected.names:
                named_s = verdict.named_s.get(rank)
                if named_s is None:
                    problems.append(f"rank {rank} did not print {injected.names[rank]}: {said}")
                elif not re.search(injected.remedy, said):
                    problems.append(f"rank {rank} did not print {injected.remedy}: {said}")
                elif named_s > NAMED_S * verdict.load:
                    problems.append(f"rank {rank} named it after {named_s} s only")
            if "Traceback" in said and "gpipe_hpc/" in said.partition("Traceback")[2]:
                problems.append(f"rank {rank} shows a traceback of gpipe_hpc: {said}")
        if verdict.ended_s > ENDED_S * verdict.load:
            problems.append(f"all had ended after {verdict.ended_s} s only")

    def _look_for_left(self, family: set[ProcessInfo], verdict: Verdict) -> None:
        """Record leftovers of the ranks: processes, shared memory, the lock of the folder."""
        deadline_s = time.monotonic() + LEFT_S * verdict.load
        while any(each.lives for each in family) and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
        for each in family:
            if each.lives:
                verdict.problems.append(f"process {each.pid} is left: {each.words()}")
                each.signal(signal.SIGKILL)
        verdict.problems += self._left_in_memory(has_copies=True)
        by_itself = verdict.codes[:1] in ([1], [_STOPPED_CODE])
        if by_itself and ENDED_NOW not in self._ranks[0].output and self._lock.exists():
            verdict.problems.append("rank 0 ended by itself and left its LOCK")

    def _left_in_memory(self, *, has_copies: bool) -> list[str]:
        """Return leftover files in shared memory, without in-memory checkpoints of this run."""
        run = json.loads((self._folder / "run.json").read_text())["id"]
        copies = f"gpipe_hpc_{os.getuid()}/{run}"
        kept = has_copies and "checkpoint.neighbour_every=0" not in self._run.words
        found = []
        for place in self._hosts.places:
            if place.shared_memory.exists():  # otherwise the host has no power
                found += [
                    str(path.relative_to(place.shared_memory))
                    for path in place.shared_memory.glob("**/*" if place.is_private else copies)
                    if not path.is_dir()
                ]
        if kept:
            found = [each for each in found if not each.startswith(copies)]
        return [f"{each} is left in shared memory" for each in found]

    def end(self) -> RunEnd:
        """Let the run finish; compare it with one without faults."""
        end = RunEnd(self._run.number)
        self._finish()
        end.problems += self._left_in_memory(has_copies=False)
        for left in [self._lock, *self._folder.glob("checkpoints/*.partial")]:
            if left.exists():
                end.problems.append(f"{left.name} is left in the run folder")
        one = Layout(1, 1, 1, "gpipe")
        layout = self._run.faults[0].layout if self._run.keeps_layout else one
        self._start(layout, self._stop_at, self._whole)
        self._finish()
        ours, theirs = _losses(self._folder), _losses(self._whole)
        end.steps, end.exact = len(theirs), self._run.keeps_layout
        limit = 0.0 if self._run.keeps_layout else EXACT
        if ours.keys() != theirs.keys() or not theirs:
            end.problems.append(f"steps {sorted(ours)} were expected to be {sorted(theirs)}")
        else:
            end.largest_loss = max(abs(ours[step] - theirs[step]) for step in theirs)
            if not end.largest_loss <= limit:
                end.problems.append(f"losses differ by up to {end.largest_loss}")
        self._compare_states(end, limit)
        return end

    def _compare_states(self, end: RunEnd, limit: float) -> None:
        out = self._work / "compared.json"
        process = self._hosts.places[0].start(
            [str(self._folder), str(self._whole), str(out)],
            module="experiments.soak.comparing",
            folder=self._work,
            output=self._work / "compared.txt",
        )
        self._ranks = [process]
        self._await(lambda: process.code is not None, "the comparison", codes=())
        if process.code != 0:
            raise FailedCheckError(f"the comparison failed: {process.output}")
        found = json.loads(out.read_text())
        end.largest_state, end.tensors = found["largest"], found["num_tensors"]
        if not found["largest"] <= limit or not found["num_tensors"]:
            end.problems.append(f"states differ by up to {found['largest']}")

    def close(self) -> None:
        """End all processes."""
        family = families(rank.process for rank in self._ranks)
        for each in family:
            each.signal(signal.SIGKILL)
        deadline_s = time.monotonic() + _START_S
        while any(rank.code is None for rank in self._ranks) and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)

    def clean(self) -> None:
        """Remove the files of the runs."""
        for folder in (self._folder, self._whole):
            shutil.rmtree(folder, ignore_errors=True)

    def _start(
        self, layout: Layout, stop_at: int | None = None, folder: Path | None = None
    ) -> None:
        is_struck = folder is None
        self._starts += 1
        words = [
            *_COMMON,
            *self._run.words,
            *layout.words,
            f"run.dir={folder or self._folder}",
            *([f"train.stop_at={stop_at}"] if stop_at is not None else []),
        ]
        env = (
            {"SOAK_ORDER": str(self._order), "SOAK_PACE_S": str(self._pace_s)} if is_struck else {}
        )
        logs = self._work / f"start_{self._starts}"
        self._ranks = self._hosts.start(layout.ranks, words, folder=self._work, logs=logs, env=env)

    def _resumed(self) -> int:
        """Wait until the last start trains; return the step from which it continued, or 0."""
        first = self._ranks[0]
        trains = re.compile(r"^step +\d+/", re.MULTILINE)
        self._await(lambda: trains.search(first.output) is not None, "its first step", (None, 0))
        found = re.findall(r"resumed from .*: (\d+) steps done", first.output)
        return int(found[-1]) if found else 0

    def _finish(self) -> None:
        self._await(lambda: all(rank.code is not None for rank in self._ranks), "the end", codes=())
        if any(rank.code != 0 for rank in self._ranks):
            raise FailedCheckError(
                "the run did not end well: " + "\n".join(r.output for r in self._ranks)
            )

    def _await(
        self, holds: Callable[[], bool], what: str, codes: Collection[int | None] = (None,)
    ) -> None:
        """Wait for a condition while the exit codes of ranks are among the given ones."""
        began_s = time.monotonic()
        while not holds():
            if codes and any(rank.code not in codes for rank in self._ranks):
                said = "\n".join(rank.output for rank in self._ranks)
                raise FailedCheckError(f"ended while waiting for {what}: {said}")
            if time.monotonic() - began_s > _START_S * patience():
                said = "\n".join(rank.output for rank in self._ranks)
                raise FailedCheckError(f"waited {_START_S * patience():.0f} s for {what}: {said}")
            time.sleep(_LOOK_S)

    def _step(self) -> int:
        """Return the last step in metrics.jsonl."""
        return max(_losses(self._folder), default=0)

    def _saved(self) -> list[Path]:
        return list((self._folder / "checkpoints").glob("step_????????"))


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint by its name."""
    return int(checkpoint.name.removeprefix("step_"))


def _losses(run: Path) -> dict[int, float]:
    """Return the loss of each step."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}
