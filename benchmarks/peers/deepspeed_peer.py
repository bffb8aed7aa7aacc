"""DeepSpeed's PipelineModule with 1F1B; each stage is one of its layers, to fix the partition."""

import itertools
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.peers.environment import EXTENSIONS

# The folder in which the environment has compiled them.
os.environ["TORCH_EXTENSIONS_DIR"] = str(Path(sys.prefix) / EXTENSIONS)

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint
from torch import Tensor, nn

from benchmarks.cells import Cell
from benchmarks.contestants.plain import join_gloo
from benchmarks.workloads import LEARNING_RATE, Workload, global_parameters


class Stage(nn.Module):
    """The layers of a stage, built on the rank that holds it."""

    def __init__(self, workload: Workload, span: range) -> None:
        super().__init__()
        self.span = span
        self.module = workload.module(span)

    def forward(self, *inputs: Tensor) -> Any:
        return self.module(*inputs)


class DeepSpeedPipeline:
    """DeepSpeed without gradient clipping (its default norm is 1), as for all other contestants."""

    def __init__(self, workload: Workload, cell: Cell) -> None:
        _, size = join_gloo()
        if not deepspeed.comm.is_initialized():
            deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        spans = workload.spans(size)
        module = PipelineModule(
            [LayerSpec(Stage, workload, span) for span in spans],
            num_stages=size,
            loss_fn=workload.mean_loss,
            partition_method="uniform",
            activation_checkpoint_interval=1 if cell.recompute == "always" else 0,
            # The default function fails on a first stage with token ids as input.
            activation_checkpoint_func=non_reentrant_checkpoint,
        )
        self.stage = next(each for each in module.modules() if isinstance(each, Stage))
        self.counts = workload.counts(size)
        inputs, targets = workload.batch()
        # The first step is checked: with a rate of 1, the change of weights is the gradient.
        self.optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        self.before = {name: p.detach().clone() for name, p in self._parameters()}
        self.engine = deepspeed.initialize(
            model=module,
            optimizer=self.optimizer,
            config={
                "train_micro_batch_size_per_gpu": len(inputs) // cell.microbatches,
                "gradient_accumulation_steps": cell.microbatches,
                "gradient_clipping": 0.0,
                "steps_per_print": 10**9,
            },
        )[0]
        parts = (inputs.tensor_split(cell.microbatches), targets.tensor_split(cell.microbatches))
        self.batches = itertools.cycle(list(zip(*parts, strict=True)))

    def _parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return global_parameters(self.stage.module, self.stage.span)

    def step(self) -> None:
        self.engine.train_batch(self.batches)

    def gradients(self) -> Iterable[tuple[str, Tensor]]:
        gradients = {name: self.before[name] - p.detach() for name, p in self._parameters()}
        with torch.no_grad():
            for name, parameter in self._parameters():
                parameter.copy_(self.before[name])
        self.before.clear()
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE
        return gradients.items()

    def notes(self) -> dict[str, Any]:
        return {"counts": self.counts, "schedule": "one_f_one_b", "version": deepspeed.__version__}

    def close(self) -> None:
        self.engine.destroy()
