"""What algorithms send and take: plans beside closed forms, and the fit of a link."""

import random
from itertools import pairwise
from math import log2

import pytest

from experiments.outer.collectives.costs import (
    FORMS,
    PIPELINED,
    Link,
    Terms,
    best_block_bytes,
    bus_factor,
)
from experiments.outer.collectives.fitting import Sample, fit
from experiments.outer.collectives.menu import PLANNERS, Case, hosts_of, plan
from experiments.outer.collectives.one_port import simulated_s
from experiments.outer.collectives.trees import double_binary_trees
from experiments.outer.collectives.tuning import bucket_bytes, choose, crossovers, predicted
from gpipe_hpc.comm.collectives.plan import PlanPosition
from tests.comm.collectives.fitting_plans import num_sent

SIZES = range(2, 10)
COUNT = 40320  # divided by every number of ranks up to 9, and by 16
BLOCK = COUNT // 12
LINK = Link(start_s=3.0, byte_s=0.011, add_s=0.004)


def plans_of(collective, name, size, count=COUNT, block=BLOCK, group=1):
    case = Case(count, block, 0, hosts_of(size, group))
    return [plan(collective, name, PlanPosition(size, i), case) for i in range(size)]


def is_power_of_two(n):
    return n & (n - 1) == 0


TWO_LEVELS = ("hierarchical", "two_level", "nccl_hierarchical", "chain_binomial", "chain_chain")
CASES = [
    (collective, name, n, g)
    for collective, names in FORMS.items()
    for name in names
    for n in SIZES
    for g in ((1, 2, 3) if name in TWO_LEVELS else (1,))
]


@pytest.mark.parametrize(("collective", "name", "size", "group"), CASES)
def test_plans_take_what_their_closed_forms_say(collective, name, size, group):
    form = LINK.seconds(FORMS[collective][name](size, COUNT, BLOCK, group))
    took = simulated_s(plans_of(collective, name, size, group=group), LINK)
    by_halves = name in ("rabenseifner", "halving", "doubling", "scatter_ring", "scatter_doubling")
    if by_halves and not is_power_of_two(size):
        assert 0.5 * form <= took <= form * (1 + 1e-9)
    elif name == "double_binary_tree":
        assert took == pytest.approx(form, rel=0.1)
    else:
        assert took == pytest.approx(form, rel=1e-9)


def test_every_algorithm_has_a_closed_form():
    assert {c: set(each) for c, each in FORMS.items()} == {
        c: set(each) for c, each in PLANNERS.items()
    }


def test_a_double_binary_tree_moves_each_byte_twice_and_no_rank_has_more_than_two_children():
    """Sanders, Speck, Traeff: a leaf of one tree is within the other."""
    for n in range(2, 40):
        trees = double_binary_trees(n)
        children = [sum(len(tree.children(i)) for tree in trees) for i in range(n)]
        assert max(children) <= 2
        assert max(tree.height for tree in trees) <= (n - 1).bit_length() + 1
        assert all(tree.path(i)[0] == tree.parents.index(None) for tree in trees for i in range(n))
    link, num_bytes = Link(1e-6, 1e-9), 2**30
    for n in (8, 64, 512):
        fastest = predicted("all_reduce", "double_binary_tree", link, n, num_bytes).seconds
        assert fastest == pytest.approx(2 * num_bytes * link.byte_s, rel=0.05)
    assert (
        predicted("all_reduce", "double_binary_tree", link, 512, 4096).seconds
        < predicted("all_reduce", "ring", link, 512, 4096).seconds / 10
    )


def sent(collective, name, size):
    return [num_sent(plan) for plan in plans_of(collective, name, size)]


