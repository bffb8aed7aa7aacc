"""A search over layouts: against every layout of small problems, laid out and simulated in full."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpipe_hpc.device.device import planned_device
from gpipe_hpc.errors import ConfigError, GpipeError
from gpipe_hpc.models import normalise_layers, stage_layers
from gpipe_hpc.planner import CountedCosts, Example, Request, lay_out
from gpipe_hpc.planner.costs.rates import Rates
from gpipe_hpc.planner.forecast import flop_costs, forecast
from gpipe_hpc.planner.search import ranking
from gpipe_hpc.planner.search.bounds import CombiningOptions, bound
from gpipe_hpc.planner.search.cache import SearchCache
from gpipe_hpc.planner.search.candidates import Candidate, Space
from gpipe_hpc.planner.search.explanation import explain_slower, parts_s
from gpipe_hpc.planner.search.machine import Machine, on_hosts
from gpipe_hpc.planner.search.minimum_ranks import MinimumRanks, find_minimum_ranks
from gpipe_hpc.planner.search.ranking import merged, search
from gpipe_hpc.planner.search.reductions import copies_of, reductions_time
from gpipe_hpc.planner.search.text import counts_text
from gpipe_hpc.planner.search.trial import (
    CandidateEvaluation,
    CandidateTable,
    CombiningChoices,
    MemoryExcess,
    lay_out_in_memory,
    try_out,
)
from gpipe_hpc.planner.shares import microbatch_shares
from gpipe_hpc.schedule import Cluster, Link, simulate_job
from gpipe_hpc.schedule.families.rerouted import ORDERS
from gpipe_hpc.settings import Outer
from tests.support import mean_square

WIDTHS = (64, 96, 32, 128, 64, 64)


def layers_of(widths=WIDTHS):
    pairs = list(pairwise(widths))
    return normalise_layers([each for a, b in pairs for each in (nn.Linear(a, b), nn.ReLU())])


def cache_of(
    ranks=4,
    hosts=1,
    batch=12,
    widths=WIDTHS,
    *,
    link_s=1e-5,
    speed=1e9,
    layer_s=1e-5,
    policy="time",
):
    layers = layers_of(widths)

    def counted(samples):
        inputs = torch.empty(samples, widths[0], device="meta")
        targets = torch.empty(samples, widths[-1], device="meta")
        example = Example(inputs, targets, mean_square, 0, planned_device("cpu"))
        return CountedCosts(layers, example)

    cluster = Cluster(on_hosts(ranks, hosts), Link(link_s / 10, 10 * speed), Link(link_s, speed))
    return SearchCache(Machine(cluster, Rates.alike(1e9), layer_s), layers, counted, batch, policy)


def space_of(cache, **asked):
    request = Request(**{"partition": "time", "outer": Outer(bucket_bytes=20e3), **asked})
    ranks = cache.machine.num_ranks
    return Space(request, ranks, cache.batch_size, len(cache.layers))


def all_ways(cache, space):
    return CombiningChoices.of(space.base, space.fixed, len(cache.machine.cluster.hosts))


def in_full(trial, cache):
    """Return the seconds of a step of all replicas, lowered and simulated with its reductions."""
    each = trial.candidate
    samples = each.samples(cache.batch_size)
    cost_model = cache.cost_model(samples)
    layout = lay_out(trial.request, cost_model)
    stages = cache.stages(samples, layout.partition.counts)
    costs = layout.partition._replace(times=cost_model.times).stage_costs()
    if layout.recomputed is not None:
        again = [sum(cost_model.times[i].forward for i in own) for own in layout.recomputed]
        costs = replace(costs, recompute=again)
    sent = flop_costs(stages)
    shares = microbatch_shares(
        cache.batch_size, each.replicas * each.microbatches, range(each.microbatches)
    )
    costs = replace(
        costs, boundary_bytes=sent.boundary_bytes, skip_bytes=sent.skip_bytes, shares=shares
    )
    cluster, placement = cache.machine.cluster, layout.schedule.placement
    replicas = cluster.replicas(layout.schedule, costs, each.replicas)
    outer, half = trial.request.combining, 1.0
    sums, sizes = [], {}
    for number, stage in enumerate(stages):
        own = cache.bucket_sizes(stage.layers, outer.bucket_bytes)
        ranks = copies_of(placement, number, each.replicas, each.stages)
        by_host = outer.hierarchy == "host"
        sums.append(reductions_time(cluster, ranks, sum(own), len(own), by_host=by_host))
        if len(ranks) > 1 and own:
            sizes[number] = own
    if outer.shard == "flat" and trial.combining is not None:
        half = 0.5
    with_sums = {
        id(own): replace(
            own,
            reduction=[half * time.bytes_s for time in sums],
            reduction_latency=[half * time.latency_s for time in sums],
            gather=[0.0] * len(sums)
            if half == 1
            else [
                half * (time.bytes_s + time.latency_s * len(sizes.get(number, ())))
                for number, time in enumerate(sums)
            ],
            bucket_shares=sizes,
            reduces_within=outer.overlap,
        )
        for own in replicas
    }
    return simulate_job(layout.schedule, [with_sums[id(own)] for own in replicas]).makespan


def every_trial(cache, space):
    for candidate in space:
        try:
            yield candidate, try_out(candidate, cache, space.base, all_ways(cache, space))
        except GpipeError:
            continue


def test_a_trial_takes_and_holds_what_the_whole_layout_does():
    """Nothing was lowered and no reduction simulated: a closed form stands in for both."""
    cache = cache_of(4, 2, 6)
    space = space_of(cache)
    seen = set()
    for candidate, trial in every_trial(cache, space):
        assert isinstance(trial, CandidateEvaluation)
        assert in_full(trial, cache) == pytest.approx(trial.step_s, rel=0.01), candidate
        layout = lay_out(trial.request, cache.cost_model(candidate.samples(cache.batch_size)))
        shares = microbatch_shares(
            cache.batch_size,
            candidate.replicas * candidate.microbatches,
            range(candidate.microbatches),
        )
        ranks = forecast(
            cache.cost_model(candidate.samples(cache.batch_size)).count,
            layout.partition.counts,
            layout.schedule,
            trial.request.kept_states,
            layout.recomputed,
            shares,
            layout.sharing,
        ).ranks
        assert max(rank.total_bytes for rank in ranks) == trial.nbytes, candidate
        assert sum(parts_s(trial).values()) == pytest.approx(trial.step_s)
        seen |= {candidate.schedule, trial.combining and trial.combining.shard}
    assert {"chimera", "zb_v", "interleaved", "none", "flat"} <= seen


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    ranks=st.sampled_from([2, 3, 4]),
    hosts=st.sampled_from([1, 2]),
    batch=st.sampled_from([4, 6]),
    widths=st.lists(st.sampled_from([16, 64, 200]), min_size=4, max_size=6).map(tuple),
    speed=st.sampled_from([1e7, 1e9]),
    layer_s=st.sampled_from([0.0, 1e-4]),
    room=st.sampled_from([None, 0.0, 0.3]),
)
def test_a_search_is_never_worse_than_every_layout_tried(
    ranks, hosts, batch, widths, speed, layer_s, room
):
    """The winner, in full, is within 1 % of the best of all layouts, in full."""
    hosts = hosts if ranks % hosts == 0 else 1
    cache = cache_of(ranks, hosts, batch, widths, speed=speed, layer_s=layer_s)
    space = space_of(cache)
    if room is not None:
        held = [each.nbytes for _, each in every_trial(cache, space)]
        space = space_of(cache, memory_bytes=min(held) + room * (max(held) - min(held)))
    trials = [
        each for _, each in every_trial(cache, space) if isinstance(each, CandidateEvaluation)
    ]
    assert trials
    found = search(space, cache)
    best = min(in_full(each, cache) for each in trials)
    assert in_full(found.trials[0], cache) <= 1.01 * best
    assert found.distance <= 0.01


@pytest.mark.parametrize(("ranks", "batch", "holes_win"), [(5, 10, False), (7, 14, True)])
def test_pipelines_with_holes_are_among_the_layouts(ranks, batch, holes_win):
    """Seven ranks were 1 x 7 or 7 x 1. Of all layouts tried the search finds the best.

    Each keeps its bound, and takes in full what its trial says. Where a rank may hold less than
    the whole model, seven ranks are the fastest with holes.
    """
    cache = cache_of(ranks, 1, batch, (64,) * 5, layer_s=1e-4)

    def two_each(**asked):
        space = space_of(cache, microbatches=2, **asked)
        return replace(space, fixed=frozenset({"microbatches"}))

    space = two_each()
    ways = all_ways(cache, space)
    allowed = CombiningOptions("host" in ways.hierarchies, "flat" in ways.shards)
    of_rows = {}
    for candidate, trial in every_trial(cache, space):
        known = bound(candidate, cache, space.base, allowed)
        assert known.seconds <= trial.step_s * (1 + 1e-9), candidate
        assert known.nbytes <= trial.nbytes, candidate
        if candidate.rows > 1:
            assert in_full(trial, cache) == pytest.approx(trial.step_s, rel=0.01), candidate
            own = of_rows.setdefault(candidate.written.stages, [])
            own.append(trial)
    assert set(of_rows) == {n for n in range(2, ranks) if ranks % n}
    assert {t.candidate.written.schedule for own in of_rows.values() for t in own} == set(ORDERS)

    alone = min(t.nbytes for _, t in every_trial(cache, space) if t.candidate.stages == 1)
    tight = two_each(memory_bytes=0.9 * alone)
    tried = [each for _, each in every_trial(cache, tight) if isinstance(each, CandidateEvaluation)]
    found = search(tight, cache).trials[0]
    assert found.step_s <= 1.01 * min(each.step_s for each in tried)
    whole = min(each.step_s for each in tried if each.candidate.rows == 1)
    assert (found.step_s < whole) == (found.candidate.rows > 1) == holes_win


def test_of_ranks_of_unequal_paces_holes_are_among_the_layouts_too():
    """One of five ranks takes three times as long; no layout beats its bound."""
    cache = cache_of(5, 1, 10, (64,) * 5, layer_s=1e-4)
    space = space_of(cache, microbatches=2, paces=(1.0, 1.0, 1.0, 3.0, 1.0))
    space = replace(space, fixed=frozenset({"microbatches"}))
    ways = all_ways(cache, space)
    allowed = CombiningOptions("host" in ways.hierarchies, "flat" in ways.shards)
    tried = []
    for candidate, trial in every_trial(cache, space):
        known = bound(candidate, cache, space.base, allowed)
        assert known.seconds <= trial.step_s * (1 + 1e-9), candidate
        assert known.nbytes <= trial.nbytes, candidate
        tried.append(trial)
    assert {t.candidate.written.stages for t in tried if t.candidate.rows > 1} == {2, 3, 4}
    found = search(space, cache).trials[0]
    assert found.step_s <= 1.01 * min(each.step_s for each in tried)


@pytest.mark.parametrize(
    ("asked", "fixed"),
    [
        ({"schedule": "zb_v"}, "schedule"),
        ({"normalise_over_replicas": True}, ""),
        ({"stages": 5}, "stages"),
    ],
)
def test_what_holes_cannot_do_has_whole_replicas_alone(asked, fixed):
    cache = cache_of(5)
    space = replace(space_of(cache, **asked), fixed=frozenset({fixed} - {""}))
    assert not space.shapes_with_holes()
    assert space.shapes() and {each.rows for each in space} == {1}


def test_no_layout_beats_its_bound_and_those_left_out_are_no_better():
    cache = cache_of(6, 2, 12)
    space = space_of(cache)
    ways = all_ways(cache, space)
    allowed = CombiningOptions("host" in ways.hierarchies, "flat" in ways.shards)
    least = {}
    for candidate, trial in every_trial(cache, space):
        known = bound(candidate, cache, space.base, allowed)
        assert known.seconds <= trial.step_s * (1 + 1e-9), candidate
        assert known.nbytes <= trial.nbytes, candidate
        least[candidate] = trial.step_s
    found = search(space, cache)
    assert found.num_simulated < found.num_layouts == len(list(space))
    assert found.trials[0].step_s <= min(least.values()) * 1.01


def test_a_search_that_ends_early_says_how_far_it_may_be_off():
    cache = cache_of(4, 1, 64)
    space = space_of(cache)
    whole, cut_off = search(space, cache), search(space, cache, most_actions=200)
    assert cut_off.num_simulated < whole.num_simulated
    assert cut_off.num_large > 0
    best = cut_off.trials[0].step_s
    assert whole.trials[0].step_s >= best * (1 - cut_off.distance) * (1 - 1e-9)
    assert cut_off.distance > whole.distance


def test_with_little_memory_something_is_recomputed_and_with_less_nothing_fits():
    cache = cache_of(2, 1, 256, (32,) * 6)

    def coarse(**asked):
        return replace(space_of(cache, microbatches=4, **asked), fixed=frozenset({"microbatches"}))

    free = search(coarse(), cache)
    assert all(each.candidate.recompute == "never" for each in free.trials)
    limit = 0.98 * min(each.nbytes for _, each in every_trial(cache, coarse()))
    tight = search(coarse(memory_bytes=limit), cache)
    assert "budget" in {each.candidate.recompute for each in tight.trials}
    assert max(each.nbytes for each in tight.trials) <= limit
    none = search(coarse(memory_bytes=1.0), cache)
    assert not none.trials and none.num_too_much == none.num_layouts


def test_the_fewest_ranks_are_the_first_number_on_which_any_layout_fits():
    cache = cache_of(1, 1, 8, (64,) * 9)

    def on(ranks):
        return cache.on(Cluster((ranks,), Link(), Link()))

    whole = min(each.nbytes for _, each in every_trial(on(1), space_of(on(1))))
    limit = whole / 2.5

    def spaces(ranks):
        return space_of(on(ranks), memory_bytes=limit)

    found = find_minimum_ranks(spaces, on)
    fitting = [
        ranks
        for ranks in range(1, found.num_ranks + 1)
        if any(
            isinstance(each, CandidateEvaluation)
            for _, each in every_trial(on(ranks), spaces(ranks))
        )
    ]
    assert fitting == [found.num_ranks] and found.num_ranks > 2
    assert isinstance(found.nearest, MemoryExcess) and found.nearest.nbytes > limit
    assert found.first <= found.num_ranks and "one_f_one_b" in found.schedules
    with pytest.raises(ConfigError, match="one layer alone"):
        find_minimum_ranks(lambda ranks: space_of(on(ranks), memory_bytes=10_000), on)


def test_a_search_times_the_best_layouts_on_the_cuts_that_a_run_takes():
    widths = (16, 64, 16, 64, 16, 64, 200, 300)
    cache = cache_of(2, 1, 8, widths, policy="simulated")
    space = space_of(cache, partition="simulated")
    for trial in search(space, cache).trials[:6]:
        assert in_full(trial, cache) == pytest.approx(trial.step_s, rel=0.01), trial.candidate
    even, best = dict(every_trial(cache, space)), dict(every_trial(cache.with_open_cuts(), space))
    several = [each for each in even if each.num_stages > each.stages]
    gains = [1 - best[each].step_s / even[each].step_s for each in several]
    assert max(gains) > 0.05 and {"zb_v", "interleaved"} <= {each.schedule for each in several}


def test_a_layout_asks_for_a_simulated_cut_where_that_makes_it_faster():
    """A search told cuts of mirrored pipelines that were 30 % off, and nobody said what to do."""
    cache = cache_of(2, 1, 8, (16, 64, 16, 64, 16, 64, 200, 300))
    asked = frozenset({"stages", "schedule"})
    space = replace(space_of(cache, stages=2, schedule="zb_v"), fixed=asked)
    even = {each.microbatches: trial for each, trial in every_trial(cache, space)}
    trials = search(space, cache).trials
    asking = [each for each in trials if each.candidate.simulates_cut]
    assert asking
    for trial in asking:
        assert trial.step_s < 0.99 * even[trial.candidate.microbatches].step_s
        assert in_full(trial, cache) == pytest.approx(trial.step_s, rel=0.01), trial.candidate
        assert "pipeline.partition=simulated" in trial.candidate.overrides()
    assert [each.step_s for each in trials] == sorted(each.step_s for each in trials)
    given = search(replace(space, fixed=asked | {"partition"}), cache).trials
    by_size = search(space, cache_of(2, 1, 8, WIDTHS, policy="uniform")).trials
    assert given and by_size
    assert not any(each.candidate.simulates_cut for each in (*given, *by_size))


@pytest.mark.parametrize(
    ("policy", "fixed", "says"),
    [("time", (), True), ("time", ("partition",), False), ("simulated", (), False)],
)
def test_what_was_not_tried_on_simulated_cuts_is_said(policy, fixed, says):
    """No layout was faster than the first, it said; one that was left out could be, cut anew."""
    cache = cache_of(2, 1, 8, policy=policy)
    found = search(replace(space_of(cache, partition=policy), fixed=frozenset(fixed)), cache)
    assert found.trials
    assert ("on cuts with even stages, no" in counts_text(found, 1)) == says
    assert counts_text(merged([found, found]), 1).count("even stages") == says


@pytest.fixture
def searched_whole(monkeypatch):
    """Search two ranks whose cuts are simulated, each layout tried; that of so many tried anew."""
    cache = cache_of(2, 1, 8, policy="simulated")
    space = space_of(cache, partition="simulated")
    monkeypatch.setattr(ranking, "_ENOUGH", 10**6)

    def searched(cut_again):
        monkeypatch.setattr(ranking, "_CUT_AGAIN", cut_again)
        return search(space, cache)

    shared = [c for c in space if c.num_stages > c.stages]
    bounds = {
        c: bound(c, cache, space.base, CombiningOptions(by_host=False, divided=False))
        for c in shared
    }
    return searched, {candidate: each.seconds for candidate, each in bounds.items()}


def test_the_bound_is_of_layouts_that_were_not_cut_anew(searched_whole):
    """They were tried on cuts with even stages, and counted as if none were faster."""
    searched, least_s = searched_whole
    assert searched(10**6).least_s is None  # nothing is left to be faster
    found = searched(1)
    best_s = found.trials[0].step_s
    behind = [s for c, s in least_s.items() if c != found.trials[0].candidate and s < best_s]
    assert behind and found.least_s == pytest.approx(min(behind))


def test_the_bound_is_of_no_layout_that_cannot_be_built(searched_whole, monkeypatch):
    searched, least_s = searched_whole
    hopeful = min(least_s, key=least_s.get)
    tried = ranking.try_out

    def refusing(candidate, *others):
        if replace(candidate, simulates_cut=False) == hopeful:
            raise GpipeError("planted")
        return tried(candidate, *others)

    monkeypatch.setattr(ranking, "try_out", refusing)
    found = searched(10**6)
    assert found.num_refused > 0 and least_s[hopeful] < found.trials[0].step_s
    assert found.least_s is None


def test_why_a_layout_is_worse_names_what_grows_most():
    cache = cache_of(4, 1, 16, layer_s=0.0)
    space = space_of(cache)
    ways = all_ways(cache, space)

    def tried(**settings):
        each = {"replicas": 1, "stages": 4, "microbatches": 8, "schedule": "one_f_one_b"}
        return try_out(Candidate(**{**each, **settings}), cache, space.base, ways)

    assert "fill and drain +" in explain_slower(tried(microbatches=2), tried())
    assert "compute (recomputation) +" in explain_slower(tried(recompute="always"), tried())
    assert explain_slower(tried(), tried()) == "as fast"
    slow = replace(tried(), step_s=2 * tried().step_s)
    assert explain_slower(slow, tried()).startswith("100.0 % slower")


def test_a_slow_link_between_hosts_keeps_pipelines_within_them():
    """And where it is cheap to, gradients are summed inside each host first."""
    cache = cache_of(8, 2, 16, (64,) * 9, speed=1e6)
    # Pipelines with holes have few copies, so their sums may cross the link.
    best = next(each for each in search(space_of(cache), cache).trials if each.candidate.rows == 1)
    assert best.load.is_between
    spans = stage_layers(cache.partition(1, best.candidate.num_stages).counts)
    assert len(spans) == best.candidate.num_stages
    assert best.candidate.stages <= 4 or best.combining is None


def test_slow_ranks_get_less_and_no_layout_is_missed_for_them():
    """The cut of a search took all ranks for equally fast, whatever `pipeline.paces` said."""
    cache = cache_of(4, 1, 12, (64,) * 9, layer_s=0.0)
    paces = (1.0, 1.0, 3.0, 1.0)
    asked = space_of(cache, paces=paces)
    tried = [each for _, each in every_trial(cache, asked) if isinstance(each, CandidateEvaluation)]
    best = search(asked, cache).trials[0]
    assert best.step_s <= 1.01 * min(each.step_s for each in tried)
    even = min(each.step_s for _, each in every_trial(slowed(cache, paces), space_of(cache)))
    assert best.step_s < 0.9 * even, "equal shares wait for the slow rank"


def slowed(cache, paces):
    """Return the ground of ranks of which the cut knows nothing, as slow as they are."""
    return cache.on(replace(cache.machine.cluster, paces=dict(enumerate(paces))))


def test_what_lacks_where_nothing_fits_is_told_of_the_least():
    """It was told of a layout that recomputes nothing."""
    cache = cache_of(2, 1, 64)
    chosen = Candidate(1, 2, 4, "gpipe")
    free = space_of(cache)
    ways = all_ways(cache, free)

    def held(recompute):
        found = lay_out_in_memory(replace(chosen, recompute=recompute), cache, free.base, ways)
        assert isinstance(found, CandidateTable)
        return found.held(next(ways.all()))

    least, most = max(held("except_last")), max(held("never"))
    assert least < 0.9 * most
    base = replace(free.base, memory_bytes=[0.99 * each for each in held("except_last")])
    found = try_out(chosen, cache, base, ways)
    assert isinstance(found, MemoryExcess) and found.candidate.recompute == "except_last"
    assert found.excess_bytes <= 0.011 * least


def test_fewer_ranks_that_were_not_tried_are_not_spoken_of():
    found = MinimumRanks(4, Candidate(1, 4, 4, "gpipe"), 2, None, ("gpipe",))
    assert "no layout tried on fewer ranks fits (tried: gpipe" in found.fewer_text()
    assert found._replace(first=4).fewer_text().endswith("alone need that many ranks")
    assert found._replace(num_ranks=1).fewer_text() == ""
    assert "no layout on fewer ranks" in found._replace(first=1, schedules=()).fewer_text()


def test_a_given_number_of_stages_has_holes_whatever_it_is():
    """Of many stages not every number is tried, and a given one between was not found."""
    cache = cache_of(50, batch=50, widths=(8,) * 21)
    space = replace(space_of(cache, stages=17), fixed=frozenset({"stages"}))
    assert space.shapes_with_holes() == [(3, 17)]
