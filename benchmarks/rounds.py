"""Visit all contestants in turn, so that they are measured under the same noise."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.cells import Block, Cell, Contestant
from benchmarks.probes import is_disturbed, machine_busy_s, usage
from benchmarks.worker_pool import ANSWER_S, WorkerError, WorkerPool

# A visit lasts at least this long: the clock of processor time ticks every 0.01 s.
_VISIT_S: Final = 0.25
_MOST_STEPS: Final = 100
# How often the processes of important contestants are restarted.
_STARTS: Final = 3
# Share of a block's time for building and checking its cells; later ones are left out.
_OPENING_SHARE: Final = 0.7
# A cell that is opened again may take this much more, and this many times as long, as at first.
_REOPEN_S: Final = 20.0
_REOPEN_FACTOR: Final = 5.0
# Gradients may differ from the reference by rounding only.
TOLERANCES: Final = {"float32": 1e-3, "bfloat16": 0.1}


@dataclass(frozen=True)
class Sample:
    """One visit: seconds of a step on each rank, processor seconds, and whether it was disturbed.

    `foreign_s` is the processor time of other processes meanwhile.
    """

    ranks_s: tuple[float, ...]
    cpu_s: float
    foreign_s: float
    num_preempted: int
    is_disturbed: bool

    @property
    def step_s(self) -> float:
        """Return the seconds from the start to the end of the last rank."""
        return max(self.ranks_s)


@dataclass
class Measured:
    """State of the measurement of a cell.

    `peaks` are the bytes of each rank for each time it was opened. `sitting` has the undisturbed
    visits before this sitting, and those wanted at its end.
    """

    cell: Cell
    samples: list[Sample] = field(default_factory=list)
    peaks: list[list[int]] = field(default_factory=list)
    gradient_error: float | None = None
    num_steps: int = 1
    opened_s: float | None = None
    is_open: bool = False
    failed: str = ""
    notes: list[dict[str, Any]] = field(default_factory=list)
    sitting: tuple[int, int] | None = None

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Return the mean peak of each rank; fragmentation of the heap varies between runs."""
        return tuple(round(statistics.fmean(ranks)) for ranks in zip(*self.peaks, strict=True))

    @property
    def patience_s(self) -> float:
        """Return the timeout for opening the cell, which is known once it was open."""
        if self.opened_s is None:
            return ANSWER_S
        return min(ANSWER_S, _REOPEN_S + _REOPEN_FACTOR * self.opened_s)

    @property
    def clean(self) -> list[Sample]:
        """Return the undisturbed visits."""
        return [sample for sample in self.samples if not sample.is_disturbed]

    def choose_steps(self, step_s: float) -> None:
        """Choose the number of steps per visit from the duration of a step."""
        wanted = math.ceil(_VISIT_S / max(step_s, 1e-4))
        # An early step may have been slow: the number only grows.
        self.num_steps = min(_MOST_STEPS, max(self.num_steps, wanted))

    def is_due(self, round_number: int, num_rounds: int) -> bool:
        """Return whether the cell lacks undisturbed visits at this point of the rounds."""
        before, goal = self.sitting or (0, self.cell.wanted)
        num_clean, wanted = len(self.clean) - before, goal - before
        if self.failed or num_clean >= wanted:
            return False
        return num_clean * num_rounds <= wanted * round_number

    def sit_down(self, number: int, num_sittings: int) -> None:
        """Start a sitting that is to end with the given share of the undisturbed visits."""
        self.sitting = len(self.clean), math.ceil(self.cell.wanted * (number + 1) / num_sittings)


@dataclass(frozen=True)
class _Course:
    """A block in progress: its cells, reference gradients, and deadline."""

    measured: Sequence[Measured]
    reference: str
    deadline_s: float


