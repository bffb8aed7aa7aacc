"""`python -m gpipe_hpc.plan`: what a run would need and take, before it starts.

Nothing is read, allocated or measured: models of any size are counted in seconds.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from gpipe_hpc.config import (
    Config,
    DataConfig,
    TokenDataConfig,
    bind_loss,
    build_target,
    num_tokens_of,
)
from gpipe_hpc.config.checks import check_planning
from gpipe_hpc.config.commands import DONE_EXIT_CODE, Job, run_jobs, say_error
from gpipe_hpc.config.data import Shape
from gpipe_hpc.errors import GpipeError, PartitionError, ScheduleError
from gpipe_hpc.models import Layer, long_skips, loss_function, normalise_layers, skip_routes
from gpipe_hpc.planning.budget import choose_recompute
from gpipe_hpc.planning.counted import ModelCount, count_model
from gpipe_hpc.planning.forecast import flop_costs, forecast
from gpipe_hpc.planning.meta import META
from gpipe_hpc.planning.optimizer import OptimizerMemory
from gpipe_hpc.planning.partition import by_hand, minimax, uniform
from gpipe_hpc.planning.report import Assumptions, Sections, owned_parameters, report
from gpipe_hpc.planning.stages import count_stages
from gpipe_hpc.planning.units import bytes_text
from gpipe_hpc.planning.vocabulary import check_vocabulary
from gpipe_hpc.schedule import Schedule, add_offload, add_recompute, build, check, lower
from gpipe_hpc.training.optimizer import optimizer_memory

DEFAULT_STAGES: Final = 4
TOO_LARGE_EXIT_CODE: Final = 3


class Plan(NamedTuple):
    """A plan as text, and whether every rank fits into the memory it was given."""

    text: str
    fits: bool


class Sample(NamedTuple):
    """A micro-batch without values, and the name of the loss that goes with it."""

    inputs: torch.Tensor
    targets: torch.Tensor
    loss: str


def main() -> None:
    """Compose the settings from Hydra's command line, plan, and exit.

    Exit codes: 0 done, 1 failed, 2 settings that cannot work, 3 a rank needs more memory than
    pipeline.memory_bytes. Of a sweep (-m) the first that is not 0.
    """
    sys.exit(run_jobs(_task, "plan"))


def _task(job: Job) -> int:
    try:
        found = make_plan(job.config)
    except GpipeError as error:
        return say_error(error)
    print(found.text)
    return DONE_EXIT_CODE if found.fits else TOO_LARGE_EXIT_CODE


def make_plan(config: Config) -> Plan:
    """Count the model, cut it, and forecast a step of one replica.

    Raises ConfigError, ModelError, PartitionError or ScheduleError for what cannot work.
    """
    num_ranks = config.pipeline.stages or DEFAULT_STAGES
    check_planning(config, num_ranks)
    layers = normalise_layers(build_target("model", config.model))
    if isinstance(config.data, TokenDataConfig):
        check_vocabulary(layers, num_tokens_of(config.data))
    sample = microbatch(config.data, samples_per_microbatch(config))
    loss_fn: Callable[[Any, Any], Any] = (
        bind_loss(config.loss) if config.loss else loss_function(sample.loss)
    )
    model = count_model(
        layers,
        sample.inputs,
        sample.targets,
        loss_fn,
        device_type=_device_type(config),
        precision=config.train.precision,
        shares_casts=not config.pipeline.offload,
    )
    bare, counts, cut_by = _table(config, num_ranks, model)
    states = optimizer_memory(config.optimizer)
    recomputation = _recomputation(config, model, counts, bare, states)
    schedule = _lowered(recomputation.table, config.pipeline.offload)
    check(schedule)
    assumptions = Assumptions(config.plan.flops_per_s, config.pipeline.memory_bytes)
    found = forecast(model, counts, schedule, states, recomputation.layers)
    sections = Sections(
        heading=_heading(config, layers, model, schedule, sample),
        cut_by=cut_by,
        recomputed=recomputation.text,
    )
    text = report(layers, model, counts, schedule, found, assumptions, sections)
    return Plan(text, all(map(assumptions.fits, found.ranks)))


def _table(config: Config, num_ranks: int, model: ModelCount) -> tuple[Schedule, list[int], str]:
    """Return the bare table, the layers of each stage, and how they were chosen."""
    pipeline = config.pipeline
    table = partial(
        build,
        pipeline.schedule,
        ranks=num_ranks,
        microbatches=pipeline.microbatches * config.train.accumulation,
        recompute="never" if pipeline.recompute == "budget" else pipeline.recompute,
    )
    bare = table(**pipeline.options)
    counts, cut_by = cut(pipeline.partition, model, bare.num_stages)
    if pipeline.schedule == "auto" and "costs" not in pipeline.options:
        bare = table(**pipeline.options, costs=flop_costs(count_stages(model, counts)))
    if not bare.is_lowered:
        bare = replace(bare, skips=long_skips(skip_routes(model.skips, counts)))
    return bare, counts, cut_by


def _lowered(table: Schedule, offloads: bool) -> Schedule:
    if table.is_lowered:
        return table
    return lower(add_offload(table) if offloads else table)


class Recomputation(NamedTuple):
    """A table with its R, the layers that they run again (None for all), and what to say of it."""

    table: Schedule
    layers: tuple[frozenset[int], ...] | None = None
    text: str = ""


def _recomputation(
    config: Config,
    model: ModelCount,
    counts: Sequence[int],
    bare: Schedule,
    states: OptimizerMemory,
) -> Recomputation:
    limit = config.pipeline.memory_bytes
    if config.pipeline.recompute != "budget" or limit is None:
        return Recomputation(bare)
    if bare.is_lowered:
        raise ScheduleError(
            f"schedule {bare.name!r}: recompute=budget places recomputation itself, expected a "
            f"bare table, got a lowered one; leave its communication out"
        )
    try:
        budget = choose_recompute(model, counts, bare, limit, states)
    except PartitionError as error:
        # The plan shows how far from fitting the run is that needs least.
        return Recomputation(add_recompute(bare, "except_last"), None, str(error))
    return Recomputation(budget.schedule, budget.recomputed, budget.text)


def cut(partition: Any, model: ModelCount, num_stages: int) -> tuple[list[int], str]:
    """Return the layers of each stage, and how they were chosen.

    `time` cannot be measured here, and becomes FLOPs. Raises PartitionError.
    """
    num_layers = len(model.layers)
    if isinstance(partition, Sequence) and not isinstance(partition, str):
        return by_hand(partition, num_layers, num_stages, allow_empty=True), "by hand"
    if partition == "parameters":
        return minimax(owned_parameters(model), num_stages), "by parameters"
    if partition == "uniform":
        return uniform(num_layers, num_stages), "uniformly by layers"
    flops = [layer.flops for layer in model.layers]
    if not any(flops):
        return uniform(num_layers, num_stages), "uniformly by layers, as none has counted FLOPs"
    return (
        minimax(flops, num_stages),
        "by counted FLOPs (pipeline.partition=time measures on the machine that trains; the cut "
        "may differ)",
    )


def samples_per_microbatch(config: Config) -> int:
    """Return how many samples the largest micro-batch has."""
    pipeline, train = config.pipeline, config.train
    return -(-train.batch_size // (pipeline.replicas * pipeline.microbatches * train.accumulation))


def microbatch(data: DataConfig, num_samples: int) -> Sample:
    """Return a micro-batch of the shapes that this kind of data has."""
    inputs, targets, loss = data.shapes(num_samples)
    return Sample(_empty(inputs), _empty(targets), loss)


def _empty(shape: Shape) -> torch.Tensor:
    return torch.empty(shape.sizes, dtype=getattr(torch, shape.dtype), device=META)


def _device_type(config: Config) -> str:
    if config.train.device != "auto":
        return config.train.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _heading(
    config: Config,
    layers: Sequence[Layer],
    model: ModelCount,
    schedule: Schedule,
    sample: Sample,
) -> str:
    shape = "x".join(map(str, sample.inputs.shape))
    dtype = str(sample.inputs.dtype).removeprefix("torch.")
    lines = [
        f"{len(layers)} layers, {model.parameters:,} parameters",
        f"{schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{config.pipeline.replicas} replica(s); micro-batch {dtype}[{shape}] "
        f"({bytes_text(sum(model.inputs.tensors))}), {config.train.precision}, "
        f"recompute {config.pipeline.recompute}, "
        f"{'offload, ' * config.pipeline.offload}kernels as on {_device_type(config)}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
