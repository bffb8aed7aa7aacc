"""How the settings divide a step's micro-batches over the replicas."""

from gpipe_hpc.config.schema import Config
from gpipe_hpc.engine.outer.portions import Portions, checked_weights


def portions_of(config: Config) -> Portions:
    """Return the micro-batches of each replica, all passes of a step together.

    Raises ConfigError for weights that divide nothing.
    """
    pipeline, weights = config.pipeline, config.outer.weights
    if weights is not None:
        weights = list(checked_weights(weights))
    count = pipeline.microbatches * config.train.accumulation
    return Portions.divide(count, pipeline.num_replicas, weights)