@pytest.mark.parametrize("n", SIZES)
def test_bytes_sent_by_each_rank_are_those_of_theory(n):
    """Elements stand for bytes; the textbooks' sums, written again from them."""
    p = 2 ** int(log2(n))
    folds = n - p
    halves = 2 * COUNT * (n - 1) // n
    assert sent("all_reduce", "ring", n) == [halves] * n
    assert sent("all_reduce", "rank_order", n) == [halves] * n
    assert sent("reduce_scatter", "ring", n) == sent("all_gather", "ring", n) == [halves // 2] * n
    # Of each folded pair the first hands over its vector, the other gives back the result.
    doubling = [COUNT, COUNT * (int(log2(p)) + 1)] * folds
    doubling += [COUNT * int(log2(p))] * (n - 2 * folds)
    assert sent("all_reduce", "recursive_doubling", n) == doubling
    core = 2 * COUNT * (p - 1) // p
    expected = [COUNT, COUNT + core] * folds + [core] * (n - 2 * folds)
    assert sent("all_reduce", "rabenseifner", n) == expected
    ends = [COUNT] + [2 * COUNT] * (n - 2) + [COUNT]
    assert sorted(sent("all_reduce", "chain", n)) == sorted(ends)
    # A tree has n-1 edges: the vector goes up each once, and down once.
    assert sum(sent("all_reduce", "tree", n)) == 2 * (n - 1) * COUNT
    assert sent("broadcast", "binomial", n)[0] == -(-log2(n) // 1) * COUNT
    assert sum(sent("broadcast", "binomial", n)) == (n - 1) * COUNT
    assert sent("broadcast", "chain", n) == [COUNT] * (n - 1) + [0]
    assert sent("broadcast", "scatter_ring", n)[0] == halves
    if folds == 0:
        assert sent("reduce_scatter", "halving", n) == [halves // 2] * n
        assert sent("all_gather", "doubling", n) == [halves // 2] * n


@pytest.mark.parametrize("name", ["hierarchical", "two_level", "nccl_hierarchical"])
def test_between_hosts_the_vector_goes_once_for_each(name):
    hosts = (0, 0, 0, 1, 1, 2)
    case = Case(100, 10, 4, hosts)
    plans = [plan("broadcast", name, PlanPosition(6, i), case) for i in range(6)]
    crossing = [
        (rank, move.span.length)
        for rank, own in enumerate(plans)
        for step in own
        for move in step.sends
        if hosts[rank] != hosts[move.peer]
    ]
    assert sum(length for _, length in crossing) == 200 and {r for r, _ in crossing} <= {0, 4, 5}
    assert sum(num_sent(own) for own in plans) == 5 * 100


@pytest.mark.parametrize("n", [2, 3, 4, 9, 64])
@pytest.mark.parametrize(
    ("collective", "name"), [(c, a) for c, names in FORMS.items() for a in names if a in PIPELINED]
)
@pytest.mark.parametrize("num_bytes", [1000, 1_000_000, 1_000_000_000])
def test_no_block_is_better_than_the_best(collective, name, n, num_bytes):
    link = Link(5e-6, 1e-10, 5e-11)
    form = FORMS[collective][name]

    block = best_block_bytes(collective, name, link, n, num_bytes, 4)
    numbers = [round(1.1**power) for power in range(104)]
    least = min(link.seconds(form(n, num_bytes, num_bytes / m, 4)) for m in numbers)
    # Blocks are whole bytes: of short vectors that rounds a little.
    assert link.seconds(form(n, num_bytes, block, 4)) <= least * (1 + 1e-3)
    if (collective, name) == ("broadcast", "chain") and n > 2 and num_bytes > 1e6:
        star = (num_bytes * link.start_s / ((n - 2) * link.byte_s)) ** 0.5
        assert block == pytest.approx(star, rel=0.02)


def test_the_best_chain_is_that_of_the_paper():
    """16 ranks, 5 us, 10 GB/s, 64 MiB: 8.15 ms, where a binomial tree takes 26.9 ms."""
    link, size = Link(5e-6, 1e-10), 64 * 2**20
    assert predicted("broadcast", "chain", link, 16, size).seconds == pytest.approx(8.15e-3, 1e-2)
    assert predicted("broadcast", "binomial", link, 16, size).seconds == pytest.approx(
        26.9e-3, 1e-2
    )
    ring = predicted("broadcast", "scatter_ring", link, 16, size).seconds
    assert ring == pytest.approx(12.7e-3, 1e-2)


@pytest.mark.parametrize("collective", FORMS)
def test_the_tuner_picks_the_fastest_closed_form(collective):
    for link in (Link(5e-6, 1e-10, 5e-11), Link(5e-3, 8e-8), Link(0.0, 1e-9), Link(1e-4, 0.0)):
        for n in (2, 3, 4, 8, 13):
            for num_bytes in (0, 4, 1024, 2**20, 2**28):
                choice = choose(collective, link, n, num_bytes)
                times = {
                    name: link.seconds(form(n, num_bytes, choice.block_bytes, 1))
                    for name, form in FORMS[collective].items()
                    if name not in PIPELINED
                }
                assert choice.seconds <= min(times.values())
                if choice.algorithm not in PIPELINED:
                    assert times[choice.algorithm] == min(times.values()) == choice.seconds


def test_the_tuner_turns_from_few_steps_to_few_bytes_as_vectors_grow():
    link = Link(1e-4, 1e-9)
    names = ["recursive_doubling", "rabenseifner", "ring"]
    picks = [choose("all_reduce", link, 8, 4**k, names).algorithm for k in range(2, 15)]
    assert picks[0] == "recursive_doubling" and picks[-1] == "rabenseifner"
    assert sum(a != b for a, b in pairwise(picks)) == 1


def test_crossovers_are_where_two_closed_forms_meet():
    """Of recursive doubling and Rabenseifner on 8 ranks: 3 a + 3 B b = 6 a + 2 (7/8) B b."""
    link = Link(1e-4, 1e-9)
    names = ["recursive_doubling", "rabenseifner"]
    (found,) = crossovers("all_reduce", link, 8, (64, 2**30), names)
    assert (found.before, found.after) == ("recursive_doubling", "rabenseifner")
    assert found.num_bytes == pytest.approx(3e-4 / (1.25e-9), rel=1e-4)
    # Of all the changes there are: none is passed over, and they follow one another.
    chain = crossovers("broadcast", Link(5e-6, 1e-10), 16, (1, 2**30), g=4)
    assert all(a.after == b.before and a.num_bytes < b.num_bytes for a, b in pairwise(chain))
    assert crossovers("broadcast", link, 2, (64, 2**20), ["binomial"]) == []


@pytest.mark.parametrize("seed", range(5))
def test_a_fit_finds_the_link_behind_noise_and_outliers(seed):
    noise = random.Random(seed)
    link = Link(80e-6, 4e-10, 1.5e-10)
    samples = []
    for names in FORMS.values():
        for form in names.values():
            for size in (2, 3, 4, 8):
                for num_bytes in (1e3, 1e5, 1e7):
                    true_s = link.seconds(form(size, num_bytes, 1e5, 1))
                    factor = noise.uniform(0.95, 1.05) * (8.0 if noise.random() < 0.1 else 1.0)
                    samples.append(Sample(form(size, num_bytes, 1e5, 1), true_s * factor))
    found = fit(samples)
    assert found.link.start_s == pytest.approx(link.start_s, rel=0.1)
    assert found.link.byte_s == pytest.approx(link.byte_s, rel=0.1)
    assert found.link.add_s == pytest.approx(link.add_s, rel=0.5)
    assert found.error < 0.06
    exact = fit([sample._replace(seconds=link.seconds(sample.terms)) for sample in samples])
    assert exact.link == pytest.approx(link, rel=1e-6) and exact.error < 1e-6


def test_a_fit_has_no_negative_unit_and_does_with_few_samples():
    form = FORMS["all_reduce"]["ring"]
    # Falling with size: the best line would have bandwidth below zero.
    odd = fit([Sample(form(2, b, b, 1), t) for b, t in ((1e3, 2e-3), (1e6, 1.9e-3), (2e6, 1.7e-3))])
    assert min(odd.link) >= 0 and odd.link.start_s > 0
    one = fit([Sample(Terms(2, 100, 50), 1e-3)])
    assert one.link.seconds(Terms(2, 100, 50)) == pytest.approx(1e-3)


def test_a_bucket_of_the_advised_size_spends_the_share_on_start_ups():
    link = Link(1e-4, 1e-9, 1e-10)
    for n, name in ((2, "ring"), (4, "ring"), (8, "rabenseifner"), (3, "rank_order")):
        size = bucket_bytes(link, n, name, share=0.05)
        terms = FORMS["all_reduce"][name](n, size, size, 1)
        assert terms.messages * link.start_s / link.seconds(terms) == pytest.approx(0.05, rel=1e-3)
    assert bucket_bytes(link, 4, "chain") is None and bucket_bytes(Link(1e-4, 0.0), 4) is None


def test_bus_bandwidth_is_as_nccl_tests_define_it():
    assert bus_factor("all_reduce", 4) == 1.5 and bus_factor("broadcast", 4) == 1.0
    assert bus_factor("all_gather", 4) == bus_factor("reduce_scatter", 4) == 0.75
