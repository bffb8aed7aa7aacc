"""Whether BatchNorm layers can normalise the smallest micro-batch of a run, before it starts."""

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
from gpipe_hpc.planner.costs.meta import meta_layer
from gpipe_hpc.planner.costs.trial import forgotten


def check_batchnorm(layers: Sequence[Layer], smallest: Callable[[], Any]) -> None:
    """Raise ModelError, naming layer and shape, if a BatchNorm layer is given one value a channel.

    `smallest` reads inputs of the smallest micro-batch; only where the model has such layers. They
    run on the meta device: where that cannot be, nothing is said before the first step.
    """
    try:
        modules = {index: meta_layer(layer, index) for index, layer in enumerate(layers)}
    except ModelError:
        return  # who builds the layer in earnest tells of it
    for index, module in modules.items():
        convert_batchnorm(module, f"layers.{index}")
    parts = [part for module in modules.values() for part in module.modules()]
    norms = [part for part in parts if isinstance(part, PooledBatchNorm)]
    refusals: list[ModelError] = []

    def look(norm: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(norm, PooledBatchNorm), "hooked to those alone"
        try:
            refuse_single_values(norm, *args)
        except ModelError as refusal:
            refusals.append(refusal)
            raise

    for norm in norms:
        if norm.training:
            norm.register_forward_pre_hook(look)
    if norms:
        inputs = forgotten(smallest())
        with torch.no_grad(), contextlib.suppress(Exception):
            run_layers(modules, layers, inputs)
    if refusals:
        raise refusals[0]
