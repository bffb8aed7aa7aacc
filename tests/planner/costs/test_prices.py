"""Prices of a step: their file, what it refuses, and what they add to costs."""

from dataclasses import replace

import pytest

from gpipe_hpc.config import compose_config
from gpipe_hpc.device.host.machine import processor_name
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.plan import make_plan
from gpipe_hpc.planner.costs.prices import (
    FREE,
    PassCost,
    Prices,
    PricesContext,
    check_prices,
    read_prices,
    write_prices,
)
from gpipe_hpc.schedule import Costs, Link
from gpipe_hpc.trainer.search.answer import compared

HERE = PricesContext("cpu", "some processor", 2, "float32", "adamw")
SOME = Prices(
    1e-4, Link(2e-5, 3e9), Link(4e-5, 1e9),
    PassCost(1e-5, 2e-6, 3e-10), PassCost(1e-6, 2e-6, 1e-10), 5e-4,
    HERE, 300_000_000,
)  # fmt: skip


ASKED = {"device": "cpu", "name": HERE.name, "precision": "float32", "optimizer": "adamw"}


@pytest.fixture
def path(tmp_path):
    write_prices(tmp_path / "prices.yaml", SOME)
    return tmp_path / "prices.yaml"


def test_what_is_written_is_read(path):
    assert read_prices(path) == SOME
    assert [each.name for each in path.parent.iterdir()] == ["prices.yaml"]


@pytest.mark.parametrize(
    "before, after, said",
    [
        ("action_s: 0.0001", "action_s: -1", r"action_s, expected 0 or more seconds, got -1"),
        ("action_s: 0.0001", "action_s: fast", r"action_s, expected a number of seconds"),
        ("step_s:", "steps:", r"top level, expected the keys format, measured"),
        ("cores: 2", "cores: 0", r"measured\.cores, expected an integer of at least 1"),
        ("device: cpu", "device: 3", r"measured\.device, expected a string"),
        ("prices of gpipe_hpc, 3", "prices of gpipe_hpc, 1", r"format, expected"),
        (
            "process_bytes: 300000000",
            "process_bytes: -1",
            r"host_process_bytes, expected an integer of at least 0",
        ),
        ("host_process", "device_process", r"top level, expected the keys .*host_process_bytes"),
        ("device: cpu", "device: cuda", r"top level, expected the keys .*device_process_bytes"),
        ("tensor_s: 2.0e-06", "tensor_s: .nan", r"tensor_s, expected 0 or more"),
        ("bandwidth_bytes_per_s: 3000000000.0", "bandwidth_bytes_per_s: 0", r"more than 0 bytes"),
    ],
)
def test_a_damaged_file_is_refused_by_its_key(path, before, after, said):
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    with pytest.raises(ConfigError, match=said) as refused:
        read_prices(path)
    assert str(path) in str(refused.value)
    assert "preflight.steps=true" in str(refused.value)


@pytest.mark.parametrize("device, memory", [("cpu", "host"), ("cuda", "device")])
def test_a_file_says_in_which_memory_a_process_takes_something(tmp_path, device, memory):
    """`process_bytes` was the host's on CPUs and else the device's; such files are still read."""
    path, prices = tmp_path / "prices.yaml", replace(SOME, measured=HERE._replace(device=device))
    write_prices(path, prices)
    told = path.read_text()
    assert f"\n{memory}_process_bytes: 300000000\n" in told and told.count("process_bytes") == 1
    assert read_prices(path) == prices
    older = told.replace(f"{memory}_process", "process").replace("hpc, 3", "hpc, 2")
    path.write_text(older)
    assert read_prices(path) == prices
    path.write_text(older.replace("hpc, 2", "hpc, 3"))
    with pytest.raises(ConfigError, match=f"expected the keys .*{memory}_process_bytes"):
        read_prices(path)


@pytest.mark.parametrize("content", ["", "[1, 2]", "a: [", "hosts: 2\nlinks: {}\n"])
def test_a_foreign_file_is_refused(tmp_path, content):
    path = tmp_path / "links.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"links\.yaml"):
        read_prices(path)
    with pytest.raises(ConfigError, match="cannot read the prices"):
        read_prices(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    "name, value", [("device", "cuda"), ("precision", "bfloat16"), ("optimizer", "sgd")]
)
def test_prices_of_other_settings_are_refused(name, value):
    check_prices(SOME, "prices.yaml", **ASKED)
    with pytest.raises(ConfigError, match=f"expected {name} {value}"):
        check_prices(SOME, "prices.yaml", **{**ASKED, name: value})


