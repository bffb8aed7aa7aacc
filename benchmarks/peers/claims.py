"""Claims checked against the results: each ratio with the spread of the same run."""

import math
import statistics
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from benchmarks.cells import FULL, MAIN, OURS_OF_TORCH
from benchmarks.figures import Figures, Row
from benchmarks.peers.grid import OTHERS

MODELS = ("A", "B", "C")
FEWER = (1, 2, 4, 8)


class Claim(NamedTuple):
    """A ratio and the bound that it must satisfy; None if the run did not measure it."""

    number: int
    what: str
    bound: str
    value: str
    reached: bool | None
    note: str = ""


class Ratio(NamedTuple):
    """The time or memory of one cell relative to another or to a limit, with the spread of both."""

    value: float
    spread: float
    name: str
    num_clean: int

    def __str__(self) -> str:
        return f"{self.value:.3f} (spread {self.spread:.3f}, {self.num_clean} steps, {self.name})"


def block(workload: str, microbatches: int) -> str:
    return f"{workload} M={microbatches} {FULL}"


def ratio(top: Row | None, bottom: Row | None, name: str) -> Ratio | None:
    """Return the ratio of two medians, or None if one is missing."""
    if top is None or bottom is None or not top.median_s or not bottom.median_s:
        return None
    value = top.median_s / bottom.median_s
    spread = value * math.hypot(top.spread, bottom.spread)
    return Ratio(value, spread, name, min(top.num_clean, bottom.num_clean))


def found(ratios: Iterable[Ratio | None]) -> list[Ratio]:
    return [each for each in ratios if each is not None]


def bounded(number: int, what: str, ratios: list[Ratio], bound: float) -> Claim:
    """Compare all ratios with one bound and report the worst."""
    if not ratios:
        return Claim(number, what, f"<= {bound:g}", "not measured", None)
    worst = max(ratios)
    num_kept = sum(each.value <= bound for each in ratios)
    notes = [f"{num_kept} of {len(ratios)} within the bound"]
    if worst.value > bound >= worst.value - worst.spread:
        notes.append("excess within the spread")
    few = sum(each.num_clean < MAIN for each in ratios)
    if few:
        notes.append(f"{few} with fewer than {MAIN} undisturbed steps")
    # A bound that holds with too few steps is not reached yet.
    reached = (None if few else True) if num_kept == len(ratios) else False
    return Claim(number, what, f"<= {bound:g}", f"worst {worst}", reached, "; ".join(notes))


def judge(figures: Figures) -> list[Claim]:
    """Return all claims, in order."""
    claims = [*_same_schedule(figures), *_best(figures), *_recomputing(figures)]
    return [*claims, *_tiny(figures), *_memory(figures), *_bfloat16(figures)]


def _same_schedule(figures: Figures) -> Iterator[Claim]:
    for counts, bound in ((FEWER, 1.02), ((16,), 1.04)):
        ratios = [
            _over_limit(figures.find(block(model, count), f"ours {name}"), model, count)
            for model in MODELS
            for count in counts
            for name in OURS_OF_TORCH.values()
        ]
        which = "M <= 8" if counts == FEWER else "M = 16"
        yield bounded(1, f"ours / limit, {which}, A B C", found(ratios), bound)
    pairs = [
        _against_torch(figures, model, count, theirs)
        for model in MODELS
        for count in (*FEWER, 16)
        for theirs in OURS_OF_TORCH
    ]
    yield bounded(1, "ours / torch, same schedule", found(pairs), 1.0)
    at_16 = found(
        _against_torch(figures, model, 16, theirs) for model in MODELS for theirs in OURS_OF_TORCH
    )
    if at_16:
        mean = statistics.geometric_mean(each.value for each in at_16)
        spread = math.hypot(*(each.spread for each in at_16)) / len(at_16)
        value = f"{mean:.3f} (spread {spread:.3f}, {len(at_16)} pairs)"
        yield Claim(1, "ours / torch, geometric mean, M = 16", "<= 0.95", value, mean <= 0.95)


def _over_limit(row: Row | None, model: str, count: int) -> Ratio | None:
    if row is None or not row.limit_s or not row.median_s:
        return None
    value = row.median_s / row.limit_s
    return Ratio(value, value * row.spread, f"{model} M={count} {row.variant}", row.num_clean)


def _against_torch(figures: Figures, model: str, count: int, theirs: str) -> Ratio | None:
    where = block(model, count)
    ours = figures.find(where, f"ours {OURS_OF_TORCH[theirs]}")
    return ratio(ours, figures.find(where, f"torch {theirs}"), f"{model} M={count} {theirs}")


