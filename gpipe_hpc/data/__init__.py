"""Datasets of a run, the order of their samples, and iterators over batches.

Names are imported lazily, so that worker processes that only index files do not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpipe_hpc.data.corruption import CorruptTally, tolerance
    from gpipe_hpc.data.dataset import CorruptSampleError, DataFacts, Dataset, DataSource
    from gpipe_hpc.data.identity import Identity, differences, identify
    from gpipe_hpc.data.opening import open_data, open_readers
    from gpipe_hpc.data.processes import ProcessReaders
    from gpipe_hpc.data.reading import BatchData, BatchReader, Readers, ReadRequest
    from gpipe_hpc.data.sampler import PlannedBatch, ShuffledSampler, validation_batches

__all__ = [
    "BatchData",
    "BatchReader",
    "CorruptSampleError",
    "CorruptTally",
    "DataFacts",
    "DataSource",
    "Dataset",
    "Identity",
    "PlannedBatch",
    "ProcessReaders",
    "ReadRequest",
    "Readers",
    "ShuffledSampler",
    "differences",
    "identify",
    "open_data",
    "open_readers",
    "tolerance",
    "validation_batches",
]

_HOMES = (
    ("corruption", ("CorruptTally", "tolerance")),
    ("dataset", ("CorruptSampleError", "DataFacts", "DataSource", "Dataset")),
    ("identity", ("Identity", "differences", "identify")),
    ("opening", ("open_data", "open_readers")),
    ("processes", ("ProcessReaders",)),
    ("reading", ("BatchReader", "ReadRequest", "Readers", "BatchData")),
    ("sampler", ("PlannedBatch", "ShuffledSampler", "validation_batches")),
)


def __getattr__(name: str) -> object:
    for module, names in _HOMES:
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
