"""Profiles of libraries: costs by hand, labels, and what fusion brings."""

import pytest

from experiments.outer.collectives.__main__ import main
from experiments.outer.collectives.costs import Link
from experiments.outer.collectives.profiles import (
    PROFILES,
    Cluster,
    aluminum,
    baidu,
    exposed_s,
    gloo,
    hierarchical,
    horovod,
    mlsl,
    nccl,
    rabenseifner,
    recursive_doubling,
    resnet50_bytes,
    switches,
)

WITHIN, BETWEEN = Link(1e-6, 1e-11), Link(1e-5, 1e-10)
CLUSTER = Cluster(4, 2, WITHIN, BETWEEN, 1e-12)
FLAT = Cluster(8, 1, WITHIN, BETWEEN, 1e-12)
BY_NAME = {profile.name: profile for profile in PROFILES}


def test_costs_on_two_levels_are_those_by_hand():
    b = 8e6
    assert baidu(CLUSTER, b).seconds == pytest.approx(14 * (1e-5 + 1e6 * 1e-10))
    # One exchange within a host, two between them, at which both ranks share the card.
    took = 1e-6 + b * 1e-11 + 2 * (1e-5 + 2 * b * 1e-10)
    assert recursive_doubling(CLUSTER, b).seconds == pytest.approx(took)
    halves = 1e-6 + b / 2 * 1e-11 + 1e-5 + b / 4 * 2e-10 + 1e-5 + b / 8 * 2e-10
    assert rabenseifner(CLUSTER, b).seconds == pytest.approx(2 * halves)
    # Half the vector within hosts, and 3/4 of it over each card, both ways.
    levels = (1e-6 + b / 2 * 1e-11) + 3 * (1e-5 + b / 4 * 1e-10)
    assert hierarchical(CLUSTER, b).seconds == pytest.approx(2 * levels)


def test_without_levels_they_are_the_closed_forms_of_one_link():
    for b in (1e3, 1e6):
        ring = 14 * (BETWEEN.start_s + b / 8 * BETWEEN.byte_s)
        assert baidu(FLAT, b).seconds == pytest.approx(ring)
        assert hierarchical(FLAT, b).seconds == pytest.approx(ring)
        moved = 2 * b * 7 / 8 * BETWEEN.byte_s
        assert rabenseifner(FLAT, b).seconds == pytest.approx(6 * BETWEEN.start_s + moved)


def test_each_library_uses_what_its_source_says():
    assert mlsl(CLUSTER, 2048).algorithm == "recursive doubling"
    assert mlsl(CLUSTER, 2049).algorithm == "Rabenseifner"
    assert switches(BY_NAME["MLSL"], CLUSTER, 1024, 1 << 20) == [(2049, "Rabenseifner")]
    large = Cluster(64, 2, WITHIN, BETWEEN, 1e-12)
    assert nccl(large, 1024).algorithm == "tree with LL"
    assert nccl(CLUSTER, 1 << 30).algorithm == "ring with Simple"
    assert aluminum(CLUSTER, 8).algorithm == "recursive doubling"
    for b in (1024, 1 << 26):
        assert aluminum(CLUSTER, b).seconds <= baidu(CLUSTER, b).seconds
        # Half a cycle of 1 ms, and two copies.
        assert horovod(CLUSTER, b).seconds - nccl(CLUSTER, b).seconds == pytest.approx(
            0.5e-3 + 2e-12 * b
        )
        # A second start-up in each of 14 steps at least.
        assert gloo(CLUSTER, b).seconds >= baidu(CLUSTER, b).seconds + 14 * BETWEEN.start_s


def test_fusion_makes_few_sums_of_many():
    tensors = [1e3] * 100
    count, fused_s = exposed_s(BY_NAME["Horovod"], CLUSTER, tensors)
    assert count == 1 and fused_s == pytest.approx(horovod(CLUSTER, 1e5).seconds)
    count, each_s = exposed_s(BY_NAME["Baidu's ring"], CLUSTER, tensors)
    assert count == 100 and each_s == pytest.approx(100 * baidu(CLUSTER, 1e3).seconds)
    assert exposed_s(BY_NAME["NCCL"], CLUSTER, [20e6, 4e6, 2e6])[0] == 2


def test_the_command_says_that_all_are_models_and_names_their_sources(capsys):
    assert main(["profiles"]) == 0
    said = capsys.readouterr().out
    assert "Models, no measurements" in said and said.count("Source: ") == len(PROFILES) == 7
    assert "The 161 gradients of ResNet-50 (102.2 MB)" in said
    assert sum(resnet50_bytes()) == 4 * 25_557_032