def test_prices_of_another_processor_are_refused_by_both_names():
    """Only the kind was compared: those of one processor were taken for another's."""
    assert check_prices(SOME, "prices.yaml", **ASKED) == []
    said = "was measured on another cpu, some processor; this machine has another one"
    with pytest.raises(ConfigError, match=said):
        check_prices(SOME, "prices.yaml", **{**ASKED, "name": "another one"})


def test_prices_of_a_device_that_is_not_here_are_warned_of():
    far = replace(SOME, measured=HERE._replace(device="cuda", name="some accelerator"))
    (doubt,) = check_prices(far, "prices.yaml", **{**ASKED, "device": "cuda", "name": None})
    assert "was measured on some accelerator, and this machine has no cuda" in doubt


def test_a_plan_and_a_search_compare_the_processor(tiny, tmp_path):
    path, words = tmp_path / "prices.yaml", [*tiny, "pipeline.stages=2"]
    own = HERE._replace(name=processor_name())
    write_prices(path, replace(SOME, measured=own))
    words += [f"plan.prices={path}", "plan.flops_per_s=1e9"]
    searched = [*words, "plan.search=true", "plan.ranks=2"]
    assert "Warning: plan.prices" not in make_plan(compose_config(words)).text
    assert "Warning: plan.prices" not in compared(compose_config(searched)).text
    write_prices(path, SOME)
    for settings, planned in ((words, make_plan), (searched, compared)):
        with pytest.raises(ConfigError, match="measured on another cpu, some processor"):
            planned(compose_config(settings))
    write_prices(path, replace(SOME, measured=HERE._replace(name="")))
    assert "Warning: plan.prices" in make_plan(compose_config(words)).text
    assert "Warning: plan.prices" in compared(compose_config(searched)).text


def test_a_plan_and_a_search_count_what_a_process_takes(tiny, tmp_path):
    """Every rank fitted into a memory that its interpreter and libraries alone would fill."""
    path, words = tmp_path / "prices.yaml", [*tiny, "pipeline.stages=2", "plan.flops_per_s=1e9"]
    priced = [*words, f"plan.prices={path}"]
    for nbytes in (300_000_000, 100_000_000):
        own = HERE._replace(name=processor_name())
        write_prices(path, replace(SOME, measured=own, process_bytes=nbytes))
        for settings, fits in ((words, True), (priced, nbytes < 200_000_000)):
            plan = make_plan(compose_config([*settings, "pipeline.memory_bytes=200e6"]))
            assert plan.fits is fits
            searched = [*settings, "plan.search=true", "plan.ranks=2", "pipeline.memory_bytes=2e8"]
            assert bool(compared(compose_config(searched)).chosen) is fits
    bare = make_plan(compose_config(words))
    plan = make_plan(compose_config(priced))
    for rank, without in zip(plan.forecast.ranks, bare.forecast.ranks, strict=True):
        assert rank.total_bytes == without.total_bytes + 100_000_000
    assert "  process  " in plan.text and "  process  " not in bare.text
    assert "host memory of a rank's process besides tensors" in plan.text
    assert "host memory" not in bare.text
    write_prices(path, replace(SOME, measured=HERE._replace(device="cuda")))
    plan = make_plan(compose_config([*priced, "train.device=cuda"]))
    assert "  other  " in plan.text and "  process  " not in plan.text
    assert "device memory besides torch's tensors" in plan.text


def test_an_unwritable_place_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write the prices"):
        write_prices(tmp_path / "file" / "prices.yaml", SOME)


def test_prices_add_to_each_action():
    costs = Costs(forward=[1.0, 2.0], backward=3.0)
    more = Prices(action_s=0.5).of_actions(costs)
    assert (more.forward, more.backward, more.recompute) == ([1.5, 2.5], 3.5, None)
    assert FREE.of_actions(costs) is costs


def test_a_pass_over_nothing_takes_no_time():
    assert PassCost(1.0, 2.0, 3.0).seconds(0, 0) == 0
    assert PassCost(1.0, 2.0, 3.0).seconds(2, 10) == 35
