"""Layout of the planned run, computed without reading data or measuring layers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from gpipe_hpc.comm.world.mesh import Mesh
from gpipe_hpc.config import bind_loss, build_target, on_ranks
from gpipe_hpc.data.shapes import microbatch, samples_per_microbatch
from gpipe_hpc.device.device import planned_device
from gpipe_hpc.errors import GpipeError
from gpipe_hpc.models import loss_function, normalise_layers
from gpipe_hpc.planner import FIT, CountedCosts, Example, Layout, Request, fit_stages, lay_out
from gpipe_hpc.planner.forecast import RankForecast, rank_forecasts
from gpipe_hpc.planner.shares import microbatch_shares
from gpipe_hpc.planner.stages import count_stages
from gpipe_hpc.settings import Config
from gpipe_hpc.trainer.machines import with_process
from gpipe_hpc.trainer.pipeline_request import request_of


@dataclass(frozen=True)
class PlannedLayout:
    """A layout with the memory forecast of each rank, or the reason why there is no forecast."""

    layout: Layout
    ranks: tuple[RankForecast, ...] | None = None
    why_not: str = ""

    @property
    def mesh(self) -> Mesh:
        """Return the mesh of replicas and stages of the layout."""
        return Mesh(self.layout.replicas, self.layout.schedule.num_ranks)


def plan_layout(config: Config, num_ranks: int) -> PlannedLayout:
    """Return the layout of a run on a number of ranks, with its memory forecast.

    The model is partitioned by counted FLOPs, or by number of layers if the data shapes are
    unknown; neighbouring ranks are those of the run. A schedule to be searched is replaced by one
    found without a search. Raises ConfigError, ModelError, PartitionError or ScheduleError for
    impossible settings.
    """
    config = on_ranks(config, num_ranks)
    request = _quick(request_of(config))
    layers = normalise_layers(build_target("model", config.model))
    try:
        sample = microbatch(config.data, samples_per_microbatch(config))
        loss_fn: Callable[[Any, Any], Any] = (
            bind_loss(config.loss) if config.loss else loss_function(sample.loss)
        )
        device = planned_device(config.train.device)
        # Processes have already allocated their memory besides tensors.
        request = with_process(request, 0, device)
        example = Example(sample.inputs, sample.targets, loss_fn, request.seed, device)
        cost_model = CountedCosts(
            layers, example, request.precision, shares_casts=not request.offload
        )
        if request.stages == FIT:
            request = fit_stages(request, num_ranks, cost_model).request
        request = _on_mesh(request, num_ranks)
        layout = lay_out(request, cost_model)
        return PlannedLayout(layout, _forecast(config, request, layout, cost_model))
    except GpipeError as error:
        why_not = str(error)
    # If the layout itself is impossible, this raises the error.
    cost_model = CountedCosts(layers, None, request.precision, shares_casts=True)
    layout = lay_out(_on_mesh(_without_example(request), num_ranks), cost_model)
    return PlannedLayout(layout, why_not=why_not)


def _quick(request: Request) -> Request:
    """Return the request without measured slowdowns and without search trials."""
    options = request.options
    if request.schedule == "auto":
        options["trials"] = 0
    return replace(request, schedule_options=options, paces=None)


def _without_example(request: Request) -> Request:
    searches = request.schedule == "auto"
    return replace(
        request,
        stages=None if request.stages == FIT else request.stages,
        schedule="one_f_one_b" if searches else request.schedule,
        schedule_options=None if searches else request.schedule_options,
        partition=request.partition if isinstance(request.partition, list) else "uniform",
        recompute="except_last" if request.recompute == "budget" else request.recompute,
    )


def _on_mesh(request: Request, num_ranks: int) -> Request:
    assert not isinstance(request.stages, str), "found by now"
    return replace(request, stages=Mesh.fit(num_ranks, request.stages, request.replicas).stages)


def _forecast(
    config: Config, request: Request, layout: Layout, cost_model: CountedCosts
) -> tuple[RankForecast, ...]:
    portions = layout.portions
    shares = microbatch_shares(
        config.train.batch_size, portions.total, portions.of(portions.fullest)
    )
    stages = count_stages(cost_model.count, layout.partition.counts)
    return rank_forecasts(
        cost_model.count,
        stages,
        layout.schedule,
        request.kept_states,
        layout.recomputed,
        shares,
        layout.sharing,
    )
