"""Measure what a step takes beside its layers, with the engine and the optimizer of a run.

Pipelines of layers with hardly any work take as long as all else does. On a CPU these layers read
more than a core has caches of its own, as layers with work do, and what a step takes beside them
finds little of its own there. Times are usual ones, as those of layers are.
"""

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from gpipe_hpc.comm.cores.machine import allowed_cpus
from gpipe_hpc.comm.device import maker_name
from gpipe_hpc.comm.host.machine import kernel_identity
from gpipe_hpc.comm.mesh import Mesh
from gpipe_hpc.comm.world import World, together
from gpipe_hpc.config import Config
from gpipe_hpc.models import LayerSpec
from gpipe_hpc.pipeline import Pipeline
from gpipe_hpc.planning import measure_layers
from gpipe_hpc.planning.costs.built_layers import usual
from gpipe_hpc.planning.costs.caches import Caches
from gpipe_hpc.planning.costs.clock import Clock
from gpipe_hpc.planning.costs.prices import Measured, Pass, Prices
from gpipe_hpc.planning.step_time import Crowd
from gpipe_hpc.schedule import Link
from gpipe_hpc.training.joining import settle_memory
from gpipe_hpc.training.machines import optimizer_kind
from gpipe_hpc.training.optimizers.optimizer import build_optimizer

_WIDTH: Final = 8
_READ: Final = 2**20  # float32: more than the caches of a core that are its own
_IN_A_ROW: Final = 8  # layers
_MICROBATCHES: Final = (4, 20)
_REPEATS: Final = 8
_SMALL: Final = 64  # numbers of a tensor that takes no time but that of being one
_MANY: Final = 65  # tensors
_LARGE: Final = 2**21  # numbers: more than caches hold, with their gradient and states
_SUMMED: Final = (64, 2**20)  # numbers of messages


def measure_prices(config: Config, world: World, mesh: Mesh, send: Link) -> Prices | None:
    """Return, on rank 0, what a step takes beside its layers on ranks laid out so.

    Every rank calls it. `send`: what links two ranks of a host, as timed before.
    """
    crowd = _crowd(world)
    slowed = 1.0 if world.device.is_accelerator else max(1.0, crowd.ranks / crowd.cores)
    own = _Bench(config, world, mesh, slowed)
    action_s, step_s = own.overheads()
    update, norm = own.passes()
    summing = own.summing()
    load_as_a_run(config)
    process_bytes = _process_bytes(world)
    if world.rank:
        return None
    return Prices(
        action_s,
        send,
        summing,
        update,
        norm,
        step_s,
        Measured(
            world.device.type,
            maker_name(world.device),
            crowd.cores,
            config.train.precision,
            optimizer_kind(config),
        ),
        process_bytes,
    )


def load_as_a_run(config: Config) -> None:
    """Load the libraries of a run that a preflight does without; they take some 13 MB."""
    importlib.import_module("gpipe_hpc.training.command")
    if "tensorboard" in config.metrics.to:
        importlib.import_module("torch.utils.tensorboard")


def _process_bytes(world: World) -> int:
    """Return what the process of a rank takes beside the tensors of a run; the most of any rank.

    Every rank calls it, once pipelines have run here: their libraries and connections are there,
    their tensors are not. On an accelerator it is what is taken of the device beside torch's
    tensors, 0 where the device does not tell.
    """
    device = world.device
    settle_memory(device)
    own = device.memory_allocated()
    if device.is_accelerator:
        total, free = device.memory_total(), device.memory_free()
        own = 0 if total is None or free is None else max(0, total - free - own)
    with together(world, "measuring memory"):
        most: int = world.everybody.merge_object(own, max)
    return most


def _crowd(world: World) -> Crowd:
    """Return, on every rank, how many ranks share how many cores on the first rank's host."""
    with together(world, "counting cores"):
        own = kernel_identity(), sorted(allowed_cpus() or range(os.cpu_count() or 1))
        told = world.everybody.gather_object(own, root=0)
        found = None
        if told is not None:
            here = [cpus for host, cpus in told if host == told[0][0]]
            ranks = 1 if world.is_one_process else len(here)
            found = Crowd(ranks, len({cpu for cpus in here for cpu in cpus}))
        crowd: Crowd = world.everybody.broadcast_object(found, root=0)
    return crowd


class _Reading(nn.Linear):
    """A small layer that reads so many numbers on its way, in its forward and in its backward."""

    def __init__(self, width: int, num_read: int) -> None:
        super().__init__(width, width)
        self._read = torch.ones(num_read)  # no parameter and no buffer: nobody sums or sends it

    def forward(self, value: Tensor) -> Tensor:
        """Return what a linear layer does."""
        output = super().forward(value)
        self._read.sum()
        register: Any = output.register_hook  # torch has left it without types
        if output.requires_grad:
            register(self._read_again)
        return output

    def _read_again(self, _: Tensor) -> None:
        self._read.sum()


class _Bag(nn.Module):
    """So many tensors of so many numbers, all of which get a gradient."""

    def __init__(self, num: int, size: int) -> None:
        super().__init__()
        self.own = nn.ParameterList(torch.full((size,), 1e-3) for _ in range(num))

    def forward(self, value: Tensor) -> Tensor:
        """Return the input times about nothing."""
        means = torch.stack([each.mean() for each in self.own])
        return value * (1 + means.sum())


