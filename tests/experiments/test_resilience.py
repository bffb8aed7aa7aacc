"""The goodput of experiments/resilience: held against Daly's formula, and what must be so."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from experiments.resilience.formulas import daly_goodput, daly_s, young_s
from experiments.resilience.hosts import Event, events
from experiments.resilience.inputs import DAY_S, HOUR_S, Inputs
from experiments.resilience.job import Policy, goodput
from experiments.resilience.steps import (
    Slowdowns,
    as_they_fell,
    cut_anew,
    replanned,
    whole_replicas,
)

ROOT = Path(__file__).parents[2]
# Hosts that are back at once: what is left of a failure is what the formula has.
AT_ONCE = Inputs(repair_s=0.0, detection_s=(20.0, 20.0), horizon_s=60 * DAY_S)
LITTLE = Inputs(stages=4, replicas=3, microbatches=8, ranks_per_host=1)


@pytest.mark.parametrize("mtbf_days", [2, 20])
@pytest.mark.parametrize("interval_s", [120.0, 600.0, None])
def test_restarts_give_what_dalys_formula_says(mtbf_days, interval_s):
    """Also where failures come while a checkpoint is written, and amid the recovery of another."""
    inputs = replace(AT_ONCE, mtbf_s=mtbf_days * DAY_S)
    policy = Policy("restart", in_memory=False, interval_s=interval_s)
    got = mean(goodput(inputs, policy, seed) for seed in range(3))
    recovery_s = 20.0 + inputs.restart_s + inputs.load_s
    every_s = policy.interval(inputs)
    expected = daly_goodput(inputs.job_mtbf_s, every_s, inputs.save_s, recovery_s)
    assert got == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize("save_s", [1.0, 10.0, 60.0])
def test_dalys_interval_is_the_best_of_his_formula(save_s):
    mtbf_s = 3600.0
    best = daly_s(mtbf_s, save_s)
    at = daly_goodput(mtbf_s, best, save_s, 100.0)
    for other in (0.7 * best, 1.4 * best):
        assert daly_goodput(mtbf_s, other, save_s, 100.0) < at
    near = daly_goodput(mtbf_s, young_s(mtbf_s, save_s), save_s, 100.0)
    assert near == pytest.approx(at, rel=1e-2)
    assert daly_s(10.0, 30.0) == 10.0


def test_hosts_fail_as_often_as_they_are_said_to_and_spare_ones_do_not_change_that():
    inputs = Inputs(mtbf_s=10 * DAY_S, repair_s=DAY_S, horizon_s=200 * DAY_S)
    found = events(inputs, seed=1)
    assert found == sorted(found)
    fails = sum(not event.is_up for event in found)
    assert fails == pytest.approx(125 * 200 / 11, rel=0.05)
    more = events(replace(inputs, spare_hosts=3), seed=1)
    assert [event for event in more if event.host < 125] == found


def test_without_failures_all_is_work_but_what_checkpoints_and_spare_hosts_take():
    inputs = Inputs(mtbf_s=1e15, horizon_s=DAY_S)
    on_disk = Policy("", in_memory=False, interval_s=100 * inputs.save_s)
    assert goodput(inputs, on_disk, 0) == pytest.approx(1 / 1.01, abs=1e-3)
    spare = replace(on_disk, spare_hosts=5)
    assert goodput(inputs, spare, 0) == pytest.approx(125 / 130 / 1.01, abs=1e-3)


# Three hours in which the first host fails after one hour and is back after two; a checkpoint every
# half hour, so at the failure nothing but the last moment is lost; recovery takes 20 + 60 + 31 s.
ONE_FAILURE = [Event(HOUR_S, False, 0), Event(2 * HOUR_S, True, 0)]
SLOW = Slowdowns(125, {1: 1.25})


def work_of(policy, happened=ONE_FAILURE):
    inputs = replace(AT_ONCE, horizon_s=3 * HOUR_S, save_s=0.0, copy_s=0.0, mtbf_s=1e15)
    paid = (125 + policy.spare_hosts) / 125
    policy = replace(policy, in_memory=False, interval_s=HOUR_S / 2)
    return goodput(inputs, policy, 0, happened) * inputs.horizon_s * paid


@pytest.mark.parametrize(
    ("policy", "worked_s"),
    [
        # Detected long before the host is back: then a restart.
        (Policy("repair"), 2 * HOUR_S - 91),
        (Policy("spare", spare_hosts=1), 3 * HOUR_S - 111),
        # Slower from the restart until the host is back, then another restart.
        (Policy("re-route", SLOW), HOUR_S + (HOUR_S - 111) / 1.25 + HOUR_S - 91),
        # Half a step of 30 s, the detection, and a moment to join, twice.
        (Policy("stays", SLOW, stays=True), HOUR_S - 15 + (HOUR_S - 30) / 1.25 + HOUR_S - 10),
    ],
)
def test_one_failure_costs_what_a_policy_makes_of_it(policy, worked_s):
    assert work_of(policy) == pytest.approx(worked_s)


def test_work_since_the_last_checkpoint_is_lost_and_a_failure_amid_recovery_begins_it_anew():
    early = [Event(HOUR_S + 600, False, 0), Event(HOUR_S + 601, True, 0)]
    assert work_of(Policy("repair"), early) == pytest.approx(3 * HOUR_S - 600 - 111)
    again = [*early, Event(HOUR_S + 610, False, 3), Event(HOUR_S + 611, True, 3)]
    assert work_of(Policy("repair"), again) == pytest.approx(3 * HOUR_S - 610 - 111)


def test_a_spare_host_that_has_failed_is_no_spare_host():
    first = [Event(60.0, False, 125), Event(HOUR_S, False, 0), Event(2 * HOUR_S, True, 0)]
    assert work_of(Policy("spare", spare_hosts=1), first) == pytest.approx(2 * HOUR_S - 91)


@pytest.mark.parametrize("neighbour", [1, 2])
def test_copies_in_memory_are_gone_where_two_neighbours_fail_together(neighbour):
    inputs = replace(AT_ONCE, horizon_s=3 * HOUR_S, mtbf_s=20 * DAY_S)
    both = [Event(HOUR_S, False, 0), Event(HOUR_S, False, neighbour)]
    back = [Event(HOUR_S + 5, True, 0), Event(HOUR_S + 5, True, neighbour)]
    policy = Policy("memory", interval_s=60.0)
    alone = goodput(inputs, policy, 0, [both[0], back[0]]) * inputs.horizon_s
    lost_s = alone - goodput(inputs, policy, 0, [*both, *back]) * inputs.horizon_s
    assert (lost_s > 300) == (neighbour == 1)


def test_steps_with_missing_hosts_are_those_of_the_projects_own_tables():
    """More room never hurts here, nor does a cut that gives stages on fewer ranks less to do."""
    assert whole_replicas(LITTLE, 0) == replanned(LITTLE, 0, 1) == 1
    assert whole_replicas(LITTLE, 1) == whole_replicas(LITTLE, 4) > 1.3
    assert whole_replicas(LITTLE, 9) == math.inf
    for lost in (1, 2):
        roomy, tight = replanned(LITTLE, lost, 4), replanned(LITTLE, lost, 1)
        assert 1 < roomy <= tight
        assert 1 < as_they_fell(LITTLE, lost, 4, draws=3) < 2
        assert 1 < cut_anew(LITTLE, lost, 4) <= roomy
    slow = Slowdowns(10, {2: 1.2, 4: 1.6})
    assert [slow(lost) for lost in (0, 1, 2, 3, 4)] == pytest.approx([1, 1.1, 1.2, 1.4, 1.6])
    assert slow(7) == pytest.approx(3.2) and slow(10) == math.inf


@pytest.mark.slow
def test_the_command_writes_tables_and_a_picture(tmp_path):
    words = ["--seeds", "1", "--days", "2", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "experiments.resilience", *words]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=100)
    assert (tmp_path / "goodput.svg").read_text().startswith("<?xml")
    table = (tmp_path / "policies.md").read_text()
    assert table.count("\n") == 11 and "| wait for the repair |" in table
    assert "Daly's formula" in (tmp_path / "checkpoints.md").read_text()
