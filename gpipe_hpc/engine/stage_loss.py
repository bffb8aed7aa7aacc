"""The loss of the last stage, which runs as the layer after the last one of the model.

A loss may draw random numbers and have buffers, so it is keyed and versioned as a layer is.
"""

from functools import partial

import torch
from torch import nn

from gpipe_hpc.device.deferred import AsyncHostTensor
from gpipe_hpc.engine.backward.outsiders import NUM_LOOKED
from gpipe_hpc.engine.buffers import PersistentBuffers
from gpipe_hpc.engine.inputs import Intake, refuse_astray
from gpipe_hpc.engine.layer_runner import ASTRAY, Layer, Loss
from gpipe_hpc.engine.loss import (
    LossTerm,
    LossWatch,
    has_graph,
    loss_term,
    refuse_constant,
)
from gpipe_hpc.engine.run import Run
from gpipe_hpc.engine.stages.stage import Stage
from gpipe_hpc.errors import DataError, GpipeError, ModelError
from gpipe_hpc.models import LossFunction, Reductions, TorchLoss, torch_loss
from gpipe_hpc.pytree import Nest


class StageLoss:
    """Computes the loss terms of a stage's micro-batches, and checks how the loss reduces.

    Args:
        stage: The stage; only a last one has losses.
        intake: Brings targets to the device.
    """

    def __init__(self, stage: Stage, intake: Intake) -> None:
        self._stage, self._intake = stage, intake
        self.function: LossFunction | None = None
        self._layer: Layer | None = None
        self._reduction: TorchLoss | None = None  # if it is one of torch's own losses
        self._lasting = PersistentBuffers()
        self._num_begun = 0
        self._constants: list[AsyncHostTensor] = []  # losses without a graph, in the step before

    def begin(self) -> None:
        """Begin a step, or an evaluation. Raises ModelError for a constant of the step before."""
        self._num_begun += 1
        if self._stage.loss_watch is not None:
            self._stage.loss_watch.begin()
        constants, self._constants = self._constants, []
        for loss in constants:
            refuse_constant(float(loss.read()))
        if self.function is not None:
            self._reduction = torch_loss(self.function)

    def end(self) -> None:
        """End it, also one that failed: the buffers of the loss have their newest values."""
        self._lasting.settle()

    def of(self, run: Run, microbatch: int, num_samples: int) -> Loss | None:
        """Return the loss of a micro-batch for `LayerRunner.run`; None if the run has no loss."""
        if run.loss_fn is None:
            return None
        if self._layer is None or self.function is not run.loss_fn:
            self.function, self._reduction = run.loss_fn, torch_loss(run.loss_fn)
            self._layer = self._as_layer(run.loss_fn, run.num_layers)
        return self._layer, partial(self._term, run, microbatch, num_samples)

    def _as_layer(self, function: LossFunction, index: int) -> Layer:
        module = function if isinstance(function, nn.Module) else nn.Module()
        where = f"loss_fn ({getattr(function, '__name__', type(function).__name__)})"
        return Layer(index, module, where, self._stage.random, self._lasting)

    def _term(self, run: Run, microbatch: int, num_samples: int, output: Nest) -> LossTerm:
        """Return the loss term of one micro-batch."""
        assert run.loss_fn is not None and self._layer is not None, "known from the layer"
        where = self._layer.where
        target = self._target(run, microbatch, num_samples)
        watch: Reductions | None = None
        if self._num_begun <= NUM_LOOKED and self._reduction is None:
            watch = self._watch(where)
        try:
            term = loss_term(run.loss_fn, output, target, num_samples, self._reduction, watch)
            if watch is not None and self._stage.loss_watch is not None:
                self._stage.loss_watch.note(watch, term, num_samples, is_cut=run.is_cut)
            # A forward without a graph will be recomputed, and is checked then.
            lost = not term.total.requires_grad and torch.is_grad_enabled()
            if lost and has_graph(output):
                self._check_constant(term.total)
        except Exception as error:
            if not isinstance(error, GpipeError):  # ours name the loss in their text
                error.add_note(where)
            raise
        if self._stage.device.is_accelerator:
            both = term.total, term.weight
            refuse_astray(both, self._stage.device, where, ASTRAY, ModelError)
        return term

    def _target(self, run: Run, microbatch: int, num_samples: int) -> Nest:
        """Return the target of a micro-batch; raise DataError if it is of another size."""
        if run.targets is None:
            return None
        nests, sizes = run.targets
        if sizes[microbatch] != num_samples:
            known = f" ({sum(run.inputs[1])} inputs against {sum(sizes)})" if run.inputs else ""
            raise DataError(
                f"targets: expected {num_samples} samples in micro-batch {microbatch}, as its "
                f"inputs have, got {sizes[microbatch]}{known}; give as many targets as inputs, of "
                f"the same slice of the batch on every rank (a list of tensors counts as several "
                f"of all samples: stack them, or mark each of them, [gpipe_hpc.whole(x) for ...])"
            )
        return self._intake.to_device(nests[microbatch])

    def _watch(self, where: str) -> Reductions | None:
        """Return a recorder of the sums and means in a user's loss; None for compiled layers."""
        if self._stage.is_compiled:
            return None
        if self._stage.loss_watch is None:
            self._stage.loss_watch = LossWatch(self._stage.device, where)
        return Reductions()

    def _check_constant(self, loss: torch.Tensor) -> None:
        """Refuse a loss without a graph; one of a device when the next step begins.

        The host would wait for it now.
        """
        if self._stage.device.is_accelerator and self._stage.device.holds(loss):
            self._constants.append(AsyncHostTensor.of(loss, self._stage.device))
        else:
            refuse_constant(float(loss))
