"""What collectives took, beside their closed forms: tables in Markdown, crossovers and advice."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from typing import Any, Final, NamedTuple

from experiments.outer.collectives.costs import FORMS, Link, Terms, bus_factor
from experiments.outer.collectives.fitting import Fit
from experiments.outer.collectives.menu import BACKEND
from experiments.outer.collectives.tuning import Crossover, bucket_bytes, choose, crossovers

_HEAD: Final = (
    *("ranks", "collective", "bytes", "algorithm", "ms", "quartiles", "closed form ms"),
    *("algorithm GB/s", "bus GB/s"),
)
_ADVICE_HEAD: Final = (
    *("ranks", "collective", "bytes", "the tuner picks", "its ms", "fastest of ours", "its ms"),
    *("backend ms",),
)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the lower and the upper one; the ends of fewer than four values."""
    if len(values) < 4:
        return min(values), max(values)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


@dataclass(frozen=True)
class Timing:
    """An algorithm over a vector: seconds of each repetition, of the slowest rank.

    `form_s`: what its closed form says over the fitted link; None for the backend's own.
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
        """Return the median repetition."""
        return statistics.median(self.seconds)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """Return the lower and the upper one; the ends of fewer than four repetitions."""
        return quartiles(self.seconds)

    def terms(self, g: int) -> Terms:
        """Return its closed form; `g`: ranks of a host."""
        form = FORMS[self.collective][self.algorithm]
        return form(self.ranks, self.num_bytes, self.block_bytes or self.num_bytes, g)

    @property
    def algorithm_bytes_per_s(self) -> float:
        """Return the whole vector's bytes over the time, as nccl-tests call algbw."""
        return self.num_bytes / self.median_s

    @property
    def bus_bytes_per_s(self) -> float:
        """Return what compares with the speed of links whatever the ranks: nccl-tests' busbw."""
        return self.algorithm_bytes_per_s * bus_factor(self.collective, self.ranks)


@dataclass(frozen=True)
class Found:
    """All timings with one number of ranks, and the link that was fitted to them.

    `group`: ranks that counted as one host.
    """

    ranks: int
    group: int
    timings: tuple[Timing, ...]
    fit: Fit

    def as_json(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self) | {"fit": {**self.fit.link._asdict(), "error": self.fit.error}}

    @classmethod
    def of(cls, read: dict[str, Any]) -> "Found":
        """Return what was read from JSON."""
        fitted = dict(read["fit"])
        error = fitted.pop("error")
        timings = [
            Timing(**{**each, "seconds": tuple(each["seconds"])}) for each in read["timings"]
        ]
        return cls(read["ranks"], read["group"], tuple(timings), Fit(Link(**fitted), error))

    @property
    def collectives(self) -> list[str]:
        """Return those that were timed, in the order of `FORMS`."""
        timed = {timing.collective for timing in self.timings}
        return [collective for collective in FORMS if collective in timed]

    def along(self, collective: str, algorithm: str) -> list[Timing]:
        """Return the timings of an algorithm by size, ascending."""
        some = [t for t in self.timings if (t.collective, t.algorithm) == (collective, algorithm)]
        return sorted(some, key=lambda timing: timing.num_bytes)


