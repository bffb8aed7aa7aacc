"""What all ranks are told of a failure: its words, and whether settings cannot work."""

import pytest

from gpipe_hpc.comm.watchdog.report import FailureReport
from gpipe_hpc.comm.world.threads import run_on_threads
from gpipe_hpc.comm.world.world import collective_errors
from gpipe_hpc.errors import (
    ConfigError,
    DataError,
    ModelError,
    PartitionError,
    PeerError,
    ScheduleError,
    is_users_mistake,
)


@pytest.mark.parametrize("is_mistake", [True, False])
def test_a_report_is_read_as_it_was_written(is_mistake):
    report = FailureReport('rank 1 on h\u00f6st: "data":\n[1, true]', is_mistake)
    assert FailureReport.read(report.written()) == report


@pytest.mark.parametrize(
    ("kind", "is_mistake"),
    [
        (ConfigError, True),
        (ModelError, True),
        (PartitionError, True),
        (ScheduleError, True),
        (DataError, False),
        (OSError, False),
    ],
)
def test_others_are_told_whether_settings_cannot_work(kind, is_mistake):
    """A rank that only heard of a refusal ended with 1, and the one that refused with 2."""
    heard = []

    def body(world):
        with collective_errors(world, "the start"):
            if world.rank == 1:
                raise kind("what it is")
            try:
                with collective_errors(world, "meeting"):
                    world.world_group.all_gather_object(None)
            except PeerError as error:
                heard.append(error)
                raise

    with pytest.raises(kind):
        run_on_threads(3, body)
    assert len(heard) == 2
    assert {is_users_mistake(error) for error in heard} == {is_mistake}
