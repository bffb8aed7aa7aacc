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
from gpipe_hpc.training.data.corruption import CorruptTally, tolerance
from gpipe_hpc.training.data.dataset import (
    CorruptSampleError,
    DataFacts,
    Dataset,
    DataSource,
)
from gpipe_hpc.training.data.reading import BatchReader, Readers, Reading, Request
from gpipe_hpc.training.data.sampler import PlannedBatch, ShuffledSampler, sequential_batches
from gpipe_hpc.training.data.synthetic import (
    open_synthetic_images,
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
    "PlannedBatch",
    "Readers",
    "Reading",
    "Request",
    "ShuffledSampler",
    "open_data",
    "sequential_batches",
    "tolerance",
]


def open_data(config: DataConfig, seed: int = 0) -> DataSource:
    """Return the training and validation sets that the settings describe.

    Looks at names, sizes, headers, and what an index needs; the first read opens the rest. `seed`
    is that of the run: images are varied by it. Raises DataError where there is nothing to train
    on, or more is corrupt than the settings bear.
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
