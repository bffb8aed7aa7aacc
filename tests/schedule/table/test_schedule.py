import os
import subprocess
import sys
from dataclasses import replace

import pytest

from gpipe_hpc.schedule import Placement, ScheduleError, build, digest, lower

MIRRORED = Placement(routes=((0, 1, 2), (2, 1, 0)), route_of=(0, 1, 1))


def test_mirrored_placement():
    assert (MIRRORED.num_stages, MIRRORED.num_ranks, MIRRORED.num_microbatches) == (3, 3, 3)
    assert [MIRRORED.rank_of(0, microbatch) for microbatch in range(3)] == [0, 2, 2]
    assert [MIRRORED.holders(stage) for stage in range(3)] == [(0, 2), (1,), (0, 2)]
    assert [MIRRORED.stages_of(rank) for rank in range(3)] == [(0, 2), (1,), (0, 2)]


@pytest.mark.parametrize(
    ("routes", "route_of"),
    [((), (0,)), (((0,),), ()), (((0, 1), (1,)), (0,)), (((0,),), (1,)), (((-1,),), (0,))],
)
def test_impossible_placements_are_refused(routes, route_of):
    with pytest.raises(ScheduleError, match="placement"):
        Placement(routes, route_of)


def test_a_table_of_one_rank_is_lowered_too():
    bare = build("gpipe", ranks=1, microbatches=2)
    assert not bare.is_lowered
    assert lower(bare).is_lowered


def test_digest_tells_tables_apart_but_not_names():
    one = build("gpipe", ranks=2, microbatches=3)
    changed = [
        build("gpipe", ranks=2, microbatches=4),
        build("one_f_one_b", ranks=2, microbatches=3),
        lower(one),
        replace(one, max_activations=(3, 4)),
        replace(one, ranks=(one.ranks[0], one.ranks[1][::-1])),
        replace(one, placement=Placement(((0, 1), (1, 0)), (0, 0, 0))),
    ]
    assert len({digest(schedule) for schedule in [one, *changed]}) == 1 + len(changed)
    assert digest(replace(one, name="other")) == digest(one)


def test_digest_is_the_same_in_another_process():
    code = (
        "from gpipe_hpc.schedule import *;"
        "print(digest(lower(build('one_f_one_b', ranks=3, microbatches=5))))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == digest(lower(build("one_f_one_b", ranks=3, microbatches=5)))


def test_importing_schedules_loads_no_torch():
    code = "import sys, gpipe_hpc.schedule; print('torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "False"
