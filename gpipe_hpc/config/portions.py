"""How the settings divide a step's micro-batches over the replicas."""

from gpipe_hpc.config.schema import Config
from gpipe_hpc.data_parallel import MicrobatchSplit


def portions_of(config: Config) -> MicrobatchSplit:
    """Return the micro-batches of each replica, all passes of a step together.

    Raises ConfigError for weights that divide nothing.
    """
    pipeline, weights = config.pipeline, config.outer.weights
    count = pipeline.microbatches * config.train.accumulation
    return MicrobatchSplit.divide(count, pipeline.num_replicas, weights)
