"""What a rank is said to hold and send, and how numbers are written."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gpipe_hpc.models import LayerSpec, build_mlp, build_model
from gpipe_hpc.planner.costs.counted import count_model
from gpipe_hpc.planner.forecast import flop_costs, forecast
from gpipe_hpc.planner.report.columns import RepeatedItems, fold_repeats
from gpipe_hpc.planner.report.tables import (
    Assumptions,
    layer_table,
    rank_table,
    stage_table,
    step_text,
)
from gpipe_hpc.planner.stages import count_stages
from gpipe_hpc.schedule import build, lower
from gpipe_hpc.units import bytes_text, flops_text

WIDTH, SAMPLES = 16, 3
INSIDE = SAMPLES * WIDTH * 4  # of one linear layer: its input


def linears(number: int):
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(number)]
    return layers, count_model(layers, torch.empty(SAMPLES, WIDTH, device="meta"))


def foreseen(model, counts, name, *, microbatches, ranks, recompute="never", states=2):
    schedule = lower(build(name, ranks=ranks, microbatches=microbatches, recompute=recompute))
    return forecast(model, counts, schedule, states), schedule


def test_weights_gradients_and_optimizer_by_its_states():
    _, model = linears(4)
    found, _ = foreseen(model, [1, 3], "gpipe", microbatches=4, ranks=2, states=2)
    one = (WIDTH * WIDTH + WIDTH) * 4
    rank = found.ranks[1]
    assert (rank.weight_bytes, rank.gradient_bytes, rank.optimizer_bytes) == (
        3 * one,
        3 * one,
        6 * one,
    )
    assert rank.parameters == 3 * one // 4
    assert rank.total_bytes == 12 * one + rank.activation_bytes + rank.workspace_bytes
    plain, _ = foreseen(model, [1, 3], "gpipe", microbatches=4, ranks=2, states=0)
    assert plain.ranks[1].optimizer_bytes == 0


@pytest.mark.parametrize(
    "name, recompute, microbatches, expected",
    [
        ("gpipe", "never", 6, [6 * 2, 6 * 2, 6 * 2]),
        ("one_f_one_b", "never", 6, [3 * 2, 2 * 2, 1 * 2]),
        # All boundaries, and the inside of one micro-batch.
        ("gpipe", "always", 6, [6 + 1, 6 + 1, 6 + 1]),
        ("one_f_one_b", "always", 6, [3 + 1, 2 + 1, 1 + 1]),
        ("one_f_one_b", "except_last", 6, [3 + 1, 2 + 1, 2]),
    ],
)
def test_activations_by_the_tables_order(name, recompute, microbatches, expected):
    """Each stage has two linear layers, so it keeps two inputs, the first its boundary."""
    _, model = linears(6)
    found, _ = foreseen(
        model, [2, 2, 2], name, microbatches=microbatches, ranks=3, recompute=recompute
    )
    assert [rank.activation_bytes / INSIDE for rank in found.ranks] == expected


def test_bytes_sent_are_outputs_forward_and_gradients_back():
    _, model = linears(3)
    found, _ = foreseen(model, [1, 1, 1], "gpipe", microbatches=5, ranks=3)
    assert [rank.sent_bytes for rank in found.ranks] == [5 * INSIDE, 10 * INSIDE, 5 * INSIDE]


def test_nothing_is_sent_between_stages_of_one_rank():
    _, model = linears(4)
    found, _ = foreseen(model, [1, 1, 1, 1], "zb_v", microbatches=4, ranks=2)
    # Rank 1 holds stages 1 and 2: only the boundaries 0|1 and 2|3 are crossed.
    assert [rank.sent_bytes for rank in found.ranks] == [8 * INSIDE, 8 * INSIDE]
    assert [rank.stages for rank in found.ranks] == [(0, 3), (1, 2)]


def test_a_mirrored_stage_weighs_on_both_its_ranks():
    _, model = linears(2)
    found, _ = foreseen(model, [1, 1], "chimera", microbatches=4, ranks=2)
    assert all(rank.parameters == model.parameters for rank in found.ranks)


def test_tied_weights_on_one_rank_are_held_once():
    layers = build_model("gpt", width=16, num_layers=1, tied=True)
    model = count_model(layers, torch.empty(2, 8, dtype=torch.int64, device="meta"))
    apart, _ = foreseen(model, [2, 3], "gpipe", microbatches=2, ranks=2)
    shared = 256 * 16
    assert sum(rank.parameters for rank in apart.ranks) == model.parameters + shared
    together, _ = foreseen(model, [1, 1, 1, 2], "zb_v", microbatches=2, ranks=2)
    assert sum(rank.parameters for rank in together.ranks) == model.parameters


def test_bubble_is_the_closed_form_for_equal_stages():
    # Its first layer has no gradient of the input: put all under trained inputs.
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)]
    given = torch.empty(SAMPLES, WIDTH, device="meta", requires_grad=True)
    model = count_model(layers, given)
    found, schedule = foreseen(model, [1] * 4, "one_f_one_b", microbatches=8, ranks=4)
    assert found.timeline.bubble == pytest.approx(3 / (8 + 3))
    flops = 6 * SAMPLES * WIDTH * WIDTH
    assert found.step_flops == 4 * 8 * flops
    text = step_text(found, schedule, Assumptions(flops_per_s=1e6))
    assert "bubble 27.3 %" in text and f"{11 * flops / 1e6:.4g} s at 1.00 MFLOP/s a rank" in text
    assert "step time" not in step_text(found, schedule, Assumptions())
    assert found.parallelism == (32 * flops, 4 * flops)
    assert "average parallelism 8.00 (work over depth)" in text


def test_i_and_w_share_the_backward():
    _, model = linears(3)
    costs = flop_costs(count_stages(model, [1, 2]))
    one = 2 * SAMPLES * WIDTH * WIDTH
    assert costs.backward == [one, 4 * one]
    assert costs.input_gradient == [0, 2 * one] and costs.weight_gradient == [one, 2 * one]


def test_a_model_without_flops_has_no_bubble():
    layers = [LayerSpec(nn.ReLU), LayerSpec(nn.ReLU)]
    model = count_model(layers, torch.empty(2, 2, device="meta"))
    found, schedule = foreseen(model, [1, 1], "gpipe", microbatches=2, ranks=2)
    assert "bubble 0.0 %" in step_text(found, schedule, Assumptions())


def test_ranks_that_do_not_fit_are_named():
    _, model = linears(4)
    found, schedule = foreseen(model, [1, 3], "gpipe", microbatches=2, ranks=2)
    limit = Assumptions(limits=[found.ranks[1].total_bytes - 1] * 2)
    assert limit.fit(found.ranks) == [True, False]
    lines = rank_table(found.ranks, limit).splitlines()
    assert [line.split()[-1] for line in lines] == ["fits", "yes", "NO"]
    assert "memory: rank 1 needs" in step_text(found, schedule, limit)
    advised = step_text(found, schedule, limit)
    assert "to reduce it: more micro-batches" in advised and "recompute=budget" in advised
    told = replace(limit, others="2 of 3 other settings fit")
    assert ", counted)\n2 of 3 other settings fit" in step_text(found, schedule, told)
    exact = Assumptions(limits=[found.ranks[1].total_bytes] * 2)
    assert "every rank fits" in step_text(found, schedule, exact)
    assert "fits" not in rank_table(found.ranks, Assumptions())


def test_each_rank_is_held_to_its_own_limit():
    _, model = linears(4)
    found, schedule = foreseen(model, [2, 2], "gpipe", microbatches=2, ranks=2)
    first, second = (rank.total_bytes for rank in found.ranks)
    limit = Assumptions(limits=[first - 1, 9 * second])
    lines = [line.split() for line in rank_table(found.ranks, limit).splitlines()]
    assert [line[-1] for line in lines] == ["fits", "NO", "yes"]
    assert lines[0][-2] == "limit"
    assert "memory: rank 0 needs" in step_text(found, schedule, limit)
    both = Assumptions(limits=[first - 1, second - 10])
    assert "ranks 0-1 need too much: rank 1 needs " in step_text(found, schedule, both)
    ample = Assumptions(limits=[first, 9 * second])
    assert "every rank fits, with " in step_text(found, schedule, ample)
    assert " to " in step_text(found, schedule, ample).split("every rank fits")[1]


def test_repeated_layers_are_folded():
    layers = build_mlp([4, 8, 8, 8, 8, 2])
    model = count_model(layers, torch.empty(1, 4, device="meta"))
    lines = [line.split() for line in layer_table(model).splitlines()]
    assert lines[1][:2] == ["0", "Linear"]
    assert lines[2][:4] == ["1-6", "3", "x", "ReLU"] and lines[3][:2] == ["Linear", "72"]
    assert lines[-1][:3] == ["all", "9", f"{model.parameters:,}"]


def test_folding_takes_the_group_that_swallows_most():
    groups = [RepeatedItems(0, 1, 1), RepeatedItems(1, 2, 3), RepeatedItems(7, 1, 1)]
    assert list(fold_repeats("cabababc")) == groups
    assert list(fold_repeats("abcabcabc")) == [RepeatedItems(0, 3, 3)]
    assert list(fold_repeats("aaaa")) == [RepeatedItems(0, 1, 4)]
    assert list(fold_repeats("")) == []
    for text in ("aabababc", "abcabcab", "xyzzy"):
        pieces = [text[g.start : g.start + g.period] * g.times for g in fold_repeats(text)]
        assert "".join(pieces) == text


def test_the_cut_shows_shares_of_flops():
    layers, model = linears(4)
    _, schedule = foreseen(model, [1, 3], "gpipe", microbatches=2, ranks=2)
    table = stage_table(layers, model, [1, 3], schedule).splitlines()
    assert table[0].endswith("% FLOPs")
    # FLOPs of a layer: forward 1, weights 1, input 1, which the first does not need.
    assert [line.split()[-1] for line in table[1:3]] == ["18.2", "81.8"]


@pytest.mark.parametrize(
    "number, text",
    [
        (0, "0 B"),
        (999, "999 B"),
        (1500, "1.50 kB"),
        (8e9, "8.00 GB"),
        (20e9, "20.0 GB"),
        (12288e15, "12288 PB"),
    ],
)
def test_bytes_in_words(number, text):
    assert bytes_text(number) == text


def test_flops_in_words():
    shown = [flops_text(n) for n in (999, 1.5e3, 27.7e9, 165e9, 4.2e12)]
    assert shown == ["999 FLOP", "1.50 kFLOP", "27.7 GFLOP", "165 GFLOP", "4.20 TFLOP"]
