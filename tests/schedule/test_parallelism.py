"""Work, depth and average parallelism, against closed forms."""

import pytest

from gpipe_hpc.schedule import Costs, build, lower, parallelism_of, simulate

HALVES = Costs(forward=1, input_gradient=2, weight_gradient=3)


def found(name, k, m, costs, recompute="never", **options):
    table = build(name, ranks=k, microbatches=m, recompute=recompute, **options)
    return parallelism_of(simulate(table, costs))


@pytest.mark.parametrize("k, m", [(1, 1), (1, 5), (4, 1), (4, 8), (5, 3)])
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
def test_micro_batches_are_what_a_pipeline_has(name, k, m):
    """However many stages: M micro-batches, each a chain of K (F + B)."""
    assert found(name, k, m, Costs(forward=1, backward=2)) == (3 * k * m, 3 * k)
    assert found(name, k, m, Costs(forward=1, backward=2)).average == pytest.approx(m)


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2"])
def test_weight_gradients_are_beside_the_chain(name):
    """Of a split backward K F + K I + W are a chain; the other W hang beside it."""
    assert found(name, 4, 8, HALVES) == (6 * 4 * 8, 4 * (1 + 2) + 3)


def test_only_the_last_stage_waits_for_its_recomputation():
    """Others run their forward again while the gradient is on its way to them."""
    costs = Costs(forward=1, backward=2, recompute=1)
    assert found("gpipe", 4, 8, costs, "always") == (4 * 4 * 8, 4 * (1 + 2) + 1)
    slow = Costs(forward=1, backward=2, recompute=[1, 1, 1, 50])
    assert found("gpipe", 4, 8, slow, "always").depth == 4 + 50 + 8
    early = Costs(forward=1, backward=2, recompute=[50, 1, 1, 1])
    assert found("gpipe", 4, 8, early, "always").depth == 1 + 50 + 2


@pytest.mark.parametrize("name", ["interleaved", "gems", "chimera", "dualpipe", "zb_v", "hanayo"])
def test_depth_is_that_of_the_model_whatever_the_placement(name):
    """A split backward adds one W, of the first stage, if its micro-batch splits everywhere."""
    table = build(name, ranks=4, microbatches=16)
    share = 1 / table.num_stages
    costs = Costs(forward=share, backward=2 * share, input_gradient=share, weight_gradient=share)
    depth = parallelism_of(simulate(table, costs)).depth
    assert depth == pytest.approx(2 + share if name == "zb_v" else 3)


def test_transfers_and_slow_ranks_count_in_neither():
    table = lower(build("gpipe", ranks=3, microbatches=4))
    plain = Costs(forward=[1, 2, 3], backward=[2, 4, 6])
    slow = Costs(forward=[1, 2, 3], backward=[2, 4, 6], send=7, reduction=9, paces={1: 2.0})
    even = parallelism_of(simulate(table, plain))
    assert even == (4 * 18, 18)
    assert parallelism_of(simulate(table, slow), [1.0, 2.0, 1.0]) == even


def test_an_empty_micro_batch_adds_nothing():
    table = build("gpipe", ranks=2, microbatches=3)
    costs = Costs(forward=1, backward=2, shares=(1.0, 0.5, 0.0))
    assert parallelism_of(simulate(table, costs)) == (6 * 1.5, 6)
    free = parallelism_of(simulate(table, Costs(forward=0, backward=0)))
    assert (*free, free.average) == (0, 0, 0)
