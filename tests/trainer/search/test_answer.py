"""`plan.search=true`: what it says of a run's settings, and what it refuses."""

import re
from contextlib import nullcontext
from itertools import pairwise

import pytest

from gpipe_hpc import plan
from gpipe_hpc.config import CommandJob, check_config, compose_config
from gpipe_hpc.device.cores.planned_ranks import CpuShare
from gpipe_hpc.device.host.machine import processor_name
from gpipe_hpc.errors import ConfigError, PartitionError
from gpipe_hpc.plan import make_plan
from gpipe_hpc.planner.costs.prices import PassCost, Prices, PricesContext, write_prices
from gpipe_hpc.planner.costs.rates import Rates
from gpipe_hpc.planner.search.trial import CombiningChoices, try_out
from gpipe_hpc.schedule import Link
from gpipe_hpc.trainer.measuring import rank_emulation
from gpipe_hpc.trainer.search.answer import compared
from gpipe_hpc.trainer.search.from_settings import LayoutSearch, StartedRanks, fixed_by
from gpipe_hpc.units import bytes_text

MLP = ["model=mlp", "data=synthetic_vectors", "plan.flops_per_s=1e10", "plan.search=true"]
ADASCALE = ["lr.scaling=adascale", "lr.base_batch_size=8", "lr.noise_over=replicas"]
LINKS = """
hosts: [2, 2]
links:
  within: {latency_s: 3.0e-6, bandwidth_bytes_per_s: 10.0e9}
  between: {latency_s: 1.0e-5, bandwidth_bytes_per_s: 1.0e8}
"""


def answer(*words):
    return compared(compose_config([*MLP, *words]), words)


PRICES = Prices(
    1e-4, Link(2e-5, 3e9), Link(4e-5, 1e9), PassCost(0.5, 0.0, 0.0), PassCost(0.25, 0.0, 0.0), 5e-4,
    PricesContext("cpu", processor_name(), 64, "float32", "adamw"),
)  # fmt: skip


def settings_in(text):
    return [line.split() for line in text.splitlines() if line.startswith("   pipeline.")]


def test_each_line_is_settings_that_train_takes_and_plan_counts_alike():
    free = "plan.layer_s=0"  # `plan` cuts by operations alone
    found = answer("plan.ranks=4", "plan.shown=40", "pipeline.memory_bytes=1.3MB", free)
    lines = settings_in(found.text)
    assert len(lines) >= 5
    held = re.findall(r"([\d.]+ \w+) \(rank \d+\)", found.text)
    for words, nbytes in zip(lines, held, strict=True):
        config = compose_config([*MLP, *words, "pipeline.memory_bytes=1.3MB"])
        check_config(config, 4)
        planned = make_plan(config)
        assert bytes_text(max(rank.total_bytes for rank in planned.forecast.ranks)) == nbytes, words


def test_lines_with_holes_are_settings_that_train_takes_and_plan_counts_alike():
    """Three stages on four ranks, as rows that ranks do not fill, and not as one table of them."""
    words = ["plan.ranks=4", "pipeline.stages=3", "plan.shown=40", "plan.layer_s=0"]
    found = answer(*words)
    lines = settings_in(found.text)
    assert {"pipeline.replicas=2", "pipeline.stages=3"} <= set(lines[0])
    held = re.findall(r"([\d.]+ \w+) \(rank \d+\)", found.text)
    for line, nbytes in zip(lines, held, strict=True):
        config = compose_config([*MLP, *line])
        check_config(config, 4)
        plan = make_plan(config)
        assert bytes_text(max(rank.total_bytes for rank in plan.forecast.ranks)) == nbytes, line
        assert plan.layout.schedule.num_ranks == 4


def test_each_line_says_how_far_its_cut_is_from_the_best_as_plan_does():
    """A search printed no such figure; with one rank a stage the best cut is known, else not."""
    asked = ["pipeline.partition=uniform", "model.widths=[64,256,128,256,128,256,128,64,10]"]
    space = ["plan.ranks=4", "plan.shown=99", "pipeline.microbatches=8"]
    lines = answer(*asked, *space, "plan.layer_s=0").text.splitlines()
    head = next(line for line in lines if "off best cut" in line)
    end = head.index("off best cut") + len("off best cut")
    seen = set()
    for figures, words in pairwise(lines):
        if not words.startswith("   pipeline."):
            continue
        told = figures[:end].split("  ")[-1].strip()
        seen.add(told[0] if told[0] in "-<" else told > "0.0 %")
        said = make_plan(compose_config([*MLP, *asked, *words.split()])).text
        if told == "-":
            assert "pipeline.stages=1" in words and "best cut" not in said
        elif told == "0.0 %":
            assert "no cut gives the most loaded rank less work" in said, words
        else:
            share = told.replace("<= ", "at most ")
            assert f"the most loaded rank has {share} more work than in the best cut" in said, words
    assert seen == {"-", "<", False, True}, "all kinds"


