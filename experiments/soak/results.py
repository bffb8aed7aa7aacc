"""Results of a soak test: printed during the test, and stored as JSON and Markdown."""

import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.soak.execution import NAMED_S, RunEnd, Verdict
from experiments.soak.plan import Fault, Kind


class Results:
    """Verdicts and final comparisons so far; `out` and its JSON are rewritten after each."""

    def __init__(self, words: Sequence[str], out: Path | None, without_disks: str | None) -> None:
        self._words, self._out, self._without_disks = list(words), out, without_disks
        self._verdicts: list[Verdict] = []
        self._ends: list[RunEnd] = []
        self._left_out: list[tuple[Fault, str]] = []
        self._began_s = time.time()

    @property
    def num_problems(self) -> int:
        """Return the number of faults and runs with failed checks."""
        problems = [each.problems for each in self._verdicts] + [e.problems for e in self._ends]
        return sum(map(bool, problems))

    @property
    def exit_code(self) -> int:
        """Return 0 if something ran and all checks passed."""
        return 0 if self._verdicts and not self.num_problems else 1

    def leave_out(self, faults: Sequence[Fault], reason: str) -> None:
        """Record faults that were not injected."""
        self._left_out += [(fault, reason) for fault in faults]
        for fault in faults:
            print(f"fault {fault.number}: left out: {reason}", flush=True)
        self._write()

    def add(self, verdict: Verdict) -> None:
        """Record the outcome of a fault."""
        self._verdicts.append(verdict)
        fault = verdict.fault
        named = f", named in {max(verdict.named_s.values()):.1f} s" if verdict.named_s else ""
        print(
            f"fault {fault.number}: {fault.kind.value} {fault.way} (rank {fault.victim} of "
            f"{fault.layout}) at step {verdict.step}{named}, ended in {verdict.ended_s:.1f} s, "
            f"load {verdict.load:.1f}, went on from {verdict.resumed} on {fault.after}: "
            f"{'as it must be' if not verdict.problems else 'PROBLEMS'}",
            flush=True,
        )
        self._tell(verdict.problems)
        self._write()

    def add_end(self, end: RunEnd) -> None:
        """Record the final comparison of a run."""
        self._ends.append(end)
        print(
            f"run {end.run}: {end.steps} steps, largest difference of losses {end.largest_loss}, "
            f"of {end.tensors} tensors {end.largest_state}: "
            f"{'as it must be' if not end.problems else 'PROBLEMS'}",
            flush=True,
        )
        self._tell(end.problems)
        self._write()

    def _tell(self, problems: Sequence[str]) -> None:
        for problem in problems:
            print(f"  {problem}", flush=True)

    def _write(self) -> None:
        if self._out is not None:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            self._out.write_text(self.text())
            told = json.dumps(self.as_dict(), indent=1)
            self._out.with_suffix(".json").write_text(told + "\n")

    def as_dict(self) -> dict[str, Any]:
        """Return all results."""
        return {
            "command": self._command(),
            "minutes": round((time.time() - self._began_s) / 60, 1),
            "faults": [each.as_dict() for each in self._verdicts],
            "runs": [asdict(each) for each in self._ends],
            "left_out": [{"fault": fault.number, "reason": why} for fault, why in self._left_out],
        }

    def text(self) -> str:
        """Return the results in Markdown: a summary, and lines for each kind, fault and run."""
        return "\n".join([*self._summary(), *self._kinds(), *self._faults(), *self._runs(), ""])

    def _command(self) -> str:
        return " ".join(["python -m experiments.soak", *self._words])

    def _summary(self) -> list[str]:
        good = sum(not each.problems for each in self._verdicts)
        ends = sum(not each.problems for each in self._ends)
        minutes = (time.time() - self._began_s) / 60
        loads = sorted(each.load for each in self._verdicts)
        lines = [
            f"    {self._command()}",
            "",
            f"{len(self._verdicts)} faults injected, {good} met all conditions; {len(self._ends)} "
            f"runs finished, {ends} of them equal to the undisturbed run. "
            f"{len(self._left_out)} faults were left out. {time.strftime('%Y-%m-%d')}, "
            f"{minutes:.0f} minutes, Python {platform.python_version()}; runnable processes per "
            f"processor: {loads[len(loads) // 2]:.1f} (median), {loads[-1]:.1f} (most)."
            if loads
            else "No fault was injected yet.",
        ]
        if self._verdicts:
            named = [seconds for each in self._verdicts for seconds in each.named_s.values()]
            soon = sum(seconds <= NAMED_S for seconds in named)
            forced = sum(each.num_forced for each in self._verdicts)
            late = max(each.ended_s for each in self._verdicts)
            lines.append(
                f"{soon} of {len(named)} survivors named the fault within {NAMED_S:.0f} s, the "
                f"last after {max(named, default=0.0):.1f} s; all ranks had ended after at most "
                f"{late:.1f} s, {forced} of them ended by their watchers."
            )
        if self._without_disks is not None:
            lines.append(f"No disk of its own ({self._without_disks}): RLIMIT_FSIZE instead.")
        return lines

    def _kinds(self) -> list[str]:
        lines = ["", "| fault | injected | as required | named in, s (median, most) |"]
        lines.append("| --- | ---: | ---: | ---: |")
        for kind in Kind:
            own = [each for each in self._verdicts if each.fault.kind is kind]
            named = sorted(max(each.named_s.values()) for each in own if each.named_s)
            times = f"{named[len(named) // 2]:.1f}, {named[-1]:.1f}" if named else "-"
            good = sum(not each.problems for each in own)
            lines.append(f"| {kind.value} | {len(own)} | {good} | {times} |")
        return lines

    def _faults(self) -> list[str]:
        lines = ["", "| n | fault | rank | layout | at step | named s | ended s | load | on |"]
        lines[-1] += " as it must be |"
        lines.append("| ---: | --- | ---: | --- | ---: | ---: | ---: | ---: | --- | --- |")
        for each in self._verdicts:
            fault = each.fault
            what = ", ".join(filter(None, [fault.kind.value, each.form or fault.way]))
            named = f"{max(each.named_s.values()):.1f}" if each.named_s else "-"
            goes_on = f"{each.resumed}: {fault.after}"
            lines.append(
                f"| {fault.number} | {what} | {fault.victim} | {fault.layout} | {each.step} | "
                f"{named} | {each.ended_s:.1f} | {each.load:.1f} | {goes_on} | "
                f"{'no' if each.problems else 'yes'} |"
            )
        return lines

    def _runs(self) -> list[str]:
        lines = ["", "| run | steps | largest difference of losses | of tensors | as it must be |"]
        lines.append("| ---: | ---: | ---: | ---: | --- |")
        for end in self._ends:
            bound = "to the bit" if end.exact else "1e-10"
            lines.append(
                f"| {end.run} | {end.steps} | {end.largest_loss} | {end.largest_state} | "
                f"{'no' if end.problems else 'yes'}, {bound} |"
            )
        return lines
