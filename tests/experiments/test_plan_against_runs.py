"""The experiment that holds plans against runs: its layouts, its figures, and failed layouts."""

import json
from dataclasses import fields

import pytest

from experiments.plan.__main__ import write
from experiments.plan.figures import errors, named, noise, spearman, summary, table
from experiments.plan.layouts import MODELS, layouts
from experiments.plan.running import Bench, Result, load, save, try_layout
from gpipe_hpc.config import check_config, compose_config
from gpipe_hpc.schedule import schedule_names


def test_layouts_are_of_all_models_ranks_schedules_and_modes():
    found = layouts()
    assert len({each.name for each in found}) == len(found) >= 40
    assert {each.ranks for each in found} == {1, 2, 4}
    words = {word for each in found for word in each.words}
    run = {w.partition("=")[2] for w in words if w.startswith("pipeline.schedule=")}
    assert run == set(schedule_names()) - {"auto", "file", "rerouted"}
    assert {f"pipeline.recompute={mode}" for mode in ("never", "always", "except_last")} <= words
    assert "pipeline.replicas=2" in words
    assert [each.name for each in layouts("mlp_1r")] == [
        "mlp_1r_gpipe_never",
        "mlp_1r_gpipe_always",
    ]


@pytest.mark.parametrize("model", MODELS)
def test_their_settings_can_work(model):
    last = layouts(model)[-1]
    config = compose_config(list(last.words))
    check_config(config, last.ranks)
    assert config.pipeline.schedule in last.name


def test_a_failed_layout_is_told_and_the_others_count(tmp_path):
    thrice = (1.0, 1.2, 0.8)
    results = [
        Result("a", (1.1, 1.0, 1.21), thrice, 190, 100, 200, 220, replays_s=(1.0, 1.26, 0.88)),
        Result("b", (2.0, 2.0), (2.0,), 200, 100, 200, 220, replays_s=(2.06,)),
        Result(
            *("c", (4.0,), (5.0,), 198, 100, 200, 250),
            **{"crowded": True, "calibrated_s": 4.5, "replays_s": (4.9,)},
        ),
        try_layout(Bench("cpu", 2, tmp_path), layouts("mlp_2r")[0], tmp_path / "none.yaml", 1),
    ]
    assert "none.yaml" in results[-1].failed
    told = errors(results)
    assert told is not None and told.num == 3 and told.correlation == pytest.approx(1.0)
    assert told.median == pytest.approx(0.1)
    assert told.memory_median == pytest.approx(0.01)
    assert told.tensors_median == pytest.approx(0.02)
    assert told.kept_median == pytest.approx(0.1)
    assert told.replayed == (pytest.approx(0.03), pytest.approx(1.0), 3)
    assert "their own run measured: 2 layouts, error of time median 4.0 %" in summary(results)
    assert noise(results) == pytest.approx((0.2, 1 / 11))  # of 0.21, 1 / 11 and 0
    assert noise(results[1:]) is None
    assert "repeated runs are 20.0 % from their median, plans before" in summary(results)
    assert "failed: " in table(results) and "failed: 1 of 4 layouts" in summary(results)
    assert "more ranks than cores (*): 1 layouts" in summary(results)
    assert told.calibrated == (pytest.approx(0.1), None, 1)
    assert named(told)["calibrated"] == told.calibrated._asdict()
    assert "1 layouts, error of time median 10.0 %, rank correlation too few" in summary(results)


def test_ranks_that_are_equal_share_their_place():
    assert spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 1, 1], [1, 2, 3]) == 0.0


def test_what_is_written_down_is_what_the_code_writes(repository):
    """A table stayed behind whose page explained a column that it did not have."""
    folder = repository / "experiments" / "plan"
    page = (folder / "README.md").read_text("utf-8")
    kept = sorted(folder.glob("*.json"))
    assert folder / "cpu.json" in kept
    for path in kept:
        told = json.loads(path.read_text("utf-8"))["results"]
        assert all(each.keys() == {field.name for field in fields(Result)} for each in told)
        device, results = load(path)
        assert (device == "cpu") == (path.stem == "cpu")
        assert len(results) == len(told)
        shown = page.partition(f"<!-- {path.stem} -->")[2].partition("<!-- end of")[0]
        assert shown.split() == f"```text {summary(results)} {table(results)} ```".split()


def test_an_accelerator_has_layouts_of_one_rank():
    found = layouts(device="cuda")
    assert len({each.name for each in found}) == len(found) >= 10
    assert {each.ranks for each in found} == {1}
    assert {each.precision for each in found} == {"bfloat16", "float32"}
    for each in found:
        config = compose_config([*each.words, *each.beside])
        check_config(config, each.ranks)
        assert config.train.precision == each.precision
        assert (config.plan.host_copy_bytes_per_s is not None) == config.pipeline.offload


def test_memory_of_accelerators_is_that_of_tensors():
    result = Result("a", (1.1,), (1.0,), 190, 0, 200, 200, replays_s=(1.0,))
    told = summary([result])
    assert "a device for each: 1 layouts" in told and "memory of all: error median 5.0 %\n" in told


def test_each_device_has_files_and_a_table_of_its_own(tmp_path):
    """What was read of an accelerator would have taken the place of the CPUs'."""
    page = tmp_path / "README.md"
    page.write_text(
        "<!-- cpu -->old<!-- end of cpu -->\n<!-- accelerator --><!-- end of accelerator -->"
    )
    result = Result("a", (1.1,), (1.0,), 190, 0, 200, 200, replays_s=(1.0,))
    save(tmp_path / "kept.json", "cuda", [result])
    device, results = load(tmp_path / "kept.json")
    assert results == [result]
    write(results, device, tmp_path)
    text = page.read_text("utf-8")
    assert "<!-- cpu -->old<!-- end of cpu -->" in text and "a device for each" in text
    assert {each.name for each in tmp_path.iterdir()} == {
        *("README.md", "kept.json", "accelerator.json", "accelerator.svg")
    }
