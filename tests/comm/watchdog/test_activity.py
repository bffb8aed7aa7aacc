"""How long a rank may do one thing before it is said to make no progress."""

from gpipe_hpc.comm.watchdog.activity import ActivityTracker, BetweenPhases, Phase


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def run_phase(pulse, clock, name, *gaps_s):
    """Run a phase of some actions; return the limit within it."""
    pulse.note(Phase(name))
    limit_s = pulse.limit_s
    for number, gap_s in enumerate(gaps_s):
        pulse.note(number)
        clock.now_s += gap_s
    pulse.note(BetweenPhases(name))
    return limit_s


def test_the_first_of_a_kind_has_half_of_the_timeout():
    """A first step compiles, a first checkpoint makes its files, data are indexed once."""
    clock = Clock()
    pulse = ActivityTracker(600.0, None, clock=clock)
    for kind in ("start", "opening the run", "step 0", "saving a/step_00000010", "evaluation"):
        assert run_phase(pulse, clock, kind, 1.0) == 300.0


def test_later_ones_have_ten_times_the_longest_so_far_of_their_kind():
    clock = Clock()
    pulse = ActivityTracker(600.0, None, clock=clock)
    run_phase(pulse, clock, "step 0", 0.1, 5.0)
    run_phase(pulse, clock, "saving a/step_00000001", 20.0)
    assert run_phase(pulse, clock, "step 1", 0.1) == 50.0
    assert run_phase(pulse, clock, "step 2", 0.1) == 50.0
    assert run_phase(pulse, clock, "saving a/step_00000003", 1.0) == 200.0
    run_phase(pulse, clock, "evaluation", 0.1)
    assert run_phase(pulse, clock, "evaluation", 0.1) == 30.0  # not less


def test_the_caller_s_own_time_is_no_time_of_a_phase():
    clock = Clock()
    pulse = ActivityTracker(600.0, None, clock=clock)
    run_phase(pulse, clock, "step 0", 1.0)
    clock.now_s += 500.0
    assert run_phase(pulse, clock, "step 1", 1.0) == 30.0
    assert run_phase(pulse, clock, "step 2", 1.0) == 30.0


def test_a_limit_that_is_given_holds_for_all():
    clock = Clock()
    pulse = ActivityTracker(600.0, 7.0, clock=clock)
    assert run_phase(pulse, clock, "start", 1.0) == run_phase(pulse, clock, "step", 1.0) == 7.0


def test_what_it_does_names_phase_action_and_for_whom_it_waits():
    pulse = ActivityTracker(600.0, None)
    assert str(pulse) == "starting" and pulse.is_inside
    pulse.note(Phase("step 3"))
    pulse.note("1F0")
    assert str(pulse) == "1F0 in step 3" and not pulse.waits
    pulse.waits_for = (2,)
    assert str(pulse) == "1F0 in step 3, waiting for rank 2" and pulse.waits
    pulse.waits_for = tuple(range(20))
    assert str(pulse).endswith("waiting for ranks 0, 1, 2, 3, 4, 5, 6, 7, ...")
    pulse.note("1F1")
    assert str(pulse) == "1F1 in step 3" and not pulse.waits
    pulse.note(BetweenPhases("step 3"))
    assert not pulse.is_inside and "step 3" in str(pulse)
