"""What a rank shows is there at once, and stays when it is dead."""

import os
import signal
import tracemalloc

from gpipe_hpc.comm.watchdog.activity import ActivityTracker, BetweenPhases, Phase
from gpipe_hpc.comm.watchdog.published_status import StatusPublisher, StatusReader


def test_a_view_shows_the_newest_action_and_its_phase():
    display = StatusPublisher()
    view = StatusReader(f"/proc/self/fd/{display.descriptor}")
    pulse = ActivityTracker(600.0, None, display)
    for activity, text in (
        (Phase("step 12"), "step 12"),
        ("1F0", "1F0 in step 12"),
        ("1SEND_F0", "1SEND_F0 in step 12"),
        (Phase("x" * 1000), "x" * 240),
        ("é" * 300, "é" * 120 + " in " + "x" * 240),
        (BetweenPhases("step 12"), "the caller's own work after step 12"),
    ):
        pulse.note(activity)
        shown = view.read()
        assert shown is not None and (shown.num_actions, shown.text) == (pulse.count, text)
        assert shown.is_together == (not isinstance(activity, BetweenPhases))
    display.close()
    pulse.note(Phase("later"))
    view.close()
    assert view.read() is None


def test_the_last_action_of_a_dead_process_can_be_read():
    display = StatusPublisher()
    view = StatusReader(f"/proc/self/fd/{display.descriptor}")
    pid = os.fork()
    if pid == 0:
        ActivityTracker(600.0, None, display).note("2B3")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    shown = view.read()
    assert shown is not None and shown.text == "2B3"


def test_texts_of_steps_are_not_kept():
    """Each step's "reading ... of step N" stayed in memory, as its text is another object."""
    display = StatusPublisher()
    pulse = ActivityTracker(600.0, None, display)
    pulse.note(Phase("reading"))
    for step in range(1000):
        pulse.note(f"reading training samples of step {step} ")
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for step in range(10_000):
        pulse.note(f"reading training samples of step {step}")
    kept_bytes = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    display.close()
    assert kept_bytes < 100_000, kept_bytes


def test_what_is_not_there_shows_nothing():
    assert StatusReader("/nowhere").read() is None
