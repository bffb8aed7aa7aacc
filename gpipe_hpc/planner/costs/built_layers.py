"""Build consecutive layers, run them on a micro-batch and time their forward and backward."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn

from gpipe_hpc.device.device import Device
from gpipe_hpc.engine import Deferred, DeferWeights
from gpipe_hpc.errors import ModelError, words_of
from gpipe_hpc.models import (
    Layer,
    LayerSpec,
    LossFunction,
    build_layer,
    init_key,
    run_layer,
    seeded_generators,
)
from gpipe_hpc.models.remedies import with_remedy
from gpipe_hpc.planner.costs.clock import WorkClock
from gpipe_hpc.planner.costs.walk import LayerVisit, described
from gpipe_hpc.pytree import map_tensors, tensors_of

_DISTURBED: Final = 1.5  # repetitions above this multiple of the fastest are dropped
_FIT_LAYER: Final = "make the layer accept the output of the layer before it (or the data)"
_FIT_LOSS: Final = (
    "correct the loss, or choose model, data and loss that match (for example as many outputs as "
    "the targets have classes)"
)


class MeasuringOptions(NamedTuple):
    """Options for measuring layers: seed, device, numbers of repetitions, and the clock."""

    seed: int
    device: Device
    repetitions: int
    warmup: int
    clock: WorkClock

    @contextmanager
    def built(
        self, visits: Sequence[LayerVisit], loss: "ExampleLoss | None"
    ) -> Iterator["BuiltLayers"]:
        """Build consecutive layers, and the loss of the last one if given, for the block.

        Within the block the layers use their own random generators. At its end the autocast cache
        is cleared, which would otherwise keep each cast weight and its gradient alive.
        """
        key = init_key(self.seed, visits[0].index)
        with ExitStack() as stack:
            stack.callback(torch.clear_autocast_cache)
            stack.enter_context(seeded_generators(key))
            modules = [
                build_layer(
                    _copy_for_measurement(visit.layer, visit.index),
                    index=visit.index,
                    seed=self.seed,
                    device=self.device,
                )
                for visit in visits
            ]
            yield BuiltLayers(visits, modules, loss, self)


class LayerSeconds(NamedTuple):
    """Measured seconds of each pass of a layer or of several layers.

    Attributes:
      of_input, of_weight: the two halves of a split backward.
      bare_forward: a forward without an autograd graph.
      split_forward: a forward whose backward will be split.
    """

    forward: float
    backward: float
    of_input: float
    of_weight: float
    bare_forward: float
    split_forward: float


def usual(times_s: Sequence[float]) -> float:
    """Return the mean of the times that are at most 1.5 times the smallest.

    Longer times were disturbed by other work on the machine.
    """
    least_s = min(times_s)
    return fmean(time_s for time_s in times_s if time_s <= _DISTURBED * abs(least_s))


class PassSeconds(NamedTuple):
    """Seconds that one pass takes on the device, and that the host takes to launch it."""

    device: float
    host: float


# Output and stashed values of a run, and the time of each pass.
_Run = tuple[list[Any], Sequence[PassSeconds]]


@dataclass(frozen=True)
class BuiltLayers:
    """Consecutive layers with allocated weights, and the micro-batch to run them on.

    `loss` belongs to the last layer; None if the layers have no loss.
    """

    visits: Sequence[LayerVisit]
    modules: Sequence[nn.Module]
    loss: "ExampleLoss | None"
    bench: MeasuringOptions

    def measured(self) -> tuple[list[Any], tuple[LayerSeconds, ...], tuple[LayerSeconds, ...]]:
        """Measure forward and backward repeatedly; return results, device times and host times.

        The results are the last output and the stashed values, detached. The times have one entry
        per repetition.
        """
        results, whole = self._repeated(self.trained)
        _, halves = self._repeated(partial(self.trained, is_split=True))
        _, bare = self._repeated(self.bare)
        rows = [
            (*both, *of_halves, *of_bare, split_forward)
            for both, (split_forward, *of_halves), of_bare in zip(whole, halves, bare, strict=True)
        ]
        of_device = tuple(LayerSeconds(*(took.device for took in row)) for row in rows)
        return results, of_device, tuple(LayerSeconds(*(took.host for took in row)) for row in rows)

    def _repeated(self, run: Callable[[], _Run]) -> tuple[list[Any], list[Sequence[PassSeconds]]]:
        """Call `run` repeatedly; return the last results, and all times after the warm-up."""
        warmup, wanted = self.bench.warmup, self.bench.repetitions
        times: list[Sequence[PassSeconds]] = []
        for _ in range(warmup + wanted):
            results: list[Any] = []  # free the last results before the next repetition
            results, seconds = run()
            times.append(seconds)
        return results, times[warmup:]

    def trained(self, *, is_split: bool = False) -> _Run:
        """Run one forward and backward; return output, stashed values, and the times of each pass.

        The passes are forward and backward, or with `is_split` forward, input gradients, weight
        gradients.
        """
        deferred = Deferred() if is_split else None
        # Parameter gradients are kept, so that repetitions accumulate as micro-batches do.
        forward, results = self._forward()
        ordered = partial(self.bench.clock.ordered, device=self.bench.device)
        with self._errors_named():
            with ExitStack() as blocks:
                if deferred is not None:
                    blocks.enter_context(deferred.in_forward())
                    blocks.enter_context(DeferWeights(deferred))
                ends, *in_forward = ordered(forward)
            seeds = [torch.ones_like(end) for end in ends]
            _, *in_backward = ordered(lambda: _backward(ends, seeds))
            parts = [
                PassSeconds(*in_forward),
                PassSeconds(*in_backward) if ends else PassSeconds(0.0, 0.0),
            ]
            if deferred is not None:
                parts.append(PassSeconds(*ordered(deferred.run)[1:]))
        return map_tensors(_detached, results), parts

    def bare(self) -> _Run:
        """Run one forward without an autograd graph; return an empty list, and its time."""
        forward, _ = self._forward()
        with self._errors_named(), torch.no_grad():
            _, *took = self.bench.clock.ordered(forward, device=self.bench.device)
        return [], [PassSeconds(*took)]

    def through(self) -> tuple[float, ...]:
        """Return the seconds of a forward and backward, from an idle device until it is idle again.

        Returns two numbers on a CPU (forward, backward), and one on an accelerator, which starts
        the backward before the forward has completed.
        """
        forward, _ = self._forward()
        ends: list[Tensor] = []

        def first() -> None:
            ends.extend(forward())

        def second() -> None:
            _backward(ends, [torch.ones_like(end) for end in ends])

        def both() -> None:
            first()
            second()

        with self._errors_named():
            if self.bench.device.is_accelerator:
                return (self._from_idle(both),)
            return self._from_idle(first), self._from_idle(second)

    def _from_idle(self, work: Callable[[], object]) -> float:
        return self.bench.clock.from_idle(work, self.bench.device)[1]

    def bare_through(self) -> float:
        """Return the seconds of a forward without a graph, from idle device to idle device."""
        forward, _ = self._forward()
        with self._errors_named(), torch.no_grad():
            return self._from_idle(forward)

    def kept_bytes(self) -> int:
        """Return the bytes that a forward saves for its backward, without parameters.

        Returns 0 if the forward does not support saved-tensor hooks, as with `torch.func`.
        """
        own = {parameter.untyped_storage().data_ptr() for parameter in self._parameters()}
        kept: dict[int, UntypedStorage] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage  # kept alive, so that its address is not reused
            return tensor.detach()  # a node that saves its own output would never be freed

        forward, _ = self._forward()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            try:
                forward()
            except Exception:  # timing the layer reports the error
                return 0
        return sum(each.nbytes() for place, each in kept.items() if place not in own)

    def num_bytes(self, results: list[Any]) -> int:
        """Return the bytes that a training step accesses: weights, inputs, and `results`."""
        given = [tuple(visit.given) for visit in self.visits]
        return sum(each.nbytes for each in (*self._parameters(), *tensors_of((given, results))))

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for module in self.modules for parameter in module.parameters()]

    def _forward(self) -> tuple[Callable[[], list[Tensor]], list[Any]]:
        """Return a function that runs one forward, and the list that receives its results.

        The function must be called once and returns the tensors from which a backward starts. It
        runs on clones, because a layer may work in place, which autograd forbids on a leaf and
        which would change the next repetition's input.
        """
        given = map_tensors(_cloned, self.visits[0].given.value)
        popped = map_tensors(_cloned, _external_pops(self.visits))
        results: list[Any] = []

        def forward() -> list[Tensor]:
            output, stashed = given, dict[str, Any]()
            for visit, module, own in zip(self.visits, self.modules, popped, strict=True):
                stashed.update(own)
                output = run_layer(module, visit.names, output, stashed, visit.where)
            results.extend([output, *stashed.values()])
            ends = results if self.loss is None else [self.loss.of(output, self._where)]
            return [tensor for tensor in tensors_of(ends) if tensor.requires_grad]

        return forward, results

    @property
    def _where(self) -> str:
        """Return the names of the layers for error messages."""
        first, last = self.visits[0], self.visits[-1]
        return first.where if len(self.visits) == 1 else f"{first.where} to {last.where}"

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        """Convert exceptions in the block to ModelError with the layer's name."""
        try:
            yield
        except LossError:
            raise
        except Exception as error:
            raise ModelError(
                f"{self._where}: failed on the example micro-batch "
                f"({described(self.visits[0].given)}): {with_remedy(error, _FIT_LAYER)}"
            ) from error