def test_links_of_other_ranks_than_a_plan_is_for_are_refused_by_what_the_user_gave(tmp_path):
    """It told to leave plan.ranks out, which nobody had given."""
    (tmp_path / "links.yaml").write_text(LINKS)
    words = ["plan.search=false", f"plan.links={tmp_path}/links.yaml", "pipeline.stages=3"]
    with pytest.raises(
        ConfigError, match=r"expected the 3 ranks .*change pipeline\.stages"
    ) as found:
        make_plan(compose_config([*MLP, *words]))
    assert "plan.ranks" not in str(found.value)


def test_what_stands_on_the_command_line_stays():
    words = ("plan.ranks=4", "pipeline.schedule=gpipe", "pipeline.replicas=2", "outer.shard=none")
    for line in settings_in(answer(*words).text):
        assert {"pipeline.schedule=gpipe", "pipeline.replicas=2"} <= set(line)
        assert "outer.shard=flat" not in line
    assert fixed_by(["pipeline.options.waves=1", "pipeline.stages=null"]) == {"schedule"}
    assert not fixed_by(["model=gpt", "train.batch_size=8", "outer=allreduce"])


def test_precisions_are_compared_where_that_is_asked_for():
    """Half the bytes and twice the speed: the first line is in bfloat16, at half the time."""
    rates = "plan.precisions={float32: 1e10, bf16: 2e10}"
    both = answer("plan.ranks=2", "plan.layer_s=0", "plan.shown=40", rates)
    lines = settings_in(both.text)
    assert "train.precision=bfloat16" in lines[0]
    assert "train.precision=float32" in {word for line in lines for word in line}
    assert "float32 10.0 GFLOP/s, bfloat16 20.0 GFLOP/s" in both.text
    alone = answer("plan.ranks=2", "plan.layer_s=0")
    assert both.chosen.step_s == pytest.approx(alone.chosen.step_s / 2)
    assert both.ranking.num_layouts == 2 * alone.ranking.num_layouts
    assert not any("train.precision" in line for line in settings_in(alone.text))
    check_config(compose_config([*MLP, *lines[0]]), 2)


def test_layers_that_are_measured_have_no_rate_that_was_never_asked_for(monkeypatch):
    """It said `1 FLOP/s a rank`, of layers that were measured."""
    monkeypatch.setattr(rank_emulation, "load_generators", lambda *_: nullcontext())
    monkeypatch.setattr(rank_emulation, "planned_share", lambda *_, **__: CpuShare(1, 1))
    words = ["plan.ranks=2", "plan.costs=measured", "plan.flops_per_s=null"]
    fixed = ["pipeline.stages=2", "pipeline.microbatches=2", "pipeline.schedule=gpipe"]
    found = answer(*words, *fixed).text
    assert "layers measured here, on 1 thread while another process computes" in found
    assert "FLOP/s" not in found
    found = answer(*words, *fixed, "plan.precisions={float32: null, bfloat16: null}").text
    assert "precisions: float32, bfloat16;" in found and "FLOP/s" not in found
    assert "FLOP/s a rank" in answer("plan.ranks=2", *fixed).text


def test_prices_of_one_precision_give_their_links_and_actions_to_all(tmp_path):
    """Any file was refused, as one of the precisions was never that it was measured in."""
    write_prices(tmp_path / "prices.yaml", PRICES)
    words = ["plan.ranks=2", f"plan.prices={tmp_path}/prices.yaml"]
    found = answer(*words, "plan.precisions={float32: 1e10, bf16: 2e10}")
    assert "was measured in float32; as precisions are compared" in found.text
    assert "3.00 GB/s and 20 us within a host" in found.text
    config = compose_config([*MLP, *words, "plan.precisions={float32: 1e10, bf16: 2e10}"])
    for each in LayoutSearch.in_each_precision(config, ()):
        prices = each.cache.machine.prices
        assert (prices.send, prices.summing) == (PRICES.send, PRICES.summing)
        assert (prices.action_s, prices.update, prices.norm) == (1e-4, PassCost(), PassCost())
    alone = answer(*words, "plan.precisions={float32: 1e10}")
    assert "as precisions are compared" not in alone.text and alone.chosen.overhead_s > 0.75


