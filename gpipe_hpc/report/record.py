"""What a run has left in its folder, read without running anything of it."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpipe_hpc.config.flat import flat_settings
from gpipe_hpc.errors import ConfigError, DataError
from gpipe_hpc.training.run.opening import CONFIG_FILE
from gpipe_hpc.training.summary.compose import SUMMARY_FILE
from gpipe_hpc.training.traces.files import ReadStep, read_step, typical_trace
from gpipe_hpc.training.writers import METRICS_FILE

_LINE: Final = re.compile(
    r"(?P<moment>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ (?P<level>[A-Z]+) rank (?P<rank>\d+) "
    r"stage \S+ \S+: (?P<text>.*)"
)
_TOLD: Final = ("run folder ", "resumed from ", "saved ")
_MOST_ALIKE: Final = 3  # events that differ in numbers alone, and are shown one by one
_NUMBERS: Final = re.compile(r"\d+(\.\d+)?")


class Happening(NamedTuple):
    """Something that a run has logged; `ranks` said the same, `times` counts it and those like it.

    `level`: INFO, WARNING, ERROR.
    """

    moment: str
    level: str
    ranks: tuple[int, ...]
    text: str
    times: int = 1


@dataclass(frozen=True)
class Record:
    """One run. What it has not left is empty, or None.

    `steps`: the lines of finished steps; `others`: those of validations and stalls. `settings`: by
    full name. `num_starts`: how often it was started, as its log tells.
    """

    folder: Path
    summary: Mapping[str, Any]
    steps: tuple[Mapping[str, Any], ...] = ()
    others: tuple[Mapping[str, Any], ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    traced: ReadStep | None = None
    happened: tuple[Happening, ...] = ()
    num_starts: int = 0

    @property
    def name(self) -> str:
        """Return how the run is called: as its folder."""
        return self.folder.resolve().name

    @property
    def counted_steps(self) -> tuple[Mapping[str, Any], ...]:
        """Return the steps of the newest start whose times are known, without its first one.

        That prepares what later ones find ready; it counts where it is the only one.
        """
        first = self.summary.get("first_step", 0)
        timed = [row for row in self.steps if row.get("pipeline_s") is not None]
        newest = [row for row in timed if row["step"] > first] or timed
        return tuple(newest[1:] or newest)

    def stall_s(self, name: str) -> list[float]:
        """Return the stalls of a kind, of the newest start, behind counted steps."""
        counted = {row["step"] for row in self.counted_steps}
        return [
            float(row[name])
            for row in self.others
            if row.get(name) is not None and row["step"] in counted
        ]


def read_record(folder: Path) -> Record:
    """Read what a run has left; ConfigError where that is no folder of a run."""
    if not folder.is_dir():
        what = "no folder" if folder.exists() else "not there"
        raise ConfigError(
            f"config: bad run.dir, expected the folder of a run, got {str(folder)!r}, which is "
            f"{what}; correct it, or look in runs/"
        )
    lines = tuple(_json_lines(folder / METRICS_FILE))
    summary = _json(folder / SUMMARY_FILE)
    if not lines and not summary:
        raise ConfigError(
            f"report: {folder} is no run that has done a step, expected its {METRICS_FILE} or "
            f"{SUMMARY_FILE}, got neither; correct run.dir, or wait for the first step"
        )
    happened, num_starts = _happened(folder / "logs")
    return Record(
        folder,
        summary,
        tuple(line for line in lines if "loss" in line),
        tuple(line for line in lines if "loss" not in line),
        _settings(folder / CONFIG_FILE),
        _traced(folder, summary),
        happened,
        num_starts,
    )


def _json(path: Path) -> Mapping[str, Any]:
    """Return an object of a file; nothing where there is none, or none that is whole."""
    try:
        told = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def _json_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the lines of a file that are whole: of a run that goes on the last may be cut short."""
    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError):
        return
    for line in text.splitlines():
        try:
            told = json.loads(line)
        except ValueError:
            continue
        if isinstance(told, dict) and isinstance(told.get("step"), int):
            yield told


def _settings(path: Path) -> Mapping[str, Any]:
    """Return the settings by full name, as they stand: nothing they refer to is looked up."""
    try:
        return flat_settings(path.read_text("utf-8"))
    except Exception:  # a damaged file may raise anything
        return {}


def _traced(folder: Path, summary: Mapping[str, Any]) -> ReadStep | None:
    try:
        told = summary.get("traced_step")
        path = folder / told["file"] if told else typical_trace(folder)
        return read_step(path)
    except (DataError, ConfigError, TypeError, KeyError):
        return None


def _happened(logs: Path) -> tuple[tuple[Happening, ...], int]:
    """Return what all ranks have logged, by time, and how often the run was started."""
    found: dict[tuple[str, str], Happening] = {}
    num_starts = 0
    for path in sorted(logs.glob("rank*.log")):
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                told = _LINE.match(line)
                if told is None:
                    continue
                moment, level, text = told["moment"], told["level"], told["text"]
                num_starts += text.startswith(_TOLD[0])
                if level == "INFO" and not text.startswith(_TOLD):
                    continue
                # Ranks say the same within a moment: one event, in the second it was said first.
                key = moment[:16], text
                before = found.get(key)
                ranks = {int(told["rank"]), *(before.ranks if before else ())}
                first = before.moment if before else moment
                found[key] = Happening(min(first, moment), level, tuple(sorted(ranks)), text)
    return tuple(_fold(sorted(found.values()))), num_starts


def _fold(happened: list[Happening]) -> Iterator[Happening]:
    """Yield events, and of many that differ in numbers alone the first, with their count."""
    kinds: dict[str, list[Happening]] = {}
    for each in happened:
        kinds.setdefault(_NUMBERS.sub("#", each.text), []).append(each)
    folded = {id(e) for kind in kinds.values() if len(kind) > _MOST_ALIKE for e in kind[1:]}
    for each in happened:
        if id(each) not in folded:
            kind = kinds[_NUMBERS.sub("#", each.text)]
            is_many = len(kind) > _MOST_ALIKE
            yield each._replace(times=len(kind)) if is_many else each
