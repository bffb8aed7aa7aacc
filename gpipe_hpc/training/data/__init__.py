"""Data: what a run reads, and in which order."""

from gpipe_hpc.config import (
    DataConfig,
    PythonSourceConfig,
    SyntheticImagesConfig,
    SyntheticTokensConfig,
    SyntheticVectorsConfig,
    TextConfig,
)
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.training.data.dataset import Dataset, DataSource
from gpipe_hpc.training.data.sampler import ShuffledSampler, sequential_batches
from gpipe_hpc.training.data.synthetic import (
    open_synthetic_images,
    open_synthetic_tokens,
    open_synthetic_vectors,
)
from gpipe_hpc.training.data.text import open_python_source, open_text

__all__ = [
    "DataSource",
    "Dataset",
    "ShuffledSampler",
    "open_data",
    "sequential_batches",
]


def open_data(config: DataConfig) -> DataSource:
    """Return the training and validation sets that the settings describe.

    Looks at names and sizes only; the first read opens files. Raises DataError where there is
    nothing to train on.
    """
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
    raise ConfigError(
        f"data: unknown kind, expected one of conf/data, got {type(config).__name__}; choose data="
        f"python_source, text, synthetic, synthetic_vectors or synthetic_images"
    )
