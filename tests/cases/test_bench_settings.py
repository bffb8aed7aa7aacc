"""`bench` looks at its settings before it measures anything."""

import json
import re

import pytest


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("pipeline.schedule=no_such",), "pipeline.schedule"),
        (("bench.ranks=[2,3]", "pipeline.stages=4"), "pipeline.stages"),
        (("bench.ranks=[2]", "pipeline.partition=[1,1]"), "partition"),
        (("data=text", "data.paths=[nowhere.txt]"), "nowhere.txt"),
        (("comm.backend=no_such",), "comm.backend"),
    ],
)
def test_settings_that_cannot_work_end_it_with_code_2_before_a_rank_starts(
    start, tiny, words, named
):
    """It started ranks for every point: 43 s, and code 1."""
    ended = start(*tiny, *words, module="gpipe_hpc.bench").wait(60)
    assert ended.code == 2
    assert named in ended.output and "Traceback" not in ended.output
    assert not re.search(r"(^|\s)1/\d", ended.output), "a point was begun"


@pytest.mark.slow
def test_points_that_cannot_work_are_passed_over_and_the_others_measured(start, tiny, tmp_path):
    words = ("bench.ranks=[1,2]", "pipeline.stages=2", "bench.steps=1", "bench.out=out")
    ended = start(*tiny, *words, module="gpipe_hpc.bench").wait(120)
    assert ended.code == 0, ended.output
    found = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert [bool(each["steps_s"]) for each in found] == [False, True]
    assert "exit code 2" in found[0]["failed"] and "pipeline.stages" in found[0]["failed"]


@pytest.mark.slow
def test_what_only_ranks_can_refuse_ends_it_with_code_2_too(start, tiny, tmp_path):
    """torchrun ends with 1, whatever its ranks end with."""
    (tmp_path / "mine.py").write_text(
        "import os\n"
        "from gpipe_hpc.models import build_gpt\n"
        "def build(**own):\n"
        "    width = 15 if 'RANK' in os.environ else 16\n"
        "    return build_gpt(**{**own, 'width': width, 'num_heads': 4})\n"
    )
    own = ("model._target_=mine.build", "bench.ranks=[2]", "bench.steps=1")
    env = {"PYTHONPATH": str(tmp_path)}
    ended = start(*tiny, *own, module="gpipe_hpc.bench", env=env).wait(120)
    assert ended.code == 2, ended.output
