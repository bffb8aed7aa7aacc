"""Layers that are built, run on a micro-batch, and timed: one alone, or several in a row."""

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
from gpipe_hpc.engine.backward.splitting import Deferred, DeferWeights
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
from gpipe_hpc.planner.costs.clock import Clock
from gpipe_hpc.planner.costs.walk import Visit, described
from gpipe_hpc.pytree import map_tensors, tensors_of

_DISTURBED: Final = 1.5  # times the least
_FIT_LAYER: Final = "make the layer take what the layer before it (or the data) gives"
_FIT_LOSS: Final = (
    "correct the loss, or choose model, data and loss that fit each other (as many outputs as the "
    "targets have classes)"
)


class Bench(NamedTuple):
    """How layers are measured."""

    seed: int
    device: Device
    repetitions: int
    warmup: int
    clock: Clock

    @contextmanager
    def built(self, visits: Sequence[Visit], loss: "Loss | None") -> Iterator["BuiltLayers"]:
        """Build layers that follow each other; the last one has the loss, if there is one.

        Within the block they draw random numbers of their own. Behind it nothing of them is left:
        autocast would hold each weight that it has cast, with its gradient.
        """
        key = init_key(self.seed, visits[0].index)
        with ExitStack() as stack:
            stack.callback(torch.clear_autocast_cache)
            stack.enter_context(seeded_generators(key))
            modules = [
                build_layer(
                    _private(visit.layer, visit.index),
                    index=visit.index,
                    seed=self.seed,
                    device=self.device,
                )
                for visit in visits
            ]
            yield BuiltLayers(visits, modules, loss, self)


class Seconds(NamedTuple):
    """Of forward, backward, the two halves of a split backward, and a forward without a graph.

    `split_forward`: of a forward whose backward will be split.
    """

    forward: float
    backward: float
    of_input: float
    of_weight: float
    bare_forward: float
    split_forward: float


def usual(times_s: Sequence[float]) -> float:
    """Return the mean of times, without those above 1.5 times the least: others had the machine."""
    least_s = min(times_s)
    return fmean(time_s for time_s in times_s if time_s <= _DISTURBED * abs(least_s))


class Took(NamedTuple):
    """Seconds of a part: of the device, and of the host that ordered it."""

    device: float
    host: float


# Output and stashes of a run, and what its parts took.
_Run = tuple[list[Any], Sequence[Took]]


