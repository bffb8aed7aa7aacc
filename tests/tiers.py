"""Which tests run when, beyond the markers that stand at the tests themselves.

    make test            the fast tests: five minutes on two cores
    make test-slow       starts of several processes, kills, the wheel: seven minutes
    make test-product    the combinations of settings of which the fast tests are a sample
    make test-simulated  training on the simulated accelerator (tests/simulated)
    make test-long       soak, scale, sweeps, searches, the tutorial, studies and benchmarks

Continuous integration runs `make check` and the first two. Only the others find faults of these
kinds: a setting that is wrong in one combination (product); a missing wait between streams, or an
unwanted wait of the host, on an accelerator (simulated); leaks, growth with the number of ranks,
and damage to the studies and benchmarks (long). Run them before you resolve an issue that touches
one of these.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final

import pytest

SIMULATED: Final = "tests/simulated/"
# They test the simulated device itself, or sample what is trained on it.
SIMULATED_FAST: Final = ("test_tracker.py", "test_transport.py", "test_astray.py")
LONG: Final = (
    "tests/bench/test_sweep.py",
    "tests/benchmarks/test_bench.py",
    "tests/benchmarks/test_memory.py",
    "tests/device/host/test_allocator.py",
    "tests/device/host/test_flight_recorder.py",
    "tests/comm/world/mpi/test_failing.py",
    "tests/comm/world/mpi/test_mpiexec.py",
    "tests/comm/world/mpi/test_training.py",
    "tests/experiments/test_characterisation.py",
    "tests/experiments/test_course_runs.py",
    "tests/experiments/test_gpu.py",
    "tests/experiments/test_network_faults.py",
    "tests/experiments/test_papers.py",
    "tests/experiments/test_plan_against_runs.py",
    "tests/experiments/test_scale_simulation.py",
    "tests/experiments/test_scale_startup.py",
    "tests/experiments/test_scale_startup_processes.py",
    "tests/experiments/test_slow_link.py",
    "tests/experiments/test_soak.py",
    "tests/generated/test_settings.py",
    "tests/planner/search/test_ranking.py",
    "tests/preflight/test_launchers.py",
    "tests/test_rerun_failures.py",
    "tests/test_tutorial.py",
    "tests/train/test_cores.py",
    "tests/train/test_hosts_come_and_go.py",
    "tests/train/test_inexact.py",
    "tests/train/test_memory.py",
    "tests/trainer/measuring/test_load_generators.py",
    "tests/trainer/search/test_answer.py",
)
# Starts of processes, waits, and whole commands, whose tests take half a second each or more.
SLOW: Final = (
    "tests/cases/test_bench_settings.py",
    "tests/cases/test_dropped_pipelines.py",
    "tests/cases/test_other_service.py",
    "tests/cases/test_output_goes_away.py",
    "tests/cases/test_signal_while_starting.py",
    "tests/cases/test_tokens_and_labels.py",
    "tests/comm/collectives/test_wide_processes.py",
    "tests/comm/watchdog/test_heartbeat.py",
    "tests/comm/watchdog/test_uncaught.py",
    "tests/comm/world/test_rendezvous.py",
    "tests/comm/world/test_membership.py",
    "tests/comm/collectives/test_levels_processes.py",
    "tests/comm/watchdog/test_watcher.py",
    "tests/config/test_commands.py",
    "tests/data_parallel/test_pairs.py",
    "tests/data_parallel/test_sharding_processes.py",
    "tests/engine/test_networks.py",
    "tests/engine/test_process_lifetime.py",
    "tests/engine/test_process_watch.py",
    "tests/experiments/test_large_images.py",
    "tests/experiments/test_literature.py",
    "tests/plan/test_plan.py",
    "tests/preflight/test_command.py",
    "tests/preflight/test_run.py",
    "tests/train/test_said.py",
    "tests/train/test_seeded_losses.py",
    "tests/train/test_summary.py",
    "tests/data/test_running.py",
    "tests/optim/large_batch/test_adascale.py",
    "tests/trainer/start/test_layout_choice.py",
    "tests/trainer/test_fewer_ranks.py",
    "tests/trainer/test_host_waits.py",
    "tests/trainer/test_signals.py",
    "tests/trainer/test_telling.py",
    "tests/verify/test_on_device.py",
)
# How many cases of each parametrized test function stay in its tier; the others are products.
# Chosen by cost: a file stands here if its cases took more than a few seconds together.
CASES: Final = {
    "tests/cases/test_huggingface_families.py": 1,
    "tests/cases/test_losses.py": 10,
    "tests/cases/test_small_files.py": 3,
    "tests/checkpoint/test_shards.py": 6,
    "tests/checkpoint/test_verifying.py": 8,
    "tests/cluster/test_batch_script.py": 6,
    "tests/comm/collectives/test_exactness.py": 12,
    "tests/comm/world/mpi/test_mpiexec.py": 8,
    "tests/config/test_checks.py": 8,
    "tests/config/test_commands.py": 4,
    "tests/config/test_errors.py": 12,
    "tests/draw/test_pictures.py": 3,
    "tests/engine/test_kept_casts.py": 6,
    "tests/engine/test_offload.py": 4,
    "tests/engine/test_local_sgd_checkpoints.py": 4,
    "tests/engine/test_local_sgd.py": 4,
    "tests/data_parallel/test_compression.py": 5,
    "tests/data_parallel/test_exact_choices.py": 2,
    "tests/data_parallel/test_exactness.py": 6,
    "tests/data_parallel/test_pairs.py": 4,
    "tests/data_parallel/test_sharding.py": 4,
    "tests/data_parallel/test_wide_copies.py": 2,
    "tests/engine/test_tied.py": 2,
    "tests/engine/test_batchnorm.py": 4,
    "tests/engine/test_catalogue.py": 20,
    "tests/engine/test_holes.py": 4,
    "tests/engine/test_mirrored.py": 4,
    "tests/engine/test_networks.py": 4,
    "tests/engine/test_schedules_run.py": 3,
    "tests/engine/test_skips.py": 6,
    "tests/experiments/collectives/test_costs.py": 16,
    "tests/experiments/collectives/test_exactness.py": 16,
    "tests/experiments/collectives/test_plans.py": 6,
    "tests/export/test_trust.py": 8,
    "tests/models/huggingface/test_counted.py": 4,
    "tests/models/huggingface/test_pipelined.py": 5,
    "tests/models/zoo/test_settings.py": 2,
    "tests/models/zoo/test_training.py": 2,
    "tests/plan/test_plan.py": 3,
    "tests/planner/costs/test_busy.py": 4,
    "tests/planner/costs/test_calibration.py": 6,
    "tests/planner/costs/test_casts.py": 4,
    "tests/planner/costs/test_prices.py": 6,
    "tests/planner/cutting/test_memory_aware.py": 6,
    "tests/planner/memory/test_sharing.py": 4,
    "tests/planner/memory/test_update.py": 5,
    "tests/planner/search/test_ranking.py": 3,
    "tests/planner/test_layout.py": 6,
    "tests/schedule/families/test_families.py": 20,
    "tests/schedule/passes/test_offload.py": 24,
    "tests/schedule/search/test_auto.py": 3,
    "tests/schedule/test_closed_forms.py": 12,
    "tests/schedule/test_skips.py": 12,
    "tests/train/test_command_line.py": 6,
    "tests/train/test_faults.py": 6,
    "tests/train/test_launch.py": 6,
    "tests/data/test_running.py": 3,
    "tests/optim/test_masters.py": 5,
    "tests/preflight/test_settings.py": 4,
    "tests/trainer/search/test_answer.py": 4,
    "tests/trainer/start/test_layout_choice.py": 4,
    "tests/checkpoint/test_in_memory.py": 5,
    "tests/verify/test_seeded_faults.py": 3,
    "tests/verify/test_verify.py": 4,
}


def is_left_out(path: str, expression: str) -> bool:
    """Say whether ``-m expression`` takes no test of a file, which need not be imported then."""
    tiers = {"long": path in LONG, "slow": path in SLOW, "simulated": is_simulated(path)}
    return any(is_in and f"not {tier}" in expression for tier, is_in in tiers.items())


def is_simulated(path: str) -> bool:
    """Say whether a file's tests train on the simulated accelerator."""
    return path.startswith(SIMULATED) and not path.endswith(SIMULATED_FAST)


def sort_into_tiers(items: Sequence[pytest.Item]) -> None:
    """Mark tests as simulated, long or product, by the tables above."""
    groups: defaultdict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        path = item.nodeid.partition("::")[0]
        if is_simulated(path):
            item.add_marker(pytest.mark.simulated)
        elif path in LONG:
            item.add_marker(pytest.mark.long)
        elif path in SLOW:
            item.add_marker(pytest.mark.slow)
        if path in CASES and not item.get_closest_marker("product"):
            groups[path, item.nodeid.partition("[")[0]].append(item)
    for (path, _), cases in groups.items():
        for case in beyond(cases, CASES[path]):
            case.add_marker(pytest.mark.product)


def beyond(cases: Sequence[pytest.Item], number: int) -> list[pytest.Item]:
    """Return all but `number` cases, which are spread evenly over the list."""
    if len(cases) <= number:
        return []
    kept = Counter(
        round(position * (len(cases) - 1) / max(1, number - 1)) for position in range(number)
    )
    return [case for position, case in enumerate(cases) if position not in kept]
