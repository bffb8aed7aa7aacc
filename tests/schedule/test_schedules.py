"""Each schedule against its published closed forms and its own docstring."""

import inspect
import itertools

import pytest

from gpipe_hpc.schedule import (
    Costs,
    ScheduleError,
    build,
    check,
    draw_text,
    gpipe,
    lower,
    one_f_one_b,
    schedule_names,
    simulate,
)

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


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
@pytest.mark.parametrize("recompute", ["never", "always", "except_last"])
def test_all_sizes_pass_the_checker_bare_and_lowered(name, recompute):
    for k, m in SIZES:
        bare = build(name, ranks=k, microbatches=m, recompute=recompute)
        check(bare)
        check(lower(bare))


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


@pytest.mark.parametrize("function", [gpipe, one_f_one_b])
def test_the_figure_in_the_docstring_is_true(function):
    timeline = simulate(function(4, 4), Costs(forward=1, backward=2))
    assert draw_text(timeline) in inspect.getdoc(function).replace("\n    ", "\n")


def test_unknown_names_and_options_are_refused_with_the_known_ones():
    with pytest.raises(ScheduleError, match=r"gpipe, one_f_one_b.*'gpip'"):
        build("gpip", ranks=2, microbatches=2)
    with pytest.raises(ScheduleError, match=r"no options.*'waves'"):
        build("gpipe", ranks=2, microbatches=2, waves=3)
    with pytest.raises(ScheduleError, match=r"always, except_last, never.*'often'"):
        build("gpipe", ranks=2, microbatches=2, recompute="often")
    assert schedule_names()[:2] == ("gpipe", "one_f_one_b")


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2", None])
def test_counts_must_be_whole_and_positive(count):
    with pytest.raises(ScheduleError, match="ranks"):
        build("gpipe", ranks=count, microbatches=2)
    with pytest.raises(ScheduleError, match="microbatches"):
        build("gpipe", ranks=2, microbatches=count)
