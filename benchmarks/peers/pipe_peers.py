"""fairscale's Pipe and torchgpipe: GPipe in one process, with two threads per micro-batch."""

from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.metadata import version
from typing import Any

from torch import Tensor, nn

from benchmarks.cells import RANKS, Cell
from benchmarks.workloads import Casting, Workload, sgd


class InOneProcess:
    """Base class of both: a sequence of modules, a balance, and devices."""

    package = ""

    def make(self, module: nn.Sequential, balance: list[int], **options: Any) -> nn.Module:
        raise AssertionError("a subclass says how")

    def __init__(self, workload: Workload, cell: Cell) -> None:
        self.workload = workload
        self.layers = workload.build(range(len(workload.layers)))
        modules = list(self.layers.values())
        if workload.precision != "float32":
            modules = [Casting(module) for module in modules]
        self.pipe = self.make(
            nn.Sequential(*modules),
            workload.counts(RANKS),
            devices=["cpu"] * RANKS,
            chunks=cell.microbatches,
            checkpoint=cell.recompute,
        )
        self.optimizer = sgd(list(self.pipe.parameters()))
        self.inputs, self.targets = workload.batch()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.workload.mean_loss(self.pipe(self.inputs), self.targets).backward()
        self.optimizer.step()

    def gradients(self) -> Iterable[tuple[str, Tensor]]:
        for index, layer in self.layers.items():
            for name, parameter in layer.named_parameters():
                yield f"layers.{index}.{name}", parameter.grad

    def notes(self) -> dict[str, Any]:
        return {"version": version(self.package)}

    def close(self) -> None:
        pass


class FairscalePipe(InOneProcess):
    package = "fairscale"

    def make(self, module: nn.Sequential, balance: list[int], **options: Any) -> nn.Module:
        pipe: Callable[..., nn.Module] = import_module("fairscale.nn").Pipe
        return pipe(module, balance=balance, **options)


class TorchGPipe(InOneProcess):
    package = "torchgpipe"

    def make(self, module: nn.Sequential, balance: list[int], **options: Any) -> nn.Module:
        pipe: Callable[..., nn.Module] = import_module("torchgpipe").GPipe
        return pipe(module, balance=balance, **options)
