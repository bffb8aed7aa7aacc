"""Forecast of a run's memory and FLOPs before its first step, on rank 0."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import Layer, LayerSpec, LossFunction, normalise_layers
from gpipe_hpc.models.remedies import is_shape_mistake
from gpipe_hpc.pipeline import Pipeline
from gpipe_hpc.planner import CountedCosts, Example
from gpipe_hpc.planner.advice import Advice, KnownCosts, advise, layer_times
from gpipe_hpc.planner.costs.meta import meta_copies
from gpipe_hpc.planner.forecast import RankForecast, rank_forecasts
from gpipe_hpc.planner.memory.by_rank import memory_limits
from gpipe_hpc.planner.shares import microbatch_shares
from gpipe_hpc.planner.stages import count_stages
from gpipe_hpc.pytree import Nest
from gpipe_hpc.schedule import Timeline

log = logging.getLogger("gpipe_hpc.train")


@dataclass(frozen=True)
class RunForecast:
    """Forecast of memory and FLOPs for the micro-batches of the first batch.

    Attributes:
      ranks: peak memory of each rank of a replica, without its process.
      model_flops: FLOPs of a step of all replicas, without recomputation.
      known: the layers, without allocated weights, and their counted costs.
      shares: relative micro-batch sizes of the replica with most samples, see `microbatch_shares`.
    """

    ranks: tuple[RankForecast, ...]
    model_flops: int
    known: KnownCosts
    shares: tuple[float, ...] = ()

    def layers(self) -> list[dict[str, Any]]:
        """Return name, kind, parameters and FLOPs of each layer, for summary.json."""
        return [
            {
                "name": count.name,
                "kind": _kind(layer),
                "parameters": count.parameters,
                "forward_flops": count.forward_flops,
                "backward_flops": count.backward_flops,
            }
            for layer, count in zip(self.known.layers, self.known.count.layers, strict=True)
        ]

    def advice(
        self, pipe: Pipeline, measured: Timeline, finer: int | None, most_actions: int
    ) -> list[Advice]:
        """Return settings that would make a measured step faster; see `advise`."""
        cut = pipe.partition
        basis = cut.times or self.known.times
        known = replace(self.known, times=layer_times(measured, cut.counts, basis, cut.stage_paces))
        limits = memory_limits(pipe.request)
        total = pipe.world.device.memory_total()
        if limits is None and total is not None:
            limits = (total,) * pipe.layout.schedule.num_ranks
        return advise(
            pipe.request,
            pipe.layout,
            known,
            measured_s=measured.makespan,
            shares=self.shares,
            limits=limits,
            finer=finer,
            most_actions=most_actions,
        )


def _kind(layer: Layer) -> str:
    made_by = layer.factory if isinstance(layer, LayerSpec) else type(layer)
    return str(getattr(made_by, "__name__", type(made_by).__name__))


def shares_of(pipe: Pipeline, num_samples: int) -> tuple[float, ...]:
    """Return the relative micro-batch sizes of the first replica with the most micro-batches.

    `num_samples`: size of the global batch.
    """
    portions = pipe.layout.portions
    return microbatch_shares(num_samples, portions.total, portions.of(portions.fullest))


def forecast_run(
    pipe: Pipeline,
    layers: Sequence[Layer],
    loss_fn: LossFunction,
    example: Callable[[], tuple[Nest, Nest] | None],
    num_samples: int,
) -> RunForecast | None:
    """Forecast memory and FLOPs from an example micro-batch; None if layers cannot be counted.

    The reason for None is logged and does not stop the run. `num_samples` is the size of the global
    batch; the example is one of its largest micro-batches. Raises ModelError if a layer does not
    accept its input, as the first step would.
    """
    try:
        given = example()
        if given is None:
            return None
        request, counts = pipe.request, pipe.partition.counts
        shares = shares_of(pipe, num_samples)
        # Copies without values, because built modules would be kept with all their weights.
        light = meta_copies(normalise_layers(layers))
        on = Example(*given, loss_fn, request.seed, pipe.world.device)
        counted = CountedCosts(light, on, request.precision, shares_casts=not request.offload)
        stages = count_stages(counted.count, counts)
        # Not simulated: that takes minutes for hundreds of ranks, and times are not needed here.
        ranks = rank_forecasts(
            counted.count,
            stages,
            pipe.layout.schedule,
            request.kept_states._replace(process_bytes=0),
            pipe.layout.recomputed,
            shares,
            pipe.layout.sharing,
        )
        of_largest = sum(each.forward_flops + each.backward_flops for each in stages)
        largest = -(-num_samples // pipe.num_global_microbatches)
        flops = round(of_largest * num_samples / largest)
        known = KnownCosts(light, counted.times, counted.count)
        return RunForecast(ranks, flops, known, shares)
    except Exception as error:
        if isinstance(error, ModelError) and is_shape_mistake(error.__cause__):
            raise ModelError(f"model and data do not match: {error}") from error
        log.info("memory was not planned because layers could not be counted: %s", error)
        log.debug("traceback of the failed count", exc_info=True)
        return None
