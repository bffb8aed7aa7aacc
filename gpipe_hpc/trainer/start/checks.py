"""Checks before the first step that model, loss and data are compatible."""

import logging
from collections.abc import Mapping, Sequence

from torch import Tensor

from gpipe_hpc.data import DataSource
from gpipe_hpc.data.pairs import SHIFTED, UNSHIFTED, PairSource, labels_are
from gpipe_hpc.errors import ConfigError, ModelError
from gpipe_hpc.models import (
    Layer,
    LayerSpec,
    LossFunction,
    causal_lm,
    normalise_layers,
    sees_ahead,
    token_cross_entropy,
)
from gpipe_hpc.optim.large_batch.ramp import smallest_batch
from gpipe_hpc.planner.batchnorm import check_batchnorm
from gpipe_hpc.planner.vocabulary import check_vocabulary
from gpipe_hpc.settings import Config, TokenDataConfig
from gpipe_hpc.trainer.horizon import last_step
from gpipe_hpc.trainer.start.example import read_samples

log = logging.getLogger("gpipe_hpc.train")


def check_model(config: Config, source: DataSource | None, layers: Sequence[Layer]) -> None:
    """Raise ConfigError or ModelError if the model cannot be trained on the data.

    `source` is None except on rank 0, which alone reads samples.
    """
    if isinstance(config.data, TokenDataConfig):
        model = normalise_layers(layers)
        holds_bytes = config.data.holds_bytes
        check_vocabulary(model, config.data.num_tokens, holds_bytes=holds_bytes)
        _check_objective(model, config.data)
    _check_positions(config, source, normalise_layers(layers))
    _check_batchnorm(config, source, layers)


def check_labels(config: Config, source: DataSource | None, loss_fn: LossFunction) -> None:
    """Raise ConfigError if the loss would shift labels twice; warn if a model could copy labels.

    Also logs the loss chosen for user data. `source` is None except on rank 0.
    """
    function = getattr(loss_fn, "func", loss_fn)
    name = str(getattr(function, "__name__", type(function).__name__))
    if isinstance(source, PairSource):
        shift = labels_are(source.train) if function in (causal_lm, token_cross_entropy) else None
        log.info("loss: %s", _loss_text(config, name, shift))
    else:
        is_next = isinstance(config.data, TokenDataConfig) and config.data.objective == "next_token"
        shift = SHIFTED if is_next else None
    if shift == SHIFTED and function is causal_lm:
        raise ConfigError(
            f"config: bad loss._target_: {name} would shift labels that are already shifted; set "
            "loss._target_=gpipe_hpc.models.token_cross_entropy, or leave it out"
        )
    if shift == UNSHIFTED and function is token_cross_entropy:
        log.warning(
            "the labels of the first samples are their input tokens, and with the loss %s "
            "position i predicts label i: a model that sees its own position learns to copy; for "
            "a language model set loss._target_=gpipe_hpc.models.causal_lm",
            name,
        )


def _loss_text(config: Config, name: str, shift: str | None) -> str:
    said = "chosen by the targets; set loss._target_ for another"
    if config.loss:
        said = f"set by loss._target_={config.loss['_target_']}"
    if name == "causal_lm":
        said = f"position i predicts label i + 1, {said}"
    elif name == "token_cross_entropy":
        said = f"position i predicts label i, {said}"
    if shift is not None:
        said = f"{said}; the labels are {shift}"
    return f"{name} ({said})"


def _check_objective(layers: Sequence[Layer], data: TokenDataConfig) -> None:
    """Raise ConfigError if the model could copy the tokens that it should predict."""
    if data.objective == "next_token" and sees_ahead(layers):
        raise ConfigError(
            "config: bad data.objective: with next_token, a model whose positions see later ones "
            "would copy the token that it should predict, and its loss would fall to 0; set "
            "data.objective=masked (BERT's training), or use a causal model, such as gpt"
        )


def _check_positions(config: Config, source: DataSource | None, layers: Sequence[Layer]) -> None:
    """Raise an error if sequences are longer than the model accepts.

    A model declares its limit by `most_positions` and `check_positions` of an argument of its first
    layer.
    """
    made_with = [
        each for layer in layers[:1] if isinstance(layer, LayerSpec) for each in layer.args
    ]
    limited = [each for each in made_with if getattr(each, "most_positions", None) is not None]
    if not limited:
        return
    if isinstance(config.data, TokenDataConfig):
        length = config.data.seq_len
    elif source is not None and source.train.num_samples:
        inputs, _ = read_samples(config, source, [0])
        tokens = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
        length = tokens.shape[1] if isinstance(tokens, Tensor) and tokens.dim() > 1 else 0
    else:
        return
    for each in limited:
        each.check_positions(length)


def _check_batchnorm(config: Config, source: DataSource | None, layers: Sequence[Layer]) -> None:
    """Raise ModelError, on rank 0, if micro-batches are too small for BatchNorm layers."""
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
