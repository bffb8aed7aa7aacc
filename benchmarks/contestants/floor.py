"""The floor: each rank computes its stage on local tensors without any communication."""

import time
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor, nn

from benchmarks.cells import Cell
from benchmarks.contestants.plain import join_gloo
from benchmarks.workloads import Workload, casting, sgd

# Number of passes for the median times of layers.
_PASSES: Final = 7


class Floor:
    """This rank's stage of a balanced partition, run forward and backward without communication."""

    def __init__(self, workload: Workload, cell: Cell) -> None:
        rank, size = join_gloo()
        self.workload, self.num_microbatches = workload, cell.microbatches
        spans = workload.spans(size)
        self.modules = workload.build(spans[rank])
        self.num_ranks = size
        self.is_first, self.is_last = rank == 0, rank == size - 1
        parameters = [p for module in self.modules.values() for p in module.parameters()]
        self.optimizer = sgd(parameters)
        inputs, self.targets = workload.batch()
        self.inputs = inputs
        if not self.is_first:
            with torch.no_grad(), casting(workload):
                for span in spans[:rank]:
                    for module in workload.build(span).values():
                        self.inputs = module(self.inputs)

    def step(self) -> None:
        """Run forward and backward of all micro-batches, and step the optimizer."""
        self.optimizer.zero_grad()
        count = self.num_microbatches
        targets = self.targets.tensor_split(count)
        for part, target in zip(self.inputs.tensor_split(count), targets, strict=True):
            value = part if self.is_first else part.detach().requires_grad_()
            with casting(self.workload):
                for module in self.modules.values():
                    value = module(value)
            if self.is_last:
                torch.autograd.backward(self.workload.mean_loss(value, target) / count)
            else:
                torch.autograd.backward(value, torch.full_like(value, 1e-3))
        self.optimizer.step()

    def gradients(self) -> None:
        """Return None, because the inputs are synthetic."""

    def notes(self) -> dict[str, Any]:
        """Return the partition, and the seconds of forward and backward of each layer."""
        passes = [self._layer_times() for _ in range(_PASSES)]
        return {
            "counts": self.workload.counts(self.num_ranks),
            "layers": {
                str(index): [median(each[index][part] for each in passes) for part in range(3)]
                for index in self.modules
            },
        }

    def _layer_times(self) -> dict[int, list[float]]:
        """Time each layer alone on one micro-batch; the loss counts as part of the last layer."""
        times: dict[int, list[float]] = {}
        value = self.inputs.tensor_split(self.num_microbatches)[0]
        last = max(self.modules)
        for index, module in self.modules.items():
            given = value.detach()
            if given.is_floating_point():
                given.requires_grad_()
            begin = time.perf_counter()
            with casting(self.workload):
                value = module(given)
            ends = value
            if self.is_last and index == last:
                target = self.targets.tensor_split(self.num_microbatches)[0]
                ends = self.workload.mean_loss(value, target)
            forward_s = time.perf_counter() - begin
            times[index] = [forward_s, *_backward_times(ends, given, module)]
        self.optimizer.zero_grad()
        return times

    def close(self) -> None:
        """Do nothing; the garbage collector frees the stage."""


def _backward_times(output: Tensor, given: Tensor, module: nn.Module) -> tuple[float, float]:
    """Return the seconds of a full backward and of its input gradient."""
    gradient = torch.full_like(output, 1e-3)
    input_s = 0.0
    if given.requires_grad:
        begin = time.perf_counter()
        torch.autograd.grad(output, given, gradient, retain_graph=True)
        input_s = time.perf_counter() - begin
    begin = time.perf_counter()
    torch.autograd.backward(output, gradient)
    return time.perf_counter() - begin, input_s
