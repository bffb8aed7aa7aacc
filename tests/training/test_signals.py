"""Ctrl-C: the first is a request, the second ends the process at once, whatever it is in."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys, threading, time
from gpipe_hpc.training.signals import StopRequest

stop = StopRequest()
stop.listen()
lock = threading.Lock()
lock.acquire()

def press(number=signal.SIGINT):
    os.kill(os.getpid(), number)

def at_last():
    print("at last", flush=True)

with stop.doing_last(lambda: print("earlier", flush=True)):
    with stop.doing_last(at_last):
        if "steps" not in sys.argv:
            press()
        with stop.between_steps():
            press(signal.SIGTERM if "term" in sys.argv else signal.SIGINT)
            press()  # passed on by a launcher within the same moment
            print("goes on", stop.came, stop.signal.name, flush=True)
            if "twice" in sys.argv:
                time.sleep(0.6)
                threading.Timer(0.1, press).start()
                lock.acquire()  # the main thread is stuck
    print("left", flush=True)
"""


def run(*how, **env):
    """Return the exit code and what was printed."""
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, *how],
        capture_output=True,
        timeout=60,
        check=False,
        text=True,
        env={"PATH": "", "PYTHONPATH": ":".join(sys.path), **env},
    )
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.returncode, ended.stdout.splitlines(), ended.stderr


def test_the_first_is_a_request_and_one_press_counts_once():
    """It raised KeyboardInterrupt in the middle of a step: no checkpoint, and a traceback."""
    code, out, error = run("steps")
    assert (code, out) == (0, ["goes on True SIGINT", "left"])
    assert error.count("gpipe_hpc: ") == 1 and "Ctrl-C again ends at once" in error


def test_the_second_ends_a_process_that_is_stuck():
    """What is left to do, such as removing copies from memory, is done before."""
    code, out, error = run("steps", "twice")
    assert (code, out) == (130, ["goes on True SIGINT", "at last", "earlier"])
    assert "interrupted: ends now" in error


def test_a_press_after_sigterm_ends_it_too():
    code, out, _ = run("steps", "term", "twice")
    assert (code, out) == (130, ["goes on True SIGTERM", "at last", "earlier"])


def test_before_the_first_step_one_is_enough():
    code, out, error = run()
    assert (code, out) == (130, ["at last", "earlier"])
    assert "before the first step" in error


@pytest.mark.parametrize("name", ["RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"])
def test_one_rank_says_so(name):
    assert "gpipe_hpc" in run(**{name: "0"})[2]
    assert run(**{name: "3"})[2] == ""
