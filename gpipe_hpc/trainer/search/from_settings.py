"""Set up a search over layouts from the settings and, if they are running, the ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from gpipe_hpc.config import bind_loss, build_target
from gpipe_hpc.data.shapes import microbatch
from gpipe_hpc.device.cores.planned_ranks import CpuShare, share_of_bound
from gpipe_hpc.device.device import Device, name_here, planned_device
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.models import Layer, loss_function, normalise_layers
from gpipe_hpc.planner import CostModel, CountedCosts, Example, MeasuredCosts
from gpipe_hpc.planner.advice import KnownCosts
from gpipe_hpc.planner.cluster_file import read_cluster
from gpipe_hpc.planner.costs.calibration import check_calibration, read_calibration
from gpipe_hpc.planner.costs.cost_models import MEASURED, LayerTimes
from gpipe_hpc.planner.costs.counted import ModelCount
from gpipe_hpc.planner.costs.rates import Rates
from gpipe_hpc.planner.cutting.pins import read_pins
from gpipe_hpc.planner.search.cache import SearchCache
from gpipe_hpc.planner.search.candidates import Space
from gpipe_hpc.planner.search.machine import FREE, Machine
from gpipe_hpc.planner.search.minimum_ranks import MinimumRanks, find_minimum_ranks
from gpipe_hpc.planner.search.scaling import Scaling
from gpipe_hpc.schedule import Cluster
from gpipe_hpc.settings import Config, refuse
from gpipe_hpc.trainer.machines import (
    cluster_of,
    doubts_of_prices,
    machine_of,
    notes_of_calibration,
    rates_of,
    slow_once,
    with_process,
)
from gpipe_hpc.trainer.measuring.rank_emulation import (
    measured_under_load,
    measurement_mode,
    on_threads,
    share_of_rank,
)
from gpipe_hpc.trainer.pipeline_request import request_of

PINS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "pipeline": (
            "stages",
            "replicas",
            "microbatches",
            "recompute",
            "offload",
            "schedule",
            "partition",
        ),
        "outer": ("shard", "hierarchy", "bucket_bytes"),
    }
)
"""Settings that a search chooses, by section."""


def fixed_by(words: Sequence[str]) -> frozenset[str]:
    """Return the layout settings on a command line, which the search keeps fixed."""
    found: set[str] = set()
    for word in words:
        name, is_set, value = word.lstrip("+").partition("=")
        section, _, rest = name.partition(".")
        own = rest.partition(".")[0]
        if own == "options":
            found.add("schedule")
        elif is_set and own in PINS.get(section, ()) and value not in ("null", "fit"):
            found.add(own)
    return frozenset(found)


class StartedRanks(NamedTuple):
    """Measured speeds and hosts of the ranks of a run that has started.

    Attributes:
        rates: rates of the fastest rank.
        hosts: number of ranks on each host.
        paces: slowdown of each rank relative to the fastest, for the model's layers if these are
            measured (plan.costs), else for matrix products; empty if all are equal.
        host_copy_bytes_per_s: device-to-host bandwidth of the slowest rank, None on CPUs.
    """

    rates: Rates
    hosts: tuple[int, ...]
    paces: tuple[float, ...] = ()
    host_copy_bytes_per_s: float | None = None


@dataclass(frozen=True)
class LayoutSearch:
    """A search over layouts, set up from the settings.

    Attributes:
        config: the settings.
        fixed: names of the layout settings that the search does not change.
        cache: cache of the model's costs.
        came: the ranks, if they are running.
        doubts: warnings about the files that describe the ranks.
        notes: source and limits of layer times scaled from another run; empty if there are none.
        measured: how layers are measured; empty if they are not.
    """

    config: Config
    fixed: frozenset[str]
    cache: SearchCache
    ranks: StartedRanks | None = None
    doubts: Sequence[str] = ()
    notes: Sequence[str] = ()
    measured: str = ""

    @classmethod
    def of(
        cls, config: Config, words: Sequence[str], ranks: StartedRanks | None = None
    ) -> "LayoutSearch":
        """Return the search for the settings; raise ConfigError if they cannot be searched.

        `words`: the settings on the command line; `came`: the ranks, if they are running.
        """
        fixed = fixed_by(words)
        _refuse_what_is_no_search(config, fixed)
        model = normalise_layers(build_target("model", config.model))
        device = planned_device(config.train.device)
        counted = _counting(config, model, device)
        scaling, doubts = _scaling(config, counted, device)
        is_measured = config.plan.measures_layers and scaling is None
        if ranks is not None:
            rates = ranks.rates
        elif is_measured:
            rates = Rates.alike(1.0)
        elif scaling is not None and config.plan.flops_per_s is None and device.is_accelerator:
            rates = scaling.rates  # of an accelerator that may not be here
        else:
            with on_threads(_share(config, device, None)):
                rates = rates_of(config, device)
        copies = _host_copies(config, ranks)
        machine = machine_of(config, device, cluster_of(config, 1), rates, copies)
        cost_model_of: Callable[[int], CostModel] = counted
        measured = ""
        if scaling is not None:
            cost_model_of = _scaled(scaling, machine, counted, ranks)
        elif is_measured:
            share = _share(config, device, ranks)
            cost_model_of = _measuring(config, counted, ranks, share)
            measured = measurement_mode(share)
        policy = config.pipeline.partition
        pins = read_pins(config.pipeline.pins, model)
        alone: Callable[[int], ModelCount] | None = None
        if config.train.precision != "float32" and not config.pipeline.offload:
            alone = partial(_without_shared_casts, counted)
        cache = SearchCache(
            machine, model, cost_model_of, config.train.batch_size, policy, pins, alone
        )
        doubts = [*doubts, *doubts_of_prices(config, device)]
        notes = () if scaling is None else (scaling.text(), *notes_of_calibration(config))
        return cls(config, fixed, cache, ranks, doubts, notes, measured)

    @classmethod
    def in_each_precision(
        cls, config: Config, words: Sequence[str], ranks: StartedRanks | None = None
    ) -> "tuple[LayoutSearch, ...]":
        """Return one search per precision of plan.precisions, or one for train.precision."""
        found = []
        for precision, rate in (config.plan.precisions or {config.train.precision: None}).items():
            train = replace(config.train, precision=precision)
            plan = replace(config.plan, flops_per_s=rate or config.plan.flops_per_s)
            found.append(cls.of(replace(config, train=train, plan=plan), words, ranks))
        return tuple(found)

    def space(self, num_ranks: int) -> Space:
        """Return the set of candidate layouts for a number of ranks."""
        device = planned_device(self.config.train.device)
        process_bytes = self.cache.machine.prices.process_bytes
        base = with_process(request_of(self.config), process_bytes, device)
        paces = base.paces
        if isinstance(paces, str) or (paces is None and self.ranks and self.ranks.paces):
            known = self._cluster(num_ranks).paces
            paces = [known.get(rank, 1.0) for rank in range(num_ranks)] if known else None
        copies = _host_copies(self.config, self.ranks)
        may_offload = copies is not None and base.memory_bytes is not None
        return Space(
            replace(base, paces=paces),
            num_ranks,
            self.config.train.batch_size,
            len(self.cache.layers),
            self.fixed,
            (False, True) if may_offload else (False,),
            self.config.train.precision if self.config.plan.precisions else None,
        )

    def on(self, num_ranks: int) -> SearchCache:
        """Return the cost cache for a number of ranks and the links between them."""
        cluster, given = self._cluster(num_ranks), self.space(num_ranks).base.paces
        paces = [float(pace) for pace in given or ()]
        # If ranks are running, times are those of the fastest rank.
        plan = self.config.plan
        is_measured = plan.measures_layers or plan.calibration is not None
        of_rank_0 = self.ranks is None and is_measured
        own = 1.0 if of_rank_0 or not paces else paces[0]
        return self.cache.on(slow_once(cluster, paces, own))

    def _cluster(self, num_ranks: int) -> Cluster:
        """Return the cluster, with slowdowns of ranks as measured, else from plan.links."""
        if self.ranks is None:
            return cluster_of(self.config, num_ranks)
        found = cluster_of(self.config, num_ranks, self.ranks.hosts)
        return replace(found, paces=dict(enumerate(self.ranks.paces)) or found.paces)

    def num_ranks(self) -> int | None:
        """Return the number of ranks; None to search the smallest number with enough memory."""
        if self.ranks is not None:
            return sum(self.ranks.hosts)
        found = _ranks_asked(self.config)
        if found is None and self.config.pipeline.memory_bytes is None:
            raise refuse(
                "plan.ranks",
                "a number of ranks with plan.search=true, or pipeline.memory_bytes to find how "
                "many are needed",
                None,
                "set it, for example plan.ranks=16, or pipeline.memory_bytes=24GB",
            )
        return found

    def fewest(self) -> MinimumRanks:
        """Return the smallest number of ranks on which the model fits in pipeline.memory_bytes."""
        if isinstance(self.config.pipeline.memory_bytes, list):
            raise refuse(
                "pipeline.memory_bytes",
                "one number for all ranks if the number of ranks is not set",
                self.config.pipeline.memory_bytes,
                "set plan.ranks, or pass one number",
            )
        return find_minimum_ranks(self.space, lambda n: self.cache.on(_alike(n)))


def _host_copies(config: Config, ranks: StartedRanks | None) -> float | None:
    """Return the device-to-host bandwidth in bytes/s, or None if unknown."""
    return config.plan.host_copy_bytes_per_s or (ranks and ranks.host_copy_bytes_per_s)


def _alike(num_ranks: int) -> Cluster:
    return Cluster((num_ranks,), FREE, FREE)


def _compares_replicas(config: Config) -> bool:
    return config.lr.scaling == "adascale" and config.lr.noise_over == "replicas"


def _refuse_what_is_no_search(config: Config, fixed: frozenset[str]) -> None:
    pipeline = config.pipeline
    if isinstance(pipeline.partition, list):
        raise refuse(
            "pipeline.partition",
            "a policy, because a search compares cuts into different numbers of stages",
            pipeline.partition,
            "leave it out",
        )
    if config.outer.weights is not None:
        raise refuse(
            "outer.weights",
            "null in a search, which compares different numbers of replicas",
            config.outer.weights,
            "leave it out",
        )
    outer = config.outer
    if "replicas" not in fixed and (outer.uses_local_sgd or _compares_replicas(config)):
        how = f"outer.every={outer.every}" if outer.uses_local_sgd else "lr.noise_over=replicas"
        raise refuse(
            "pipeline.replicas",
            f"a number on the command line, because the result of {how} depends on it",
            None,
            "set it; the other settings are searched",
        )
    if config.train.accumulation > 1:
        raise refuse(
            "train.accumulation",
            "1 in a search, which chooses the number of micro-batches",
            config.train.accumulation,
            "leave it out: the schedule limits how many micro-batches a rank keeps",
        )


def _counting(
    config: Config, layers: Sequence[Layer], device: Device
) -> Callable[[int], CountedCosts]:
    """Return a function that counts FLOPs and bytes of the layers for a micro-batch size."""

    def counted(num_samples: int) -> CountedCosts:
        sample = microbatch(config.data, num_samples)
        loss_fn: Callable[[Any, Any], Any] = (
            bind_loss(config.loss) if config.loss else loss_function(sample.loss)
        )
        example = Example(sample.inputs, sample.targets, loss_fn, config.train.seed, device)
        return CountedCosts(
            layers, example, config.train.precision, shares_casts=not config.pipeline.offload
        )

    return counted


def _without_shared_casts(counted: Callable[[int], CountedCosts], num_samples: int) -> ModelCount:
    return replace(counted(num_samples), shares_casts=False).count


def cost_model_of_layers(config: Config, device: Device, num_samples: int) -> MeasuredCosts:
    """Return the times of each layer, measured on first access for a micro-batch of `num_samples`.

    Layers run in this process with its threads, without load generators.
    """
    layers = normalise_layers(build_target("model", config.model))
    return measured_under_load(
        config, _counting(config, layers, device)(num_samples), num_samples, None
    )


def _share(config: Config, device: Device, ranks: StartedRanks | None) -> CpuShare | None:
    """Return the threads and competing processes of a rank for measurements, or None if unknown."""
    if ranks is not None:
        return None if device.is_accelerator else share_of_bound(ranks.hosts[0])
    return share_of_rank(config, device, _ranks_asked(config))


def _ranks_asked(config: Config) -> int | None:
    """Return the number of ranks from the settings or the file of plan.links, or None."""
    found = config.plan.ranks or config.pipeline.ranks
    if found is None and config.plan.links is not None:
        found = read_cluster(config.plan.links).num_ranks
    return found


def _scaling(
    config: Config, counted: Callable[[int], CountedCosts], device: Device
) -> tuple[Scaling | None, list[str]]:
    """Return the layer times of plan.calibration, if set, and warnings about them.

    Raises ConfigError if they are of another model or micro-batch.
    """
    path = config.plan.calibration
    if path is None:
        return None, []
    found, sample_bytes = read_calibration(path), sum(counted(1).count.inputs.tensors)
    samples, rest = divmod(found.input_bytes, sample_bytes)
    if rest or not samples:
        raise ConfigError(
            f"plan.calibration: {path} was measured with another micro-batch: expected inputs of a "
            f"multiple of {sample_bytes} bytes, got {found.input_bytes}; pass the file of a run "
            f"with these settings, or omit plan.calibration"
        )
    cost_model = counted(samples)
    precision = config.train.precision
    doubts = check_calibration(
        found,
        path,
        cost_model.count,
        device=device.type,
        name=name_here(device),
        precision=precision,
    )
    return Scaling(found, path, samples, cost_model), doubts


def _scaled(
    scaling: Scaling,
    machine: Machine,
    counted: Callable[[int], CountedCosts],
    ranks: StartedRanks | None,
) -> Callable[[int], CostModel]:
    """Return a function that scales the layer times of plan.calibration to a micro-batch size.

    These are the times of rank 0, and are converted to those of the fastest rank.
    """
    pace = ranks.paces[0] if ranks is not None and ranks.paces else 1.0
    return lambda num_samples: scaling.scaled(counted(num_samples), machine, pace)


def _measuring(
    config: Config,
    counted: Callable[[int], CountedCosts],
    ranks: StartedRanks | None,
    share: CpuShare | None,
) -> Callable[[int], CostModel]:
    """Return a function that measures the layers on this rank for a micro-batch size.

    If ranks are running, this is rank 0, whose times are converted to those of the fastest rank.
    """
    pace = ranks.paces[0] if ranks is not None and ranks.paces else 1.0

    def measured(num_samples: int) -> CostModel:
        counts = counted(num_samples)
        of_here = measured_under_load(config, counts, num_samples, share).times
        times = tuple(LayerTimes(*(part / pace for part in each)) for each in of_here)
        return KnownCosts(counts.layers, times, counts.count, MEASURED)

    return measured
