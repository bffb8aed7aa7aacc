"""The elements of a picture, shared by SVG, PNG and HTML.

Headings, labels and legend have positions in pixels. Boxes and memory curves keep times, because
the HTML page changes their positions on zoom; `Scene.x` converts a time to its initial position.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from gpipe_hpc.schedule.memory import LiveCount
from gpipe_hpc.schedule.timeline import Event, Timeline
from gpipe_hpc.schedule.waits import Wait
from gpipe_hpc.visualize.colours import INK, ink_on

LEFT: Final = 76.0
RIGHT: Final = 76.0
# Width of a digit relative to the font size.
LETTER: Final = 0.62
# Smallest readable font size, and height of marks, in pixels.
LEAST_LABEL: Final = 7.0
MARK_HEIGHT: Final = 4.0


class TextLine(NamedTuple):
    """A line of text; `y` is its baseline."""

    x: float
    y: float
    text: str
    size: float = 12.0
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False
    ink: str = INK


class Rect(NamedTuple):
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    fill: str


class Box(NamedTuple):
    """A drawn compute action: start, duration, and the idle time of the rank directly before."""

    start: float
    duration: float
    idle: float
    fill: str
    label: str
    event: Event
    wait: Wait | None


class AsyncMark(NamedTuple):
    """A drawn asynchronous action, such as a copy or a reduction: start and duration."""

    start: float
    duration: float
    fill: str
    event: Event


class PictureRow(NamedTuple):
    """A rank's row: its boxes on a grey background up to `span`, and the marks below the boxes."""

    rank: int
    y: float
    height: float
    label_size: float
    span: float
    boxes: tuple[Box, ...]
    marks: tuple[AsyncMark, ...] = ()

    @property
    def mark_y(self) -> float:
        """Return the vertical position of the marks."""
        return self.y + self.height + 1.5


class Strip(NamedTuple):
    """The memory curve of one rank; `full` is the value at full height."""

    rank: int
    y: float
    height: float
    full: int
    span: float
    steps: tuple[LiveCount, ...]


class Axis(NamedTuple):
    """A time axis from 0 to `span`; `top` is the upper end of its grid lines."""

    y: float
    top: float
    span: float


class TimeScale(NamedTuple):
    """Unit in which times are displayed: its name, and how many are one unit of the timeline."""

    unit: str
    factor: float

    def show(self, time: float) -> str:
        """Return a time, given in the displayed unit, as text."""
        return f"{time:.4g} {self.unit}".rstrip()


@dataclass(frozen=True)
class Section:
    """One timeline of a picture: its rows, memory curves and axes."""

    timeline: Timeline
    rows: tuple[PictureRow, ...]
    strips: tuple[Strip, ...]
    axes: tuple[Axis, ...]


@dataclass
class Scene:
    """A whole picture; its height grows as sections are added."""

    width: float
    span: float
    clock: TimeScale
    height: float = 0.0
    fixed: list[TextLine | Rect] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)

    @property
    def scale(self) -> float:
        """Return the pixels per displayed unit of time."""
        return (self.width - LEFT - RIGHT) / self.span if self.span > 0 else 0.0

    def x(self, time: float) -> float:
        """Return the horizontal position of a time in pixels."""
        return LEFT + time * self.scale

    def ticks(self) -> Iterator[float]:
        """Yield round times, about ten over the widest axis."""
        step = round_step(self.span / 10)
        if step > 0:
            yield from (index * step for index in range(math.floor(self.span / step + 1e-9) + 1))


def clock_for(longest: float, unit: str) -> TimeScale:
    """Return the unit in which times of at most `longest` are displayed."""
    if unit == "s" and 0 < longest < 1:
        return TimeScale("ms", 1e3) if longest >= 1e-3 else TimeScale("us", 1e6)
    return TimeScale(unit, 1.0)


def round_step(least: float) -> float:
    """Return the smallest of 1, 2 or 5 times a power of ten that is at least `least`."""
    if least <= 0:
        return 0.0
    power: float = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * 0.999999)


def label_fits(label: str, size: float, width: float) -> bool:
    """Return whether a label of a font size fits into a box `width` pixels wide."""
    return size >= LEAST_LABEL and len(label) * size * LETTER + 2 <= width


def ink_of(box: Box) -> str:
    """Return the text colour of a box's label."""
    return ink_on(box.fill)
