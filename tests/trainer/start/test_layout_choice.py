"""`pipeline.layout=auto`: one search for all ranks, whose answer a later start takes again."""

import json
from functools import partial
from threading import current_thread

import pytest
import torch

from gpipe_hpc import run_on_threads
from gpipe_hpc.config import check_config, check_drawing, compose_config
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.planner.costs.rates import Rates
from gpipe_hpc.trainer import loop
from gpipe_hpc.trainer.loop import run_training
from gpipe_hpc.trainer.run.identity import RunIdentity
from gpipe_hpc.trainer.search.answer import compared
from gpipe_hpc.trainer.search.from_settings import LayoutSearch, StartedRanks
from gpipe_hpc.trainer.signals import StopRequest
from gpipe_hpc.trainer.start import layout_choice
from gpipe_hpc.trainer.start.layout_choice import LAYOUT_FILE, with_layout

RANKS = 4
WORDS = (
    "model=mlp",
    "data=synthetic_vectors",
    "train.batch_size=8",
    "plan.flops_per_s=1e9",
    "plan.link_bytes_per_s=1e6",
    "pipeline.layout=auto",
)


def chosen(folder, *words, ranks=RANKS, lineage="new"):
    """Return what each rank has chosen for the settings."""
    config = compose_config([*WORDS, *words])
    run = RunIdentity(folder, "run", False, (), lineage)
    return run_on_threads(ranks, lambda world: with_layout(config, world, run, words))


@pytest.fixture
def searches(monkeypatch):
    """Return the number of ranks of each search that is made."""
    found = []

    def counted(config, words, came):
        found.append(sum(came.hosts))
        return searched(config, words, came)

    searched = layout_choice.compared_on
    monkeypatch.setattr(layout_choice, "compared_on", counted)
    return found


def test_all_ranks_take_the_winner_of_the_search(tmp_path, searches):
    first, *others = chosen(tmp_path, "pipeline.memory_bytes=1.3MB")
    assert searches == [RANKS]
    assert all(each.config == first.config for each in others)
    assert not any(each.said for each in others), "rank 0 alone says it"
    words = ("plan.search=true", f"plan.ranks={RANKS}", "pipeline.memory_bytes=1.3MB")
    best = compared(compose_config([*WORDS, *words]), words).chosen
    got = first.config.pipeline
    assert best.candidate.stages > 1, "a layout that nobody gets by default"
    assert (got.replicas, got.stages, got.microbatches, got.schedule, got.recompute) == (
        best.candidate.replicas,
        best.candidate.stages,
        best.candidate.microbatches,
        best.candidate.schedule,
        best.candidate.recompute,
    )
    assert got.options == dict(best.candidate.options)
    if best.combining is not None:
        assert first.config.outer.shard == best.combining.shard
    off = json.loads((tmp_path / LAYOUT_FILE).read_text())["off_best_cut"]
    assert off == best.cut_distance._asdict() and set(off) == {"share", "is_exact"}
    assert f"pipeline.replicas={got.replicas} pipeline.stages={got.stages}" in first.said
    (again, *_) = chosen(tmp_path, "pipeline.memory_bytes=1.3MB")
    assert again.said.endswith(f"{LAYOUT_FILE}; {best.cut_distance.text()}")
    assert searches == [RANKS]


