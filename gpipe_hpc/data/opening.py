"""Open the data that settings describe, and read them in the order of a run."""

from collections.abc import Iterable
from pathlib import Path

from gpipe_hpc.data.dataset import DataSource, reads_in_processes
from gpipe_hpc.data.masking import hide_tokens
from gpipe_hpc.data.processes import ProcessReaders
from gpipe_hpc.data.reading import BatchReader, Readers, ReadRequest
from gpipe_hpc.settings import DataConfig, TokenDataConfig


def open_data(config: DataConfig, seed: int = 0, spare: Path | None = None) -> DataSource:
    """Return the training and validation sets that the settings describe.

    Looks at names, sizes, headers, and what an index needs; the first read opens the rest. `seed`
    is that of the run: images are varied by it, and tokens hidden. `spare`: a folder for indices of
    data whose own is read-only. Raises DataError where there is nothing to train on, or more is
    corrupt than the settings bear.
    """
    source: DataSource = config.open(seed, spare)
    if isinstance(config, TokenDataConfig) and config.objective == "masked":
        return hide_tokens(source, config, seed)
    return source


def open_readers(
    reader: BatchReader,
    requests: Iterable[ReadRequest],
    num_workers: int,
    prefetch: int,
    timeout_s: float,
) -> Readers | ProcessReaders:
    """Return the readings of requests, in order: read when needed, or ahead by `num_workers`.

    Threads read what lets the interpreter go (files, decoding, arrays), processes the code of a
    user. Where threads would read targets alone, none does: they are quickly read.
    """
    if num_workers and reads_in_processes(reader.dataset):
        return ProcessReaders(reader, requests, num_workers, prefetch, timeout_s)
    return Readers(reader, requests, num_workers if reader.inputs else 0, prefetch, timeout_s)
