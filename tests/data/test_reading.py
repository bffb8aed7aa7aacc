"""Tests of reading ahead in threads: order of batches, errors, and end of the threads."""

import threading
import time
from dataclasses import dataclass, field

import pytest
import torch

from gpipe_hpc.data import BatchReader, CorruptSampleError, CorruptTally, Readers, ReadRequest
from gpipe_hpc.errors import DataError

REQUESTS = [ReadRequest([epoch, 7, 3, 9 - epoch], epoch) for epoch in range(8)]


@dataclass(frozen=True)
class Numbers:
    """Dataset with input i + epoch / 100 and target 10 i; some samples are corrupt or missing."""

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

    def read_targets(self, indices, epoch=0):
        return torch.tensor([10 * index for index in indices])

    def digest(self):
        return "numbers"


@dataclass(frozen=True)
class Meeting(Numbers):
    """Dataset whose first two reads wait for each other."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(2, timeout=30))

    def read_inputs(self, indices, epoch=0):
        if epoch < 2:
            self.barrier.wait()
        return super().read_inputs(indices, epoch)


def readers(dataset: Numbers, workers: int, tolerance: int = 0, **options) -> Readers:
    return Readers(BatchReader(dataset, True, True, tolerance), REQUESTS, workers, **options)


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("reader")]


def test_reading_ahead_changes_nothing():
    with_none = [each._asdict() for each in readers(Numbers(), 0)]
    assert with_none[2]["inputs"].tolist() == pytest.approx([2.02, 7.02, 3.02, 7.02])
    assert with_none[2]["targets"].tolist() == [20, 70, 30, 70]
    ahead = readers(Numbers(), 2)
    with_two = [each._asdict() for each in ahead]
    ahead.close()
    assert str(with_two) == str(with_none) and len(with_two) == 8


def test_only_what_is_needed_is_read():
    """Unreadable inputs raise no error on a rank that reads only targets."""
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
    assert first.used == [0, 0, 3, 0]  # 7, 8 and 9 are corrupt; the next one is 0
    assert first.inputs.tolist() == [0, 0, 3, 0] and first.targets.tolist() == [0, 0, 30, 0]
    assert sorted(first.corrupt) == ["s7", "s8", "s9"]
    reading.close()


def test_corrupt_sample_stops_where_none_is_borne():
    with pytest.raises(CorruptSampleError, match="s7 is corrupt; replace it"):
        next(readers(Numbers(corrupt=(7,)), 0))


@pytest.mark.parametrize(("tolerance", "corrupt"), [(2, (7, 8, 9)), (50, tuple(range(10)))])
def test_search_for_a_readable_sample_ends(tolerance, corrupt):
    with pytest.raises(DataError, match=f"data.max_corrupt={tolerance} allows"):
        next(readers(Numbers(corrupt=corrupt), 0, tolerance=tolerance))


def test_empty_share_is_read_like_any_other(files, tmp_path):
    reading = BatchReader(Numbers(), True, True, tolerance=3).read(ReadRequest([], 0))
    assert len(reading.inputs) == len(reading.targets) == 0


def test_several_read_at_once_and_end_when_closed():
    reading = readers(Meeting(), 2, prefetch=1)
    assert [next(reading).inputs[0].item() for _ in range(2)] == pytest.approx([0, 1.01])
    assert len(reading_threads()) == 2
    reading.close()
    assert reading_threads() == []


def test_no_more_is_read_ahead_than_asked_for(until):
    read = []

    class Noted(Numbers):
        def read_inputs(self, indices, epoch=0):
            read.append(epoch)
            return super().read_inputs(indices, epoch)

    reading = readers(Noted(), 1, prefetch=3)
    next(reading)
    until(lambda: len(read) == 3, 10, "three batches were read")
    time.sleep(0.05)
    assert read == [0, 1, 2]
    next(reading)
    until(lambda: len(read) == 4, 10, "one more was read")
    reading.close()


def test_error_that_nobody_foresaw_arrives_too():
    reading = readers(Numbers(num_samples=None, corrupt=(0,)), 1, tolerance=1)
    with pytest.raises(TypeError):
        next(reading)
    reading.close()


def test_what_was_read_ahead_is_dropped_when_closed():
    reading = readers(Numbers(slow_s=0.05), 1, prefetch=8)
    next(reading)
    reading.close()
    assert list(reading) == [] and reading_threads() == []


def test_reader_that_hangs_is_reported():
    reading = readers(Numbers(slow_s=1), 1, timeout_s=0.3)
    with pytest.raises(DataError, match=r"comm\.timeout_s=0\.3 s"):
        next(reading)
    reading.close()


def test_nothing_starts_before_the_first_batch():
    reading = readers(Numbers(), 2)
    assert reading_threads() == []
    reading.close()


def test_each_corrupt_sample_counts_once(caplog):
    tally = CorruptTally(2, ["a"])
    tally.add({"a": "a is bad", "b": "b is bad"}, says=True)
    tally.add({"b": "b is bad"}, says=True)
    assert (tally.count, tally.names) == (2, ["a", "b"])
    assert [record.message for record in caplog.records] == [
        "corrupt sample 2 of at most 2: b is bad"
    ]
    with pytest.raises(DataError, match=r"data\.max_corrupt=2 allows: c is bad"):
        tally.add({"c": "c is bad"}, says=True)
