"""Reading ahead: the same batches in the same order, errors that arrive, processes that end."""

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from gpipe_hpc.errors import DataError
from gpipe_hpc.training.data import (
    BatchReader,
    CorruptSampleError,
    CorruptTally,
    Readers,
    Request,
)

REQUESTS = [Request([epoch, 7, 3, 9 - epoch], epoch) for epoch in range(8)]


@dataclass(frozen=True)
class Numbers:
    """Sample i in epoch e is i + e / 100, its target 10 i; some are corrupt."""

    corrupt: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    slow_s: float = 0.0
    num_samples: int = 10

    def read_inputs(self, indices, epoch=0):
        time.sleep(self.slow_s)
        for index in indices:
            if index in self.corrupt:
                raise CorruptSampleError(f"s{index}", f"data: s{index} is corrupt; replace it")
            if index in self.missing:
                raise DataError(f"data: s{index} cannot be read")
        return torch.tensor([index + epoch / 100 for index in indices])

    def read_targets(self, indices):
        return torch.tensor([10 * index for index in indices])

    def digest(self):
        return "numbers"


@dataclass(frozen=True)
class Pids(Numbers):
    """Samples are the number of the process that reads them."""

    def read_inputs(self, indices, epoch=0):
        return torch.tensor([os.getpid()] * len(indices))


def readers(dataset: Numbers, workers: int, tolerance: int = 0, **options) -> Readers:
    return Readers(BatchReader(dataset, True, True, tolerance), REQUESTS, workers, **options)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except FileNotFoundError:
        return True


def test_reading_ahead_changes_nothing():
    with_none = [each._asdict() for each in readers(Numbers(), 0)]
    assert with_none[2]["inputs"].tolist() == pytest.approx([2.02, 7.02, 3.02, 7.02])
    assert with_none[2]["targets"].tolist() == [20, 70, 30, 70]
    ahead = readers(Numbers(), 2)
    with_two = [each._asdict() for each in ahead]
    ahead.close()
    assert str(with_two) == str(with_none) and len(with_two) == 8


def test_only_what_is_needed_is_read():
    """An input that cannot be had does not trouble who reads targets alone."""
    broken = Numbers(missing=tuple(range(10)))
    reading = BatchReader(broken, inputs=False, targets=True, tolerance=3).read(REQUESTS[0])
    assert reading.inputs is None and reading.targets.tolist() == [0, 70, 30, 90]
    reading = BatchReader(Numbers(), inputs=True, targets=False).read(REQUESTS[0])
    assert reading.targets is None and reading.inputs is not None


@pytest.mark.parametrize("workers", [0, 2])
def test_error_comes_with_the_batch_that_has_it(workers):
    reading = readers(Numbers(missing=(4,)), workers)
    assert [next(reading).inputs[0].item() for _ in range(4)] == pytest.approx(
        [0, 1.01, 2.02, 3.03]
    )
    with pytest.raises(DataError, match=r"^data: s4 cannot be read$"):
        next(reading)
    reading.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_next_readable_sample_takes_the_place_of_a_corrupt_one(workers):
    reading = readers(Numbers(corrupt=(7, 8, 9)), workers, tolerance=5)
    first = next(reading)
    assert first.used == [0, 0, 3, 0]  # 7, 8 and 9 lead around to 0
    assert first.inputs.tolist() == [0, 0, 3, 0] and first.targets.tolist() == [0, 0, 30, 0]
    assert sorted(first.corrupt) == ["s7", "s8", "s9"]
    reading.close()


def test_corrupt_sample_stops_where_none_is_borne():
    with pytest.raises(CorruptSampleError, match="s7 is corrupt; replace it"):
        next(readers(Numbers(corrupt=(7,)), 0))


@pytest.mark.parametrize(("tolerance", "corrupt"), [(2, (7, 8, 9)), (50, tuple(range(10)))])
def test_search_for_a_readable_sample_ends(tolerance, corrupt):
    with pytest.raises(DataError, match=f"data.max_corrupt, expected at most {tolerance}, got one"):
        next(readers(Numbers(corrupt=corrupt), 0, tolerance=tolerance))


def test_empty_share_is_read_like_any_other(files, tmp_path):
    reading = BatchReader(Numbers(), True, True, tolerance=3).read(Request([], 0))
    assert len(reading.inputs) == len(reading.targets) == 0


def test_processes_are_others_and_end_when_closed(until):
    reading = readers(Pids(), 2, prefetch=1)
    pids = {int(next(reading).inputs[0]) for _ in range(4)}
    assert len(pids) == 2 and os.getpid() not in pids
    reading.close()
    until(lambda: all(map(gone, pids)), 10, "the readers ended")


def test_processes_end_when_dropped(until):
    reading = readers(Pids(), 1)
    pid = int(next(reading).inputs[0])
    del reading
    until(lambda: gone(pid), 10, "the reader ended")


def test_process_that_is_killed_is_reported(until):
    reading = readers(Pids(), 1, prefetch=1)
    os.kill(int(next(reading).inputs[0]), signal.SIGKILL)
    with pytest.raises(DataError, match=r"reading ahead failed.*(signal|unexp).*data\.workers=0"):
        for _ in range(8):
            next(reading)
    reading.close()


def test_signals_to_stop_are_for_who_trains(until):
    """Slurm signals every process of a job: a step under way still needs its batches."""
    reading = readers(Pids(), 1, prefetch=1)
    pid = int(next(reading).inputs[0])
    for number in ("TERM", "USR1", "INT"):
        subprocess.run(["kill", f"-{number}", str(pid)], check=True)
    assert [int(each.inputs[0]) for each in reading] == [pid] * 7
    reading.close()
    reading = readers(Pids(), 1)
    pid = int(next(reading).inputs[0])
    os.kill(pid, signal.SIGTERM)  # from who trains: it leaves in a hurry
    until(lambda: gone(pid), 10, "the reader ended")
    reading.close()


def test_reader_that_hangs_is_reported():
    reading = readers(Numbers(slow_s=1), 1, timeout_s=0.3)
    with pytest.raises(
        DataError, match=r"expected a batch within 0\.3 s from 1 processes.*timed out"
    ):
        next(reading)
    reading.close()


def test_start_of_readers_draws_no_random_number():
    """The process's generator is that of the layers."""
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    reading = readers(Numbers(), 1)
    next(reading)
    assert torch.equal(torch.rand(4), expected)
    reading.close()


def test_nothing_starts_before_the_first_batch():
    reading = readers(Pids(), 2)
    assert reading._readings is None
    reading.close()
    assert list(reading) == []


def test_each_corrupt_sample_counts_once(caplog):
    tally = CorruptTally(2, ["a"])
    tally.add({"a": "a is bad", "b": "b is bad"}, says=True)
    tally.add({"b": "b is bad"}, says=True)
    assert (tally.count, tally.names) == (2, ["a", "b"])
    assert [record.message for record in caplog.records] == [
        "corrupt sample 2 of at most 2: b is bad"
    ]
    with pytest.raises(DataError, match="expected at most 2, got one more: c is bad"):
        tally.add({"c": "c is bad"}, says=True)