def test_what_is_not_offloaded_for_want_of_a_rate_is_said():
    """Moving activations to the host was left out without a word."""
    words = ["plan.ranks=2", "pipeline.memory_bytes=10MB"]
    assert "offload: not tried" in answer(*words).text
    assert "offload: not tried" not in answer(*words, "plan.host_copy_bytes_per_s=1e9").text
    assert "offload: not tried" not in answer(*words, "pipeline.offload=true").text
    assert "nothing is recomputed or offloaded" in answer("plan.ranks=2").text


def test_a_search_in_which_nothing_fits_ends_with_code_3(capsys):
    """As a plan of one layout does; scripts tell by it that the answer is no layout."""
    words = ("plan.ranks=1", "pipeline.memory_bytes=0.5MB")
    config = compose_config([*MLP, *words])
    assert plan._task(CommandJob(config, None, words, {})) == 3
    assert "no layout fits" in capsys.readouterr().out
    assert plan._task(CommandJob(compose_config([*MLP, "plan.ranks=1"]), None, (), {})) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan.precisions={fp7: null}"], "write it as"),
        (["plan.precisions={float32: fast}"], "write it as"),
        (["plan.precisions={float32: true}"], "write it as"),
        (["plan.precisions={bfloat16: null}", "plan.search=false"], "without a search"),
    ],
)
def test_precisions_that_cannot_be_compared_are_refused(words, said):
    with pytest.raises(ConfigError, match=f"bad plan.precisions, expected .*{said}"):
        check_config(compose_config([*MLP, *words]), 2)


def test_ranks_that_know_how_fast_they_copy_to_their_host_may_offload():
    config = compose_config([*MLP, "pipeline.memory_bytes=1MB"])
    knows, not_known = (StartedRanks(Rates.alike(1e10), (2,), (), rate) for rate in (1e9, None))
    assert LayoutSearch.of(config, (), knows).space(2).offloads == (False, True)
    assert LayoutSearch.of(config, (), not_known).space(2).offloads == (False,)


def test_a_model_that_fits_nowhere_says_what_lacks_and_how_many_ranks_would_do():
    found = answer("plan.ranks=1", "pipeline.memory_bytes=1MB")
    assert found.chosen is None
    said = re.search(r"the closest layout .* on rank 0, .* too much", found.text)
    assert said, found.text
    (more,) = re.findall(r"suffice: plan\.ranks=(\d+)", found.text)
    assert answer(f"plan.ranks={more}", "pipeline.memory_bytes=1MB").chosen is not None


def test_where_fewer_ranks_would_do_or_limits_differ_that_is_said():
    """Nothing was said of fewer ranks, nor where memory_bytes is a list."""
    # With holes seven ranks would do, which this rules out.
    whole = "pipeline.normalise_over_replicas=true"
    prime = answer("plan.ranks=7", "pipeline.memory_bytes=1MB", whole)
    assert prime.chosen is None
    said = r"(\d) instead of 7 ranks of 1.00 MB suffice: plan.ranks=\1 (.*)"
    ((fewer, words),) = re.findall(said, prime.text)
    found = answer(f"plan.ranks={fewer}", "pipeline.memory_bytes=1MB", *words.split())
    assert int(fewer) < 7 and found.chosen is not None
    several = answer("plan.ranks=2", "pipeline.memory_bytes=[0.92MB,0.95MB]")
    assert several.chosen is None
    said = r"(\d+) ranks of 920 kB \(the smallest of .*\) suffice: plan.ranks=\1 (.*)"
    ((more, words),) = re.findall(said, several.text)
    found = answer(f"plan.ranks={more}", "pipeline.memory_bytes=0.92MB", *words.split())
    assert found.chosen is not None


