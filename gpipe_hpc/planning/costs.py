"""Measure what each layer costs on the device and micro-batch at hand."""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from gpipe_hpc.comm.nests import flatten, map_tensors, tensors_of
from gpipe_hpc.engine.splitting import Deferred, DeferWeights
from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import (
    Layer,
    LayerSpec,
    SkipNames,
    build_layer,
    find_skips,
    init_key,
    layer_name,
    run_layer,
    seeded_generators,
    skip_names,
)
from gpipe_hpc.planning.trial import Given, structure

Result = TypeVar("Result")
LossFunction = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs for one micro-batch.

    ``forward_s`` and ``backward_s`` are seconds without recomputation, ``input_s`` and ``weight_s``
    those of a backward that is split in two. ``activation_bytes`` is what the forward keeps for the
    backward (its input where it needs that; parameters and buffers are not counted),
    ``output_bytes`` what crosses a boundary behind this layer.
    """

    forward_s: float
    backward_s: float
    input_s: float
    weight_s: float
    parameters: int
    activation_bytes: int
    output_bytes: int = 0

    @property
    def total_s(self) -> float:
        """Return the seconds of forward plus backward."""
        return self.forward_s + self.backward_s


def measure_layers(
    layers: Sequence[Layer],
    example_inputs: Any,
    example_targets: Any = None,
    loss_fn: LossFunction | None = None,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    repetitions: int = 5,
    warmup: int = 2,
) -> list[LayerCost]:
    """Return the cost of every layer, each run alone on one micro-batch; medians over repetitions.

    One layer at a time is built (`build_layer` with ``seed``) and dropped again. Equal specs whose
    inputs have equal structure are measured once. Without ``loss_fn`` the last layer's backward
    starts from ones; with it the loss counts for the last layer. ``example_inputs`` is any nest of
    tensors. Modules that come built are copied, so neither their buffers nor their gradients
    change, and torch's random state is left as it was. Purely local: no communication.

    Raises `ModelError`, naming the layer, when it does not run on what the layer before gives.
    """
    target = torch.device(device)
    value = _to(example_inputs, target)
    goal = _to(example_targets, target)
    find_skips(layers)  # refuses what cannot be popped
    stashed: dict[str, Any] = {}
    known: list[_Known] = []
    costs: list[LayerCost] = []
    for index, layer in enumerate(layers):
        names = skip_names(layer)
        given = Given(value, tuple(stashed.pop(name) for name in names.pops))
        loss = _Loss(loss_fn, goal) if loss_fn and index == len(layers) - 1 else None
        signature = None if loss else (structure(given), len(names.stashes))
        found = _found(known, layer, signature)
        if found is None:
            # In a function of its own, so that the layer is gone before the next one is built.
            found = _measured(layer, index, given, loss, seed, target, repetitions, warmup)
            if isinstance(layer, LayerSpec):
                known.append(_Known(layer, signature, found))
        value = found.output
        stashed.update(zip(names.stashes, found.stashed, strict=True))
        costs.append(found.cost)
    return costs


class _Measured(NamedTuple):
    """What a layer costs, and what it gives to layers behind it."""

    cost: LayerCost
    output: Any
    stashed: tuple[Any, ...]


class _Known(NamedTuple):
    """A layer that was measured, and on what."""

    spec: LayerSpec
    signature: object
    found: _Measured


def _measured(
    layer: Layer,
    index: int,
    given: Given,
    loss: "_Loss | None",
    seed: int,
    device: torch.device,
    repetitions: int,
    warmup: int,
) -> _Measured:
    with seeded_generators(init_key(seed, index)):
        module = build_layer(_private(layer, index), index=index, seed=seed, device=device)
        where = f"layers.{index} ({layer_name(layer)})"
        trial = _Trial(where, module, skip_names(layer), given, loss, device)
        return trial.measure(repetitions, warmup)


@dataclass(frozen=True)
class _Trial:
    """One built layer and the micro-batch it is run on."""

    where: str
    module: nn.Module
    names: SkipNames
    given: Given
    loss: "_Loss | None"
    device: torch.device

    def measure(self, repetitions: int, warmup: int) -> _Measured:
        """Return the layer's cost, and detached what it gives to layers behind it."""
        kept: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(self._keeper(kept), _identity):
            results, _ = self._pass(None)
        forward_s, backward_s = self._medians(repetitions, warmup, lambda: None)
        _, input_s, weight_s = self._medians(repetitions, 1, Deferred)
        output, *stashed = results
        cost = LayerCost(
            forward_s=forward_s,
            backward_s=backward_s,
            input_s=input_s,
            weight_s=weight_s,
            parameters=sum(p.numel() for p in self.module.parameters()),
            activation_bytes=sum(kept.values()),
            output_bytes=sum(tensor.nbytes for tensor in tensors_of(output)),
        )
        return _Measured(cost, output, tuple(stashed))

    def _medians(
        self, repetitions: int, warmup: int, deferred: Callable[[], Deferred | None]
    ) -> list[float]:
        times = [self._pass(deferred())[1] for _ in range(warmup + repetitions)][warmup:]
        return [statistics.median(column) for column in zip(*times, strict=True)]

    def _pass(self, deferred: Deferred | None) -> tuple[list[Any], tuple[float, ...]]:
        """Run one forward and backward; return output and stashes, and the seconds of its parts.

        The parts are forward and backward, or, where weight gradients are deferred, three.
        """
        # Clones, for a layer may work in place: on a leaf that is forbidden, and the next
        # repetition needs the input unchanged. Parameter gradients stay, so that repetitions
        # accumulate into them as micro-batches do.
        given = map_tensors(lambda tensor: _detached(tensor).clone(), tuple(self.given))
        results: list[Any] = []

        def forward() -> list[Tensor]:
            value, popped = given
            stashed = dict(zip(self.names.pops, popped, strict=True))
            output = run_layer(self.module, self.names, value, stashed, self.where)
            results.extend([output, *(stashed[name] for name in self.names.stashes)])
            ends = results if self.loss is None else [self.loss.of(output, self.where)]
            return [tensor for tensor in tensors_of(ends) if tensor.requires_grad]

        try:
            with ExitStack() as blocks:
                if deferred is not None:
                    blocks.enter_context(deferred.in_forward())
                    blocks.enter_context(DeferWeights(deferred))
                ends, forward_s = _timed(forward, self.device)
            seeds = [torch.ones_like(end) for end in ends]
            _, backward_s = _timed(lambda: _backward(ends, seeds), self.device)
            seconds = [forward_s, backward_s if ends else 0.0]
            if deferred is not None:
                seconds.append(_timed(deferred.run, self.device)[1])
        except _LossError:
            raise
        except Exception as error:
            raise ModelError(
                f"{self.where}: failed on the example micro-batch, expected it to run on "
                f"{_describe(tuple(self.given))}, got {type(error).__name__}: {error}; make the "
                f"layer take what the layer before it (or the data) gives"
            ) from error
        return map_tensors(_detached, results), tuple(seconds)

    def _keeper(self, kept: dict[int, int]) -> Callable[[Tensor], Tensor]:
        """Return a hook that notes the storage of each saved tensor, by address, in ``kept``."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        own = {tensor.untyped_storage().data_ptr() for tensor in tensors}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        return keep


def _backward(ends: list[Tensor], seeds: list[Tensor]) -> None:
    if ends:
        torch.autograd.backward(ends, seeds)


def _timed(work: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    """Run ``work`` and return its result and the seconds the device needed for it."""
    if device.type != "cuda":
        begin = time.perf_counter()
        result = work()
        return result, time.perf_counter() - begin
    with torch.cuda.device(device):
        begin_event = torch.Event(device, enable_timing=True)
        end_event = torch.Event(device, enable_timing=True)
        torch.cuda.synchronize()
        begin_event.record()
        result = work()
        end_event.record()
        end_event.synchronize()
        return result, float(begin_event.elapsed_time(end_event)) / 1e3


class _LossError(ModelError):
    """The loss failed, not the layer before it."""


class _Loss(NamedTuple):
    """The loss, and the targets of the example."""

    function: LossFunction
    targets: Any

    def of(self, output: Any, where: str) -> Tensor:
        """Return the one tensor that the backward starts from; `where` names the last layer."""
        try:
            value = self.function(output, self.targets)
        except Exception as error:
            raise _LossError(
                f"loss: failed on the output of {where} and the example's targets, expected it to "
                f"take output {_describe(output)} and targets {_describe(self.targets)}, got "
                f"{type(error).__name__}: {error}; correct the loss, or choose model, data and "
                f"loss that fit each other (as many outputs as the targets have classes)"
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
            f"got {type(error).__name__}: {error}; give a LayerSpec, or partition by parameters"
        ) from error


def _found(known: list[_Known], layer: Layer, signature: object) -> _Measured | None:
    if signature is None or not isinstance(layer, LayerSpec):
        return None
    for spec, seen, found in known:
        if seen == signature and spec == layer:
            return found
    return None


def _describe(nest: Any) -> str:
    return ", ".join(
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        if isinstance(leaf, Tensor)
        else type(leaf).__name__
        for leaf in flatten(nest)[0]
    )


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _detached(tensor: Tensor) -> Tensor:
    """Cut a tensor from its graph; it remembers whether a gradient will be asked of it."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _to(nest: Any, device: torch.device) -> Any:
    return map_tensors(lambda tensor: tensor.to(device), nest)
