"""Schedules with several stages a rank, split backwards or two directions, each against what was
published of it: bubble or makespan, and peak memory. Times are exact: small whole numbers."""

import itertools
from dataclasses import replace

import pytest

from gpipe_hpc.schedule import Costs, build, simulate

ONE_EACH = Costs(forward=1, input_gradient=1, weight_gradient=1)
EQUAL = Costs(forward=1, backward=1)
DOUBLE = Costs(forward=1, backward=2)


def grid(ranks, factors, extra=(0,)):
    """Return (K, M) for M a multiple of K, and a few more."""
    return [(k, k * n + more) for k, n, more in itertools.product(ranks, factors, extra)]


def timed(name, k, m, costs, **options):
    return simulate(build(name, ranks=k, microbatches=m, **options), costs)


def idle_in_span(timeline):
    """Return for each rank the time it idles between its first and its last action."""
    return [
        row[-1].end_s - row[0].start_s - busy
        for row, busy in zip(timeline.events, timeline.busy, strict=True)
    ]


@pytest.mark.parametrize("stages_per_rank", [1, 2, 3])
@pytest.mark.parametrize("costs", [EQUAL, DOUBLE, Costs(forward=3, backward=1)], ids=str)
def test_looped_bfs(stages_per_rank, costs):
    both = costs.forward + costs.backward
    for k, m in itertools.product((1, 2, 3, 5), (1, 2, 3, 4, 5, 9)):
        timeline = timed("looped_bfs", k, m, costs, stages_per_rank=stages_per_rank)
        expected = (stages_per_rank * max(m, k) + min(m, k) - 1) * both
        assert timeline.makespan == expected
        assert timeline.peak_activations == (m * stages_per_rank,) * k


@pytest.mark.parametrize("stages_per_rank", [1, 2, 3, 4])
@pytest.mark.parametrize("costs", [EQUAL, DOUBLE, Costs(forward=3, backward=1)], ids=str)
def test_interleaved(stages_per_rank, costs):
    v = stages_per_rank
    for k, m in grid((1, 2, 3, 4, 6), (1, 2, 3, 4)):
        timeline = timed("interleaved", k, m, costs, stages_per_rank=v)
        assert timeline.makespan == (v * m + k - 1) * (costs.forward + costs.backward)
        assert timeline.bubble == pytest.approx((k - 1) / (v * m + k - 1))
        peaks = [min(m * v, 2 * (k - 1 - rank) + (v - 1) * k + 1) for rank in range(k)]
        assert list(timeline.peak_activations) == peaks


def test_interleaved_peak_is_the_published_factor_over_1f1b():
    """1 + (K - 1) / (K v) times the K micro-batches of 1F1B, counted in stages v times smaller."""
    for k, v in itertools.product((2, 4, 8), (2, 3)):
        peak = build("interleaved", ranks=k, microbatches=3 * k, stages_per_rank=v).max_activations
        assert peak[0] / v == pytest.approx(k * (1 + (k - 1) / (k * v)))