def test_without_ranks_the_least_number_is_found():
    found = answer("pipeline.memory_bytes=1MB")
    (ranks,) = re.findall(
        r"the model fits on (\d+) ranks of 1.00 MB; (?:no lay|weights)", found.text
    )
    assert found.chosen.candidate.replicas * found.chosen.candidate.stages == int(ranks)
    assert answer(f"plan.ranks={int(ranks) - 1}", "pipeline.memory_bytes=1MB").chosen is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "plan.ranks"),
        (["plan.ranks=3", "plan.hosts=2"], "use 2 or 4 ranks"),
        (["plan.ranks=37", "train.batch_size=4"], "37 ranks cannot be divided"),
        (["plan.ranks=4", "pipeline.partition=[3,2]"], "pipeline.partition"),
        (["plan.ranks=4", "plan.calibration=x.yaml"], "plan.calibration: cannot read x.yaml"),
        (["plan.ranks=4", "train.device=cuda", "plan.flops_per_s=null"], "plan.flops_per_s"),
        (["pipeline.memory_bytes=[1MB,2MB]"], "set plan.ranks"),
        (["pipeline.memory_bytes=10kB"], "one layer alone"),
        (["plan.ranks=4", "train.accumulation=2"], "train.accumulation"),
        (["plan.ranks=4", "outer=diloco"], "the result of outer.every=64"),
        (["plan.ranks=4", *ADASCALE], "the result of lr.noise_over=replicas"),
        (["plan.ranks=4", "pipeline.stages=3", "pipeline.schedule=zb_v"], "use 3 or 6 ranks"),
    ],
)
def test_what_cannot_be_searched_is_refused(words, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        answer(*words)


def test_links_of_a_file_are_those_of_the_ranks_or_refused(tmp_path):
    path = tmp_path / "links.yaml"
    path.write_text(LINKS)
    found = answer(f"plan.links={path}")
    assert "4 ranks on 2 hosts of 2" in found.text and "100 MB/s and 10 us between" in found.text
    for words, said in (
        (["plan.ranks=8"], "describes 4 ranks on 2 host(s), expected the 8 of plan.ranks"),
        (["plan.hosts=4"], "describes 2 host(s), expected the 4"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            answer(f"plan.links={path}", *words)


def test_a_slow_rank_is_slow_once_wherever_it_is_told_of(tmp_path):
    """In the file it slows the run; told to the cut, the rank gets less, and is slow once."""
    path = tmp_path / "links.yaml"
    path.write_text(LINKS + "slow_ranks: {0: 2.0}\n")
    alone = [
        "pipeline.stages=4",
        "pipeline.schedule=gpipe",
        "model.widths=[64,64,64,64,64,64,64,64,10]",
        "train.batch_size=256",
        "plan.layer_s=0",
    ]

    def step_s(*words):
        return answer(*alone, f"plan.links={path}", *words).chosen.step_s

    in_file, measured = step_s(), step_s("pipeline.paces=measured")
    assert measured < in_file
    assert step_s("pipeline.paces=[2,1,1,1]") == measured
    path.write_text(LINKS)
    assert step_s("pipeline.paces=[2,1,1,1]") == measured
    assert step_s("pipeline.paces=measured") == step_s() < measured


def test_a_slow_rank_is_as_slow_in_a_plan_of_one_layout(tmp_path):
    """One in the file and in paces was four times as slow, and a slow rank 0 was the measure."""
    path = tmp_path / "links.yaml"
    layout = ["pipeline.stages=4", "pipeline.microbatches=8", "pipeline.recompute=never"]
    alone = [*MLP, *layout, "model.widths=[64,64,64,64,64,64,64,64,10]", "train.batch_size=256"]
    alone += ["plan.layer_s=0", "pipeline.schedule=gpipe", "pipeline.replicas=1"]

    def both_s(*words):
        words = (*alone, f"plan.links={path}", *words)
        searched = compared(compose_config(words), words).chosen.step_s
        return searched, make_plan(compose_config([*words, "plan.search=false"])).step.total_s

    found = {}
    for slow in ("{0: 2.0}", "{1: 2.0}"):
        path.write_text(f"{LINKS}slow_ranks: {slow}\n")
        for paces in ("measured", "[2,1,1,1]", "[1,2,1,1]"):
            searched_s, planned_s = both_s(f"pipeline.paces={paces}")
            assert planned_s == pytest.approx(searched_s, rel=0.02), (slow, paces)
            found[slow, paces] = planned_s
    assert found["{1: 2.0}", "measured"] == found["{1: 2.0}", "[1,2,1,1]"]


def test_layouts_with_offload_count_casts_that_are_their_own():
    """As a run has them: 2 bytes a weight and micro-batch were missing."""
    given = ["plan.ranks=2", "train.precision=bfloat16", "plan.host_copy_bytes_per_s=1e9"]
    given += ["pipeline.stages=2", "pipeline.replicas=1", "pipeline.microbatches=8"]
    given += ["pipeline.schedule=gpipe", "pipeline.recompute=never", "plan.layer_s=0"]
    for offload in ("true", "false"):
        words = (*MLP, *given, "pipeline.memory_bytes=1GB")
        searching = LayoutSearch.of(compose_config(words), words)
        space, cache = searching.space(2), searching.on(2)
        own = [each for each in space if str(each.offload).lower() == offload]
        (candidate,) = (each for each in own if each.microbatches == 8 and each.stages == 2)
        trial = try_out(
            candidate, cache, space.base, CombiningChoices.of(space.base, space.fixed, 1)
        )
        planned = make_plan(
            compose_config([*words, "plan.search=false", f"pipeline.offload={offload}"])
        )
        assert trial.nbytes == max(rank.total_bytes for rank in planned.forecast.ranks)


def test_a_search_counts_what_compression_keeps_where_there_are_copies():
    words = ("plan.ranks=2", "outer.compress=topk", "pipeline.memory_bytes=1GB", "plan.layer_s=0")
    found = answer(*words, "plan.shown=40")
    lines = settings_in(found.text)
    held = re.findall(r"([\d.]+ \w+) \(rank \d+\)", found.text)
    assert {f"pipeline.replicas={n}" for n in (1, 2)} <= {word for line in lines for word in line}
    for line, nbytes in zip(lines, held, strict=True):
        planned = make_plan(compose_config([*MLP, *words, "plan.search=false", *line]))
        most = max(rank.total_bytes for rank in planned.forecast.ranks)
        assert bytes_text(most) == nbytes, line


def test_why_no_layout_can_be_built_is_said():
    """It was said that weights did not fit, and to allow more memory."""
    found = answer("plan.ranks=4", "pipeline.stages=4", "pipeline.schedule=zb_v", "plan.layer_s=0")
    limited = answer(
        "plan.ranks=4", "pipeline.stages=4", "pipeline.schedule=zb_v", "pipeline.memory_bytes=8GB"
    )
    assert found.chosen is None and limited.chosen is None
    assert limited.text.splitlines()[-1].startswith("no layout can be built: ")
    assert "the model has 5 layers, got 8 stages" in limited.text


def test_all_ranks_that_lack_memory_are_named():
    words = ("plan.ranks=4", "pipeline.stages=4", "pipeline.memory_bytes=[1kB,2kB,1kB,9MB]")
    found = answer(*words)
    assert found.chosen is None
    lacking = found.ranking.nearest.lacks
    assert [bool(lack) for lack in lacking] == [True, True, True, False]
    for rank in (0, 1, 2):
        assert (
            re.search(rf"rank {rank}[ ,]", found.text) and bytes_text(lacking[rank]) in found.text
        )


def test_layouts_whose_stages_cannot_hold_pins_are_left_out_and_said():
    # Of the five layers 3 is on the third stage, so there are three or four stages.
    found = answer("plan.ranks=4", "pipeline.pins={3:2,-1:-1}")
    assert "cannot satisfy pipeline.pins" in found.text
    assert found.ranking.num_unpinned and found.ranking.trials
    assert {trial.candidate.num_stages for trial in found.ranking.trials} == {3, 4}
    for words in settings_in(found.text):
        config = compose_config([*MLP, "plan.search=false", *words, "pipeline.pins={3:2,-1:-1}"])
        counts = plan.make_plan(config).layout.partition.counts
        assert sum(counts[:2]) <= 3 < sum(counts[:3])
    every = answer("plan.ranks=4", "pipeline.pins={0:0,-1:-1}")
    assert not every.ranking.num_unpinned and "pipeline.pins" not in every.text
    with pytest.raises(
        PartitionError, match=r"layers\.1 is pinned to stage 900, but stages are 0 to \d+"
    ):
        answer("plan.ranks=4", "pipeline.pins={1:900}")
    with pytest.raises(PartitionError, match="no layer 'Head'"):
        answer("plan.ranks=4", "pipeline.pins={Head:0}")
