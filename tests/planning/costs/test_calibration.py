"""A calibration: what a run writes is what a plan reads, and what is of another run is refused."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gpipe_hpc import plan
from gpipe_hpc.comm.host.machine import processor_name
from gpipe_hpc.config import compose_config
from gpipe_hpc.config.commands import Job
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.models import LayerSpec
from gpipe_hpc.plan import make_plan
from gpipe_hpc.planning import LayerTimes
from gpipe_hpc.planning.costs.calibration import (
    Calibration,
    check_calibration,
    read_calibration,
    shape_of,
    write_calibration,
)
from gpipe_hpc.planning.costs.counted import count_model
from tests.support import train_here

COUNT = count_model([LayerSpec(nn.Linear, 4, 4)] * 2, torch.empty(3, 4, device="meta"))
SOME = Calibration(
    device="cpu",
    device_name="some processor",
    precision="float32",
    hosts=1,
    ranks=2,
    versions={"torch": "2"},
    input_bytes=48,
    model=shape_of(COUNT),
    layers=(LayerTimes.alike(0.5, 1.0, 0.5, 0.5), LayerTimes.alike(0.25, 0.5, 0.25, 0.25)),
)


HERE = {"device": "cpu", "name": "some processor", "precision": "float32"}


@pytest.fixture
def path(tmp_path):
    write_calibration(tmp_path / "calibration.yaml", SOME)
    return tmp_path / "calibration.yaml"


def test_what_is_written_is_read(path):
    assert read_calibration(path) == SOME
    assert [each.name for each in path.parent.iterdir()] == ["calibration.yaml"]
    check_calibration(SOME, path, COUNT, **HERE)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("gpipe_hpc, 2", "gpipe_hpc, 3", "expected version 2, got .*of another version"),
        ("gpipe_hpc, 2", "gpipe_hpc, 1", "expected the keys forward, backward, of_input, of_wei"),
        ("calibration of", "prices of", "format, expected calibration of"),
        ("forward: 0.5", "forward: -0.5", r"layers\[0\].forward, expected 0 or more seconds"),
        ("forward: 0.5", "forward: .nan", r"layers\[0\].forward, expected 0 or more seconds"),
        ("forward: 0.5", "ahead: 0.5", r"layers\[0\], expected the keys forward"),
        ("ranks: 2", "ranks: two", "ranks, expected a whole number"),
        ("hosts: 1", "machines: 1", "top, expected the keys format, device"),
        ("device: cpu", "device: 3", "device, expected a text"),
        ("layers:", "layers: [", "is not readable"),
    ],
)
def test_a_damaged_file_is_refused_by_its_key(path, before, after, said):
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))
    with pytest.raises(ConfigError, match=said):
        read_calibration(path)


def test_one_of_the_version_before_has_forwards_of_one_kind(path):
    text = path.read_text().replace("gpipe_hpc, 2", "gpipe_hpc, 1")
    path.write_text("".join(line for line in text.splitlines(True) if "bare_" not in line))
    assert read_calibration(path) == SOME


def test_one_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"plan.calibration: .*is not readable"):
        read_calibration(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"precision": "bfloat16"}, "another precision, expected float32, got bfloat16"),
        ({"device": "cuda"}, "another device, expected cpu, got cuda"),
        ({"device_name": "another"}, "measured on some processor, .* got one of another"),
        ({"input_bytes": 96}, "another micro-batch, expected inputs of 48 bytes, got 96 bytes"),
        ({"model": SOME.model[:1]}, "another model, expected 2 layers, got 1"),
        ({"model": ((21, 96), SOME.model[1])}, "expected 20 parameters in layers.0, got 21"),
    ],
)
def test_one_of_another_run_is_refused_by_what_differs(changes, said):
    other = replace(SOME, **changes)
    with pytest.raises(ConfigError, match=said):
        check_calibration(other, "file", COUNT, **HERE)


def test_one_of_a_device_that_is_not_here_is_warned_of():
    far, asked = replace(SOME, device="cuda"), {**HERE, "device": "cuda", "name": None}
    (doubt,) = check_calibration(far, "file", COUNT, **asked)
    assert "was measured on some processor, and this machine has no cuda" in doubt


def test_one_from_before_processors_had_names_is_warned_of(path):
    path.write_text(path.read_text().replace("some processor", "cpu"))
    (doubt,) = check_calibration(read_calibration(path), path, COUNT, **HERE)
    assert "does not say on which cpu" in doubt


def test_a_search_takes_none(tmp_path, capsys):
    """Its layouts have micro-batches of many sizes: exit code 2, as for other settings."""
    asked = compose_config(["plan.search=true", f"plan.calibration={tmp_path}"])
    assert plan._task(Job(asked, None, (), {})) == 2
    assert "plan.calibration" in capsys.readouterr().err


def test_a_plan_takes_the_times_of_a_run(tiny, tmp_path):
    """Of given clocks: the plan's step is that of the simulator for what the file says."""
    own = ("pipeline.stages=2", "train.steps=2")
    train_here(2, *tiny, *own, f"run.dir={tmp_path}")
    path = tmp_path / "calibration.yaml"
    found = read_calibration(path)
    assert found.device_name == processor_name()
    assert found.ranks == 2 and min(min(each) for each in found.layers) >= 0
    given = tuple(LayerTimes.alike(1.0, 2.0, 1.0, 1.0) for _ in found.layers)
    write_calibration(path, replace(found, layers=given))
    settings = (*tiny, *own, "pipeline.recompute=never", "pipeline.partition=uniform")
    found_plan = make_plan(compose_config([*settings, f"plan.calibration={path}"]))
    microbatches = found_plan.layout.schedule.num_microbatches
    slowest = max(found_plan.layout.partition.counts)
    step_s = float(found_plan.text.split("expected step time ")[1].split(" s")[0])
    assert 3 * slowest * microbatches <= step_s <= 3 * slowest * (microbatches + 1)
    assert "Warning: plan.calibration" not in found_plan.text
    write_calibration(path, replace(found, layers=given, device_name="another"))
    with pytest.raises(ConfigError, match="got one of another"):
        make_plan(compose_config([*settings, f"plan.calibration={path}"]))
    with pytest.raises(ConfigError, match="another precision"):
        make_plan(
            compose_config([*settings, f"plan.calibration={path}", "train.precision=bfloat16"])
        )
