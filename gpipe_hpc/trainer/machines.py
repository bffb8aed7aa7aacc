"""Machine model for plans, from the settings: links, speeds of ranks, and overheads of a step."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from gpipe_hpc.device.device import Device, name_here
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.planner import Example
from gpipe_hpc.planner.cluster_file import read_cluster
from gpipe_hpc.planner.costs.calibration import Calibration, read_calibration
from gpipe_hpc.planner.costs.prices import FREE as FREE_PRICES
from gpipe_hpc.planner.costs.prices import PassCost, Prices, check_prices, read_prices
from gpipe_hpc.planner.costs.rates import Rates, measured_rates
from gpipe_hpc.planner.memory.optimizer import OptimizerMemory
from gpipe_hpc.planner.request import Request
from gpipe_hpc.planner.search.machine import FREE, Machine, on_hosts
from gpipe_hpc.schedule import Cluster, Link
from gpipe_hpc.settings import Config, TokenDataConfig, refuse

_SEED = 0  # of samples whose values do not matter


def machine_of(
    config: Config,
    device: Device,
    cluster: Cluster,
    rates: Rates,
    host_bytes_per_s: float | None = None,
) -> Machine:
    """Return a plan's machine model; raise ConfigError if plan.prices has another device type."""
    prices = prices_of(config, device)
    return Machine(
        cluster,
        rates,
        config.plan.layer_s,
        host_bytes_per_s,
        prices,
        clips=config.train.clip_norm is not None,
        cores=_cores(config, prices, device),
    )


def _cores(config: Config, prices: Prices, device: Device) -> int | None:
    """Return the cores per host; None if unknown, or if measured times include oversubscription."""
    if prices.measured is None or device.is_accelerator:
        return None
    known = calibration_of(config) if config.plan.prices is None else None
    return None if known is not None and known.is_crowded else prices.measured.cores


def calibration_of(config: Config) -> Calibration | None:
    """Read plan.calibration; return None if it is not set."""
    path = config.plan.calibration
    return None if path is None else read_calibration(path)


def prices_of(config: Config, device: Device) -> Prices:
    """Return the overheads of a step from plan.prices, else from plan.calibration, else zero.

    The optimizer's time is zero if the calibration run used another optimizer. The times of
    optimizer and gradient norm are also zero if plan.precisions contains another precision than
    plan.prices, as they depend on it.
    """
    path = config.plan.prices
    if path is not None:
        found = read_prices(path)
        _doubts_of_prices(found, path, config, device)
        return (
            replace(found, update=PassCost(), norm=PassCost())
            if _compares(config, found)
            else found
        )
    known = calibration_of(config)
    if known is None:
        return FREE_PRICES
    return (
        known.prices if _has_optimizer(known, config) else replace(known.prices, update=PassCost())
    )


def process_bytes_of(config: Config, device: Device) -> int:
    """Return a process's bytes of memory besides tensors, from plan.prices or plan.calibration."""
    return prices_of(config, device).process_bytes


def slow_once(cluster: Cluster, paces: Sequence[float], rank_0: float = 1.0) -> Cluster:
    """Remove from the cluster the slowdowns of ranks that the partition already accounts for.

    Such a partition contains each rank's slowdown relative to rank 0, `paces`. The cluster keeps
    only the slowdown of rank 0 relative to the layer times, `rank_0` (1 if they were measured on
    rank 0). If `paces` is empty, the cluster is returned unchanged.
    """
    if not paces:
        return cluster
    return replace(cluster, paces=dict.fromkeys(range(sum(cluster.hosts)), rank_0))


def with_process(request: Request, process_bytes: int, device: Device) -> Request:
    """Return the request with `process_bytes` of memory added to each rank for its process.

    `device` is the device of the tensors.
    """
    states = OptimizerMemory.of(request.optimizer_states)._replace(
        process_bytes=process_bytes, is_on_device=device.is_accelerator
    )
    return replace(request, optimizer_states=states)


def doubts_of_prices(config: Config, device: Device) -> list[str]:
    """Return warnings about plan.prices, or about plan.calibration if it is used instead.

    Raises ConfigError if plan.prices was measured on another kind of device.
    """
    path = config.plan.prices
    if path is not None:
        return _doubts_of_prices(read_prices(path), path, config, device)
    known = calibration_of(config)
    if known is None:
        return []
    doubts = []
    if known.is_crowded:
        doubts.append(
            "plan.calibration: the run had more ranks than cores per host, so its times are valid "
            "for that number of ranks per host only"
        )
    if not _has_optimizer(known, config):
        doubts.append(
            f"plan.calibration: the run did not use optimizer {optimizer_kind(config)}, so the "
            f"optimizer step is assumed to take no time"
        )
    return doubts


def notes_of_calibration(config: Config) -> list[str]:
    """Return the notes of plan.calibration about values that it could not measure."""
    known = calibration_of(config)
    return [] if known is None else [f"plan.calibration: {note}" for note in known.notes]


