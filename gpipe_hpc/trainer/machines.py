"""From the settings to what ranks are: their links, their speed, and what else a step costs."""

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
from gpipe_hpc.planner.costs.prices import Pass, Prices, check_prices, read_prices
from gpipe_hpc.planner.costs.rates import Rates, measured_rates
from gpipe_hpc.planner.memory.optimizer import OptimizerMemory
from gpipe_hpc.planner.request import Request
from gpipe_hpc.planner.search.machine import FREE, Machine, on_hosts
from gpipe_hpc.schedule import Cluster, Link
from gpipe_hpc.settings import Config, TokenDataConfig, refuse

_SEED = 0  # of samples whose values do not count


def machine_of(
    config: Config,
    device: Device,
    cluster: Cluster,
    rates: Rates,
    host_bytes_per_s: float | None = None,
) -> Machine:
    """Return ranks that work at `rates`; ConfigError where plan.prices is of another kind."""
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
    """Return the cores of each host, where they are known and not in what was measured."""
    if prices.measured is None or device.is_accelerator:
        return None
    known = calibration_of(config) if config.plan.prices is None else None
    return None if known is not None and known.is_crowded else prices.measured.cores


def calibration_of(config: Config) -> Calibration | None:
    """Return what plan.calibration says, where it is given."""
    path = config.plan.calibration
    return None if path is None else read_calibration(path)


def prices_of(config: Config, device: Device) -> Prices:
    """Return what plan.prices says, else plan.calibration; without either nothing costs anything.

    Of another optimizer than a calibration's run had, the step takes no time. Where precisions are
    compared, neither do the optimizer and the norm of prices, which were measured in one.
    """
    path = config.plan.prices
    if path is not None:
        found = read_prices(path)
        _doubts_of_prices(found, path, config, device)
        return replace(found, update=Pass(), norm=Pass()) if _compares(config, found) else found
    known = calibration_of(config)
    if known is None:
        return FREE_PRICES
    return known.prices if _has_optimizer(known, config) else replace(known.prices, update=Pass())


def process_bytes_of(config: Config, device: Device) -> int:
    """Return what a process takes beside tensors, as plan.prices or plan.calibration say."""
    return prices_of(config, device).process_bytes


def slow_once(cluster: Cluster, paces: Sequence[float], rank_0: float = 1.0) -> Cluster:
    """Return the cluster for a cut that knows `paces`, so that no slow rank counts twice.

    Such a cut has each rank's pace over that of rank 0. What is left to the cluster is how slow
    rank 0 is, compared with the times of layers: `rank_0`, 1 where these were measured there. A cut
    that knows no paces leaves the cluster as it is.
    """
    if not paces:
        return cluster
    return replace(cluster, paces=dict.fromkeys(range(sum(cluster.hosts)), rank_0))


def with_process(request: Request, process_bytes: int, device: Device) -> Request:
    """Return a request whose ranks also hold what their process takes beside tensors.

    `device`: where their tensors lie.
    """
    states = OptimizerMemory.of(request.optimizer_states)._replace(
        process_bytes=process_bytes, is_on_device=device.is_accelerator
    )
    return replace(request, optimizer_states=states)


def doubts_of_prices(config: Config, device: Device) -> list[str]:
    """Return warnings about plan.prices, or about what plan.calibration says in its place.

    Raises ConfigError where prices are of another kind.
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
            "plan.calibration: more ranks than cores shared a host, so its times hold for as many "
            "ranks on a host"
        )
    if not _has_optimizer(known, config):
        doubts.append(
            f"plan.calibration: its run had another optimizer than {optimizer_kind(config)}, whose "
            f"step takes no time here"
        )
    return doubts


def notes_of_calibration(config: Config) -> list[str]:
    """Return what plan.calibration could not tell, a line each."""
    known = calibration_of(config)
    return [] if known is None else [f"plan.calibration: {note}" for note in known.notes]


def _has_optimizer(known: Calibration, config: Config) -> bool:
    measured = known.prices.measured
    return measured is None or measured.optimizer == optimizer_kind(config)


def _doubts_of_prices(found: Prices, path: str, config: Config, device: Device) -> list[str]:
    assert found.measured is not None, "prices that were read were measured"
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
            f"optimizer and the norm, which depend on that, take no time in any of them"
        )
    return doubts


def _compares(config: Config, prices: Prices) -> bool:
    """Say whether precisions are compared, others than that of prices among them."""
    assert prices.measured is not None, "prices that were read were measured"
    return bool(set(config.plan.precisions) - {prices.measured.precision})


def optimizer_kind(config: Config) -> str:
    """Return what the optimizer is called in a file of prices."""
    return type(config.optimizer).__name__.removesuffix("Config").lower()


def rates_of(config: Config, device: Device, *, is_here: bool = False) -> Rates:
    """Return what a rank does a second: as the settings say, or measured on the device.

    `is_here`: the device is this rank's. Without, an accelerator that has no rate is refused.
    """
    plan = config.plan
    if plan.flops_per_s is not None:
        return Rates.alike(plan.flops_per_s, plan.memory_bytes_per_s)
    if device.is_accelerator and not is_here:
        raise refuse(
            "plan.flops_per_s",
            f"what a rank computes a second in practice on {device.type}, for a search",
            None,
            "set it, as plan.flops_per_s=2e14: about 0.4 of what a data sheet says",
        )
    return measured_rates(device, config.train.precision)


def cluster_of(config: Config, num_ranks: int, came: tuple[int, ...] | None = None) -> Cluster:
    """Return the ranks and their links as the settings say; ConfigError if they do not match.

    `came`: the ranks of each host, where they are known.
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
    """Return the cluster of a file; ConfigError for others. `asked`: plan.ranks says how many."""
    if cluster.num_ranks != num_ranks:
        expected = (
            f"the {num_ranks} ranks that these settings are for; start as many as it describes, "
            f"change pipeline.stages"
        )
        if asked:
            expected = f"the {num_ranks} of plan.ranks; leave plan.ranks out to take those of it"
        raise ConfigError(
            f"plan.links: {path} describes {cluster.num_ranks} ranks on {len(cluster.hosts)} "
            f"host(s), expected {expected}, or give the file of these ranks"
        )
    if num_hosts not in (None, len(cluster.hosts)):
        raise ConfigError(
            f"plan.links: {path} describes {len(cluster.hosts)} host(s), expected the {num_hosts} "
            f"of plan.hosts; leave plan.hosts out, or give the file of these hosts"
        )
    return cluster


def with_values(example: Example, config: Config) -> Example:
    """Return an example of shapes with values in it, to run layers on; nothing is read.

    Inputs are any tokens or numbers; targets that count something are 0, which any loss takes.
    """
    drawn = torch.Generator().manual_seed(_SEED)
    most = config.data.num_tokens if isinstance(config.data, TokenDataConfig) else 2

    def valued(shape: Any, top: int) -> Any:
        if shape.dtype.is_floating_point:
            return torch.randn(shape.shape, generator=drawn, dtype=shape.dtype)
        return torch.randint(0, top, shape.shape, generator=drawn).to(shape.dtype)

    return example._replace(inputs=valued(example.inputs, most), targets=valued(example.targets, 1))
