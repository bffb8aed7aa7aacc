"""An end for ranks that would wait for one another without one."""

import os
import threading

import pytest

from gpipe_hpc.comm.world.launcher import Launch
from gpipe_hpc.preflight import guard
from gpipe_hpc.preflight.guard import limit_start_time

LAUNCH = Launch(3, 4, 1, 2, "torchrun", "10.0.0.1", 29500)


@pytest.fixture
def ended(monkeypatch):
    """Return what is set, with the exit code, in place of an end of the process."""
    codes, called = [], threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), called.set()))
    monkeypatch.setattr(guard, "GRACE_S", 0.0)
    return codes, called


def test_a_meeting_that_does_not_end_is_ended_with_rank_host_and_address(ended, capfd):
    """A link that was cut right after the first answer: all ranks waited for more than a minute."""
    codes, called = ended
    with limit_start_time(LAUNCH, 0.05):
        assert called.wait(30)
    assert codes == [1]
    told = capfd.readouterr().err
    assert f"rank 3 on {os.uname().nodename} did not connect to the other 3 ranks" in told
    assert "10.0.0.1:29500" in told and "comm.reach_s" in told


def test_a_meeting_that_ends_is_left_alone(ended):
    with limit_start_time(LAUNCH, 0.2):
        pass
    assert not ended[1].wait(0.5)
