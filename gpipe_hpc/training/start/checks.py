"""What of model and data cannot work together, told before the first step."""

from collections.abc import Sequence

from gpipe_hpc.config import Config, TokenDataConfig, num_tokens_of
from gpipe_hpc.errors import ConfigError, ModelError
from gpipe_hpc.models import Layer, normalise_layers, sees_ahead
from gpipe_hpc.planning.batchnorm import check_batchnorm
from gpipe_hpc.planning.vocabulary import check_vocabulary
from gpipe_hpc.training.data import DataSource
from gpipe_hpc.training.horizon import last_step
from gpipe_hpc.training.optimizers.large_batch.ramp import smallest_batch
from gpipe_hpc.training.start.example import read_samples


def check_model(config: Config, source: DataSource | None, layers: Sequence[Layer]) -> None:
    """Raise ConfigError or ModelError for a model that cannot be trained on these data.

    `source`: on rank 0, which alone reads samples.
    """
    if isinstance(config.data, TokenDataConfig):
        model = normalise_layers(layers)
        check_vocabulary(model, num_tokens_of(config.data))
        _check_objective(model, config.data)
    _check_batchnorm(config, source, layers)


def _check_objective(layers: Sequence[Layer], data: TokenDataConfig) -> None:
    """Raise ConfigError where the model would be asked for tokens that it is given."""
    if data.objective == "next_token" and sees_ahead(layers):
        raise ConfigError(
            "config: bad data.objective, expected masked for a model whose positions see those "
            "behind them, got next_token: it would copy the token that it is to tell, and its loss "
            "fall to nothing; set data.objective=masked (BERT's training), or take a model that "
            "looks back alone, as gpt"
        )


def _check_batchnorm(config: Config, source: DataSource | None, layers: Sequence[Layer]) -> None:
    """Refuse, on rank 0, micro-batches that BatchNorm layers cannot normalise."""
    replicas = config.pipeline.num_replicas
    if source is None or not source.train.num_samples:
        return
    if config.pipeline.normalise_over_replicas and replicas > 1:
        return
    smallest = smallest_batch(source.train.num_samples, last_step(config.train), config.train)
    pieces = replicas * config.pipeline.microbatches * config.train.accumulation
    indices = list(range(max(1, smallest // pieces)))
    model = normalise_layers(layers)
    try:
        check_batchnorm(model, lambda: read_samples(config, source, indices)[0])
    except ModelError as error:
        raise ModelError(
            f"{error} (the smallest batch of the run has {smallest} samples)"
        ) from None
