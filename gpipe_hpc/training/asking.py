"""From the settings to what is asked of a pipeline."""

from dataclasses import fields, replace

from gpipe_hpc.config import Config, OuterConfig
from gpipe_hpc.engine.outer.settings import Outer
from gpipe_hpc.planning import Request
from gpipe_hpc.training.optimizer import optimizer_memory


def request_of(config: Config) -> Request:
    """Return the request of the settings: those of `pipeline` and `train` that it has, by name."""
    settings = {**vars(config.train), **vars(config.pipeline)}
    named = {each.name: settings[each.name] for each in fields(Request) if each.name in settings}
    return replace(
        Request(**named),
        microbatches=config.pipeline.microbatches * config.train.accumulation,
        schedule_options=config.pipeline.options,
        optimizer_states=optimizer_memory(config.optimizer)._replace(
            outer_states=_outer(config.outer).num_states if config.pipeline.replicas > 1 else 0
        ),
        noise_over=config.lr.noise_over if config.lr.scaling == "adascale" else None,
        outer=_outer(config.outer),
    )


def _outer(config: OuterConfig) -> Outer:
    settings = vars(config)
    return Outer(**{n: settings[n] for n in (each.name for each in fields(Outer)) if n in settings})
