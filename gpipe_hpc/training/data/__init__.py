"""Data: what a run reads, and in which order."""

from pathlib import Path

from gpipe_hpc.config import (
    CifarConfig,
    DataConfig,
    DigitsConfig,
    IdxConfig,
    ImageFolderConfig,
    ImageShardsConfig,
    JsonLinesConfig,
    PythonSourceConfig,
    SyntheticImagesConfig,
    SyntheticMasksConfig,
    SyntheticTokensConfig,
    SyntheticVectorsConfig,
    TextConfig,
    TokenDataConfig,
)
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.training.data.corruption import CorruptTally, tolerance
from gpipe_hpc.training.data.dataset import (
    CorruptSampleError,
    DataFacts,
    Dataset,
    DataSource,
)
from gpipe_hpc.training.data.identity import Identity, differences, identify
from gpipe_hpc.training.data.images import (
    open_cifar,
    open_digits,
    open_idx,
    open_image_folder,
    open_image_shards,
)
from gpipe_hpc.training.data.jsonl import open_jsonl
from gpipe_hpc.training.data.masking import hide_tokens
from gpipe_hpc.training.data.reading import BatchReader, Readers, Reading, Request
from gpipe_hpc.training.data.sampler import PlannedBatch, ShuffledSampler, validation_batches
from gpipe_hpc.training.data.synthetic import (
    open_synthetic_images,
    open_synthetic_masks,
    open_synthetic_tokens,
    open_synthetic_vectors,
)
from gpipe_hpc.training.data.text import open_python_source, open_text

__all__ = [
    "BatchReader",
    "CorruptSampleError",
    "CorruptTally",
    "DataFacts",
    "DataSource",
    "Dataset",
    "Identity",
    "PlannedBatch",
    "Readers",
    "Reading",
    "Request",
    "ShuffledSampler",
    "differences",
    "identify",
    "open_data",
    "tolerance",
    "validation_batches",
]


def open_data(config: DataConfig, seed: int = 0, spare: Path | None = None) -> DataSource:
    """Return the training and validation sets that the settings describe.

    Looks at names, sizes, headers, and what an index needs; the first read opens the rest. `seed`
    is that of the run: images are varied by it, and tokens hidden. `spare`: a folder for indices of
    data whose own is read-only. Raises DataError where there is nothing to train on, or more is
    corrupt than the settings bear.
    """
    source = _open(config, seed, spare)
    if isinstance(config, TokenDataConfig) and config.objective == "masked":
        return hide_tokens(source, config, seed)
    return source


def _open(config: DataConfig, seed: int, spare: Path | None) -> DataSource:
    match config:
        case PythonSourceConfig():
            return open_python_source(config)
        case TextConfig():
            return open_text(config)
        case SyntheticTokensConfig():
            return open_synthetic_tokens(config)
        case SyntheticVectorsConfig():
            return open_synthetic_vectors(config)
        case SyntheticImagesConfig():
            return open_synthetic_images(config)
        case SyntheticMasksConfig():
            return open_synthetic_masks(config)
        case JsonLinesConfig():
            return open_jsonl(config, spare)
    return _open_images(config, seed, spare)


def _open_images(config: DataConfig, seed: int, spare: Path | None) -> DataSource:
    match config:
        case DigitsConfig():
            return open_digits(config, seed)
        case IdxConfig():
            return open_idx(config, seed)
        case CifarConfig():
            return open_cifar(config, seed)
        case ImageFolderConfig():
            return open_image_folder(config, seed, spare)
        case ImageShardsConfig():
            return open_image_shards(config, seed, spare)
    raise ConfigError(
        f"data: unknown kind, expected one of conf/data, got {type(config).__name__}; choose a "
        f"data=... of conf/data"
    )
