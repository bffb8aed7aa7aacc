"""torch.distributed.pipelining."""

from collections.abc import Iterable
from typing import Any, Final

from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.utils.checkpoint import checkpoint

from benchmarks.cells import Cell
from benchmarks.contestants.plain import join_gloo
from benchmarks.workloads import Workload, global_parameters, sgd

# Schedules with several stages per rank.
_LOOPED: Final = ("Interleaved1F1B", "InterleavedZeroBubble")
_V_SHAPED: Final = ("ZBVZeroBubble",)


class Recomputed(nn.Module):
    """A stage that keeps only its input and recomputes the rest in the backward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Any:
        """Run the module under torch.utils.checkpoint."""
        return checkpoint(self.module, *inputs, use_reentrant=False)


class TorchPipelining:
    """A schedule of torch.distributed.pipelining on this rank's stages."""

    def __init__(self, workload: Workload, cell: Cell) -> None:
        rank, size = join_gloo()
        self.stage_indices = _stages_of(cell.variant, rank, size)
        num_stages = size * len(self.stage_indices)
        spans = workload.spans(num_stages)
        self.parts = {index: workload.module(spans[index]) for index in self.stage_indices}
        self.spans = {index: spans[index] for index in self.stage_indices}
        self.counts = workload.counts(num_stages)
        stages = [
            PipelineStage(
                Recomputed(part) if cell.recompute == "always" else part,
                index,
                num_stages,
                next(part.parameters()).device,
            )
            for index, part in self.parts.items()
        ]
        make = get_schedule_class(cell.variant)
        is_multiple = cell.variant in _LOOPED + _V_SHAPED
        self.schedule = make(
            stages if is_multiple else stages[0],
            n_microbatches=cell.microbatches,
            loss_fn=workload.mean_loss,
        )
        inputs, targets = workload.batch()
        self.inputs = (inputs,) if 0 in self.parts else ()
        self.targets = targets if num_stages - 1 in self.parts else None
        self.optimizer = sgd([p for part in self.parts.values() for p in part.parameters()])

    def step(self) -> None:
        """Run a step of the schedule, without collecting outputs, and of the optimizer."""
        self.optimizer.zero_grad()
        self.schedule.step(*self.inputs, target=self.targets, return_outputs=False)
        self.optimizer.step()

    def gradients(self) -> Iterable[tuple[str, Tensor]]:
        """Yield the `.grad` of each parameter."""
        for index, part in self.parts.items():
            for name, parameter in global_parameters(part, self.spans[index]):
                assert parameter.grad is not None, f"{name} has no gradient"
                yield name, parameter.grad

    def notes(self) -> dict[str, Any]:
        """Return the partition and, if torch has one, the table."""
        order = getattr(self.schedule, "pipeline_order", None)
        # The table of 1F1B lacks an action, because a loop runs instead of it.
        if not order or len(self.stage_indices) == 1:
            return {"counts": self.counts}
        rows = [[str(a) for a in order[rank] if a is not None] for rank in sorted(order)]
        return {"counts": self.counts, "table": "".join(",".join(row) + "\n" for row in rows)}

    def close(self) -> None:
        """Do nothing; the garbage collector frees the stages, and the process group remains."""


def _stages_of(variant: str, rank: int, size: int) -> list[int]:
    if variant in _LOOPED:
        return [rank, rank + size]
    if variant in _V_SHAPED:
        return [rank, 2 * size - 1 - rank]
    return [rank]
