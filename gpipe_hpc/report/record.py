"""Read the files that a run has written to its folder, without executing code from them."""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpipe_hpc.errors import ConfigError, DataError, GpipeError
from gpipe_hpc.report.shapes import SUMMARY, disagreement
from gpipe_hpc.schedule import mean_costs, schedule_of, simulate
from gpipe_hpc.small_files import Number, mismatch, open_regular, parse_json, read_bytes
from gpipe_hpc.trainer.run.opening import CONFIG_FILE
from gpipe_hpc.trainer.summary.compose import SUMMARY_FILE
from gpipe_hpc.trainer.traces.files import ReadStep, read_step, typical_trace
from gpipe_hpc.trainer.writers import METRICS_FILE
from gpipe_hpc.yaml_files import flat_settings

_MOST_BYTES: Final = 2**31  # maximum file size that is read
_LINE: Final = re.compile(
    r"(?P<moment>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ (?P<level>[A-Z]+) rank (?P<rank>\d+) "
    r"stage \S+ \S+: (?P<text>.*)"
)
_TOLD: Final = ("run folder ", "resumed from ", "saved ")
_UNWRITTEN: Final = 2  # steps of a failed run that may be missing in its metrics
_MOST_ALIKE: Final = 3  # more events that differ only in numbers are folded into one
_NUMBERS: Final = re.compile(r"\d+(\.\d+)?")


class LogEvent(NamedTuple):
    """An event in the logs of a run, with the ranks that logged it.

    Attributes:
      level: INFO, WARNING or ERROR.
      ranks: ranks that logged it.
      times: number of occurrences, including similar ones.
    """

    moment: str
    level: str
    ranks: tuple[int, ...]
    text: str
    times: int = 1


