"""Tests of worker processes for indexing: their results, progress messages, errors and end."""

import logging
import os
import subprocess

import numpy as np
import pytest

from gpipe_hpc.data.indexing import worker_pool
from gpipe_hpc.data.indexing.worker_pool import IndexingProgress, IndexingTask, in_order
from gpipe_hpc.errors import DataError


@pytest.fixture
def tasks(tmp_path):
    """Return indexing tasks for a file of 400 documents."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "document {number}"}}\n' for number in range(400)))
    size = path.stat().st_size
    words = {"scan": "lines", "path": str(path), "key": "text"}
    return [
        IndexingTask(words | {"start": start, "stop": min(size, start + 1000)}, path, 1000)
        for start in range(0, size, 1000)
    ]


@pytest.fixture
def processes(monkeypatch):
    """Enable worker processes for small files; return a list of the processes started."""
    monkeypatch.setattr(worker_pool, "_WORTH_PROCESSES", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    started = []
    original = subprocess.Popen

    def start(*arguments, **keywords):
        started.append(original(*arguments, **keywords))
        return started[-1]

    monkeypatch.setattr(worker_pool.subprocess, "Popen", start)
    return started


def offsets(parts) -> list[int]:
    return np.concatenate([part.arrays["offset"] for part in parts]).tolist()


def test_processes_find_what_one_does(tasks, processes, monkeypatch):
    found = offsets(in_order(tasks))
    assert len(processes) == 2 and all(each.poll() is not None for each in processes)
    monkeypatch.setattr(worker_pool, "_WORTH_PROCESSES", 2**40)
    assert found == offsets(in_order(tasks)) and len(found) == 400
    assert len(processes) == 2


@pytest.mark.parametrize("has_processes", [True, False])
def test_file_that_cannot_be_read_is_named(tasks, processes, monkeypatch, has_processes):
    if not has_processes:
        monkeypatch.setattr(worker_pool, "_WORTH_PROCESSES", 2**40)
    tasks[0].path.unlink()
    with pytest.raises(FileNotFoundError) as caught:
        list(in_order(tasks))
    assert caught.value.filename == str(tasks[0].path)


def test_process_that_dies_is_told_of(tasks, processes):
    found = in_order(tasks * 5000)  # more than the workers finish before they are killed
    next(found)
    for each in processes:
        each.kill()
    with pytest.raises(DataError, match=r"a\.jsonl has died"):
        list(found)


def test_processes_end_with_whoever_takes_no_more(tasks, processes):
    """Workers end if the results are not read to the end, as after a corrupt line."""
    found = in_order(tasks * 50)
    next(found)
    found.close()
    assert all(each.poll() is not None for each in processes)


def test_it_says_how_far_it_is(monkeypatch, caplog):
    clock = iter([0.0, 1.0, 5.5, 6.0, 11.0])
    monkeypatch.setattr(worker_pool.time, "monotonic", lambda: next(clock))
    caplog.set_level(logging.INFO)
    progress = IndexingProgress(10**9)
    for _ in range(4):
        progress.add(10**8)
    assert [record.message for record in caplog.records] == [
        "indexing data: 0.2 of 1.0 GB, 36 MB/s, 22 s left",
        "indexing data: 0.4 of 1.0 GB, 36 MB/s, 16 s left",
    ]


def test_a_worker_loads_no_torch():
    """Importing torch would take each worker seconds and hundreds of megabytes."""
    code = "import gpipe_hpc.data.indexing.worker, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([worker_pool.sys.executable, "-c", code], check=False).returncode == 0


def test_a_process_that_cannot_be_started_ends_those_before_it(tasks, processes, monkeypatch):
    """Regression: workers already started continued to index after the error."""
    start = worker_pool.subprocess.Popen

    def start_one(*arguments, **keywords):
        if processes:
            raise BlockingIOError(11, "no more processes")
        return start(*arguments, **keywords)

    monkeypatch.setattr(worker_pool.subprocess, "Popen", start_one)
    with pytest.raises(BlockingIOError):
        list(in_order(tasks))
    assert len(processes) == 1 and processes[0].poll() is not None