def table(found: Sequence[Found]) -> str:
    """Return a line for each timing."""
    rows = [_cells(timing) for each in found for timing in each.timings]
    return markdown(_HEAD, rows)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; all columns are aligned to the right."""
    lines = [f"| {' | '.join(head)} |", "|" + "---:|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def advice(found: Sequence[Found]) -> str:
    """Return the fitted links, what the tuner picks beside what was fastest, and buckets."""
    lines = [line for each in found for line in _links(each)]
    rows = [_pick_cells(pick) for each in found for pick in _picks(each)]
    return "\n".join([*lines, "", markdown(_ADVICE_HEAD, rows)])


def computed_crossovers(each: Found, collective: str) -> list[Crossover]:
    """Return where the fastest closed form changes over the fitted link, within what was timed."""
    sizes = [timing.num_bytes for timing in each.timings if timing.collective == collective]
    between = min(sizes), max(sizes)
    return crossovers(collective, each.fit.link, each.ranks, between, g=each.group)


def measured_crossovers(each: Found, collective: str) -> list[Crossover]:
    """Return where the fastest of ours changes from one size that was timed to a later one.

    Between two sizes, times are taken to follow a power of the size.
    """
    curves = {name: each.along(collective, name) for name in FORMS[collective]}
    curves = {name: curve for name, curve in curves.items() if curve}
    sizes = [timing.num_bytes for timing in next(iter(curves.values()))]
    fastest = [
        min((curve[at].median_s, name) for name, curve in curves.items())[1]
        for at in range(len(sizes))
    ]
    found, before = [], fastest[0]
    for at, (low, high) in enumerate(pairwise(sizes)):
        after = fastest[at + 1]
        if before == after or not _is_faster(curves[after][at + 1], curves[before][at + 1]):
            continue
        gaps = [
            math.log(curves[before][i].median_s / curves[after][i].median_s) for i in (at, at + 1)
        ]
        share = min(1.0, max(0.0, -gaps[0] / (gaps[1] - gaps[0]))) if gaps[1] > gaps[0] else 0.5
        found.append(Crossover(round(low * (high / low) ** share), before, after))
        before = after
    return found


def _is_faster(one: Timing, other: Timing) -> bool:
    """Say whether it was faster in more rounds than chance alone gives in 39 of 40 times.

    Both were timed in the same rounds. With fewer than five nothing can be said.
    """
    rounds = len(one.seconds)
    wins = sum(a < b for a, b in zip(one.seconds, other.seconds, strict=True))
    return wins >= rounds / 2 + 0.98 * math.sqrt(rounds)


def crossover_lines(found: Sequence[Found]) -> str:
    """Return all crossovers, computed and measured, one a line."""
    lines = []
    for each in found:
        for collective in each.collectives:
            for kind, some in (
                ("computed", computed_crossovers(each, collective)),
                ("measured", measured_crossovers(each, collective)),
            ):
                what = "; ".join(
                    f"{cross.before} -> {cross.after} at {size_text(cross.num_bytes)}"
                    for cross in some
                )
                none = "none" if kind == "computed" else "none beyond chance"
                lines.append(f"- {each.ranks} ranks, {collective}, {kind}: {what or none}")
    return "\n".join(lines)


def size_text(num_bytes: float) -> str:
    """Return bytes with a binary unit, as osu_latency's readers know them."""
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


def _links(found: Found) -> Iterator[str]:
    link = found.fit.link
    rate = f"{1e-9 / link.byte_s:.3g} GB/s" if link.byte_s else "no time for bytes"
    yield (
        f"- {found.ranks} ranks: alpha {1e6 * link.start_s:.4g} us, beta {1e9 * link.byte_s:.4g} "
        f"ns/B ({rate}), gamma {1e9 * link.add_s:.4g} ns/B; half of the lower "
        f"quartiles of ours are within {100 * found.fit.error:.0f} % of their closed forms."
    )
    over = statistics.median(pick.over for pick in _picks(found))
    yield f"  What the tuner picks takes {100 * over:.0f} % longer than our fastest (median)."
    advised = bucket_bytes(link, found.ranks)
    if advised is not None:
        yield (
            f"  Advice for {found.ranks} replicas: outer.bucket_bytes={advised}, the smallest "
            f"bucket whose ring spends 5 % on start-ups."
        )


class _Pick(NamedTuple):
    """What the tuner picks in a case, beside what was measured to be the fastest of ours."""

    pick: Timing
    fastest: Timing
    backend: Timing | None

    @property
    def over(self) -> float:
        """Return by what share the pick takes longer than the fastest."""
        return self.pick.median_s / self.fastest.median_s - 1


def _picks(found: Found) -> Iterator[_Pick]:
    ordered = sorted(found.timings, key=_case)
    for (collective, num_bytes), some in groupby(ordered, key=_case):
        timings = {timing.algorithm: timing for timing in some}
        ours = [timing for name, timing in timings.items() if name in FORMS[collective]]
        link, names = found.fit.link, [timing.algorithm for timing in ours]
        pick = choose(collective, link, found.ranks, num_bytes, names, found.group)
        fastest = min(ours, key=lambda timing: timing.median_s)
        yield _Pick(timings[pick.algorithm], fastest, timings.get(BACKEND))


def _pick_cells(each: _Pick) -> list[str]:
    pick, fastest, backend = each
    return [
        str(pick.ranks),
        pick.collective,
        str(pick.num_bytes),
        pick.algorithm,
        f"{1e3 * pick.median_s:.4g}",
        fastest.algorithm,
        f"{1e3 * fastest.median_s:.4g}",
        "" if backend is None else f"{1e3 * backend.median_s:.4g}",
    ]


def _case(timing: Timing) -> tuple[str, int]:
    return timing.collective, timing.num_bytes
