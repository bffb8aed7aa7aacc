"""The comparison of plans with runs: its layouts, its figures, and failed layouts."""

import pytest

from experiments.plan.__main__ import write
from experiments.plan.figures import errors, noise, spearman, summary, table
from experiments.plan.layouts import MODELS, layouts
from experiments.plan.running import Bench, Result, try_layout
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
        try_layout(Bench(2, tmp_path), layouts("mlp_2r")[0], tmp_path / "none.yaml", 1),
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
    assert "1 layouts, error of time median 10.0 %, rank correlation too few" in summary(results)


def test_ranks_that_are_equal_share_their_place():
    assert spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 1, 1], [1, 2, 3]) == 0.0


def test_results_are_written_between_the_marks_of_the_page(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("a\n<!-- results -->old<!-- end of results -->\nb\n")
    result = Result("layout", (1.1,), (1.0,), 190, 100, 200, 200, replays_s=(1.0,))
    write([result], page)
    text = page.read_text("utf-8")
    assert text.startswith("a\n<!-- results -->\n```text\na core for each rank: 1 layouts")
    assert "old" not in text and table([result]) in text
    assert text.endswith("```\n<!-- end of results -->\nb\n")
