"""Each wait, mark and loan of the package is there for something: without it the tracker objects.

A call is left out by doing nothing where it comes from that line. Nobody lists them by hand: a new
one that no program here misses fails this test.
"""

import pytest

from tests.simulated.errors import SimulationError
from tests.simulated.locations import Where
from tests.simulated.ordering_calls import Call, calls
from tests.simulated.programs import DRIVES
from tests.simulated.scenarios import ALL, Scenario, played
from tests.simulated.single import single_device
from tests.simulated.test_transport import on_played

_STOPS = "a clock on the host stops when the work is done"
# What the tracker cannot miss, and why it is there all the same.
ARGUED = {
    "planner/costs/clock.py timed synchronize": "work put there before is not measured",
    "planner/costs/clock.py _span synchronize": "work put there before is not measured",
    "planner/costs/clock.py from_idle synchronize": f"work before it is not measured; {_STOPS}",
    "planner/costs/clock.py _measured record": "times are measured between these marks",
    "planner/costs/clock.py _measured query": "it tells whether the host was fast enough",
    "planner/costs/clock.py _measured synchronize": _STOPS,
    "bench/point.py _steps synchronize": _STOPS,
    "preflight/timing.py follow synchronize": "the other end's clock stops at the answer",
    "preflight/timing.py _push synchronize": "making the message is not measured",
    "preflight/timing.py _pull synchronize": _STOPS,
    "preflight/measuring.py _time_sum synchronize": _STOPS,
    "comm/world/mpi/works.py _finish synchronize": "who has the future may be any thread, or C++",
    "engine/recorder.py __init__ synchronize": "nothing is ahead of the first mark",
}
# The cheapest trainings first; of those not named all are tried.
NEAR = {
    "comm/transport/device_handoff.py": ["nests"],
    "comm/collectives/thread_plans.py": ["in rank order"],
    "comm/world/threads.py": ["sums", "flat shards", "normed over replicas"],
    "comm/collectives/on_stream.py": ["in rank order", "by hosts"],
    "comm/world/mpi/": ["mpi blocks", "mpi pointers blocks", "mpi sums"],
    "data_parallel/compression.py": ["topk", "powersgd"],
    "engine/offload.py": ["one rank", "zb_h1", "nests offloaded"],
    "device/deferred.py": ["one rank", "uneven", "gpipe", "float16 with an overflow"],
    "engine/recorder.py": ["one rank", "uneven", "gpipe"],
    "engine/run.py": ["one rank", "uneven"],
}
CALLS = list(calls())
NAMED = {scenario.name: scenario for scenario in ALL}


def near(call: Call) -> list[Scenario]:
    """Return the trainings that may miss a call, the cheapest first."""
    found = [
        NAMED[n] for prefix, names in NEAR.items() if call.file.startswith(prefix) for n in names
    ]
    return found or ALL


def is_missed_by_a_drive(call: Call) -> bool:
    if call.file.startswith("comm/transport/"):
        return any(on_played(call.sites, has_backend=has)[1] for has in (False, True))
    if call.file not in DRIVES:
        return False
    try:
        with single_device(call.sites) as device:
            DRIVES[call.file](device)
    except SimulationError:
        return True
    return False


def is_missed_in_training(call: Call, scenario: Scenario) -> bool:
    try:
        played(scenario, call.sites)
    except SimulationError:
        return True
    return False


@pytest.mark.parametrize("drive", DRIVES, ids=str)
def test_the_programs_are_in_order(drive):
    with single_device() as device:
        DRIVES[drive](device)
    assert device.tracker.faults == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "call", [pytest.param(call, id=str(call)) for call in CALLS if call.name not in ARGUED]
)
def test_each_is_missed_where_it_does_nothing(call):
    assert is_missed_by_a_drive(call) or any(is_missed_in_training(call, s) for s in near(call))


def test_what_is_argued_is_there():
    """No argument outlives its call."""
    assert set(ARGUED) <= {call.name for call in CALLS}


def test_calls_are_found():
    found = {f"{call.file} {call.method}" for call in CALLS}
    assert {
        "engine/offload.py wait_event",
        "comm/transport/device_handoff.py record_event",
    } <= found
    assert len(found) > 25


def test_a_call_that_does_nothing_is_one_of_its_line_alone():
    (call,) = [
        c
        for c in CALLS
        if str(c).endswith("keep_for_stream") and c.file == "comm/transport/device_handoff.py"
    ]
    assert ("keep_for_stream", Where(call.path, call.first)) in call.sites
    assert not call.sites & next(c for c in CALLS if c.method == "wait_event").sites
