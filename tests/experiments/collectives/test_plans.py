"""Plans without any sending: they fit together and end, for every algorithm and number of ranks."""

import pytest

from experiments.outer.collectives.menu import PLANNERS, Case, hosts_of, plan
from gpipe_hpc.comm.collectives.plan import PlanPosition
from tests.comm.collectives.fitting_plans import assert_they_fit

SHARDED = ("reduce_scatter", "all_gather")
CASES = [(c, name) for c, names in PLANNERS.items() for name in names]


@pytest.mark.parametrize(("collective", "name"), CASES)
def test_plans_fit_together(collective, name):
    for size in range(1, 10):
        for count in (0, 1, 3, 7, 64):
            for group in (1, 2, 3):
                for root in {0, size // 2, size - 1}:
                    counts = tuple(count if i == size // 2 else 0 for i in range(size))
                    case = Case(count, 5, root, hosts_of(size, group), ())
                    cases = (
                        [case, case._replace(counts=counts)] if collective in SHARDED else [case]
                    )
                    for each in cases:
                        plans = [
                            plan(collective, name, PlanPosition(size, i), each) for i in range(size)
                        ]
                        assert_they_fit(plans, (size, each))
