"""Plain PyTorch without a pipeline: one process, or one per half of the batch."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.cells import Cell
from benchmarks.workloads import Workload, global_parameters, sgd

_TIMEOUT = timedelta(seconds=300)


def join_gloo() -> tuple[int, int]:
    """Start the process group if there is none; return rank and world size."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=_TIMEOUT)
    return dist.get_rank(), dist.get_world_size()


class Plain:
    """A plain training loop: forward and backward of the whole batch or of each micro-batch."""

    def __init__(self, workload: Workload, cell: Cell) -> None:
        self.workload = workload
        self.span = range(len(workload.layers))
        self.module = workload.module(self.span)
        self.num_passes = cell.microbatches if cell.variant == "micro-batches" else 1
        self.optimizer = sgd(list(self.module.parameters()))
        self.inputs, self.targets = workload.batch()

    def step(self) -> None:
        """Accumulate the gradients of all passes and step the optimizer."""
        self.optimizer.zero_grad()
        inputs = self.inputs.tensor_split(self.num_passes)
        targets = self.targets.tensor_split(self.num_passes)
        for number, (part, target) in enumerate(zip(inputs, targets, strict=True)):
            with self._pass(is_last=number == self.num_passes - 1):
                loss = self.workload.mean_loss(self.forward(part), target)
                torch.autograd.backward(loss / self.num_passes)
        self.optimizer.step()

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the model's output."""
        output: Tensor = self.module(inputs)
        return output

    def _pass(self, *, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def gradients(self) -> Iterable[tuple[str, Tensor]]:
        """Yield the `.grad` of each parameter."""
        for name, parameter in global_parameters(self.module, self.span):
            assert parameter.grad is not None, f"{name} has no gradient"
            yield name, parameter.grad

    def notes(self) -> dict[str, Any]:
        """Return an empty dictionary, because there is no schedule."""
        return {}

    def close(self) -> None:
        """Do nothing; the garbage collector frees the model."""


class DataParallel(Plain):
    """DistributedDataParallel with its best options; reduces only in the last pass."""

    def __init__(self, workload: Workload, cell: Cell) -> None:
        rank, size = join_gloo()
        super().__init__(workload, cell)
        self.parallel = DistributedDataParallel(
            self.module, gradient_as_bucket_view=True, broadcast_buffers=False
        )
        self.inputs = self.inputs.tensor_split(size)[rank]
        self.targets = self.targets.tensor_split(size)[rank]

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the model's output."""
        output: Tensor = self.parallel(inputs)
        return output

    def _pass(self, *, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last else self.parallel.no_sync()
