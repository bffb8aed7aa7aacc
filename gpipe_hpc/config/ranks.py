"""The settings of a run on a number of ranks: whole pipelines, or one with holes."""

from dataclasses import replace

from gpipe_hpc.data_parallel import MicrobatchSplit
from gpipe_hpc.schedule import Rows, in_rows, refuse_whole_replicas, replicas_on
from gpipe_hpc.settings import Config, refuse


def filled(config: Config, num_ranks: int) -> Config:
    """Return the settings with a number of replicas: that given, or as many as the ranks make."""
    pipeline = config.pipeline
    replicas = replicas_on(num_ranks, pipeline.stages, pipeline.replicas)
    return replace(config, pipeline=replace(pipeline, replicas=replicas))


def rows_of(config: Config, num_ranks: int) -> Rows | None:
    """Return how pipelines with holes run on so many ranks; None where there are none.

    Raises ConfigError for what pipelines with holes cannot do.
    """
    pipeline, outer = config.pipeline, config.outer
    if pipeline.stages is None or pipeline.stages == "fit":
        return None
    rows = in_rows(
        num_ranks,
        pipeline.stages,
        pipeline.num_replicas,
        pipeline.microbatches,
        pipeline.schedule,
        pipeline.options,
    )
    if rows is None:
        return None
    asked = {
        "pipeline.normalise_over_replicas": pipeline.normalise_over_replicas,
        "outer.every": outer.every,
        "outer.weights": outer.weights,
        "lr.noise_over": config.lr.scaling == "adascale" and config.lr.noise_over == "replicas",
    }
    refuse_whole_replicas(num_ranks, pipeline.stages, asked)
    return rows


def on_ranks(config: Config, num_ranks: int) -> Config:
    """Return the settings of a run on so many ranks: with holes, one pipeline of all of them.

    Else the same settings, where stages x replicas are the ranks or cannot be made so, with a
    number of replicas in any case.
    """
    config = filled(config, num_ranks)
    rows = rows_of(config, num_ranks)
    if rows is None:
        return config
    pipeline = replace(
        config.pipeline,
        stages=rows.ranks,
        replicas=1,
        microbatches=rows.microbatches,
        schedule=rows.schedule,
        options=rows.options,
    )
    return replace(config, pipeline=pipeline)


def ranks_to_come(config: Config, default_stages: int) -> int:
    """Return on how many ranks a run would be, for commands that start none.

    Raises ConfigError where the stages are to fit ranks that nobody has told of.
    """
    pipeline = config.pipeline
    if pipeline.stages == "fit" and pipeline.ranks is None:
        raise refuse(
            "pipeline.ranks",
            "the number of ranks that the stages are to fit (pipeline.stages=fit)",
            None,
            "set it, as pipeline.ranks=7",
        )
    return pipeline.ranks or (pipeline.stages or default_stages) * pipeline.num_replicas


def portions_of(config: Config) -> MicrobatchSplit:
    """Return the micro-batches of each replica, all passes of a step together.

    Raises ConfigError for outer.weights that do not divide them.
    """
    pipeline, weights = config.pipeline, config.outer.checked_weights()
    count = pipeline.microbatches * config.train.accumulation
    return MicrobatchSplit.divide(count, pipeline.num_replicas, weights)