def test_interleaved_without_whole_rounds_is_never_worse_than_padding_to_them():
    for k, m in itertools.product((2, 3, 4, 5), range(1, 14)):
        for v in (2, 3):
            padded = v * -(-m // k) * k + k - 1
            timeline = timed("interleaved", k, m, EQUAL, stages_per_rank=v)
            assert 2 * (v * m + min(m, k) - 1) <= timeline.makespan <= 2 * padded


@pytest.mark.parametrize("times", [(1, 1, 1), (2, 3, 2), (3, 2, 1), (2, 2, 0), (5, 4, 4)], ids=str)
def test_zb_h1(times):
    f, i, w = times
    assert w <= min(f, i)
    costs = Costs(forward=f, input_gradient=i, weight_gradient=w)
    for k, m in grid((1, 2, 3, 5, 8), (1, 2, 4), extra=(0, 1)):
        timeline = timed("zb_h1", k, m, costs)
        assert timeline.makespan == m * (f + i + w) + (k - 1) * (f + i - w)
        assert timeline.peak_activations == (min(m, k),) * k


def test_zb_h2_idles_in_no_ranks_own_span():
    for k in (1, 2, 3, 5, 8):
        for m in (2 * k - 1, 2 * k, 4 * k + 1):
            timeline = timed("zb_h2", k, m, ONE_EACH)
            assert idle_in_span(timeline) == [0] * k
            assert timeline.makespan == 3 * m + k - 1
            assert timeline.peak_activations == (2 * k - 1,) * k


def test_zb_v():
    for k in (1, 2, 3, 4, 6, 8):
        for m in (2 * k, 2 * k + 1, 4 * k):
            timeline = timed("zb_v", k, m, ONE_EACH)
            assert idle_in_span(timeline) == [0] * k
            assert timeline.makespan == 6 * m + k - 1
            assert timeline.bubble == pytest.approx((k - 1) / (6 * m + k - 1))
            assert timeline.peak_activations == (2 * k,) * k


def test_v_half():
    """Published: floor((K + 2) / 2) micro-batches of two stages, and a bubble of about K / 2M.

    This order idles a little more: 3.5 K where half of 1F1B's 6 (K - 1) would be 3 (K - 1).
    """
    for k in (1, 2, 3, 4, 5, 6, 7, 8, 16):
        for m in (2 * k, 2 * k + 1, 5 * k):
            timeline = timed("v_half", k, m, ONE_EACH)
            assert timeline.peak_activations == (2 * ((k + 2) // 2),) * k
            assert timeline.makespan == 6 * m + max(0, (7 * k - 8) // 2)
            assert timeline.bubble < (3.5 * k) / (6 * m)


@pytest.mark.parametrize("backward", [1, 2])
def test_gems_pair_period(backward):
    """A pair takes 4 K + 2 at B = 2F and 2 K + 2 at F = B; one after the other 6 K and 4 K."""
    period = {1: lambda k: 2 * k + 2, 2: lambda k: 4 * k + 2}[backward]
    for k in (2, 3, 4, 5, 8):
        times = [timed("gems", k, m, Costs(forward=1, backward=backward)) for m in (4, 6, 8, 10)]
        steps = {two.makespan - one.makespan for one, two in itertools.pairwise(times)}
        assert steps == {period(k)}
        assert {peak for one in times for peak in one.peak_activations} == {1}
    assert timed("gems", 6, 2, DOUBLE).makespan == 5 * 6 + 1


def test_gems_bubble_tends_to_the_published_one():
    for k in (2, 4, 8):
        assert timed("gems", k, 400, DOUBLE).bubble == pytest.approx((k - 1) / (k + 0.5), rel=0.01)


def test_gems_replications_set_the_memory():
    """MASTER with four passes each way keeps what MAST keeps of half as many micro-batches."""
    for m, replications, peak in ((8, 1, 4), (8, 2, 2), (16, 4, 2), (9, 2, 3), (8, 4, 1)):
        bare = build("gems", ranks=3, microbatches=m, replications=replications)
        assert bare.max_activations == (peak,) * 3
    each = build("gems", ranks=3, microbatches=8, replications=4)
    assert each.ranks == build("gems", ranks=3, microbatches=8).ranks


@pytest.mark.parametrize("pipelines", [2, 4, 8])
def test_chimera_at_equal_times(pipelines):
    for k, m in grid((2, 4, 6, 8, 16), (1, 2, 3)):
        if k % pipelines:
            continue
        timeline = timed("chimera", k, m, EQUAL, pipelines=pipelines)
        surplus = k - pipelines
        assert timeline.bubble == pytest.approx(surplus / (pipelines * m + surplus))
        peaks = timeline.peak_activations
        assert (min(peaks), max(peaks)) == (k - k // pipelines + 1, k)


def test_chimera_with_two_directions():
    for k, m in grid((2, 4, 6, 8, 16), (1, 2, 3)):
        assert timed("chimera", k, m, EQUAL).bubble == pytest.approx((k - 2) / (2 * m + k - 2))
    for k in (2, 4, 6, 8, 16):
        timeline = timed("chimera", k, k, DOUBLE)
        assert timeline.makespan == k + 2 * (2 * k - 2)
        assert timeline.bubble == pytest.approx((k - 2) / (1.5 * k + k - 2))


def test_chimera_forward_doubling_idles_half_as_long_for_twice_the_memory():
    """At B = 2F direct concatenation idles K - 2 for each unit of K and once more."""
    for k, n in itertools.product((4, 6, 8), (1, 2, 4)):
        m = 2 * k * n
        direct = timed("chimera", k, m, DOUBLE)
        doubled = timed("chimera", k, m, DOUBLE, scaling="forward_doubling")
        assert direct.makespan - 3 * m == (2 * n + 1) * (k - 2)
        assert doubled.makespan - 3 * m == 1.5 * n * (k - 2)
        assert max(doubled.peak_activations) == 2 * k


def test_dualpipe_idles_as_published():
    """(K - 2) t of (3 M + K - 2) t, and K + 1 micro-batches kept."""
    for k, n in itertools.product((2, 4, 6, 8), (0, 2, 8)):
        m = 2 * k + n
        timeline = timed("dualpipe", k, m, ONE_EACH)
        assert timeline.makespan == 3 * m + k - 2
        assert timeline.bubble == pytest.approx((k - 2) / (3 * m + k - 2))
        assert timeline.peak_activations == (k + 1,) * k
    assert timed("dualpipe", 8, 20, ONE_EACH).makespan == 66  # of its authors' own step()


def test_dualpipe_v_idles_as_published():
    """(K - 1) t of (3 M + K - 1) t where t is two half stages, and K + 1/2 micro-batches kept."""
    for k, n in itertools.product((1, 2, 3, 4, 8), (0, 1, 2, 8)):
        m = 2 * k + n
        timeline = timed("dualpipe_v", k, m, ONE_EACH)
        assert timeline.makespan == 2 * (3 * m + k - 1)
        assert timeline.bubble == pytest.approx((k - 1) / (3 * m + k - 1))
        assert timeline.peak_activations == (2 * k + 1,) * k
    assert timed("dualpipe_v", 4, 10, ONE_EACH).makespan == 66  # in half stages


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe_v"])
def test_dualpipe_idles_half_as_long_where_an_output_does_not_wait(name):
    for k, n in itertools.product((2, 4, 6, 8), (0, 2, 8)):
        m = 2 * k + n
        bare = build(name, ranks=k, microbatches=m)
        together = simulate(bare, ONE_EACH)
        at_once = simulate(replace(bare, overlaps=()), ONE_EACH)
        work = max(together.busy)
        assert at_once.makespan - work == (together.makespan - work) / 2


@pytest.mark.parametrize("waves", [1, 2, 4])
def test_hanayo_is_within_seven_percent_of_its_published_bubble(waves):
    for k in (2, 3, 4, 8):
        timeline = timed("hanayo", k, k, DOUBLE, waves=waves)
        published = (2 * k - 2) / (3 * k * waves + k - 1)
        assert timeline.bubble <= 1.07 * published
        if waves > 1:
            assert timeline.bubble >= 0.9 * published
        for m in (1, 2 * k, 4 * k + 1):
            bare = build("hanayo", ranks=k, microbatches=m, waves=waves)
            assert max(bare.max_activations) <= 2 * waves * k


def test_hanayo_with_more_micro_batches_idles_no_longer_than_1f1b():
    """Of one wave; 1F1B idles (K - 1) (F + B) of stages 2 W times as big."""
    for k in (2, 4, 8):
        for m in (2 * k, 3 * k + 1, 8 * k):
            idle = timed("hanayo", k, m, DOUBLE, waves=1).makespan - 6 * m
            assert idle <= 6 * (k - 1)


def test_hanayo_numbers_found_independently():
    """Of a greedy scheduler written apart from this one, at M = K."""
    found = {
        (k, w): round(timed("hanayo", k, k, DOUBLE, waves=w).bubble, 3)
        for k in (4, 8)
        for w in (1, 2, 4)
    }
    assert found == {
        (4, 1): 0.333,
        (4, 2): 0.213,
        (4, 4): 0.119,
        (8, 1): 0.368,
        (8, 2): 0.238,
        (8, 4): 0.135,
    }
