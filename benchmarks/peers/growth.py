"""Growth of the step time with ranks and micro-batches: work plus a term linear in messages."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.cells import Block, Cell, Contestant
from benchmarks.figures import median_step
from benchmarks.rounds import Conductor, Measured
from gpipe_hpc.schedule import from_text
from gpipe_hpc.schedule.table.actions import SENDS

RANKS = (1, 2, 4, 8)
MICROBATCHES = tuple(2**power for power in range(9))


def measure(
    folder: Path, *, budget_s: float, num_rounds: int = 3, say: Callable[[str], None] = print
) -> dict[str, list[dict[str, float]]]:
    """Return a point for each number of ranks and micro-batches, and the fit to all points."""
    work: dict[int, float] = {}
    points: list[dict[str, float]] = []
    end_s = time.monotonic() + budget_s
    for number, ranks in enumerate((0, *RANKS)):
        entrant = "benchmarks.peers.growing:Growing" + ("Ours" if ranks else "Plain")
        name = f"{ranks} ranks" if ranks else "plain"
        contestant = Contestant(name, entrant, num_ranks=ranks or 1)
        conductor = Conductor([contestant], folder, say=say)
        begin_s = time.monotonic()
        deadline_s = begin_s + (end_s - begin_s) / (1 + len(RANKS) - number)
        try:
            measured = conductor.measure(_block(name, num_rounds), deadline_s, num_rounds)
        finally:
            conductor.close()
        for each in measured:
            if each.failed or not each.samples:
                say(f"  growth: {name}, M={each.cell.microbatches}: {each.failed}")
            elif not ranks:
                work[each.cell.microbatches] = median_step(each)
            else:
                points.append(_point(ranks, each))
    return {"points": _fitted(points, work)}


def _block(name: str, num_rounds: int) -> Block:
    variant = "micro-batches" if name == "plain" else "one_f_one_b"
    cells = [Cell(name, "T", variant, count, wanted=num_rounds) for count in MICROBATCHES]
    return Block("T", 0, "growth", tuple(cells))


def _point(ranks: int, each: Measured) -> dict[str, float]:
    table = from_text(each.notes[0]["table"])
    return {
        "ranks": ranks,
        "microbatches": each.cell.microbatches,
        "step_s": median_step(each),
        "num_clean": len(each.clean),
        "num_actions": sum(len(row) for row in table.ranks),
        "num_messages": sum(action.op in SENDS for row in table.ranks for action in row),
    }


def _fitted(points: list[dict[str, float]], work: dict[int, float]) -> list[dict[str, float]]:
    """Add the work and the fitted time to each point.

    step = work / p + a * messages / p + b * ranks, where p is the number of cores that the ranks
    can keep busy, and a and b are equal for all points; least squares of the relative error. Other
    actions (forwards, backwards) are part of the work; a separate term for them was fitted as zero.
    """
    usable = [point for point in points if point["microbatches"] in work]
    if not usable:
        return points
    cores = os.cpu_count() or 1
    rows, rests = [], []
    for point in usable:
        point["parallel"] = min(point["ranks"], cores, point["microbatches"])
        point["work_s"] = work[int(point["microbatches"])] / point["parallel"]
        step_s = point["step_s"]
        rows.append([point["num_messages"] / point["parallel"] / step_s, point["ranks"] / step_s])
        rests.append((step_s - point["work_s"]) / step_s)
    per_message, per_rank = np.linalg.lstsq(np.array(rows), np.array(rests), rcond=None)[0]
    for point in usable:
        messages = point["num_messages"] / point["parallel"]
        point["message_s"], point["rank_s"] = float(per_message), float(per_rank)
        point["fit_s"] = float(point["work_s"] + per_message * messages + per_rank * point["ranks"])
    return points