def _has_optimizer(known: Calibration, config: Config) -> bool:
    measured = known.prices.measured
    return measured is None or measured.optimizer == optimizer_kind(config)


def _doubts_of_prices(found: Prices, path: str, config: Config, device: Device) -> list[str]:
    assert found.measured is not None, "prices from a file are measured"
    compares, measured_in = _compares(config, found), found.measured.precision
    doubts = check_prices(
        found,
        path,
        device=device.type,
        name=name_here(device),
        precision=measured_in if compares else config.train.precision,
        optimizer=optimizer_kind(config),
    )
    if compares:
        doubts.append(
            f"plan.prices: {path} was measured in {measured_in}; as precisions are compared, the "
            f"times of optimizer and norm, which depend on precision, are assumed to be zero"
        )
    return doubts


def _compares(config: Config, prices: Prices) -> bool:
    """Return whether plan.precisions contains another precision than that of the prices."""
    assert prices.measured is not None, "prices from a file are measured"
    return bool(set(config.plan.precisions) - {prices.measured.precision})


def optimizer_kind(config: Config) -> str:
    """Return the name by which a prices file identifies the optimizer."""
    return type(config.optimizer).__name__.removesuffix("Config").lower()


def rates_of(config: Config, device: Device, *, is_here: bool = False) -> Rates:
    """Return the compute and memory rates of a rank: from the settings, or measured on the device.

    `is_here` is whether `device` belongs to this process. If not, an accelerator requires
    plan.flops_per_s.
    """
    plan = config.plan
    if plan.flops_per_s is not None:
        return Rates.alike(plan.flops_per_s, plan.memory_bytes_per_s)
    if device.is_accelerator and not is_here:
        raise refuse(
            "plan.flops_per_s",
            f"the practical FLOP/s of a rank on {device.type}, for a search",
            None,
            "set it, for example plan.flops_per_s=2e14: about 0.4 of the data sheet's value",
        )
    return measured_rates(device, config.train.precision)


def cluster_of(config: Config, num_ranks: int, came: tuple[int, ...] | None = None) -> Cluster:
    """Return the ranks per host and the links; raise ConfigError if plan.links does not fit.

    `came` is the number of ranks on each host, if known.
    """
    plan = config.plan
    if plan.links is not None and num_ranks > 1:
        asked = plan.search and plan.ranks is not None
        return _matching(read_cluster(plan.links), plan.links, num_ranks, plan.hosts, asked)
    known = calibration_of(config)
    within, between = (FREE, FREE) if known is None else (known.within, known.between)
    if plan.link_bytes_per_s is not None:
        between = Link(plan.link_latency_s, plan.link_bytes_per_s)
    own = plan.within_bytes_per_s or plan.link_bytes_per_s
    if own is not None:
        within = Link(plan.within_latency_s, own)
    elif plan.prices is not None:
        within = read_prices(plan.prices).send
    hosts = came or ((num_ranks,) if num_ranks == 1 else on_hosts(num_ranks, plan.hosts or 1))
    return Cluster(hosts, within, between)


def _matching(
    cluster: Cluster, path: str, num_ranks: int, num_hosts: int | None, asked: bool
) -> Cluster:
    """Return `cluster`; raise ConfigError if it has other numbers of ranks or hosts than given.

    `path` is the file that describes it; `asked` is whether plan.ranks sets the number of ranks.
    """
    if cluster.num_ranks != num_ranks:
        expected = (
            f"the {num_ranks} ranks of these settings; start as many ranks as it describes, "
            f"change pipeline.stages"
        )
        if asked:
            expected = f"the {num_ranks} of plan.ranks; remove plan.ranks to use those of the file"
        raise ConfigError(
            f"plan.links: {path} describes {cluster.num_ranks} ranks on {len(cluster.hosts)} "
            f"host(s), expected {expected}, or set plan.links to a matching file"
        )
    if num_hosts not in (None, len(cluster.hosts)):
        raise ConfigError(
            f"plan.links: {path} describes {len(cluster.hosts)} host(s), expected the {num_hosts} "
            f"of plan.hosts; remove plan.hosts, or set plan.links to a matching file"
        )
    return cluster


def with_values(example: Example, config: Config) -> Example:
    """Replace an example's meta tensors by random values, so that layers can run on them.

    No data is read. Inputs are random tokens or numbers; integer targets are 0, which any loss
    accepts.
    """
    drawn = torch.Generator().manual_seed(_SEED)
    most = config.data.num_tokens if isinstance(config.data, TokenDataConfig) else 2

    def valued(shape: Any, top: int) -> Any:
        if shape.dtype.is_floating_point:
            return torch.randn(shape.shape, generator=drawn, dtype=shape.dtype)
        return torch.randint(0, top, shape.shape, generator=drawn).to(shape.dtype)

    return example._replace(inputs=valued(example.inputs, most), targets=valued(example.targets, 1))