def _loss(output: Tensor, target: Any) -> Tensor:
    return output.square().mean()


@dataclass(frozen=True)
class _Bench:
    """The ranks, how a run's pipeline stands on them, and how much they slow each other down."""

    config: Config
    world: World
    mesh: Mesh
    slowed: float

    def overheads(self) -> tuple[float, float]:
        """Return the seconds of an action of compute, and of a step with none.

        What a micro-batch more takes is its forward and backward on each rank, of which the layers'
        own seconds are known. What is left of a step without them is beside.
        """
        read = 0 if self.world.device.is_accelerator else _READ
        layers = [LayerSpec(_Reading, _WIDTH, read) for _ in range(self.mesh.stages)]
        given = torch.ones(1, _WIDTH, requires_grad=True)
        # Of several in a row: what a backward takes to begin is of the action, not of the layer.
        stage = layers[:1] * _IN_A_ROW
        layer_s = measure_layers(stage, given, None, device=self.world.device)[-1].total_s
        few, many = _MICROBATCHES
        few_s, many_s = (self._step_s(layers, number) for number in _MICROBATCHES)
        each_s = max(0.0, many_s - few_s) / (many - few)
        fill = self.mesh.stages - 1
        step_s = max(0.0, few_s - (few + fill) * each_s)
        return max(0.0, each_s / self.slowed - layer_s) / 2, step_s / self.slowed

    def _pipeline(self, layers: list[LayerSpec], microbatches: int) -> Pipeline:
        return Pipeline(
            layers,
            _loss,
            stages=self.mesh.stages,
            replicas=self.mesh.replicas,
            microbatches=microbatches,
            partition="uniform",
            recompute="never",
            precision=self.config.train.precision,
            timeout_s=self.config.comm.timeout_s,
            world=self.world,
        )

    def _step_s(self, layers: list[LayerSpec], microbatches: int) -> float:
        pipe = self._pipeline(layers, microbatches)
        inputs = torch.ones(microbatches, _WIDTH)
        return self._usual(lambda: pipe.step(inputs, inputs))

    def passes(self) -> tuple[Pass, Pass]:
        """Return what the optimizer and the norm for clipping take over parameters."""
        found = [self._pass(num, size) for num, size in self._bags()]
        (one_u, one_n), (many_u, many_n), (large_u, large_n) = found
        return _fitted(one_u, many_u, large_u), _fitted(one_n, many_n, large_n)

    @staticmethod
    def _bags() -> Iterator[tuple[int, int]]:
        yield 1, _SMALL
        yield _MANY, _SMALL
        yield 1, _LARGE

    def _pass(self, num: int, size: int) -> tuple[float, float]:
        """Return the seconds of an optimizer's step, and of clipping, for tensors on each rank."""
        layers = [LayerSpec(_Bag, num, size) for _ in range(self.mesh.stages)]
        pipe = self._pipeline(layers, 1)
        optimizer = build_optimizer(pipe.named_parameters(), self.config.optimizer)
        inputs = torch.ones(1, _WIDTH)
        pipe.step(inputs, inputs)
        update_s = self._usual(optimizer.step)
        norm_s = self._usual(lambda: pipe.clip_grad_norm_(self.config.train.clip_norm or 1.0))
        return update_s / self.slowed, norm_s / self.slowed

    def summing(self) -> Link:
        """Return what a message of a ring takes that sums over the ranks of a host.

        Free where that of rank 0 has no other.
        """
        hosts = self._ranks_of_hosts()
        size = len(hosts[0])
        if size == 1:
            return Link()
        with together(self.world, "timing sums"):
            group = self.world.group(hosts)
            small_s, large_s = (self._sum_s(group.all_reduce, number) for number in _SUMMED)
        messages = 2 * (size - 1)
        more_bytes = 4 * (_SUMMED[1] - _SUMMED[0]) * messages / size
        return Link(small_s / messages, more_bytes / max(1e-9, large_s - small_s))

    def _ranks_of_hosts(self) -> Sequence[Sequence[int]]:
        """Return the ranks of each host, the same on every rank."""
        world = self.world
        with together(world, "counting hosts"):
            told = world.everybody.gather_object(kernel_identity(), root=0)
            found: dict[str, list[int]] = {}
            for rank, host in enumerate(told or ()):
                found.setdefault(host, []).append(rank)
            hosts: Sequence[Sequence[int]] = world.everybody.broadcast_object(
                list(found.values()), root=0
            )
        return hosts

    def _sum_s(self, all_reduce: Callable[[Tensor], object], number: int) -> float:
        tensor = self.world.device.bring(torch.zeros(number))
        return self._usual(lambda: all_reduce(tensor))

    def _usual(self, work: Callable[[], object]) -> float:
        """Return the usual seconds of some work, all of which every rank does."""
        clock, device = Clock(), self.world.device
        caches = Caches(is_host=not device.is_accelerator)
        times = []
        for _ in range(_REPEATS + 2):
            caches.fill()
            times.append(clock.timed(work, device)[1])
        return usual(times[2:])


def _fitted(one_s: float, many_s: float, large_s: float) -> Pass:
    """Return the call, the tensor and the number that explain three bags."""
    tensor_s = max(0.0, many_s - one_s) / (_MANY - 1)
    element_s = max(0.0, large_s - one_s) / (_LARGE - _SMALL)
    return Pass(max(0.0, one_s - tensor_s), tensor_s, element_s)
