"""Run benchmark blocks one after the other and store their results. Does not import torch."""

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final

from benchmarks.cells import Block
from benchmarks.figures import Figures, rows_of
from benchmarks.probes import machine
from benchmarks.rounds import Conductor, Measured
from benchmarks.table import block_lines

# Approximate seconds of a step, used to divide the available time.
_GUESS_S: Final = {"A": 1.3, "A16": 0.8, "B": 0.8, "C": 1.3, "T": 0.25}


def cost_s(block: Block, num_sittings: int = 1) -> float:
    """Return the estimated seconds of an undisturbed block; a cell opens in about two steps."""
    step_s = _GUESS_S.get(block.workload, 1.0)
    return sum(step_s * cell.wanted + num_sittings * (2 * step_s + 0.5) for cell in block.cells)


def new_figures() -> Figures:
    """Return empty results with today's date and a description of this machine."""
    return Figures(machine=machine(), date=datetime.now(UTC).date().isoformat())


def run_blocks(
    conductor: Conductor,
    blocks: Sequence[Block],
    figures: Figures,
    *,
    budget_s: float,
    done: Callable[[Figures], None],
    num_sittings: int = 1,
    say: Callable[[str], None] = print,
) -> None:
    """Measure each block within its share of the time; `done` is called after each.

    Time that a block does not need is left to the following ones.
    """
    end_s = time.monotonic() + budget_s
    figures.versions |= {name: f"torch {text}" for name, text in conductor.versions.items()}
    for number, block in enumerate(blocks):
        begin_s = time.monotonic()
        left = sum(cost_s(each, num_sittings) for each in blocks[number:])
        share_s = (end_s - begin_s) * cost_s(block, num_sittings) / left
        if share_s < 1.0:
            say(f"no time is left for {len(blocks) - number} blocks, from {block.name} on")
            return
        measured = conductor.measure(block, begin_s + share_s, num_sittings=num_sittings)
        figures.blocks[block.name] = rows_of(block, measured)
        figures.versions |= peer_versions(measured)
        done(figures)
        say(f"\n{block.name}: {time.monotonic() - begin_s:.0f} s, {disturbance(measured)}")
        for line in block_lines(figures.blocks[block.name]):
            say(line)


def peer_versions(measured: Sequence[Measured]) -> dict[str, str]:
    """Return the versions of the peers other than torch."""
    noted = (
        (each.cell.contestant, each.notes[0].get("version")) for each in measured if each.notes
    )
    return {name: str(version) for name, version in noted if version is not None}


def disturbance(measured: Sequence[Measured]) -> str:
    """Return a sentence on how many visits were disturbed by other processes."""
    visits = [sample for each in measured for sample in each.samples]
    num_disturbed = sum(sample.is_disturbed for sample in visits)
    return f"{num_disturbed} of {len(visits)} visits disturbed"
