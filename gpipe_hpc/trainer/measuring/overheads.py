"""Measure the overheads of a step besides its layers, with a run's engine and optimizer.

All times are medians.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor, nn

from gpipe_hpc.comm.collectives.group import barrier
from gpipe_hpc.comm.world.mesh import Mesh
from gpipe_hpc.comm.world.world import World, collective_errors
from gpipe_hpc.device.cores.machine import allowed_cpus
from gpipe_hpc.device.device import maker_name
from gpipe_hpc.device.host.machine import kernel_identity
from gpipe_hpc.models import LayerSpec
from gpipe_hpc.optim.optimizer import build_optimizer
from gpipe_hpc.pipeline import Pipeline
from gpipe_hpc.planner.costs.clock import WorkClock
from gpipe_hpc.planner.costs.prices import PassCost, Prices, PricesContext
from gpipe_hpc.planner.step_time import Oversubscription
from gpipe_hpc.schedule import Link
from gpipe_hpc.settings import Config
from gpipe_hpc.trainer.machines import optimizer_kind
from gpipe_hpc.trainer.measuring.short_run import prices_of_short_run
from gpipe_hpc.trainer.start_world import settle_memory

_WIDTH: Final = 8
_REPEATS: Final = 21
_SMALL: Final = 64  # elements of a tensor whose time is only the overhead per tensor
_MANY: Final = 65  # tensors
_LARGE: Final = 2**21  # elements: more than caches can store, with gradient and states
_SUMMED: Final = (64, 2**20)  # elements of all-reduced tensors


def measure_prices(
    config: Config, world: World, mesh: Mesh, send: Link, folder: Path
) -> Prices | None:
    """Measure the overheads of a step for this layout of ranks; return them on rank 0. Collective.

    Args:
        config: the settings.
        world: all ranks.
        mesh: stages and replicas.
        send: the measured link between two ranks of a host.
        folder: a new folder visible to all ranks for a short run; removed afterwards.
    """
    crowd = _crowd(world)
    slowed = 1.0 if world.device.is_accelerator else max(1.0, crowd.ranks / crowd.cores)
    own = _OverheadBench(config, world, mesh, slowed)
    update, norm = own.passes()
    summing = own.summing()
    beside = prices_of_short_run(config, world, mesh, folder)
    process_bytes = _process_bytes(world)
    if beside is None:
        return None
    return Prices(
        beside.action_s,  # too short to be preempted by another rank
        send,
        summing,
        update,
        norm,
        beside.step_s / slowed,
        PricesContext(
            world.device.type,
            maker_name(world.device),
            crowd.cores,
            config.train.precision,
            optimizer_kind(config),
        ),
        process_bytes,
    )


def _process_bytes(world: World) -> int:
    """Return the largest memory of any rank's process without tensors, in bytes. Collective.

    Call it after pipelines have run, when libraries are loaded and connections open, but no tensors
    are allocated. On an accelerator it is the device memory in use besides torch's tensors; 0 if
    unknown.
    """
    device = world.device
    settle_memory(device)
    own = device.memory_allocated()
    if device.is_accelerator:
        total, free = device.memory_total(), device.memory_free()
        own = 0 if total is None or free is None else max(0, total - free - own)
    with collective_errors(world, "measuring memory"):
        most: int = world.world_group.merge_object(own, max)
    return most


def _crowd(world: World) -> Oversubscription:
    """Return, on every rank, the number of ranks and cores on the first rank's host. Collective."""
    with collective_errors(world, "counting cores"):
        own = kernel_identity(), sorted(allowed_cpus() or range(os.cpu_count() or 1))
        told = world.world_group.gather_object(own, root=0)
        found = None
        if told is not None:
            here = [cpus for host, cpus in told if host == told[0][0]]
            ranks = 1 if world.is_one_process else len(here)
            found = Oversubscription(ranks, len({cpu for cpus in here for cpu in cpus}))
        crowd: Oversubscription = world.world_group.broadcast_object(found, root=0)
    return crowd


class _ParameterLayer(nn.Module):
    """Layer of `num` parameters with `size` elements each, all of which get a gradient."""

    def __init__(self, num: int, size: int) -> None:
        super().__init__()
        self.own = nn.ParameterList(torch.full((size,), 1e-3) for _ in range(num))

    def forward(self, value: Tensor) -> Tensor:
        """Multiply the input by a number close to 1 that depends on all parameters."""
        means = torch.stack([each.mean() for each in self.own])
        return value * (1 + means.sum())


def _loss(output: Tensor, target: Any) -> Tensor:
    return output.square().mean()


