"""The cells to measure, their blocks, and the contestants that run them. Does not import torch."""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from gpipe_hpc.schedule import schedule_names

RANKS: Final = 2

# The part of the full benchmark that contains all cells of the short one.
FULL: Final = "core"

SHORT: Final = 8
"""Micro-batches of the short benchmark."""

# Number of undisturbed steps wanted: for cells of claims, other cells, and rare ones.
MAIN: Final = 10
OTHER: Final = 4
RARE: Final = 2

# Schedules on which claims are based.
OUR_MAIN: Final = ("gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_v", "auto")
# gpipe_hpc's counterpart of each schedule of torch.distributed.pipelining.
OURS_OF_TORCH: Final = {
    "GPipe": "gpipe",
    "1F1B": "one_f_one_b",
    "Interleaved1F1B": "interleaved",
    "InterleavedZeroBubble": "zb_h1",
    "ZBVZeroBubble": "zb_v",
}


@dataclass(frozen=True)
class Cell:
    """One contestant's way to run a step of a workload: schedule, micro-batches, recomputation.

    `variant` is the schedule, or another mode. `wanted` is the number of undisturbed steps
    required.
    """

    contestant: str
    workload: str
    variant: str
    microbatches: int
    recompute: str = "never"
    wanted: int = MAIN

    @property
    def name(self) -> str:
        """Return the name of the cell within its block."""
        again = "" if self.recompute == "never" else f" recompute={self.recompute}"
        return f"{self.contestant} {self.variant}{again}"

    @property
    def key(self) -> str:
        """Return a name that is unique among all cells."""
        return f"{self.workload} M={self.microbatches} {self.name}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are sent to the workers."""
        return asdict(self)


@dataclass(frozen=True)
class Block:
    """Cells with the same workload and number of micro-batches, measured in turn."""

    workload: str
    microbatches: int
    part: str
    cells: tuple[Cell, ...]

    @property
    def name(self) -> str:
        """Return the key of the block in the results."""
        return f"{self.workload} M={self.microbatches} {self.part}"

    def of(self, contestants: Collection[str]) -> "Block":
        """Return the block with only the cells of the given contestants."""
        kept = tuple(cell for cell in self.cells if cell.contestant in contestants)
        return replace(self, cells=kept)


@dataclass(frozen=True)
class Contestant:
    """Class and processes of a contestant, given as ``module:Class``.

    `python` is the interpreter of a peer with its own environment.
    """

    name: str
    entrant: str
    num_ranks: int = RANKS
    num_threads: int = 1
    python: str | None = None

    @property
    def crew(self) -> str:
        """Return the name of its processes; contestants with the same requirements share them.

        Two pairs of equal processes differ by some percent, which is more than some of the compared
        differences.
        """
        elsewhere = "" if self.python is None else f"-{self.name}"
        return f"{self.num_ranks}x{self.num_threads}{elsewhere}"


_HERE: Final = "benchmarks.contestants"

# Contestants that need only torch.
CONTESTANTS: Final = (
    Contestant("floor", f"{_HERE}.floor:Floor"),
    Contestant("ours", f"{_HERE}.ours:Ours"),
    Contestant("torch", f"{_HERE}.torch_pipelining:TorchPipelining"),
    Contestant("ddp", f"{_HERE}.plain:DataParallel"),
    Contestant("plain", f"{_HERE}.plain:Plain", num_ranks=1),
    Contestant("plain 2 threads", f"{_HERE}.plain:Plain", num_ranks=1, num_threads=2),
)


def named_schedules() -> list[str]:
    """Return the named schedules of gpipe_hpc that need no file."""
    return [name for name in schedule_names() if name != "file"]


def floor_cell(workload: str, microbatches: int) -> Cell:
    """Return the cell that all others of a block are compared with."""
    return Cell("floor", workload, "local", microbatches)


def our_cells(
    workload: str, microbatches: int, names: Sequence[str], *, wanted: int = MAIN, again: int = 0
) -> list[Cell]:
    """Return gpipe_hpc's cells for these schedules.

    `again` is the number of steps of those that recompute, 0 to omit them.
    """
    cells = [Cell("ours", workload, name, microbatches, wanted=wanted) for name in names]
    if again:
        cells += [replace(cell, recompute="except_last", wanted=again) for cell in cells]
    return cells


def torch_cells(workload: str, microbatches: int, *, again: bool = True) -> list[Cell]:
    """Return the cells of torch.distributed.pipelining for the schedules that it supports."""
    cells = [
        Cell("torch", workload, name, microbatches)
        for name in OURS_OF_TORCH
        if name == "GPipe" or microbatches >= RANKS
    ]
    if again:
        cells += [
            replace(cell, recompute="always", wanted=MAIN if cell.variant == "GPipe" else OTHER)
            for cell in cells
            if cell.variant in ("GPipe", "1F1B")
        ]
    return cells


def unpiped_cells(workload: str, microbatches: int) -> list[Cell]:
    """Return the cells of plain PyTorch and DDP, with the whole batch and with micro-batches."""
    cells = []
    for name, wanted in (("ddp", MAIN), ("plain", OTHER), ("plain 2 threads", OTHER)):
        cells.append(Cell(name, workload, "whole batch", microbatches, wanted=wanted))
        if microbatches > 1:
            cells.append(Cell(name, workload, "micro-batches", microbatches, wanted=OTHER))
    return cells


def short_blocks() -> list[Block]:
    """Return the blocks of the short benchmark: gpipe_hpc, torch's pipelining and DDP, at M = 8."""
    blocks = []
    for workload in ("A", "B", "C", "T"):
        ours = our_cells(workload, SHORT, ("gpipe", "one_f_one_b", "zb_h1", "zb_v"))
        torchs = [
            cell
            for cell in torch_cells(workload, SHORT)
            if cell.variant in ("GPipe", "1F1B", "ZBVZeroBubble")
        ]
        cells = [
            floor_cell(workload, SHORT),
            *ours,
            *(replace(each, recompute="except_last") for each in ours[:2]),
            *(replace(each, wanted=MAIN) for each in torchs),
            Cell("ddp", workload, "whole batch", SHORT),
            Cell("ddp", workload, "micro-batches", SHORT),
        ]
        blocks.append(Block(workload, SHORT, "short", tuple(cells)))
    return blocks
