"""A calibration: what a run writes is what a plan reads, and what is of another run is refused."""

from dataclasses import replace

import pytest
import torch
import yaml
from torch import nn

from gpipe_hpc.config import compose_config
from gpipe_hpc.device.host.machine import processor_name
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.models import LayerSpec
from gpipe_hpc.plan import make_plan
from gpipe_hpc.planner import LayerTimes
from gpipe_hpc.planner.costs.calibration import (
    Calibration,
    check_calibration,
    read_calibration,
    shape_of,
    write_calibration,
)
from gpipe_hpc.planner.costs.counted import count_model
from gpipe_hpc.planner.costs.prices import FREE, PassCost, Prices, PricesContext, write_prices
from gpipe_hpc.schedule import Link
from gpipe_hpc.trainer.search.answer import compared
from gpipe_hpc.trainer.search.from_settings import LayoutSearch
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
    prices=Prices(
        1e-4,
        Link(2e-5, 3e9),
        Link(4e-5, 1e9),
        PassCost(0.0, 2e-6, 3e-10),
        PassCost(0.0, 0.0, 1e-10),
        5e-4,
        PricesContext("cpu", "some processor", 2, "float32", "adamw"),
    ),
    within=Link(2e-5, 3e9),
    notes=("transfers between hosts: not told",),
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
        ("gpipe_hpc, 4", "gpipe_hpc, 5", "expected version 4, got .*another version"),
        ("gpipe_hpc, 4", "gpipe_hpc, 2", "top level, expected the keys format, device"),
        ("cores: 2", "cores: 0", "cores, expected an integer of at least 1"),
        ("action_s: 0.0001", "action_s: -1", "prices.action_s, expected 0 or more seconds"),
        ("  within:", "  inside:", "links, expected the keys within, between"),
        ("calibration of", "prices of", "format, expected calibration of"),
        ("forward: 0.5", "forward: -0.5", r"layers\[0\].forward, expected 0 or more seconds"),
        ("forward: 0.5", "forward: .nan", r"layers\[0\].forward, expected 0 or more seconds"),
        ("forward: 0.5", "ahead: 0.5", r"layers\[0\], expected the keys forward"),
        ("ranks: 2", "ranks: two", "ranks, expected an integer of at least 0"),
        ("hosts: 1", "machines: 1", "top level, expected the keys format, device"),
        ("device: cpu", "device: 3", "device, expected a text"),
        ("layers:", "layers: [", "cannot read "),
    ],
)
def test_a_damaged_file_is_refused_by_its_key(path, before, after, said):
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))
    with pytest.raises(ConfigError, match=said):
        read_calibration(path)


@pytest.mark.parametrize("version", [1, 2])
def test_one_of_an_older_version_tells_of_layers_alone(path, version):
    """Version 2 had no transfers, sums or steps; version 1 did not tell forwards apart, either."""
    told = yaml.safe_load(path.read_text())
    for name in ("optimizer", "cores", "prices", "links", "notes"):
        del told[name]
    told["format"] = f"calibration of gpipe_hpc, {version}"
    for each in told["layers"] if version == 1 else ():
        del each["bare_forward"]
    path.write_text(yaml.safe_dump(told))
    found = read_calibration(path)
    assert found.layers == SOME.layers and found.prices == FREE
    (note,) = found.notes
    assert "older version, with times of layers only" in note


def test_one_of_version_3_did_not_say_in_which_memory_a_process_takes_something(path):
    told = path.read_text()
    assert told.count("  host_process_bytes: ") == told.count("process_bytes") == 1
    path.write_text(told.replace("host_process", "process").replace("gpipe_hpc, 4", "gpipe_hpc, 3"))
    assert read_calibration(path) == SOME
    path.write_text(told.replace("host_process", "process"))
    with pytest.raises(ConfigError, match="prices, expected the keys host_process_bytes"):
        read_calibration(path)


