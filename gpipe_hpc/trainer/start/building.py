"""Build the pipeline and the loss function from the settings."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from gpipe_hpc.comm.world.world import World, collective_errors
from gpipe_hpc.config import bind_loss
from gpipe_hpc.data import DataFacts
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.models import Layer, LossFunction, looks_back, loss_function, normalise_layers
from gpipe_hpc.pipeline import Pipeline
from gpipe_hpc.planner import Partition
from gpipe_hpc.planner.costs.cost_models import MEASURED
from gpipe_hpc.planner.cutting.partition import SIMULATED
from gpipe_hpc.planner.memory.by_rank import MEASURED_PACES
from gpipe_hpc.pytree import Nest
from gpipe_hpc.settings import Config
from gpipe_hpc.trainer.machines import process_bytes_of, with_process
from gpipe_hpc.trainer.pipeline_request import request_of


def loss_of(config: Config, facts: DataFacts, layers: Sequence[Layer]) -> LossFunction:
    """Return the loss function named in the settings, or the default for data and model.

    If labels equal inputs, the default is `causal_lm` for causal language models, and
    `token_cross_entropy` for other models.
    """
    if config.loss:
        return bind_loss(config.loss)
    if facts.loss is None:
        raise ConfigError(
            "config: no default loss for these targets: they are neither a floating-point tensor "
            "nor a tensor of integer classes (for example booleans, strings, nested tensors); "
            "convert them (with data=arrays data.targets_dtype=int64), or set a loss, for example "
            "loss._target_=my.module.loss_fn"
        )
    is_causal = facts.loss != "causal_lm" or looks_back(normalise_layers(layers))
    return loss_function(facts.loss if is_causal else "token_cross_entropy")


def build_pipeline(
    config: Config,
    world: World,
    layers: Sequence[Layer],
    loss_fn: LossFunction,
    cut: Mapping[str, Any] | None,
    example: tuple[Nest, Nest] | None,
) -> Pipeline:
    """Build the pipeline from the settings; `cut` is the partition of the state to resume from."""
    request = replace(request_of(config), partition=_partition(config, cut))
    request = with_process(request, _process_bytes(config, world), world.device)
    return Pipeline(
        layers,
        loss_fn,
        **vars(request),
        example=example,
        timeout_s=config.comm.timeout_s,
        world=world,
    )


def _process_bytes(config: Config, world: World) -> int:
    """Return the planned bytes of a process besides tensors, read by rank 0. Collective."""
    if config.plan.prices is None and config.plan.calibration is None:
        return 0
    with collective_errors(world, "reading the memory of a process"):
        own = 0 if world.rank else process_bytes_of(config, world.device)
        told: int = world.world_group.broadcast_object(own, root=0)
    return told


def _partition(config: Config, cut: Mapping[str, Any] | None) -> Any:
    """Return the checkpoint's partition if the configured policy measured it; else the policy.

    A partition is measured if it depends on layer times or on measured speeds of ranks, which a new
    measurement would change.
    """
    policy = config.pipeline.partition
    if cut is None or policy not in _MEASURES:
        return policy
    stored = Partition.stored(cut)
    is_kept = _MEASURES[policy] == MEASURED or config.pipeline.paces == MEASURED_PACES
    return stored if is_kept and stored.measure == _MEASURES[policy] else policy


_MEASURES: Final = {
    "time": MEASURED,
    SIMULATED: MEASURED,
    "parameters": "parameters",
    "uniform": "layers",
}
