"""What a report consists of, whatever it is written as."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpipe_hpc.report.findings import Finding
from gpipe_hpc.trainer.traces.files import ReadStep


class Words(NamedTuple):
    """A paragraph."""

    text: str


class Figures(NamedTuple):
    """Some figures that stand out: what each is of, and its value."""

    rows: Sequence[tuple[str, str]]


class Grid(NamedTuple):
    """A table: the first column is text, the others are numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


class Curve(NamedTuple):
    """Values over steps; `points`: by series, (step, value) ascending."""

    title: str
    points: Mapping[str, Sequence[tuple[float, float]]]


class Bar(NamedTuple):
    """One whole and its parts in seconds, by name; the same name has the same colour everywhere."""

    name: str
    parts: Mapping[str, float]


class Bars(NamedTuple):
    """Bars on one scale."""

    bars: Sequence[Bar]


class Advised(NamedTuple):
    """What to change, the most useful first; `step_s`: what a mean step takes now."""

    findings: Sequence[Finding]
    step_s: float


class Picture(NamedTuple):
    """The timeline of a step, of all replicas on one clock."""

    step: ReadStep


Block = Words | Figures | Grid | Curve | Bars | Advised | Picture


class Section(NamedTuple):
    """A heading and what stands below it. `is_open`: whether it is seen without asking."""

    title: str
    blocks: Sequence[Block]
    is_open: bool = True


class Report(NamedTuple):
    """A whole report."""

    title: str
    sections: Sequence[Section]
