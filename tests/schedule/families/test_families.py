"""Each schedule against its published closed forms and its own docstring."""

import inspect
import itertools

import pytest

from gpipe_hpc.schedule import (
    Action,
    Costs,
    Op,
    ScheduleError,
    build,
    check,
    forward_only,
    lower,
    schedule_names,
    simulate,
    to_text,
)
from gpipe_hpc.schedule.registry import SCHEDULES
from gpipe_hpc.visualize import draw_text

SIZES = list(itertools.product((1, 2, 3, 5), (1, 2, 3, 4, 8)))  # (K, M)
TIMES = [(1, 1, 2), (2, 2, 3), (2, 1, 5), (2, 3, 5), (3, 1, 1), (1, 0, 1)]  # (F, R, B)


def makespan(name, ranks, microbatches, times, recompute):
    forward, again, backward = times
    costs = Costs(forward=forward, backward=backward, recompute=again)
    bare = build(name, ranks=ranks, microbatches=microbatches, recompute=recompute)
    return simulate(bare, costs).makespan


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
@pytest.mark.parametrize("times", TIMES, ids=str)
def test_makespan_with_and_without_recomputation(name, times):
    f, r, b = times
    for k, m in SIZES:
        assert makespan(name, k, m, times, "never") == (m + k - 1) * (f + b)
        assert makespan(name, k, m, times, "always") == m * (f + r + b) + (k - 1) * (f + b)


@pytest.mark.parametrize("times", TIMES, ids=str)
def test_gpipe_saves_one_recomputation_by_sparing_the_last(times):
    f, r, b = times
    for k, m in SIZES:
        expected = m * (f + r + b) + (k - 1) * (f + b) - r
        assert makespan("gpipe", k, m, times, "except_last") == expected


@pytest.mark.parametrize("times", [times for times in TIMES if times[1] <= times[2]], ids=str)
def test_one_f_one_b_spares_its_last_rank_whole(times):
    """Two recomputations are saved when one costs a forward; in general R + min(F, 2R) at M > 2."""
    f, r, b = times
    for k, m in SIZES:
        if k == 1:
            saved = m * r
        elif m == 1:
            saved = r
        else:
            saved = r + min(f, r if m == 2 else 2 * r)
            assert r != f or saved == 2 * r
        expected = m * (f + r + b) + (k - 1) * (f + b) - saved
        assert makespan("one_f_one_b", k, m, times, "except_last") == expected


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
def test_bubble_over_total(name):
    for k, m in SIZES:
        timeline = simulate(build(name, ranks=k, microbatches=m), Costs(forward=1, backward=2))
        assert timeline.bubble == pytest.approx((k - 1) / (m + k - 1))


@pytest.mark.parametrize("recompute", ["never", "always", "except_last"])
def test_peak_activations_are_the_published_and_the_declared_ones(recompute):
    costs = Costs(forward=1, backward=2, recompute=1)
    for k, m in SIZES:
        for name, peaks in (
            ("gpipe", [m] * k),
            ("one_f_one_b", [min(m, k - rank) for rank in range(k)]),
        ):
            bare = build(name, ranks=k, microbatches=m, recompute=recompute)
            assert list(bare.max_activations) == peaks
            assert list(simulate(bare, costs).peak_activations) == peaks


def test_each_has_a_variant_under_test(variants):
    assert {name for name, _ in variants} == set(schedule_names()) - {"auto", "file"}


@pytest.mark.parametrize("recompute", ["never", "always", "except_last"])
def test_every_size_runs_or_is_refused_by_a_rule_of_its_own(variant, recompute):
    """One micro-batch included; a refusal names what is allowed."""
    name, options = variant
    for k, m in SIZES:
        try:
            bare = build(name, ranks=k, microbatches=m, recompute=recompute, **options)
        except ScheduleError as error:
            assert refusal_of(name, k, m, options) in str(error)
            continue
        assert refusal_of(name, k, m, options) is None
        assert bare.name == name
        assert (bare.num_ranks, bare.num_microbatches) == (k, m)
        check(bare)
        check(lower(bare))
        evaluation = forward_only(bare)
        check(evaluation)
        check(lower(evaluation))