def test_one_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"plan.calibration: cannot read .*"):
        read_calibration(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"precision": "bfloat16"}, "another precision: expected float32, got bfloat16"),
        ({"device": "cuda"}, "another device: expected cpu, got cuda"),
        (
            {"device_name": "another"},
            "measured on another cpu, another; this machine has some processor",
        ),
        ({"input_bytes": 96}, "another micro-batch: expected inputs of 48 bytes, got 96 bytes"),
        ({"model": SOME.model[:1]}, "another model: expected 2 layers, got 1"),
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
    assert "does not contain the name of the cpu" in doubt


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
    with pytest.raises(ConfigError, match="measured on another"):
        make_plan(compose_config([*settings, f"plan.calibration={path}"]))
    with pytest.raises(ConfigError, match="another precision"):
        make_plan(
            compose_config([*settings, f"plan.calibration={path}", "train.precision=bfloat16"])
        )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the settings of a run of two ranks, of clocks that are given, and its calibration."""
    folder = tmp_path_factory.mktemp("calibrated")
    words = [
        *("model=mlp", "model.widths=[64,64,64]", "data=synthetic_vectors"),
        *("train.batch_size=16", "pipeline.microbatches=4", "pipeline.partition=uniform"),
        *("train.validate_every=0", "checkpoint.every=0", "pipeline.recompute=never"),
    ]
    train_here(2, *words, "pipeline.stages=2", "train.steps=3", f"run.dir={folder}")
    path = folder / "calibration.yaml"
    found = read_calibration(path)
    layers = tuple(LayerTimes.alike(1.0, 2.0, 1.0, 1.0) for _ in found.layers)
    prices = Prices(
        0.25,
        Link(0.5, 1e3),
        Link(0.0, 1e6),
        PassCost(0.0, 0.125, 0.0),
        PassCost(2.0, 0.0, 0.0),
        4.0,
        found.prices.measured,
    )
    given = replace(found, layers=layers, prices=prices, within=prices.send, notes=())
    write_calibration(path, given)
    return words, path, given


def step_of_plan(*words):
    return make_plan(compose_config(words)).step


def test_a_plan_by_a_calibration_has_its_transfers_and_all_else(run):
    """What a run measured beside its layers was thrown away: a plan had no transfers."""
    words, path, given = run
    step = step_of_plan(*words, "pipeline.stages=2", f"plan.calibration={path}")
    assert (step.norm_s, step.overhead_s) == (2.0, 4.0)
    assert step.optimizer_s == pytest.approx(0.125 * max(held_tensors(given)))
    free = step_of_plan(
        *words, "pipeline.stages=2", f"plan.calibration={path}", "plan.within_bytes_per_s=1e18",
        "plan.within_latency_s=0",
    )  # fmt: skip
    assert step.pipeline_s > free.pipeline_s + 2 * 0.5, "a setting of the links goes first"


def test_layers_of_a_calibration_are_those_of_rank_0_however_slow_it_is(run, tmp_path):
    """They were twice as slow where rank 0 has a pace of 2, and it is they that told so."""
    words, path, _ = run
    links = tmp_path / "links.yaml"
    links.write_text(
        "hosts: [2]\nslow_ranks: {0: 2.0}\nlinks:\n"
        "  within: {latency_s: 1.0e-6, bandwidth_bytes_per_s: 1.0e9}\n"
        "  between: {latency_s: 1.0e-6, bandwidth_bytes_per_s: 1.0e9}\n"
    )
    given = [*words, "pipeline.stages=2", f"plan.calibration={path}"]
    slow = step_of_plan(*given, "pipeline.paces=[2,1]")
    assert slow.total_s == step_of_plan(*given, "pipeline.paces=[1,0.5]").total_s
    assert slow.total_s < step_of_plan(*given, "pipeline.paces=[1,1]").total_s
    with_file = [*given, "pipeline.paces=[2,1]", f"plan.links={links}"]
    assert step_of_plan(*with_file).timeline.busy == slow.timeline.busy


def held_tensors(given):
    """Return the tensors that two ranks of an even cut hold: a weight and a bias each layer."""
    linear = [number for number, _ in given.model if number]
    return [2 * len(linear) // 2, 2 * (len(linear) - len(linear) // 2)]


def test_prices_of_a_file_go_ahead_of_a_calibration(run, tmp_path):
    words, path, given = run
    write_prices(tmp_path / "prices.yaml", replace(given.prices, step_s=7.0))
    both = [f"plan.calibration={path}", f"plan.prices={tmp_path}/prices.yaml"]
    assert step_of_plan(*words, "pipeline.stages=2", *both).overhead_s == 7.0


def test_another_optimizer_is_told_of_and_takes_no_time(run):
    words, path, _ = run
    asked = [*words, "pipeline.stages=2", "optimizer=sgd", f"plan.calibration={path}"]
    found = make_plan(compose_config(asked))
    assert found.step.optimizer_s == 0 and "did not use optimizer sgd" in found.text


def test_a_search_scales_a_calibration(run):
    """It was refused, as layouts have micro-batches of many sizes."""
    words, path, given = run
    words = [each for each in words if not each.startswith("pipeline.")]
    asked = [*words, "plan.ranks=2", "plan.flops_per_s=1e9", f"plan.calibration={path}"]
    config = compose_config(asked)
    found = compared(config)
    assert f"layers: scaled from calibration of {path} (2 ranks on one host" in found.text
    assert "layers are measured by a run (plan.calibration)" in found.text
    assert "step overheads are those of plan.calibration" in found.text
    cache = LayoutSearch.of(config, ()).cache
    assert cache.cost_model(4).times == given.layers
    counted = LayoutSearch.of(
        replace(config, plan=replace(config.plan, calibration=None)), ()
    ).cache
    for scaled, took, more, than in zip(
        *(
            cache.cost_model(8).times,
            given.layers,
            counted.cost_model(8).times,
            counted.cost_model(4).times,
        ),
        strict=True,
    ):
        assert scaled.forward == pytest.approx(took.forward * more.forward / than.forward)
    with pytest.raises(ConfigError, match="another precision"):
        compared(compose_config([*asked, "train.precision=bfloat16"]))


def test_a_calibration_tells_how_fast_an_accelerator_is_that_is_not_here(run, tmp_path):
    """A search for one had to be told plan.flops_per_s."""
    words, _, given = run
    measured = given.prices.measured._replace(device="cuda", name="some accelerator")
    far = replace(
        given,
        device="cuda",
        device_name="some accelerator",
        prices=replace(given.prices, measured=measured),
    )
    write_calibration(tmp_path / "far.yaml", far)
    words = [each for each in words if not each.startswith("pipeline.")]
    asked = [*words, "plan.ranks=2", "train.device=cuda", f"plan.calibration={tmp_path}/far.yaml"]
    found = compared(compose_config(asked))
    assert found.chosen is not None and "this machine has no cuda" in found.text


def test_a_search_refuses_half_a_sample(run, tmp_path):
    words, _, given = run
    write_calibration(tmp_path / "odd.yaml", replace(given, input_bytes=given.input_bytes + 1))
    words = [each for each in words if not each.startswith("pipeline.")]
    with pytest.raises(ConfigError, match="expected inputs of a multiple of"):
        compared(compose_config([*words, "plan.ranks=2", f"plan.calibration={tmp_path}/odd.yaml"]))