@dataclass(frozen=True)
class Record:
    """The content of a run's files; missing parts are empty or None.

    Attributes:
      steps: metrics lines of finished steps.
      others: metrics lines of validations and stalls.
      settings: settings of the run by full name.
      num_starts: number of starts found in the log.
      doubts: descriptions of files that could not be read.
    """

    folder: Path
    summary: Mapping[str, Any]
    steps: tuple[Mapping[str, Any], ...] = ()
    others: tuple[Mapping[str, Any], ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    traced: ReadStep | None = None
    happened: tuple[LogEvent, ...] = ()
    num_starts: int = 0
    doubts: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the name of the run, which is that of its folder."""
        return self.folder.resolve().name

    @property
    def is_overtaken(self) -> bool:
        """Return whether the run was started again after the start that the summary describes.

        The metrics then end after that start's last step, or well before it, because the later
        start resumed from an earlier checkpoint.
        """
        if not self.summary or not self.steps or self.summary["outcome"] == "running":
            return False
        beyond = self.steps[-1]["step"] - self.summary["last_step"]
        return bool(beyond > 0 or beyond < -_UNWRITTEN)

    @property
    def counted_steps(self) -> tuple[Mapping[str, Any], ...]:
        """Return the timed steps of the newest start, without its first step if there are others.

        The first step includes one-time preparations.
        """
        first = self.summary.get("first_step") or 0
        if self.is_overtaken and self.steps[-1]["step"] > self.summary["last_step"]:
            first = self.summary["last_step"]
        timed = [row for row in self.steps if row.get("pipeline_s") is not None]
        newest = [row for row in timed if row["step"] > first] or timed
        return tuple(newest[1:] or newest)

    def stall_s(self, name: str) -> list[float]:
        """Return the seconds of stalls of one kind (a metric name) after steps of the newest start.

        A stall after the last step of a finished run is left out, because no step waited for it.
        """
        counted = {row["step"] for row in self.counted_steps}
        if self.summary.get("outcome") in ("done", "stopped") and not self.is_overtaken:
            counted.discard(self.summary["last_step"])
        return [
            float(row[name])
            for row in self.others
            if row.get(name) is not None and row["step"] in counted
        ]


def read_record(folder: Path) -> Record:
    """Read the files of a run; raise ConfigError if the folder contains no run.

    Files that are damaged or have another version are skipped and named in `doubts`.
    """
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise ConfigError(
            f"config: run.dir={str(folder)!r} {what}; set it to the folder of a run, for example "
            f"one in runs/"
        )
    doubts: list[str] = []
    lines = _lines(folder / METRICS_FILE, doubts)
    summary = _summary(folder / SUMMARY_FILE, doubts)
    happened, num_starts = _happened(folder / "logs", doubts)
    if not lines and not summary:
        raise _no_run(folder, doubts, happened)
    return Record(
        folder,
        summary,
        tuple(line for line in lines if "loss" in line),
        tuple(line for line in lines if "loss" not in line),
        _settings(folder / CONFIG_FILE, doubts),
        _traced(folder, summary, lines, doubts),
        happened,
        num_starts,
        tuple(doubts),
    )


def _no_run(folder: Path, doubts: Sequence[str], happened: Sequence[LogEvent]) -> ConfigError:
    last_error = next((e.text for e in reversed(happened) if e.level in ("ERROR", "CRITICAL")), "")
    got = "; ".join(doubts) or f"it has no {METRICS_FILE} and no {SUMMARY_FILE}"
    if last_error:
        got += f"; the last error in its log: {last_error:.300}"
    return ConfigError(
        f"report: {folder} is not a run with a finished step: {got}; correct run.dir, or wait for "
        f"the first step"
    )


def _text(path: Path, doubts: list[str]) -> str | None:
    """Return the text of a file, or None if it does not exist or cannot be read."""
    try:
        return read_bytes(path, _MOST_BYTES).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        doubts.append(f"{path.name} cannot be read ({why})")
        return None


def _summary(path: Path, doubts: list[str]) -> Mapping[str, Any]:
    """Return the content of summary.json, or an empty mapping if it is not valid."""
    text = _text(path, doubts)
    if text is None:
        return {}
    try:
        told = parse_json(text)
    except ValueError as error:
        doubts.append(f"{path.name} is damaged ({error})")
        return {}
    wrong = mismatch(told, SUMMARY) or disagreement(told)
    if wrong:
        doubts.append(f"{path.name} is damaged, or of another version: {wrong}")
        return {}
    summary: dict[str, Any] = told
    return summary


def _lines(path: Path, doubts: list[str]) -> tuple[Mapping[str, Any], ...]:
    """Return the complete lines of the metrics file; the last one may still be incomplete."""
    text = _text(path, doubts) or ""
    kept: list[Mapping[str, Any]] = []
    num_lost = 0
    for line in text.splitlines(keepends=True):
        told = _line(line)
        if told is not None:
            kept.append(told)
        elif line.endswith("\n"):
            num_lost += 1
    if num_lost:
        doubts.append(f"{num_lost} lines of {path.name} are damaged")
    return tuple(kept)


def _line(text: str) -> Mapping[str, Any] | None:
    try:
        told = parse_json(text)
    except ValueError:
        return None
    if not isinstance(told, dict) or type(told.get("step")) is not int:
        return None
    numbers = (each for each in told.values() if each is not None)
    return told if not any(mismatch(each, Number()) for each in numbers) else None


def _settings(path: Path, doubts: list[str]) -> Mapping[str, Any]:
    """Return the settings by full name, as written: references are not resolved."""
    text = _text(path, doubts)
    if text is None:
        return {}
    try:
        return flat_settings(text)
    except ValueError as error:
        doubts.append(f"{path.name} is damaged ({error})")
        return {}


def _traced(
    folder: Path,
    summary: Mapping[str, Any],
    lines: Sequence[Mapping[str, Any]],
    doubts: list[str],
) -> ReadStep | None:
    """Return the traced step if it is complete and its layout is that of the summary."""
    told = summary.get("traced_step")
    try:
        path = folder / told["file"] if told else typical_trace(folder)
    except DataError:  # none was written
        return None
    try:
        traced = read_step(path)
        for timeline in traced.replicas:
            simulate(schedule_of(timeline), mean_costs(timeline))
    except (GpipeError, LookupError, ValueError, TypeError, ArithmeticError) as error:
        doubts.append(f"the traced step is left out: {error}")
        return None
    num_ranks = sum(timeline.num_ranks for timeline in traced.replicas)
    its = num_ranks, traced.replicas[0].num_stages, len(traced.replicas)
    layout = summary.get("layout") or dict(zip(("ranks", "stages", "replicas"), its, strict=True))
    own = layout["ranks"], layout["stages"], layout["replicas"]
    names = "%d ranks, %d stages and %d replicas"
    if its != own or len(traced.around) not in (0, num_ranks):
        doubts.append(f"the traced step is left out: it has {names % its}, the run {names % own}")
        return None
    first, last = summary.get("first_step") or 0, max((row["step"] for row in lines), default=0)
    if not told and traced.step is not None and not first < traced.step <= last:
        doubts.append(f"the traced step is left out: step {traced.step} is from an earlier start")
        return None
    return traced


def _happened(logs: Path, doubts: list[str]) -> tuple[tuple[LogEvent, ...], int]:
    """Return the events logged by all ranks in order of time, and the number of starts."""
    found: dict[tuple[str, str], LogEvent] = {}
    num_starts = 0
    for path in sorted(logs.glob("rank*.log")):
        for line in _log_lines(path, doubts):
            told = _LINE.match(line)
            if told is None:
                continue
            moment, level, text = told["moment"], told["level"], told["text"]
            num_starts += text.startswith(_TOLD[0])
            if level == "INFO" and not text.startswith(_TOLD):
                continue
            # Ranks log equal texts at about the same time: one event, at the earliest second.
            key = moment[:16], text
            before = found.get(key)
            ranks = {int(told["rank"]), *(before.ranks if before else ())}
            first = before.moment if before else moment
            found[key] = LogEvent(min(first, moment), level, tuple(sorted(ranks)), text)
    return tuple(_fold(sorted(found.values()))), num_starts


def _log_lines(path: Path, doubts: list[str]) -> Iterator[str]:
    """Yield the lines of a log file, which may be larger than memory."""
    try:
        with open_regular(path) as file:
            yield from io.TextIOWrapper(file, "utf-8", "replace")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        doubts.append(f"logs/{path.name} cannot be read ({why})")


def _fold(happened: list[LogEvent]) -> Iterator[LogEvent]:
    """Yield events; of many that differ only in numbers, yield the first with their count."""
    kinds: dict[str, list[LogEvent]] = {}
    for each in happened:
        kinds.setdefault(_NUMBERS.sub("#", each.text), []).append(each)
    folded = {id(e) for kind in kinds.values() if len(kind) > _MOST_ALIKE for e in kind[1:]}
    for each in happened:
        if id(each) not in folded:
            kind = kinds[_NUMBERS.sub("#", each.text)]
            if len(kind) > _MOST_ALIKE:
                ranks = {rank for like in kind for rank in like.ranks}
                each = each._replace(times=len(kind), ranks=tuple(sorted(ranks)))
            yield each
