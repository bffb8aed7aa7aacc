"""The whole trainer on played devices: nothing out of order, and the bits of a CPU."""

from collections import Counter

import pytest
from torch._dynamo.utils import counters, guard_failures

from gpipe_hpc import run_on_threads
from tests.simulated.scenarios import (
    ALL,
    OUTER,
    RECOMPUTE,
    SCHEDULES,
    Scenario,
    of,
    on_cpu,
    overflowing,
    pipe_of,
    played,
)
from tests.support import covering, product

SLOW = {"normed over replicas", "buffers of the first", "apart in parts", "apart and compressed"}
SLOW |= {"direct skips", "staged uneven", "no overlap", "qsgd", "v_half"}
SLOW |= {"by one host", "by weights"}


def compiled_anew() -> dict[str, Counter[str]]:
    """Return why torch compiled layers again, by their names, if it did; of many it gives up."""
    return {code.co_name: Counter(map(str, why)) for code, why in guard_failures.items()}


def assert_bits_of_a_cpu(scenario: Scenario) -> None:
    """Train on both; what the host waits for is counted from the second step on."""
    there = played(scenario)
    for own, cpu in zip(there.results, on_cpu(scenario), strict=True):
        assert own.unlike(cpu) == [], compiled_anew()
        for in_step, in_clipping in own.waits[1:]:
            assert [str(wait) for wait in in_clipping] == []
            # Whether float16 overflowed is asked behind the pipeline, and nothing besides.
            is_scaled = scenario.options.get("precision") == "float16"
            assert len(in_step) == is_scaled, [str(wait) for wait in in_step]
            assert all("device/deferred.py" in str(wait) for wait in in_step)


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(each, marks=pytest.mark.slow if each.name in SLOW else ()) for each in ALL],
    ids=str,
)
def test_training_is_in_order_and_has_the_bits_of_a_cpu(scenario):
    assert_bits_of_a_cpu(scenario)


def test_a_budget_has_some_layers_of_a_stage_run_again_and_others_kept():
    """Were it all of them or none, the scenario would play another way again."""
    (budget,) = (each for each in ALL if each.options.get("recompute") == "budget")
    first = run_on_threads(2, lambda world: pipe_of(budget, world).layout.recomputed[0])[0]
    assert 0 < len(first) < 4


def test_layers_are_compiled_on_a_played_device():
    """torch leaves them as they are where operators are watched, unless the watcher allows it."""
    (compiled,) = (each for each in ALL if "compile" in each.options)
    before = counters["frames"]["ok"]
    played(compiled)
    assert counters["frames"]["ok"] > before


NAMES = "schedule, recompute, offload, precision, outer, way"
REST = (RECOMPUTE, (False, True), ("float32", "bfloat16", "float16"))
WAYS = (None, "staged", "direct")
# Of a table, what sums over replicas see is whether a backward is split, whether a rank has several
# stages, and whether a stage has several holders. Each schedule meets every other setting here, and
# each way to sum does in test_training_is_in_order_and_has_the_bits_of_a_cpu.
KINDS = ("one_f_one_b", "zb_v", "chimera")
CHOSEN = [
    *covering(KINDS, *REST, (None, *OUTER), WAYS),
    *covering([name for name in SCHEDULES if name not in KINDS], *REST, (None, "sums"), WAYS),
]


# Every change tries each third; the others are products.
SAMPLED = [case if number % 3 == 0 else product(*case) for number, case in enumerate(CHOSEN)]


@pytest.mark.slow
@pytest.mark.parametrize(NAMES, SAMPLED)
def test_settings_in_pairs(schedule, recompute, offload, precision, outer, way):
    assert_settings_go_together(schedule, recompute, offload, precision, outer, way)


@pytest.mark.product
@pytest.mark.timeout(600)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_schedule_meets_each_way_to_sum(schedule):
    for chosen in covering(SCHEDULES, *REST, (None, *OUTER), WAYS):
        if chosen[0] == schedule:
            assert_settings_go_together(*chosen)


def assert_settings_go_together(schedule, recompute, offload, precision, outer, way):
    options = {"schedule": schedule, "recompute": recompute, "offload": offload}
    options |= {"replicas": 2, "outer": OUTER[outer]} if outer else {}
    layers = {"layers": overflowing} if precision == "float16" else {}
    ranks = 4 if outer else 2
    assert_bits_of_a_cpu(of("", ranks, precision=precision, way=way, **options, **layers))
