"""Measurements of the points of a sweep, and a Markdown table of them."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from gpipe_hpc.bench.sweep import Point

_HEAD: Final = (
    *("ranks", "threads", "batch", "micro-batches", "backend"),
    *(
        "ms a step",
        "quartiles",
        "samples/s",
        "tokens/s",
        "speed-up",
        "bubble % of total",
        "peak MB a rank",
    ),
)


@dataclass(frozen=True)
class PointResult:
    """Measurement of one point of a sweep.

    `steps_s` are the seconds of each step, `bubble` is idle time / total time of all ranks in the
    pipeline's part of the step, and `failed` is the reason if the point could not be measured.
    """

    point: Point
    steps_s: tuple[float, ...] = ()
    tokens: int = 0  # of a global batch; 0 if samples are not token sequences
    bubble: float = 0.0
    peak_bytes: tuple[int, ...] = ()
    failed: str = ""

    @property
    def median_s(self) -> float:
        """Return the median seconds of a step."""
        return statistics.median(self.steps_s)

    @property
    def samples_per_s(self) -> float:
        """Return the samples per second at the median step time."""
        return self.point.batch_size / self.median_s

    def as_dict(self) -> dict[str, Any]:
        """Return the measurement as a dict for JSON."""
        return {**asdict(self), "point": self.point._asdict()}


def table(found: Sequence[PointResult]) -> str:
    """Return a Markdown table with a row per point; speed-ups are relative to the first point."""
    first = next((each for each in found if each.steps_s), None)
    lines = [f"| {' | '.join(_HEAD)} |", "|" + "---:|" * len(_HEAD)]
    lines += [f"| {' | '.join(_cells(each, first))} |" for each in found]
    return "\n".join(lines)


def _cells(each: PointResult, first: PointResult | None) -> list[str]:
    named = [str(value) for value in each.point]
    if not each.steps_s or first is None:
        return [*named, f"none: {each.failed}".replace("|", "/"), *[""] * (len(_HEAD) - 6)]
    ordered = sorted(each.steps_s)
    ends = [ordered[0], ordered[-1]]
    if len(ordered) >= 4:
        ends = statistics.quantiles(ordered, n=4, method="inclusive")[::2]
    return [
        *named,
        f"{1e3 * each.median_s:.4g}",
        "-".join(f"{1e3 * end:.4g}" for end in ends),
        f"{each.samples_per_s:.4g}",
        f"{each.tokens / each.median_s:.4g}" if each.tokens else "",
        f"{each.samples_per_s / first.samples_per_s:.2f}",
        f"{100 * each.bubble:.1f}",
        " / ".join(f"{each / 1e6:.0f}" for each in each.peak_bytes),
    ]
