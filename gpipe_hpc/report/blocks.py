"""Building blocks of a report, independent of the output format."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpipe_hpc.report.findings import Finding
from gpipe_hpc.trainer.traces.files import ReadStep


class Paragraph(NamedTuple):
    """A paragraph of text."""

    text: str


class KeyFigures(NamedTuple):
    """Highlighted figures as pairs of label and value."""

    rows: Sequence[tuple[str, str]]


class Grid(NamedTuple):
    """A table whose first column is text and whose other columns are numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


class Curve(NamedTuple):
    """Values over steps; `points` maps the name of a series to ascending (step, value) pairs."""

    title: str
    points: Mapping[str, Sequence[tuple[float, float]]]


class Bar(NamedTuple):
    """A total in seconds divided into named parts; equal names have equal colours in all bars."""

    name: str
    parts: Mapping[str, float]


class Bars(NamedTuple):
    """Several bars drawn on one scale."""

    bars: Sequence[Bar]


class Suggestions(NamedTuple):
    """Suggested changes, the most useful first; `step_s` is the current mean step time."""

    findings: Sequence[Finding]
    step_s: float


class Picture(NamedTuple):
    """The timeline of a step, with all replicas on a common clock."""

    step: ReadStep


Block = Paragraph | KeyFigures | Grid | Curve | Bars | Suggestions | Picture


class ReportSection(NamedTuple):
    """A heading with blocks below it; `is_open`: whether it is expanded initially."""

    title: str
    blocks: Sequence[Block]
    is_open: bool = True


class ReportDocument(NamedTuple):
    """A complete report: title and sections."""

    title: str
    sections: Sequence[ReportSection]