def refusal_of(name, ranks, microbatches, options):
    """Return what the message of a refusal says, or None where the schedule has to run."""
    if name in ("chimera", "dualpipe") and ranks % 2:
        return f"such as {ranks - 1} or {ranks + 1}" if ranks > 1 else "such as 2, got 1"
    if ranks < options.get("stages", 1):
        return f"{options['stages']} stages need at least {options['stages']} ranks, got {ranks}"
    if ranks % options.get("pipelines", 1):
        return f"expected one of [2] for {ranks} ranks, got 4"
    if microbatches < 2 * options.get("replications", 0):
        return "need at least 2 micro-batches, one per pass, got 1"
    return None


def test_declared_activations_are_reached(variant):
    """The bound is the least that holds, and does not depend on recomputation."""
    name, options = variant
    peaks = set()
    for recompute in ("never", "always"):
        bare = build(name, ranks=4, microbatches=9, recompute=recompute, **options)
        costs = Costs(forward=1, input_gradient=1, weight_gradient=1, recompute=1)
        assert bare.max_activations == simulate(bare, costs).peak_activations
        peaks.add(bare.max_activations)
    assert len(peaks) == 1


def test_recomputation_stands_right_ahead_of_the_backward_it_serves(variant):
    name, options = variant
    bare = build(name, ranks=4, microbatches=5, **options)
    for row, full in zip(
        bare.ranks,
        build(name, ranks=4, microbatches=5, recompute="always", **options).ranks,
        strict=True,
    ):
        assert tuple(action for action in full if action.op is not Op.R) == row
        for action, after in itertools.pairwise(full):
            served = action.op is Op.R
            assert served == (after.op in (Op.B, Op.I))
            assert not served or action[1:] == after[1:]
    spared = build(name, ranks=4, microbatches=5, recompute="except_last", **options)
    for row in spared.ranks:
        for action, after in itertools.pairwise(row):
            if after.op in (Op.B, Op.I):
                assert action == Action(Op.R if action.op is Op.R else Op.F, *after[1:])


def test_gpipe_runs_its_backwards_in_reverse():
    row = build("gpipe", ranks=2, microbatches=3).ranks[1]
    assert " ".join(map(str, row)) == "1F0 1F1 1F2 1B2 1B1 1B0"


def test_one_f_one_b_alternates_after_its_warmup():
    rows = build("one_f_one_b", ranks=3, microbatches=4).ranks
    assert " ".join(map(str, rows[0])) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    assert " ".join(map(str, rows[2])) == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"


def test_recomputation_stands_right_ahead_of_its_backward():
    rows = build("one_f_one_b", ranks=2, microbatches=2, recompute="always").ranks
    assert " ".join(map(str, rows[0])) == "0F0 0F1 0R0 0B0 0R1 0B1"
    assert " ".join(map(str, rows[1])) == "1F0 1R0 1B0 1F1 1R1 1B1"
    rows = build("gpipe", ranks=2, microbatches=2, recompute="except_last").ranks
    assert " ".join(map(str, rows[1])) == "1F0 1F1 1B1 1R0 1B0"


FULL = Costs(forward=1, backward=2)
SPLIT = Costs(forward=1, input_gradient=1, weight_gradient=1)
FIGURES = {
    "gpipe": (4, 4, FULL),
    "one_f_one_b": (4, 4, FULL),
    "looped_bfs": (2, 4, FULL),
    "interleaved": (2, 4, FULL),
    "zb_h1": (4, 4, SPLIT),
    "zb_h2": (3, 5, SPLIT),
    "zb_v": (3, 3, SPLIT),
    "v_half": (3, 3, SPLIT),
    "gems": (3, 3, FULL),
    "chimera": (4, 4, FULL),
    "dualpipe": (4, 8, SPLIT),
    "dualpipe_v": (2, 4, SPLIT),
    "hanayo": (2, 2, FULL),
    "rerouted": (3, 4, Costs(*[[2, 1]] * 4), {"stages": 2}),
}


@pytest.mark.parametrize("name", [name for name in schedule_names() if name in FIGURES])
def test_the_figure_in_the_docstring_is_true(name):
    ranks, microbatches, costs, *more = FIGURES[name]
    options = more[0] if more else {}
    timeline = simulate(build(name, ranks=ranks, microbatches=microbatches, **options), costs)
    words = inspect.getdoc(SCHEDULES[name]).split()  # lines may be broken elsewhere
    assert " ".join(draw_text(timeline).split()) in " ".join(words)


