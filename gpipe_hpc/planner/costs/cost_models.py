"""Cost models of layers: measured by running them, or counted on the meta device."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple, Protocol

from gpipe_hpc.device.device import Device
from gpipe_hpc.engine import casting
from gpipe_hpc.errors import ConfigError, PartitionError
from gpipe_hpc.models import Layer, LossFunction
from gpipe_hpc.planner.costs.counted import ModelCount, count_model
from gpipe_hpc.planner.costs.measured import measure_layers
from gpipe_hpc.planner.costs.work import PassWork

log = logging.getLogger("gpipe_hpc.pipeline")

MEASURED: Final = "time"
COUNTED: Final = "FLOPs"
MEASURED_HERE: Final = "layers measured here"


class LayerTimes(NamedTuple):
    """Times of the passes of one layer, in seconds or FLOPs.

    Attributes:
      of_input, of_weight: the two halves of a split backward.
      bare_forward: a forward that saves nothing for the backward, because it will be recomputed.
    """

    forward: float
    backward: float
    of_input: float
    of_weight: float
    bare_forward: float

    @classmethod
    def alike(
        cls, forward: float, backward: float, of_input: float, of_weight: float
    ) -> "LayerTimes":
        """Return times in which a forward takes equally long with and without an autograd graph."""
        return cls(forward, backward, of_input, of_weight, forward)


class Example(NamedTuple):
    """One micro-batch and its loss function; counting uses only their shapes."""

    inputs: Any
    targets: Any
    loss_fn: LossFunction
    seed: int
    device: Device


class CostModel(Protocol):
    """Interface of a source of layer costs for one micro-batch, computed on first use.

    `measure` is the unit of the times: ``time`` for seconds, or ``FLOPs``.
    """

    @property
    def measure(self) -> str:
        """Return the unit of `times`: ``time`` (seconds) or ``FLOPs``."""

    @property
    def layers(self) -> Sequence[Layer]:
        """Return the layers of the model."""

    @property
    def times(self) -> tuple[LayerTimes, ...]:
        """Return the times of each layer; the loss is part of the last layer."""

    @property
    def count(self) -> ModelCount:
        """Return the counted FLOPs and bytes of each layer."""


@dataclass(frozen=True)
class CountedCosts:
    """Layer costs in FLOPs and bytes, counted on the meta device without running the model.

    `shares_casts`: whether a weight is cast to a lower `precision` once per step.
    """

    layers: Sequence[Layer]
    example: Example | None
    precision: str = "float32"
    shares_casts: bool = True
    measure: str = COUNTED

    @cached_property
    def count(self) -> ModelCount:
        """Return the counted FLOPs and bytes; raise ConfigError if there is no example."""
        if self.example is None:
            raise ConfigError(
                "memory_bytes: counting the memory of layers needs one micro-batch, but no example "
                "was passed; pass example=(inputs, targets), or leave out memory_bytes and "
                "recompute='budget'"
            )
        return count_model(
            self.layers,
            self.example.inputs,
            self.example.targets,
            self.example.loss_fn,
            device_type=self.example.device.type,
            precision=self.precision,
            shares_casts=self.shares_casts,
            library_bytes=self.example.device.library_bytes,
        )

    @cached_property
    def times(self) -> tuple[LayerTimes, ...]:
        """Return the FLOPs of each layer."""
        flops = [[work.flops for work in (*each, each.of_weight)] for each in work_of(self.count)]
        return tuple(LayerTimes.alike(*parts) for parts in flops)


def work_of(count: ModelCount) -> tuple[PassWork, ...]:
    """Return the counted work of each layer; the loss is part of the last layer."""
    works = [each.work for each in count.layers]
    if count.loss is not None:
        works[-1] = PassWork.together([works[-1], count.loss.work])
    return tuple(works)


@dataclass(frozen=True)
class MeasuredCosts:
    """Layer costs in seconds, measured by running the layers on this device.

    `around` creates a context manager that is entered while the layers run; `how` describes the
    measurement mode for messages.
    """

    counted: CountedCosts
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    how: str = MEASURED_HERE
    measure: str = MEASURED

    @property
    def layers(self) -> Sequence[Layer]:
        """Return the layers of the model."""
        return self.counted.layers

    @property
    def count(self) -> ModelCount:
        """Return the counted FLOPs and bytes."""
        return self.counted.count

    @cached_property
    def times(self) -> tuple[LayerTimes, ...]:
        """Return the seconds of each layer; raise PartitionError without an example."""
        example = self.counted.example
        if example is None:
            raise PartitionError(
                "partition: 'time' measures layers on one micro-batch, but no example was passed; "
                "pass example=(inputs, targets), or use partition='parameters'"
            )
        log.info("timing %d layers on one micro-batch ...", len(self.layers))
        began_s = time.perf_counter()
        shared = self.counted.shares_casts
        casts = casting(self.counted.precision, example.device, shared=shared)
        with self.around(), casts:
            measured = measure_layers(
                self.layers,
                example.inputs,
                example.targets,
                example.loss_fn,
                seed=example.seed,
                device=example.device,
            )
        log.info("timed the layers in %.1f s", time.perf_counter() - began_s)
        return tuple(
            LayerTimes(
                each.forward_s, each.backward_s, each.input_s, each.weight_s, each.bare_forward_s
            )
            for each in measured
        )
