"""gpipe_hpc itself."""

import os
from collections.abc import Iterable
from typing import Any, Final

from torch import Tensor

from benchmarks.cells import Cell
from benchmarks.workloads import SEED, Workload, sgd
from gpipe_hpc.pipeline import Pipeline
from gpipe_hpc.schedule import build, to_text

# The processes are stopped while other contestants run.
_SILENCE_S: Final = 3600.0


class Ours:
    """A Pipeline; schedule `auto` searches schedule and partition for the measured layers."""

    def __init__(self, workload: Workload, cell: Cell) -> None:
        inputs, targets = workload.batch()
        ranks = int(os.environ["WORLD_SIZE"])
        size = len(inputs) // cell.microbatches
        searches = cell.variant == "auto"
        table = build(cell.variant, ranks=ranks, microbatches=cell.microbatches)
        self.pipe = Pipeline(
            workload.layers,
            workload.loss_fn,
            stages=ranks,
            microbatches=cell.microbatches,
            schedule=cell.variant,
            recompute=cell.recompute,
            partition="time" if searches else workload.counts(table.num_stages),
            example=(inputs[:size], targets[:size]) if searches else None,
            precision=workload.precision,
            seed=SEED,
            device="cpu",
            silence_s=_SILENCE_S,
        )
        self.inputs = inputs if self.pipe.needs_inputs else None
        self.targets = targets if self.pipe.needs_targets else None
        self.optimizer = sgd(self.pipe.parameters())

    def step(self) -> None:
        """Run a step of the pipeline and of the optimizer."""
        self.pipe.step(self.inputs, self.targets)
        self.optimizer.step()

    def gradients(self) -> Iterable[tuple[str, Tensor]]:
        """Yield the `.grad` of each parameter."""
        for name, parameter in self.pipe.named_parameters():
            assert parameter.grad is not None, f"{name} has no gradient"
            yield name, parameter.grad

    def notes(self) -> dict[str, Any]:
        """Return the partition and, on rank 0, the table."""
        return {
            "table": to_text(self.pipe.schedule) if self.pipe.world.rank == 0 else "",
            "counts": list(self.pipe.partition.counts),
        }

    def close(self) -> None:
        """Do nothing; the garbage collector frees the pipeline, as for a user."""
