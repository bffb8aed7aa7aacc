"""Check before a run starts that BatchNorm layers can normalise its smallest micro-batch."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import (
    Layer,
    PooledBatchNorm,
    convert_batchnorm,
    refuse_single_values,
    run_layers,
)
from gpipe_hpc.planner.costs.layer_trial import as_meta_leaves
from gpipe_hpc.planner.costs.meta import meta_layer


def check_batchnorm(layers: Sequence[Layer], smallest: Callable[[], Any]) -> None:
    """Raise ModelError if a BatchNorm layer would get a single value per channel.

    The error names the layer and the shape of its input. `smallest` returns the inputs of the
    smallest micro-batch; it is called only if the model has BatchNorm layers. The layers run on the
    meta device. If they cannot, nothing is checked here and the first step raises the error
    instead.
    """
    try:
        modules = {index: meta_layer(layer, index) for index, layer in enumerate(layers)}
    except ModelError:
        return  # building the layer for the run raises the error
    for index, module in modules.items():
        convert_batchnorm(module, f"layers.{index}")
    parts = [part for module in modules.values() for part in module.modules()]
    norms = [part for part in parts if isinstance(part, PooledBatchNorm)]
    refusals: list[ModelError] = []

    def check_input(norm: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(norm, PooledBatchNorm), "hooked to those alone"
        try:
            refuse_single_values(norm, *args)
        except ModelError as refusal:
            refusals.append(refusal)
            raise

    for norm in norms:
        if norm.training:
            norm.register_forward_pre_hook(check_input)
    if norms:
        inputs = as_meta_leaves(smallest())
        with torch.no_grad(), contextlib.suppress(Exception):
            run_layers(modules, layers, inputs)
    if refusals:
        raise refusals[0]
