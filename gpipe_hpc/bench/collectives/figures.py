"""What collectives took, beside their closed forms: tables in Markdown, and advice."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Final, NamedTuple

from gpipe_hpc.comm.collectives.costs import FORMS, Link, bus_factor
from gpipe_hpc.comm.collectives.fitting import Fit
from gpipe_hpc.comm.collectives.menu import BACKEND
from gpipe_hpc.comm.collectives.tuning import bucket_bytes, choose

_HEAD: Final = (
    *("ranks", "collective", "bytes", "algorithm", "ms", "quartiles", "closed form ms"),
    *("algorithm GB/s", "bus GB/s"),
)
_ADVICE_HEAD: Final = (
    *("ranks", "collective", "bytes", "the tuner picks", "its ms", "fastest of ours", "its ms"),
    *("backend ms",),
)


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
    def algorithm_bytes_per_s(self) -> float:
        """Return the whole vector's bytes over the time, as nccl-tests call algbw."""
        return self.num_bytes / self.median_s

    @property
    def bus_bytes_per_s(self) -> float:
        """Return what compares with the speed of links whatever the ranks: nccl-tests' busbw."""
        return self.algorithm_bytes_per_s * bus_factor(self.collective, self.ranks)


@dataclass(frozen=True)
class Found:
    """All timings with one number of ranks, and the link that was fitted to them."""

    ranks: int
    timings: tuple[Timing, ...] = ()
    fit: Fit | None = None
    failed: str = ""

    def told(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self) | {
            "fit": self.fit and {**self.fit.link._asdict(), "error": self.fit.error}
        }

    @classmethod
    def of(cls, told: dict[str, Any]) -> "Found":
        """Return what was told."""
        fitted = dict(told["fit"])
        error = fitted.pop("error")
        timings = [
            Timing(**{**each, "seconds": tuple(each["seconds"])}) for each in told["timings"]
        ]
        return cls(told["ranks"], tuple(timings), Fit(Link(**fitted), error))


def table(found: Sequence[Found]) -> str:
    """Return a line for each timing."""
    lines = [f"| {' | '.join(_HEAD)} |", "|" + "---:|" * len(_HEAD)]
    for each in found:
        lines += [f"| {' | '.join(_cells(timing))} |" for timing in each.timings]
        if each.failed:
            failed = [str(each.ranks), f"none: {each.failed}".replace("|", "/")]
            lines.append(f"| {' | '.join([*failed, *[''] * (len(_HEAD) - 2)])} |")
    return "\n".join(lines)


def advice(found: Sequence[Found]) -> str:
    """Return the fitted links, what the tuner picks beside what was fastest, and buckets."""
    measured = [each for each in found if each.fit is not None]
    lines = [line for each in measured for line in _links(each)]
    lines += ["", f"| {' | '.join(_ADVICE_HEAD)} |", "|" + "---:|" * len(_ADVICE_HEAD)]
    lines += [f"| {' | '.join(_pick_cells(p))} |" for each in measured for p in _picks(each)]
    return "\n".join(lines)


def _cells(timing: Timing) -> list[str]:
    ordered = sorted(timing.seconds)
    ends = [ordered[0], ordered[-1]]
    if len(ordered) >= 4:
        ends = statistics.quantiles(ordered, n=4, method="inclusive")[::2]
    block = f" ({timing.block_bytes} B blocks)" if timing.algorithm == "chain" else ""
    return [
        str(timing.ranks),
        timing.collective,
        str(timing.num_bytes),
        timing.algorithm + block,
        f"{1e3 * timing.median_s:.4g}",
        "-".join(f"{1e3 * end:.4g}" for end in ends),
        "" if timing.form_s is None else f"{1e3 * timing.form_s:.4g}",
        f"{timing.algorithm_bytes_per_s / 1e9:.3g}",
        f"{timing.bus_bytes_per_s / 1e9:.3g}",
    ]


def _links(found: Found) -> Iterator[str]:
    assert found.fit is not None, "a link was fitted"
    link = found.fit.link
    rate = f"{1e-9 / link.byte_s:.3g} GB/s" if link.byte_s else "no time for bytes"
    yield (
        f"- {found.ranks} ranks: alpha {1e6 * link.start_s:.4g} us, beta {1e9 * link.byte_s:.4g} "
        f"ns/B ({rate}), gamma {1e9 * link.add_s:.4g} ns/B; half of our algorithms' times are "
        f"within {100 * found.fit.error:.0f} % of their closed forms."
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
    assert found.fit is not None, "a link was fitted"
    ordered = sorted(found.timings, key=_case)
    for (collective, num_bytes), some in groupby(ordered, key=_case):
        timings = {timing.algorithm: timing for timing in some}
        ours = [timing for name, timing in timings.items() if name in FORMS[collective]]
        pick = choose(collective, found.fit.link, found.ranks, num_bytes)
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
