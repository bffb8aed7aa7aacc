"""Workload T with four samples per micro-batch, so that work grows with their number."""

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from benchmarks.cells import Cell
from benchmarks.contestants.ours import Ours
from benchmarks.contestants.plain import Plain
from benchmarks.workloads import Workload

SAMPLES = 4


def _grown(workload: Workload, cell: Cell) -> Workload:
    return replace(workload, batch_size=SAMPLES * cell.microbatches)


class GrowingOurs(Ours):
    def __init__(self, workload: Workload, cell: Cell) -> None:
        super().__init__(_grown(workload, cell), cell)

    def gradients(self) -> Iterable[tuple[str, Tensor]] | None:
        return None  # there is no plain run of this batch


class GrowingPlain(Plain):
    def __init__(self, workload: Workload, cell: Cell) -> None:
        super().__init__(_grown(workload, cell), cell)

    def gradients(self) -> Iterable[tuple[str, Tensor]] | None:
        return None