@dataclass(frozen=True)
class BuiltLayers:
    """Built layers that follow each other, and the micro-batch that they are run on.

    `loss`: of the last of them, None if it has none.
    """

    visits: Sequence[Visit]
    modules: Sequence[nn.Module]
    loss: "Loss | None"
    bench: Bench

    def measured(self) -> tuple[list[Any], tuple[Seconds, ...], tuple[Seconds, ...]]:
        """Return output and stashes, detached, and the seconds of each part, of each repetition.

        The device's, then the host's.
        """
        results, whole = self._repeated(self.trained)
        _, halves = self._repeated(partial(self.trained, is_split=True))
        _, bare = self._repeated(self.bare)
        rows = [
            (*both, *of_halves, *of_bare, split_forward)
            for both, (split_forward, *of_halves), of_bare in zip(whole, halves, bare, strict=True)
        ]
        of_device = tuple(Seconds(*(took.device for took in row)) for row in rows)
        return results, of_device, tuple(Seconds(*(took.host for took in row)) for row in rows)

    def _repeated(self, run: Callable[[], _Run]) -> tuple[list[Any], list[Sequence[Took]]]:
        """Run it several times; return output and stashes of the last, and what each took."""
        warmup, wanted = self.bench.warmup, self.bench.repetitions
        times: list[Sequence[Took]] = []
        for _ in range(warmup + wanted):
            results: list[Any] = []  # what the last one made is gone before the next begins
            results, seconds = run()
            times.append(seconds)
        return results, times[warmup:]

    def trained(self, *, is_split: bool = False) -> _Run:
        """Run one forward and backward; return output and stashes, and what its parts took.

        The parts are forward and backward, or, where weight gradients are deferred, three.
        """
        deferred = Deferred() if is_split else None
        # Parameter gradients stay, so that repetitions accumulate into them as micro-batches do.
        forward, results = self._forward()
        ordered = partial(self.bench.clock.ordered, device=self.bench.device)
        with self._failures_told():
            with ExitStack() as blocks:
                if deferred is not None:
                    blocks.enter_context(deferred.in_forward())
                    blocks.enter_context(DeferWeights(deferred))
                ends, *in_forward = ordered(forward)
            seeds = [torch.ones_like(end) for end in ends]
            _, *in_backward = ordered(lambda: _backward(ends, seeds))
            parts = [Took(*in_forward), Took(*in_backward) if ends else Took(0.0, 0.0)]
            if deferred is not None:
                parts.append(Took(*ordered(deferred.run)[1:]))
        return map_tensors(_detached, results), parts

    def bare(self) -> _Run:
        """Run a forward that keeps nothing; return nothing else, and what it took."""
        forward, _ = self._forward()
        with self._failures_told(), torch.no_grad():
            _, *took = self.bench.clock.ordered(forward, device=self.bench.device)
        return [], [Took(*took)]

    def through(self) -> tuple[float, ...]:
        """Run one forward and backward from end to end; return the seconds that they take.

        On a CPU these are two numbers.
        An accelerator has the backward in hand before it is done with the forward: one number.
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

        with self._failures_told():
            if self.bench.device.is_accelerator:
                return (self._from_idle(both),)
            return self._from_idle(first), self._from_idle(second)

    def _from_idle(self, work: Callable[[], object]) -> float:
        return self.bench.clock.from_idle(work, self.bench.device)[1]

    def bare_through(self) -> float:
        """Run one forward that keeps nothing, from end to end; return its seconds."""
        forward, _ = self._forward()
        with self._failures_told(), torch.no_grad():
            return self._from_idle(forward)

    def kept_bytes(self) -> int:
        """Return the bytes that a forward keeps for its backward, without parameters.

        Of a forward that does not bear to be watched, as `torch.func` does not: 0.
        """
        own = {parameter.untyped_storage().data_ptr() for parameter in self._parameters()}
        kept: dict[int, UntypedStorage] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage  # held, so that no other one takes its place
            return tensor.detach()  # a node that holds its own output would live for ever

        forward, _ = self._forward()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            try:
                forward()
            except Exception:  # what is wrong with it is told where it is timed
                return 0
        return sum(each.nbytes() for place, each in kept.items() if place not in own)

    def num_bytes(self, results: list[Any]) -> int:
        """Return the bytes that a step touches: weights, what is given, and these `results`."""
        given = [tuple(visit.given) for visit in self.visits]
        return sum(each.nbytes for each in (*self._parameters(), *tensors_of((given, results))))

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for module in self.modules for parameter in module.parameters()]

    def _forward(self) -> tuple[Callable[[], list[Tensor]], list[Any]]:
        """Return a forward on clones, to be called once, and the list that gets what it makes.

        It returns what a backward starts from. A layer may work in place: on a leaf that is
        forbidden, and the next repetition needs the input unchanged.
        """
        given = map_tensors(_cloned, self.visits[0].given.value)
        popped = map_tensors(_cloned, _from_outside(self.visits))
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
        """Return the layers' names for messages."""
        first, last = self.visits[0], self.visits[-1]
        return first.where if len(self.visits) == 1 else f"{first.where} to {last.where}"

    @contextmanager
    def _failures_told(self) -> Iterator[None]:
        """Name the layer in what it raises."""
        try:
            yield
        except LossError:
            raise
        except Exception as error:
            raise ModelError(
                f"{self._where}: failed on the example micro-batch, expected it to run on "
                f"{described(self.visits[0].given)}, got {with_remedy(error, _FIT_LAYER)}"
            ) from error


def _backward(ends: list[Tensor], seeds: list[Tensor]) -> None:
    if ends:
        torch.autograd.backward(ends, seeds)


class LossError(ModelError):
    """The loss failed, not the layer before it."""


class Loss(NamedTuple):
    """The loss, and the targets of the example."""

    function: LossFunction
    targets: Any

    def of(self, output: Any, where: str) -> Tensor:
        """Return the one tensor that the backward starts from; `where` names the last layer."""
        try:
            value = self.function(output, self.targets)
        except Exception as error:
            raise LossError(
                f"loss: failed on the output of {where} and the example's targets, expected it to "
                f"take output {described(output)} and targets {described(self.targets)}, got "
                f"{with_remedy(error, _FIT_LOSS)}"
            ) from error
        total: Tensor = value[0] if isinstance(value, tuple) else value
        return total


def _private(layer: Layer, index: int) -> Layer:
    """Return a layer that the measurement may change: a copy of a module that comes built."""
    if isinstance(layer, LayerSpec):
        return layer
    try:
        return copy.deepcopy(layer)
    except Exception as error:
        raise ModelError(
            f"layers.{index}: cannot be measured, expected a module that copy.deepcopy copies, "
            f"got {words_of(error)}; give a LayerSpec, or partition by parameters"
        ) from error


def _from_outside(visits: Sequence[Visit]) -> list[dict[str, Any]]:
    """Return what each layer pops that none of those ahead of it here has stashed."""
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
    """Cut a tensor from its graph; it remembers whether a gradient will be asked of it."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