def test_options_out_of_range_are_refused():
    for name, option in (("interleaved", "stages_per_rank"), ("hanayo", "waves")):
        with pytest.raises(ScheduleError, match=f"{option} must be a whole number.* 1 or more"):
            build(name, ranks=2, microbatches=2, **{option: 0})
    with pytest.raises(ScheduleError, match=r"pipelines must be a whole number.* 2 or more"):
        build("chimera", ranks=2, microbatches=2, pipelines=0)
    with pytest.raises(ScheduleError, match=r"pipelines must be even.*one of \[2, 6\] for 6 ranks"):
        build("chimera", ranks=6, microbatches=2, pipelines=3)
    with pytest.raises(
        ScheduleError, match="scaling 'backwards', expected one of direct, forward_doubling"
    ):
        build("chimera", ranks=2, microbatches=2, scaling="backwards")


def test_interleaved_spreads_micro_batches_over_even_rounds():
    """Ten micro-batches on four ranks are two rounds of five, three are one of three."""
    row = build("interleaved", ranks=4, microbatches=10).ranks[0]
    forwards = [str(action) for action in row if action.op is Op.F]
    assert forwards[:10] == [f"{stage}F{index}" for stage in (0, 4) for index in range(5)]
    row = build("interleaved", ranks=4, microbatches=3).ranks[3]
    assert " ".join(map(str, row)) == "3F0 3F1 3F2 7F0 7B0 7F1 7B1 7F2 7B2 3B0 3B1 3B2"


def test_chimera_by_hand():
    """The unit of the paper's figure 3: four ranks, two micro-batches each way."""
    rows = [" ".join(map(str, row)) for row in build("chimera", ranks=4, microbatches=4).ranks]
    assert rows[0] == "0F0 0F2 3F1 3B1 3F3 3B3 0B0 0B2"
    assert rows[1] == "1F0 2F1 1F2 2F3 2B1 1B0 2B3 1B2"
    assert rows[3] == "0F1 0F3 3F0 3B0 3F2 3B2 0B1 0B3"


def test_gems_takes_one_micro_batch_at_a_time():
    rows = [" ".join(map(str, row)) for row in build("gems", ranks=2, microbatches=3).ranks]
    assert rows == ["0F0 0B0 1F1 1B1 0F2 0B2", "1F0 1B0 0F1 0B1 1F2 1B2"]
    master = build("gems", ranks=2, microbatches=8, replications=2).ranks[0]
    assert " ".join(map(str, master[:8])) == "0F0 0F1 0B1 0B0 1F2 1F3 1B3 1B2"


def test_a_file_is_a_schedule(tmp_path):
    path = tmp_path / "mine.csv"
    for recompute in ("never", "always"):
        wanted = build("one_f_one_b", ranks=3, microbatches=4, recompute=recompute)
        path.write_text(to_text(wanted))
        found = build("file", ranks=3, microbatches=4, path=str(path), recompute=recompute)
        assert found.ranks == wanted.ranks
        assert found.max_activations == wanted.max_activations
    path.write_text(to_text(lower(build("zb_v", ranks=2, microbatches=3))))
    assert build("file", ranks=2, microbatches=3, path=str(path)).is_lowered
    with pytest.raises(
        ScheduleError, match="table of 2 ranks and 3 micro-batches, but the run has 2 ranks and 4"
    ):
        build("file", ranks=2, microbatches=4, path=str(path))
    with pytest.raises(ScheduleError, match="cannot read"):
        build("file", ranks=2, microbatches=3, path=str(tmp_path / "none.csv"))
    with pytest.raises(ScheduleError, match=r"no file is given; set pipeline.options.path"):
        build("file", ranks=2, microbatches=3)


def test_unknown_names_and_options_are_refused_with_the_known_ones():
    with pytest.raises(ScheduleError, match=r"'gpip', expected one of gpipe, one_f_one_b"):
        build("gpip", ranks=2, microbatches=2)
    with pytest.raises(ScheduleError, match=r"'waves', expected no options"):
        build("gpipe", ranks=2, microbatches=2, waves=3)
    with pytest.raises(ScheduleError, match=r"'often', expected one of always, except_last, never"):
        build("gpipe", ranks=2, microbatches=2, recompute="often")
    assert schedule_names()[:2] == ("gpipe", "one_f_one_b")


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2", None])
def test_counts_must_be_whole_and_positive(count):
    with pytest.raises(ScheduleError, match="ranks"):
        build("gpipe", ranks=count, microbatches=2)
    with pytest.raises(ScheduleError, match="microbatches"):
        build("gpipe", ranks=2, microbatches=count)