def _backward(ends: list[Tensor], seeds: list[Tensor]) -> None:
    if ends:
        torch.autograd.backward(ends, seeds)


class LossError(ModelError):
    """The loss function failed; the layer before it did not."""


class ExampleLoss(NamedTuple):
    """A loss function with the targets of the example micro-batch."""

    function: LossFunction
    targets: Any

    def of(self, output: Any, where: str) -> Tensor:
        """Return the scalar loss of an output; `where` names the last layer in error messages."""
        try:
            value = self.function(output, self.targets)
        except Exception as error:
            raise LossError(
                f"loss: failed after {where}, on output {described(output)} and targets "
                f"{described(self.targets)} of the example: {with_remedy(error, _FIT_LOSS)}"
            ) from error
        total: Tensor = value[0] if isinstance(value, tuple) else value
        return total


def _copy_for_measurement(layer: Layer, index: int) -> Layer:
    """Return a layer that the measurement may modify: a spec, or a deep copy of a built module."""
    if isinstance(layer, LayerSpec):
        return layer
    try:
        return copy.deepcopy(layer)
    except Exception as error:
        raise ModelError(
            f"layers.{index}: cannot be measured, because copy.deepcopy of the module failed: "
            f"{words_of(error)}; pass a LayerSpec, or partition by parameters"
        ) from error


def _external_pops(visits: Sequence[LayerVisit]) -> list[dict[str, Any]]:
    """Return, for each layer, the popped values that no layer of this group has stashed."""
    stashed: set[str] = set()
    found = []
    for visit in visits:
        pairs = zip(visit.names.pops, visit.given.popped, strict=True)
        found.append({name: value for name, value in pairs if name not in stashed})
        stashed = stashed.difference(visit.names.pops).union(visit.names.stashes)
    return found


def _cloned(tensor: Tensor) -> Tensor:
    return _detached(tensor).clone()


def _detached(tensor: Tensor) -> Tensor:
    """Detach a tensor from its graph, keeping its requires_grad flag."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