def _best(figures: Figures) -> Iterator[Claim]:
    for models, count, bound in ((("A", "C"), 4, 1.06), (("A", "C"), 8, 1.04), (("B",), 8, 1.08)):
        ratios = []
        for model in models:
            row = figures.best(block(model, count), "ours")
            floor = figures.find(block(model, count), "floor local")
            name = f"{model} M={count} {row.variant if row else ''}"
            ratios.append(ratio(row, floor, name))
        what = f"best of ours / floor, {' '.join(models)}, M = {count}"
        yield bounded(2, what, found(ratios), bound)
    speeds, sizes = [], []
    for model in MODELS:
        for count in (4, 8):
            where = block(model, count)
            row, ddp = figures.best(where, "ours"), figures.best(where, "ddp")
            name = f"{model} M={count} {row.variant if row else ''}"
            speeds.append(ratio(row, ddp, name))
            sizes.append(_sizes(row, ddp, name))
    yield bounded(2, "best of ours / DDP, A B C, M = 4, 8", found(speeds), 1.0)
    yield bounded(2, "its peak memory / DDP's", found(sizes), 1.0)


def _sizes(top: Row | None, bottom: Row | None, name: str) -> Ratio | None:
    """Return the ratio of the peak memory of the fullest ranks, without a spread."""
    if top is None or bottom is None or not top.peak_bytes or not bottom.peak_bytes:
        return None
    return Ratio(max(top.peak_bytes) / max(bottom.peak_bytes), 0.0, name, MAIN)


def _recomputing(figures: Figures) -> Iterator[Claim]:
    for count, bound in ((4, 0.92), (16, 0.96)):
        speeds = []
        for model in MODELS:
            where = block(model, count)
            theirs = figures.find(where, "torch GPipe recompute=always")
            if theirs is None or not theirs.peak_bytes:
                continue
            row = figures.best(where, "ours", recompute=True, most_bytes=max(theirs.peak_bytes))
            name = f"{model} M={count} {row.variant if row else ''}"
            speeds.append(ratio(row, theirs, name))
        what = f"recomputing, in no more memory: best of ours / torch's GPipe, M = {count}"
        yield bounded(3, what, found(speeds), bound)


def _tiny(figures: Figures) -> Iterator[Claim]:
    rows = [
        row
        for where in (block("T", 16), f"T M=16 {OTHERS}")
        for row in figures.blocks.get(where, [])
        if row.contestant == "ours" and row.recompute == "never" and row.median_s
    ]
    each = [
        Ratio(1e3 * (row.median_s or 0) / 16, row.spread, row.variant, row.num_clean)
        for row in rows
    ]
    yield bounded(4, "T, M = 16: ms a micro-batch", each, 0.25)


def _memory(figures: Figures) -> Iterator[Claim]:
    def of(theirs: str, model: str, count: int) -> Ratio | None:
        where = block(model, count)
        ours = figures.find(where, f"ours {OURS_OF_TORCH[theirs]}")
        rival = figures.find(where, f"torch {theirs}")
        return _sizes(ours, rival, f"{model} M={count} {theirs}")

    def tensors(theirs: str, model: str, count: int) -> Ratio | None:
        weighed = figures.extras.get("tensors", {}).get(block(model, count), {})
        ours = weighed.get(f"ours {OURS_OF_TORCH[theirs]}")
        rival = weighed.get(f"torch {theirs}")
        name = f"{model} M={count} {theirs}"
        return Ratio(max(ours) / max(rival), 0.0, name, MAIN) if ours and rival else None

    for what, measure in (("peak memory", of), ("peak of tensors", tensors)):
        every = [
            measure(theirs, model, count)
            for theirs in OURS_OF_TORCH
            for model in MODELS
            for count in (*FEWER, 16)
        ]
        yield bounded(5, f"{what}, ours / torch, same schedule", found(every), 1.0)
        gpipe = found(measure("GPipe", model, 16) for model in MODELS)
        yield bounded(5, f"{what}, GPipe without recomputation, M = 16", gpipe, 0.8)


def _bfloat16(figures: Figures) -> Iterator[Claim]:
    row = figures.best(block("A", 8), "ours")
    half = figures.best(block("A16", 8), "ours")
    gain = ratio(row, half, "A M=8")
    others = {
        who: ratio(figures.find(block("A", 8), name), figures.find(block("A16", 8), name), who)
        for who, name in (("plain PyTorch", "plain whole batch"), ("the floor", "floor local"))
    }
    what = "A in float32 / in bfloat16, best of ours, M = 8"
    if gain is None:
        yield Claim(6, what, ">= 3", "not measured", None)
    else:
        note = ", ".join(f"{who}: {each.value:.2f}" for who, each in others.items() if each)
        yield Claim(6, what, ">= 3", str(gain), gain.value >= 3, note)


def table(claims: list[Claim]) -> str:
    """Return the claims as a table in Markdown."""
    lines = ["| | ratio | aim | measured | result | note |", "|---|---|---|---|---|---|"]
    verdicts = {True: "reached", False: "**not reached**", None: "?"}
    for claim in claims:
        lines.append(
            f"| {claim.number} | {claim.what} | {claim.bound} | {claim.value} "
            f"| {verdicts[claim.reached]} | {claim.note} |"
        )
    return "\n".join(lines) + "\n"