class Conductor:
    """The crews of all contestants, started once, and the loop that visits them in turn.

    `crews` are keyed by the name of the processes, `absent` and `versions` by contestant.
    """

    def __init__(
        self,
        contestants: Sequence[Contestant],
        folder: Path,
        *,
        size: str = "full",
        paths: tuple[str, ...] = (),
        say: Callable[[str], None] = print,
    ) -> None:
        self.contestants = {each.name: each for each in contestants}
        self.folder, self.size, self.paths, self.say = folder, size, paths, say
        self.crews: dict[str, WorkerPool] = {}
        self.absent: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for name in dict.fromkeys(each.crew for each in contestants):
            self._start(name)

    def _start(self, name: str) -> None:
        members = [each for each in self.contestants.values() if each.crew == name]
        try:
            crew = WorkerPool(members, self.size, self.folder / "logs", self.paths)
        except WorkerError as error:
            absent = {each.name: str(error) for each in members}
        else:
            self.crews[name] = crew
            absent = crew.absent
            self.versions |= {each.name: crew.version for each in members}
        for contestant, reason in absent.items():
            self.versions.pop(contestant, None)
            self.say(f"  left out: {contestant}: {reason}")
        self.absent |= absent

    def restart(self, name: str) -> None:
        """End processes and start them again, without any cell."""
        crew = self.crews.pop(name, None)
        if crew is not None:
            crew.close()
        for _ in range(_STARTS):
            self._start(name)
            if name in self.crews:
                members = [each.name for each in self.contestants.values() if each.crew == name]
                for member in set(members) - set(self.crews[name].absent):
                    self.absent.pop(member, None)
                return

    def _crew_of(self, cell: Cell) -> str:
        return self.contestants[cell.contestant].crew

    def measure(
        self, block: Block, deadline_s: float, num_rounds: int = 10, *, num_sittings: int = 1
    ) -> list[Measured]:
        """Open the cells of a block, visit them in turn until the deadline, and close them.

        Several sittings are used, because the memory addresses of a cell influence its speed as
        long as it is open.
        """
        measured = [Measured(cell) for cell in block.cells]
        reference = self._reference(block.workload)
        for number in range(num_sittings):
            now_s = time.monotonic()
            until_s = now_s + (deadline_s - now_s) / (num_sittings - number)
            # The last cell to open finds a fragmented heap: alternate which cell that is.
            order = measured[::-1] if number % 2 else measured
            for each in order:
                each.sit_down(number, num_sittings)
            self._sit(_Course(order, reference, until_s), math.ceil(num_rounds / num_sittings))
        return measured

    def _sit(self, course: _Course, num_rounds: int) -> None:
        """Open cells, visit them in turn until the deadline, and close them."""
        open_until_s = time.monotonic() + _OPENING_SHARE * (course.deadline_s - time.monotonic())
        for each in course.measured:
            if time.monotonic() < open_until_s and not each.failed:
                self._open(each, course)
        self._visit(course, num_rounds)
        for each in course.measured:
            each.is_open = False
        keys = [each.cell.key for each in course.measured]
        for name in list(self.crews):
            try:
                self.crews[name].ask({"do": "close", "cells": keys})
            except WorkerError:
                self.restart(name)

    def weigh(self, block: Block) -> dict[str, list[int]]:
        """Return the peak bytes of each cell's tensors on each rank.

        Cells that fail are omitted.
        """
        weighed = {}
        for cell in block.cells:
            if cell.contestant in self.absent or cell.contestant not in self.contestants:
                continue
            name = self._crew_of(cell)
            try:
                answers = self.crews[name].ask({"do": "weigh", "cell": cell.to_json()})
            except WorkerError as error:
                self.say(f"  failed: {cell.name}: {error}")
                self.restart(name)
            else:
                weighed[cell.name] = [answer["tensor_bytes"] for answer in answers]
        return weighed

    def _reference(self, workload: str) -> str:
        path = self.folder / f"plain_{workload}_{self.size}.pt"
        if not path.exists():
            own = {each.crew for each in self.contestants.values() if each.python is None}
            any_crew = next((crew for name, crew in self.crews.items() if name in own), None)
            if any_crew is None:
                raise WorkerError("no processes with this project's torch are left to compare with")
            any_crew.ask({"do": "reference", "workload": workload, "path": str(path)})
        return str(path)

    def _open(self, each: Measured, course: _Course) -> bool:
        """Open and check a cell; return whether its processes kept the other cells of the block."""
        name = each.cell.contestant
        if name in self.absent or name not in self.contestants:
            each.failed = self.absent.get(name, "takes no part in this run")
            return True
        begin_s = time.monotonic()
        try:
            request = {"do": "open", "cell": each.cell.to_json(), "reference": course.reference}
            answers = self.crews[self._crew_of(each.cell)].ask(request, each.patience_s)
        except WorkerError as error:
            self._lose(each, course, str(error))
            return False
        if each.opened_s is None:
            each.opened_s = time.monotonic() - begin_s
        each.notes, each.is_open = answers, True
        each.peaks.append([answer["peak_bytes"] for answer in answers])
        each.gradient_error, each.failed = check_gradients(each.cell, answers)
        each.choose_steps(max(answer["step_s"] for answer in answers))
        return True

    def _visit(self, course: _Course, num_rounds: int) -> None:
        # Give up after three times the number of rounds.
        for number in range(3 * num_rounds):
            due = [
                each for each in course.measured if each.is_open and each.is_due(number, num_rounds)
            ]
            # Vary the order, so that no cell always follows the same one.
            start = number % max(len(due), 1)
            for each in due[start:] + due[:start]:
                # Complete the first round even after the deadline.
                if number > 0 and time.monotonic() > course.deadline_s:
                    return
                if each.failed:
                    continue
                try:
                    each.samples.append(self._sample(each))
                except WorkerError as error:
                    self._lose(each, course, str(error))

    def _lose(self, each: Measured, course: _Course, reason: str) -> None:
        """Drop a cell that failed; restart its processes and open their other cells again.

        After the deadline, only cells that were not yet visited are opened.
        """
        self.say(f"  failed: {each.cell.name}: {reason}")
        each.failed = reason
        name = self._crew_of(each.cell)
        self.restart(name)
        opened = [other for other in course.measured if other.is_open and not other.failed]
        for other in opened:
            if self._crew_of(other.cell) != name:
                continue
            if other.samples and time.monotonic() > course.deadline_s:
                continue
            # If one fails again, `_lose` has opened the rest.
            if not self._open(other, course):
                return

    def _sample(self, each: Measured) -> Sample:
        begin_s, busy_s, own = time.monotonic(), machine_busy_s(), usage()
        answers = self.crews[self._crew_of(each.cell)].run(each.cell.key, each.num_steps)
        wall_s = time.monotonic() - begin_s
        cpu_s = sum(answer["cpu_s"] for answer in answers)
        foreign_s = machine_busy_s() - busy_s - cpu_s - (usage().cpu_s - own.cpu_s)
        num_steps = each.num_steps
        ranks_s = tuple(answer["wall_s"] / num_steps for answer in answers)
        each.choose_steps(max(ranks_s))
        return Sample(
            ranks_s=ranks_s,
            cpu_s=cpu_s / num_steps,
            foreign_s=max(foreign_s, 0.0),
            num_preempted=sum(answer["num_preempted"] for answer in answers),
            is_disturbed=is_disturbed(wall_s, foreign_s),
        )

    def close(self) -> None:
        """End all processes."""
        for crew in self.crews.values():
            crew.close()
        self.crews.clear()


def check_gradients(cell: Cell, answers: Sequence[Mapping[str, Any]]) -> tuple[float | None, str]:
    """Return the relative error of all ranks' gradients, and a description of any failure."""
    if any(answer["names"] is None for answer in answers):
        return None, ""
    names = {name for answer in answers for name in answer["names"]}
    num_plain = answers[0]["num_plain"]
    if len(names) != num_plain:
        return None, f"wrong gradients: of {len(names)} parameters, plain ones are {num_plain}"
    norm = sum(answer["norm"] for answer in answers)
    error = math.sqrt(sum(answer["error"] for answer in answers) / norm)
    tolerance = TOLERANCES["bfloat16" if cell.workload == "A16" else "float32"]
    # NaN is an error too.
    if not error <= tolerance:
        return error, f"wrong gradients: they differ from plain ones by {error:.1e} of their norm"
    return error, ""
