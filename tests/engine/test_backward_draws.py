"""Detection of threads that may draw random numbers during a backward."""

import os
import threading
import time

import torch

from gpipe_hpc.engine.backward_draws import _others, _running


def test_continuously_drawing_thread_is_detected():
    """Regression: Linux updates CPU times of threads only at ticks, so training was refused."""
    stops, draws = threading.Event(), [0]

    def draw():
        while not stops.is_set():
            torch.rand(64)
            draws[0] += 1

    thread = threading.Thread(target=draw)
    thread.start()
    drew = []
    try:
        until = time.monotonic() + 30
        while len(drew) < 20 and time.monotonic() < until:
            others, before = _others(), draws[0]
            torch.ones(100_000).sum()
            if draws[0] > before:
                drew.append(thread.name in _running(others))
    finally:
        stops.set()
        thread.join()
    assert drew and all(drew)


def test_waiting_main_thread_of_forked_process_counts_as_idle():
    """Regression: Python 3.11 kept the parent's thread number, so draws were only logged."""

    def check_main_thread():
        time.sleep(0.2)  # until the main thread waits
        others = _others()
        found_running.append(bool(_running(others)))

    pid = os.fork()
    if pid == 0:
        found_running = []
        thread = threading.Thread(target=check_main_thread)
        thread.start()
        thread.join()
        os._exit(found_running != [False])
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
