"""Functions that open the data sets chosen by the settings and read their batches."""

from collections.abc import Iterable
from pathlib import Path

from gpipe_hpc.data.dataset import DataSource, reads_in_processes
from gpipe_hpc.data.masking import mask_tokens
from gpipe_hpc.data.processes import ProcessReaders
from gpipe_hpc.data.reading import BatchReader, Readers, ReadRequest
from gpipe_hpc.settings import DataConfig, TokenDataConfig


def open_data(config: DataConfig, seed: int = 0, spare: Path | None = None) -> DataSource:
    """Open the training and validation sets that the settings describe.

    Reads file names, sizes and headers, and builds an index if the format needs one; samples are
    read later.

    Args:
        config: the data settings.
        seed: train.seed, for image augmentation and token masking.
        spare: folder for indices of data in a read-only folder.

    Raises:
        DataError: if there is nothing to train on, or if more samples are corrupt than the settings
            allow.
    """
    source: DataSource = config.open(seed, spare)
    if isinstance(config, TokenDataConfig) and config.objective == "masked":
        return mask_tokens(source, config, seed)
    return source


def open_readers(
    reader: BatchReader,
    requests: Iterable[ReadRequest],
    num_workers: int,
    prefetch: int,
    timeout_s: float,
) -> Readers | ProcessReaders:
    """Return an iterator over the requested batches, read ahead by `num_workers` workers.

    Workers are threads for files and arrays, whose reads release the GIL, and processes for user
    code. Targets alone are quick to read and are never read ahead by threads.
    """
    if num_workers and reads_in_processes(reader.dataset):
        return ProcessReaders(reader, requests, num_workers, prefetch, timeout_s)
    return Readers(reader, requests, num_workers if reader.inputs else 0, prefetch, timeout_s)
