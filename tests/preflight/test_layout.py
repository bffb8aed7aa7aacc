"""The layout that a preflight connects: that of the run, planned in seconds."""

import pytest

from gpipe_hpc.config import compose_config
from gpipe_hpc.errors import GpipeError
from gpipe_hpc.plan import make_plan
from gpipe_hpc.preflight.layout import plan_layout

TINY = ("model.num_layers=4", "model.width=16", "model.num_heads=2", "data=synthetic")


def test_the_memory_is_that_of_plan():
    words = [*TINY, "pipeline.stages=2", "pipeline.replicas=2", "pipeline.schedule=one_f_one_b"]
    found = plan_layout(compose_config(words), 4)
    planned = make_plan(compose_config(words))
    assert found.ranks == planned.forecast.ranks
    assert (found.mesh.replicas, found.mesh.stages, found.mesh.size) == (2, 2, 4)
    assert found.layout.digest() == planned.layout.digest()


def test_the_memory_of_accelerators_is_theirs():
    """What waits on the host to be saved counted as memory of the device: the run was not fit."""
    words = [*TINY, "pipeline.stages=2", "train.device=cuda"]
    plain = plan_layout(compose_config(words), 2).ranks
    saving = plan_layout(compose_config([*words, "checkpoint.in_background=true"]), 2).ranks
    assert all(each.is_on_device and each.saving_bytes for each in saving)
    assert [e.total_bytes for e in saving] == [e.total_bytes for e in plain]


@pytest.mark.parametrize(
    ("words", "ranks", "mesh"),
    [
        (["pipeline.stages=2"], 3, (1, 3)),
        (["pipeline.schedule=auto"], 2, (1, 2)),
        (["pipeline.schedule=zb_v"], 2, (1, 2)),
        (["pipeline.stages=fit"], 2, None),
        (["pipeline.replicas=3"], 3, (3, 1)),
        (["pipeline.paces=measured"], 2, (1, 2)),
    ],
)
def test_every_layout_of_a_run_is_planned(words, ranks, mesh):
    found = plan_layout(compose_config([*TINY, *words]), ranks)
    assert found.mesh.size == ranks
    assert mesh in (None, (found.mesh.replicas, found.mesh.stages))
    assert found.ranks is not None and len(found.ranks) == found.mesh.stages


@pytest.mark.parametrize(
    "words",
    [[], ["pipeline.schedule=auto"], ["pipeline.recompute=budget"], ["pipeline.stages=fit"]],
)
def test_data_that_are_not_there_leave_memory_unplanned(tmp_path, words):
    """The neighbours are known all the same."""
    given = [f"data.inputs={tmp_path}/x.npy", f"data.targets={tmp_path}/y.npy"]
    given += ["model=mlp", "model.widths=[4,8,8,2]", "pipeline.memory_bytes=1e12"]
    config = compose_config(["data=arrays", *given, *words])
    found = plan_layout(config, 2)
    assert found.ranks is None
    assert "x.npy" in found.why_not
    assert found.mesh.size == 2


def test_a_layout_that_cannot_be_is_refused():
    with pytest.raises(GpipeError, match="layers"):
        plan_layout(compose_config([*TINY, "pipeline.partition=[1,2]"]), 2)
