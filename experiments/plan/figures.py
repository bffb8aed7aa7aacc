"""Errors of predictions, rank correlation, and noise of measurements."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median, quantiles
from typing import NamedTuple

from experiments.plan.running import Result
from gpipe_hpc.planner.report.columns import aligned
from gpipe_hpc.units import bytes_text

_LEAST = 3  # results that a correlation needs


class Errors(NamedTuple):
    """Relative errors of some layouts; the correlation is None if there are too few.

    Args:
        num: number of layouts
        ninth_tenth: 90th percentile of the error of time
        tensors_median: error of memory without the part of the process that is not tensors
        kept_median: additional memory if freed memory is kept
        replayed: errors of plans with the calibration of the run itself
        calibrated: errors of plans with the calibration of another run, or None
    """

    num: int
    median: float
    ninth_tenth: float
    memory_median: float
    tensors_median: float
    kept_median: float
    correlation: float | None
    replayed: "ByRuns"
    calibrated: "ByRuns | None" = None


class ByRuns(NamedTuple):
    """Median error and rank correlation of layouts that were planned with a calibration."""

    median: float
    correlation: float | None
    num: int


def done(results: Sequence[Result]) -> list[Result]:
    """Return the results that have figures."""
    return [each for each in results if not each.failed]


def errors(results: Sequence[Result]) -> Errors | None:
    """Return the errors of the layouts that ran, or None if none did."""
    ran = done(results)
    if not ran:
        return None
    times = sorted(abs(each.error) for each in ran)
    tenths = quantiles(times, n=10, method="inclusive") if len(times) > 1 else times * 9
    order = None
    if len(ran) >= _LEAST:
        order = spearman([e.predicted_s for e in ran], [e.measured_s for e in ran])
    again = [(each.calibrated_s, each.measured_s) for each in ran if each.calibrated_s is not None]
    calibrated = None
    if again:
        apart = median(abs(plan / took - 1) for plan, took in again)
        their_order = spearman(*zip(*again, strict=True)) if len(again) >= _LEAST else None
        calibrated = ByRuns(apart, their_order, len(again))
    own_order = None
    if len(ran) >= _LEAST:
        own_order = spearman([e.replayed_s for e in ran], [e.measured_s for e in ran])
    replayed = ByRuns(median(abs(e.replayed_error) for e in ran), own_order, len(ran))
    return Errors(
        len(ran),
        median(times),
        tenths[8],
        median(abs(each.memory_error) for each in ran),
        median(abs(each.tensors_error) for each in ran),
        median(each.kept_more for each in ran),
        order,
        replayed,
        calibrated,
    )


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation; equal values share their mean rank."""
    one, other = _ranks(first), _ranks(second)
    mean = fmean(one)
    shared = sum((a - mean) * (b - mean) for a, b in zip(one, other, strict=True))
    spread = sum((a - mean) ** 2 for a in one) * sum((b - mean) ** 2 for b in other)
    return float(shared / spread**0.5) if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [order.index(v) + (order.count(v) - 1) / 2 for v in values]


class Noise(NamedTuple):
    """Median relative spread of repeated runs, and of two plans around a run."""

    runs: float
    plans: float


def noise(results: Sequence[Result]) -> Noise | None:
    """Return the spread of repeated runs and plans, or None if nothing was repeated."""
    ran = done(results)
    runs = [abs(each / of.measured_s - 1) for of in ran for each in of.runs_s if of.runs_s[1:]]
    plans = [abs(two / one - 1) for each in ran for one, two in pairwise(each.plans_s)]
    return Noise(median(runs), median(plans)) if runs and plans else None


def table(results: Sequence[Result]) -> str:
    """Return one line per layout, with aligned columns."""
    memory = ["memory planned", "measured", "error", "of tensors", "kept"]
    rows = [["layout", "planned", "measured", "error", "replayed", "calibrated", *memory]]
    for each in results:
        if each.failed:
            rows.append([each.name, f"failed: {each.failed}", *[""] * (4 + len(memory))])
            continue
        again = each.calibrated_error
        rows.append(
            [
                each.name + " *" * each.crowded,
                f"{1e3 * each.predicted_s:.1f} ms",
                f"{1e3 * each.measured_s:.1f} ms",
                f"{100 * each.error:+.0f} %",
                f"{100 * each.replayed_error:+.0f} %",
                "-" if again is None else f"{100 * again:+.0f} %",
                bytes_text(each.predicted_bytes),
                bytes_text(each.measured_bytes),
                f"{100 * each.memory_error:+.1f} %",
                f"{100 * each.tensors_error:+.0f} %",
                bytes_text(each.kept_bytes),
            ]
        )
    return aligned(rows, left={0})


def summary(results: Sequence[Result]) -> str:
    """Return the errors with and without a core for each rank, and the noise."""
    groups = {
        "a core for each rank": [e for e in results if not e.crowded],
        "more ranks than cores (*)": [e for e in done(results) if e.crowded],
    }
    lines = []
    for name, those in groups.items():
        found = errors(those)
        if found is None:
            continue
        lines.append(
            f"{name}: {found.num} layouts, error of time median {100 * found.median:.1f} %, "
            f"90th percentile {100 * found.ninth_tenth:.1f} %, rank correlation "
            f"{_order_text(found.correlation)}"
        )
        for what, by in (("their own run", found.replayed), ("another run", found.calibrated)):
            if by is not None:
                lines.append(
                    f"  planned by what {what} measured: {by.num} layouts, error of time median "
                    f"{100 * by.median:.1f} %, rank correlation {_order_text(by.correlation)}"
                )
    everything = errors(results)
    if everything is not None:
        lines.append(
            f"memory: error median {100 * everything.memory_median:.1f} % of the process, "
            f"{100 * everything.tensors_median:.1f} % of tensors; the default, which keeps freed "
            f"memory, needs {100 * everything.kept_median:.1f} % more"
        )
    floor = noise(results)
    if floor is not None:
        lines.append(
            f"noise: repeated runs are {100 * floor.runs:.1f} % from their median, plans before "
            f"and after a run {100 * floor.plans:.1f} % apart"
        )
    failed = len(results) - len(done(results))
    return "\n".join([*lines, f"failed: {failed} of {len(results)} layouts"])


def _order_text(correlation: float | None) -> str:
    return "too few" if correlation is None else f"{correlation:.3f}"
