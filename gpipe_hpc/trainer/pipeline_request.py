"""Conversion of a run's settings to the planner's `Request`."""

from dataclasses import fields, replace

from gpipe_hpc.optim.optimizer import optimizer_memory
from gpipe_hpc.planner import Request
from gpipe_hpc.settings import Config


def request_of(config: Config) -> Request:
    """Return the arguments of `Pipeline` that the settings describe, as a planner `Request`."""
    outer = config.outer
    settings = {**vars(config.train), **vars(config.pipeline)}
    named = {each.name: settings[each.name] for each in fields(Request) if each.name in settings}
    return replace(
        Request(**{**named, "replicas": config.pipeline.num_replicas}),
        microbatches=config.pipeline.microbatches * config.train.accumulation,
        schedule_options=config.pipeline.options,
        optimizer_states=optimizer_memory(config.optimizer)._replace(
            outer_states=outer.num_residuals,
            local_sgd_states=outer.num_local_sgd,
            saves_in_background=config.checkpoint.in_background and config.checkpoint.every > 0,
            copies_to_neighbours=config.checkpoint.neighbour_every > 0,
        ),
        noise_over=config.lr.noise_over if config.lr.scaling == "adascale" else None,
        outer=outer,
    )
