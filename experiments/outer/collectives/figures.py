"""Timings of collectives, and their tables in Markdown."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from experiments.outer.collectives.costs import FORMS, Link, Terms, bus_factor
from experiments.outer.collectives.fitting import Fit
from experiments.outer.collectives.tuning import bucket_bytes

_HEAD: Final = (
    *("ranks", "collective", "bytes", "algorithm", "ms", "quartiles", "closed form ms"),
    *("algorithm GB/s", "bus GB/s"),
)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and third quartile, or minimum and maximum of fewer than four values."""
    if len(values) < 4:
        return min(values), max(values)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


@dataclass(frozen=True)
class Timing:
    """Seconds of one algorithm and vector in each repetition, on the slowest rank.

    `form_s` is the closed form over the fitted link; None for the backend's collectives.
    """

    ranks: int
    collective: str
    algorithm: str
    num_bytes: int
    seconds: tuple[float, ...]
    block_bytes: int = 0
    form_s: float | None = None

    @property
    def median_s(self) -> float:
        """Return the median over the repetitions."""
        return statistics.median(self.seconds)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """Return the quartiles over the repetitions."""
        return quartiles(self.seconds)

    def terms(self, g: int) -> Terms:
        """Return the terms of the closed form; `g` is the number of ranks per host."""
        form = FORMS[self.collective][self.algorithm]
        return form(self.ranks, self.num_bytes, self.block_bytes or self.num_bytes, g)

    @property
    def algorithm_bytes_per_s(self) -> float:
        """Return the bytes of the vector over the time: algbw of nccl-tests."""
        return self.num_bytes / self.median_s

    @property
    def bus_bytes_per_s(self) -> float:
        """Return the bandwidth per link for any number of ranks: busbw of nccl-tests."""
        return self.algorithm_bytes_per_s * bus_factor(self.collective, self.ranks)


@dataclass(frozen=True)
class Measurement:
    """All timings with one number of ranks, and the link fitted to them.

    `group` is the number of ranks per host.
    """

    ranks: int
    group: int
    timings: tuple[Timing, ...]
    fit: Fit

    def as_json(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self) | {"fit": {**self.fit.link._asdict(), "error": self.fit.error}}

    @classmethod
    def of(cls, read: dict[str, Any]) -> "Measurement":
        """Return the results written by `as_json`."""
        fitted = dict(read["fit"])
        error = fitted.pop("error")
        timings = [
            Timing(**{**each, "seconds": tuple(each["seconds"])}) for each in read["timings"]
        ]
        return cls(read["ranks"], read["group"], tuple(timings), Fit(Link(**fitted), error))


def table(found: Sequence[Measurement]) -> str:
    """Return one row per timing, in Markdown."""
    rows = [_cells(timing) for each in found for timing in each.timings]
    return markdown(_HEAD, rows)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with right-aligned columns."""
    lines = [f"| {' | '.join(head)} |", "|" + "---:|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def advice(found: Sequence[Measurement]) -> str:
    """Return the fitted link and the recommended bucket size of each number of ranks."""
    return "\n".join(line for each in found for line in _links(each))


def size_text(num_bytes: float) -> str:
    """Return a number of bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} GiB"


def _cells(timing: Timing) -> list[str]:
    block = f" ({timing.block_bytes} B blocks)" if timing.block_bytes else ""
    return [
        str(timing.ranks),
        timing.collective,
        str(timing.num_bytes),
        timing.algorithm + block,
        f"{1e3 * timing.median_s:.4g}",
        "-".join(f"{1e3 * end:.4g}" for end in timing.quartiles_s),
        "" if timing.form_s is None else f"{1e3 * timing.form_s:.4g}",
        f"{timing.algorithm_bytes_per_s / 1e9:.3g}",
        f"{timing.bus_bytes_per_s / 1e9:.3g}",
    ]


def _links(found: Measurement) -> Iterator[str]:
    link = found.fit.link
    rate = f"{1e-9 / link.byte_s:.3g} GB/s" if link.byte_s else "no time for bytes"
    yield (
        f"- {found.ranks} ranks: alpha {1e6 * link.start_s:.4g} us, beta {1e9 * link.byte_s:.4g} "
        f"ns/B ({rate}), gamma {1e9 * link.add_s:.4g} ns/B; half of the lower "
        f"quartiles of ours are within {100 * found.fit.error:.0f} % of their closed forms."
    )
    advised = bucket_bytes(link, found.ranks)
    if advised is not None:
        yield (
            f"  Advice for {found.ranks} replicas: outer.bucket_bytes={advised}, the smallest "
            f"bucket whose ring spends 5 % on start-ups."
        )
