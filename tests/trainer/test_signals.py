"""Ctrl-C: the first is a request, the second ends the process at once, whatever it is in."""

import signal
import socket
import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys, threading, time
from gpipe_hpc.trainer.signals import StopRequest

stop = StopRequest()
stop.listen()
lock = threading.Lock()
lock.acquire()

def press(number=signal.SIGINT):
    os.kill(os.getpid(), number)

def at_last(ending):
    print("at last", flush=True)

with stop.before_exit(lambda ending: print("earlier", flush=True)):
    with stop.before_exit(at_last):
        if "steps" not in sys.argv:
            press()
        with stop.between_steps():
            press(signal.SIGTERM if "term" in sys.argv else signal.SIGINT)
            press()  # passed on by a launcher within the same moment
            print("goes on", stop.is_requested, stop.signal.name, flush=True)
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
    assert error.count("gpipe_hpc: ") == 1 and "press Ctrl-C again to exit now" in error


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


WAITING = """
import contextlib, ctypes, os, signal, sys, threading, time
from gpipe_hpc.trainer.signals import StopRequest

stop = StopRequest(grace_s=2.0)
stop.listen()
name, *how = sys.argv[1:]
number = signal.Signals[name]

def press():
    os.kill(os.getpid(), number)

def wait_in_c():
    # As a wait of Gloo's, which no signal breaks off: Python's handlers run when it is over.
    threading.Timer(0.2, press).start()
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    until = (ctypes.c_long * 2)(int(time.time()) + 4, 0)
    library.pthread_mutex_timedlock(mutex, until)
    print("waited in vain", flush=True)

if "fork" in how:
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(9)
    with stop.between_steps(edge_limit_s=0.5):
        time.sleep(0.2)
        os.kill(pid, number)
        time.sleep(1.5)
        print("own", stop.is_requested, flush=True)
        os.kill(pid, signal.SIGKILL)
elif "steps" in how:
    with stop.between_steps(edge_limit_s=0.5, doing=lambda: "step 7, waiting for rank 3"):
        if "obeyed" in how:
            press()
            stop.accept()
            time.sleep(1.5)
        elif "saves" in how:
            press()
            with stop.without_deadline():
                time.sleep(1.5)
        else:
            wait_in_c()
    print("left", flush=True)
elif "end" in how:
    with stop.between_steps(edge_limit_s=0.5):
        pass
    press()
    time.sleep(1.0)
    print("left", flush=True)
else:
    with stop.before_exit(lambda ending: print("last:", ending.words, flush=True)):
        if "alone" in how:
            wait_in_c()
        if "raised" in how:
            with contextlib.suppress(OSError), stop.joined(lambda: False):
                raise OSError
        else:
            with stop.joined(lambda: "failed" in how):
                wait_in_c()
        if "raised" in how:
            wait_in_c()
            print("told to end", stop.was_terminated, flush=True)
"""


def run_waiting(*how):
    """Return the exit code, what was printed, and what was said, of rank 2."""
    ended = subprocess.run(
        [sys.executable, "-c", WAITING, *how],
        capture_output=True,
        timeout=60,
        check=False,
        text=True,
        env={"PATH": "", "PYTHONPATH": ":".join(sys.path), "RANK": "2"},
    )
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.returncode, ended.stdout.splitlines(), ended.stderr


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_rank_that_waits_while_it_starts_ends_at_once(name):
    """It took note, and waited on: in the rendezvous, in the roll call, for a group."""
    code, out, said = run_waiting(name)
    alone = run_waiting(name, "alone")
    assert alone == (128 + signal.Signals[name], out, said), "no run yet that could go on"
    words = f"rank 2 on {socket.gethostname()}: stopped by {name} before the first step"
    assert code == 75
    assert out == [f"last: {words}, so nothing is lost"]
    assert said == f"gpipe_hpc: {words}, so nothing is lost\n"


def test_a_rank_whose_launcher_stops_all_for_another_s_failure_ends_by_that():
    """It would end with code 75, which asks to be started again, also where that fails again."""
    assert run_waiting("SIGTERM", "failed")[:2] == (0, ["waited in vain"])


def test_a_rank_that_has_failed_is_not_stopped_by_its_launcher():
    """Beside why it had failed it said that it was stopped: torchrun stops all when one ends."""
    left = ["waited in vain", "told to end False"]
    assert run_waiting("SIGTERM", "raised") == (0, left, "")


def test_ctrl_c_ends_one_that_waits_too():
    assert run_waiting("SIGINT")[0] == 130


def test_a_step_that_does_not_end_is_cut_off_ahead_of_the_kill():
    """A scheduler killed it in silence half a minute later."""
    code, out, said = run_waiting("SIGTERM", "steps")
    assert (code, out) == (75, [])
    assert "the step did not end within 0.5 s after SIGTERM" in said
    assert "still in step 7, waiting for rank 3" in said and "stop_grace_s" in said


@pytest.mark.parametrize("how", ["obeyed", "saves"])
def test_a_save_is_not_cut_off(how):
    """What was signalled is one that has reached the edge and saves, or saves just then."""
    assert run_waiting("SIGTERM", "steps", how)[:2] == (0, ["left"])


def test_other_signals_set_no_limit():
    """SIGUSR1 comes as early as its sender likes: nobody kills soon after it."""
    assert run_waiting("SIGUSR1", "steps")[:2] == (0, ["waited in vain", "left"])


def test_behind_the_last_step_it_is_too_late_to_stop():
    assert run_waiting("SIGTERM", "end")[:2] == (0, ["left"])


def test_a_signal_to_a_forked_process_is_not_this_one_s():
    assert run_waiting("SIGTERM", "fork")[:2] == (0, ["own False"])