@dataclass(frozen=True)
class _OverheadBench:
    """Benchmark of step overheads on the ranks of a run, with its numbers of stages and replicas.

    `slowed` is the slowdown caused by several ranks sharing a core.
    """

    config: Config
    world: World
    mesh: Mesh
    slowed: float

    def _pipeline(self, layers: list[LayerSpec]) -> Pipeline:
        return Pipeline(
            layers,
            _loss,
            stages=self.mesh.stages,
            replicas=self.mesh.replicas,
            microbatches=1,
            partition="uniform",
            recompute="never",
            precision=self.config.train.precision,
            timeout_s=self.config.comm.timeout_s,
            world=self.world,
        )

    def passes(self) -> tuple[PassCost, PassCost]:
        """Return the costs of the optimizer step and of gradient clipping."""
        found = [self._pass(num, size) for num, size in self._layer_sizes()]
        (one_u, one_n), (many_u, many_n), (large_u, large_n) = found
        return _fitted(one_u, many_u, large_u), _fitted(one_n, many_n, large_n)

    @staticmethod
    def _layer_sizes() -> Iterator[tuple[int, int]]:
        yield 1, _SMALL
        yield _MANY, _SMALL
        yield 1, _LARGE

    def _pass(self, num: int, size: int) -> tuple[float, float]:
        """Return the seconds of an optimizer step and of clipping, for given tensors on each rank.

        `num` is the number of tensors, `size` their number of elements.
        """
        layers = [LayerSpec(_ParameterLayer, num, size) for _ in range(self.mesh.stages)]
        pipe = self._pipeline(layers)
        optimizer = build_optimizer(pipe.named_parameters(), self.config.optimizer)
        inputs = torch.ones(1, _WIDTH)
        pipe.step(inputs, inputs)
        update_s = self._median_s(optimizer.step)
        norm_s = self._median_s(lambda: pipe.clip_grad_norm_(self.config.train.clip_norm or 1.0))
        return update_s / self.slowed, norm_s / self.slowed

    def summing(self) -> Link:
        """Fit latency and bandwidth of a message of a ring all-reduce between the ranks of a host.

        The link is free if rank 0's host has no other rank.
        """
        hosts = self._ranks_of_hosts()
        size = len(hosts[0])
        if size == 1:
            return Link()
        with collective_errors(self.world, "timing sums"):
            group = self.world.group(hosts)
            small_s, large_s = (self._sum_s(group.all_reduce, number) for number in _SUMMED)
        messages = 2 * (size - 1)
        more_bytes = 4 * (_SUMMED[1] - _SUMMED[0]) * messages / size
        return Link(small_s / messages, more_bytes / max(1e-9, large_s - small_s))

    def _ranks_of_hosts(self) -> Sequence[Sequence[int]]:
        """Return the ranks of each host, equal on every rank. Collective."""
        world = self.world
        with collective_errors(world, "counting hosts"):
            told = world.world_group.gather_object(kernel_identity(), root=0)
            found: dict[str, list[int]] = {}
            for rank, host in enumerate(told or ()):
                found.setdefault(host, []).append(rank)
            hosts: Sequence[Sequence[int]] = world.world_group.broadcast_object(
                list(found.values()), root=0
            )
        return hosts

    def _sum_s(self, all_reduce: Callable[[Tensor], object], number: int) -> float:
        tensor = self.world.device.to_device(torch.zeros(number))
        return self._median_s(lambda: all_reduce(tensor))

    def _median_s(self, work: Callable[[], object]) -> float:
        """Return the median seconds of an operation that all ranks perform. Collective.

        A barrier precedes each repetition, so that waiting for other ranks is not counted. On CPUs
        wall-clock time is measured, including waiting for threads that send or reduce. Gloo's
        all-reduce of two ranks varies from a fifth to twice its median.
        """
        clock, device = WorkClock(), self.world.device
        times = []
        for _ in range(_REPEATS + 2):
            with collective_errors(self.world, "timing the overheads of a step"):
                barrier(self.world.world_group)
            if device.is_accelerator:
                times.append(clock.timed(work, device)[1])
                continue
            began_s = time.perf_counter()
            work()
            times.append(time.perf_counter() - began_s)
        return median(times[2:])


def _fitted(one_s: float, many_s: float, large_s: float) -> PassCost:
    """Fit costs per call, per tensor and per element to three measurements."""
    tensor_s = max(0.0, many_s - one_s) / (_MANY - 1)
    element_s = max(0.0, large_s - one_s) / (_LARGE - _SMALL)
    return PassCost(max(0.0, one_s - tensor_s), tensor_s, element_s)
