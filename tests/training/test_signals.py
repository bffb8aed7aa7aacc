"""Ctrl-C ends a process also where its cleaning up would wait forever."""

import subprocess
import sys

SCRIPT = """
import os, signal, sys, threading, time
from gpipe_hpc.training.signals import end_when_interrupted

end_when_interrupted(grace_s=0.5)
lock = threading.Lock()
lock.acquire()
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
finally:
    if sys.argv[1] == "hangs":
        lock.acquire()
"""


def code_of(how):
    run = [sys.executable, "-c", SCRIPT, how]
    return subprocess.run(run, capture_output=True, timeout=60, check=False).returncode


def test_an_interrupt_ends_a_process_that_hangs_while_it_leaves():
    assert code_of("hangs") == 130


def test_an_interrupt_is_pythons_own_otherwise():
    assert code_of("leaves") == -2