def test_a_run_takes_the_simulated_cut_that_its_layout_asks_for(tmp_path):
    words = ("pipeline.stages=2", "pipeline.schedule=zb_v", "pipeline.microbatches=4")
    words += ("model.widths=[16,64,16,64,16,64,200,300]", "data.width=16", "data.num_classes=300")
    for number, (more, expected) in enumerate(
        [((), "simulated"), (("pipeline.partition=time",), "time")]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        for _ in range(2):  # the second takes the first one's answer
            found = chosen(folder, *words, *more, ranks=2)
            assert [each.config.pipeline.partition for each in found] == [expected] * 2
            assert ("pipeline.partition=simulated" in found[0].said) == (expected == "simulated")


def test_a_later_start_takes_the_same_unless_it_asks_for_something_else(tmp_path, searches):
    """The rate is measured anew in each start; noise must not move a run to another layout."""
    first = chosen(tmp_path)[0]
    assert chosen(tmp_path)[0].config == first.config and searches == [RANKS]
    pinned = chosen(tmp_path, "pipeline.schedule=zb_h1", "pipeline.stages=2")[0].config.pipeline
    assert (pinned.schedule, pinned.stages, pinned.replicas) == ("zb_h1", 2, 2)
    assert searches == [RANKS] * 2
    chosen(tmp_path, ranks=2)
    assert searches == [RANKS] * 2 + [2]
    for spoil in (
        "nothing",
        json.dumps({"layout": {"pipeline": {"buffers": "each"}, "outer": {}}}),
    ):
        (tmp_path / LAYOUT_FILE).write_text(spoil)
        assert chosen(tmp_path)[0].config == first.config
    assert len(searches) == 5


def test_a_start_that_trains_nothing_leaves_the_folder_as_it_is(tmp_path):
    assert chosen(tmp_path, lineage="")[0] is not None
    assert not list(tmp_path.iterdir())


def test_a_run_whose_best_layout_has_holes_trains_in_it(tmp_path):
    words = ("pipeline.stages=2", "pipeline.replicas=2", "train.steps=2", f"run.dir={tmp_path}")
    config = compose_config([*WORDS, *words, "checkpoint.every=0"])
    codes = run_on_threads(3, lambda world: run_training(config, world, StopRequest(), words=words))
    assert codes == [0] * 3
    kept = json.loads((tmp_path / LAYOUT_FILE).read_text())["layout"]["pipeline"]
    assert (kept["stages"], kept["replicas"], kept["options"]) == (2, 2, {})
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["layout"]["schedule"] == "rerouted", summary["layout"]


def test_where_nothing_fits_it_is_said_what_lacks(tmp_path):
    with pytest.raises(ConfigError, match=r"auto found no layout[\s\S]* too much[\s\S]*suffice"):
        chosen(tmp_path, "pipeline.memory_bytes=1MB", ranks=1)


def test_a_layout_that_is_given_stays(tmp_path):
    config = compose_config([*WORDS, "pipeline.layout=given"])
    assert with_layout(config, None, RunIdentity(tmp_path, "run", False), ()) is None


def test_commands_that_need_a_layout_refuse_to_look_for_one():
    config = compose_config(list(WORDS))
    assert check_config(config, 3, may_choose=True) == []
    for check in (lambda: check_config(config, 4), lambda: check_drawing(config)):
        with pytest.raises(ConfigError, match=r"pipeline\.layout.*plan\.search=true"):
            check()


def test_a_run_goes_on_in_its_layout_and_says_nothing_of_changes(tmp_path, monkeypatch, searches):
    monkeypatch.chdir(tmp_path)
    words = [*WORDS, "train.steps=4", "pipeline.partition=uniform", "run.dir=run"]
    for more in (["train.stop_at=2"], []):
        config = compose_config([*words, *more])
        assert run_on_threads(2, partial(run_training, config, stop=StopRequest())) == [0, 0]
    assert searches == [2]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    kept = json.loads((tmp_path / "run" / LAYOUT_FILE).read_text())["layout"]["pipeline"]
    assert summary["first_step"] == 2 and summary["last_step"] == 4
    for name in ("stages", "replicas", "schedule"):
        assert summary["layout"][name] == kept[name]
    logs = [path.read_text() for path in (tmp_path / "run" / "logs").iterdir()]
    assert any(LAYOUT_FILE in text for text in logs)
    assert not any("a changed setting" in text for text in logs)


def test_every_rank_runs_the_layers_and_a_slow_one_gets_fewer(tmp_path, monkeypatch):
    """Rank 0 alone ran them, and what rank 1 took was known for a matrix product alone."""
    monkeypatch.chdir(tmp_path)
    ran, took = [], layout_choice._layers_s

    def played(config, world):
        ran.append(world.rank)
        return took(config, world) * (4 if world.rank == 1 else 1)

    monkeypatch.setattr(layout_choice, "_layers_s", played)
    words = [*WORDS, "plan.costs=measured", "pipeline.stages=2", "pipeline.schedule=gpipe"]
    words += ["train.steps=1", "pipeline.partition=uniform", "run.dir=run"]
    run = partial(run_training, compose_config(words), words=words[-6:], stop=StopRequest())
    assert run_on_threads(2, run) == [0, 0]
    assert sorted(ran) == [0, 1]
    layout = json.loads((tmp_path / "run" / "summary.json").read_text())["layout"]
    first, second = layout["layers_of_stages"]
    assert first > second and layout["paces"][1] > 1.5 * layout["paces"][0]
    kept = json.loads((tmp_path / "run" / LAYOUT_FILE).read_text())
    assert kept["layout"]["pipeline"]["paces"][0] == 1.0
    assert any(each.startswith("pipeline.paces=[1.0,") for each in kept["settings"])


def test_ranks_have_their_threads_before_they_measure(tmp_path, monkeypatch):
    """torchrun gives each rank one, and so a search was by one where the run has more."""
    found = []

    def measured(config, world, run, words):
        found.append(torch.get_num_threads())
        raise ConfigError("enough")

    monkeypatch.setattr(loop, "with_layout", measured)
    threads = torch.get_num_threads() + 1
    config = compose_config([*WORDS, f"train.num_threads={threads}", f"run.dir={tmp_path}/run"])
    with pytest.raises(ConfigError, match="enough"):
        run_on_threads(1, partial(run_training, config, stop=StopRequest()))
    assert found == [threads]


def test_rank_0_alone_hears_how_fast_each_rank_is(tmp_path, monkeypatch):
    """Each heard of every other, in a start that found a layout and in one that took it again."""
    monkeypatch.setattr(layout_choice, "_layers_s", lambda config, world: 1.0 + (world.rank == 2))
    words = ["plan.costs=measured", "pipeline.stages=4", "pipeline.schedule=gpipe"]
    for _ in range(2):
        paces = [each.config.pipeline.paces for each in chosen(tmp_path, *words)]
        assert paces == [(1.0, 1.0, 2.0, 1.0), (), (), ()]
    came = []

    def refused(config, words, own):
        came.append(own)
        raise ConfigError("enough")

    monkeypatch.setattr(layout_choice, "compared_on", refused)
    monkeypatch.setattr(layout_choice.socket, "gethostname", of_rank("a", "b", "b", "a"))
    rates = of_rank(*[Rates.alike(each) for each in (1e9, 3e9, 2e9, 3e9)])
    monkeypatch.setattr(layout_choice, "rates_of", rates)
    monkeypatch.setattr(layout_choice, "host_copy_rate", of_rank(4e9, 2e9, 3e9, 5e9))
    with pytest.raises(ConfigError, match="enough"):
        chosen(tmp_path / "other", *words)
    assert came == [StartedRanks(Rates.alike(3e9), (1, 2, 1), (1.0, 1.0, 2.0, 1.0), 2e9)]
    monkeypatch.setattr(layout_choice, "host_copy_rate", of_rank(4e9, 2e9, None, 5e9))
    with pytest.raises(ConfigError, match="enough"):
        chosen(tmp_path / "other", *words)
    assert came[1] == came[0]._replace(host_copy_bytes_per_s=None)


def of_rank(*values):
    """Return what gives each rank its own value."""
    return lambda *_, **__: values[int(current_thread().name.removeprefix("rank"))]


def test_slow_ranks_get_fewer_layers_where_layers_are_counted_too():
    """Their rates were measured, and every rank got as much all the same."""
    config = compose_config([*WORDS, "pipeline.stages=2"])
    came = StartedRanks(Rates.alike(1e10), (2,), (1.0, 2.0))
    assert LayoutSearch.of(config, (), came).space(2).base.paces == [1.0, 2.0]
    alike = came._replace(paces=())
    assert LayoutSearch.of(config, (), alike).space(2).base.paces is None
    given = compose_config([*WORDS, "pipeline.stages=2", "pipeline.paces=[1,1]"])
    assert list(LayoutSearch.of(given, (), came).space(2).base.paces) == [1, 1]
    holes = compose_config([*WORDS, "pipeline.schedule=rerouted"])
    assert LayoutSearch.of(holes, (), came).space(2).base.paces == [1.0, 2.0]
