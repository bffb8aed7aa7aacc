"""Ctrl-C ends a process also where its cleaning up would wait forever."""

import subprocess
import sys

SCRIPT = """
import os, signal, sys, threading, time
from gpipe_hpc.training.signals import StopRequest, end_when_interrupted

stop = StopRequest()
stop.at_last = lambda: print("at last", flush=True)
end_when_interrupted(grace_s=0.5, stop=stop)
lock = threading.Lock()
lock.acquire()
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
finally:
    if sys.argv[1] == "hangs":
        lock.acquire()
"""


def run(how):
    """Return the exit code and what was printed."""
    command = [sys.executable, "-c", SCRIPT, how]
    ended = subprocess.run(command, capture_output=True, timeout=60, check=False, text=True)
    return ended.returncode, ended.stdout


def test_an_interrupt_ends_a_process_that_hangs_while_it_leaves():
    """What is left to do, such as removing copies from memory, is done before."""
    assert run("hangs") == (130, "at last\n")


def test_an_interrupt_is_pythons_own_otherwise():
    assert run("leaves") == (-2, "")
