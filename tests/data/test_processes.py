"""Tests of worker processes that read ahead: which signals they ignore, and when they end."""

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from gpipe_hpc.data import BatchReader, ProcessReaders, ReadRequest
from gpipe_hpc.trainer.signals import STOP_SIGNALS

MODULE = """
import time
from multiprocessing import parent_process
from pathlib import Path

import torch

class Items:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((64,), float(index)), index % 10

class Endless(Items):
    def __getitem__(self, index):
        if parent_process() is not None:
            Path("reads").touch()
            time.sleep(1000)
        return super().__getitem__(index)
"""
RUN = (
    *("model=mlp", "model.widths=[64,8,10]", "pipeline.partition=uniform", "lr.warmup_steps=0"),
    *("train.batch_size=8", "train.steps=100000", "checkpoint.every=0", "run.dir=run"),
    *("data=own", "data.workers=1"),
)


class Numbers:
    """Dataset with input i and target 10 i; all reads except those of sample 0 take `takes_s`."""

    num_samples = 10

    def __init__(self, takes_s: float = 0.0) -> None:
        self.takes_s = takes_s

    def read_inputs(self, indices, epoch=0):
        time.sleep(self.takes_s if indices[0] else 0)
        return torch.tensor(indices)

    def read_targets(self, indices, epoch=0):
        return 10 * torch.tensor(indices)


def children(pid: int) -> set[int]:
    """Return the process ids of the worker processes that a process has spawned."""
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread or process has ended
            for child in (task / "children").read_text().split():
                if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.add(int(child))
    return found


def is_there(pid: int) -> bool:
    """Return whether a process is running; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def readers(dataset: Numbers) -> ProcessReaders:
    requests = [ReadRequest([number, 7, 3], 0) for number in range(6)]
    return ProcessReaders(BatchReader(dataset, True, True), requests, 1, timeout_s=60)


def test_reader_outlives_signals_from_its_first_moment():
    """Regression: a signal to all processes ended a worker that was still starting, and the run."""
    seen, is_over = set(), threading.Event()

    def pester():
        while not is_over.wait(0.01):
            for child in children(os.getpid()):
                seen.add(child)
                for number in STOP_SIGNALS:
                    os.kill(child, number)

    pesters = threading.Thread(target=pester)
    pesters.start()
    reading = readers(Numbers())
    try:
        assert [each.inputs[0].item() for each in reading] == list(range(6))
    finally:
        reading.close()
        is_over.set()
        pesters.join()
    assert len(seen) == 1 and not any(is_there(child) for child in seen)


def test_signal_while_readers_start_reaches_the_run(monkeypatch):
    """Signals are blocked while workers start; a signal to the run is delivered afterwards."""
    came, before = [], signal.pthread_sigmask(signal.SIG_BLOCK, ())
    started = ProcessReaders._loader

    def loader(self):
        # Send it to this thread; another thread could handle a signal to the process.
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        assert not came
        return started(self)

    monkeypatch.setattr(ProcessReaders, "_loader", loader)
    handler = signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    reading = readers(Numbers())
    try:
        next(reading)
    finally:
        reading.close()
        signal.signal(signal.SIGUSR1, handler)
    assert came == [signal.SIGUSR1]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.slow
def test_reader_in_a_long_read_ends_when_closed(until):
    """A worker ignores SIGTERM, so it is killed; the run does not wait for its read."""
    reading = readers(Numbers(takes_s=1000.0))
    next(reading)
    (child,) = children(os.getpid())
    reading.close()
    until(lambda: not is_there(child), 20, "it ended")
    assert not children(os.getpid())


@pytest.mark.slow
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_job_signalled_while_readers_of_a_validation_start_is_stopped(
    start, until, tmp_path, number
):
    """Regression: workers started for a validation died of the signal, and the run failed."""
    (tmp_path / "users_items.py").write_text(MODULE)
    command = start(
        *RUN,
        "data._target_=users_items.Items",
        *("data.validation_fraction=0.5", "train.validate_every=200", "train.validate_batches=50"),
    )
    until(lambda: children(command.pid), 90, "a reader was there")
    first = children(command.pid)
    until(lambda: children(command.pid) - first, 90, "a validation has started its reader")
    both = children(command.pid)
    assert first <= both, "the reader of the training has gone"
    os.killpg(command.pid, number)
    command.wait(60)
    assert command.code == 75, command.output
    assert (tmp_path / "run" / "checkpoints").is_dir(), "nothing was saved"
    assert "died unexpectedly" not in command.output
    until(lambda: not any(is_there(child) for child in both), 20, "all ended")


@pytest.mark.slow
def test_reader_in_a_long_read_ends_with_a_run_that_is_killed(start, until, tmp_path):
    """Regression: a worker in a long read outlived its run, as torch checks only between reads."""
    (tmp_path / "users_items.py").write_text(MODULE)
    command = start(*RUN, "data._target_=users_items.Endless")
    until((tmp_path / "reads").exists, 60, "a reader reads")
    mine = children(command.pid)
    assert mine
    command.signal(signal.SIGKILL)
    until(lambda: not any(is_there(child) for child in mine), 20, "all ended")
