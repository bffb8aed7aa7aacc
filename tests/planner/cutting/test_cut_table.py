import pytest
import torch
from torch import nn

from gpipe_hpc.errors import PartitionError
from gpipe_hpc.models import (
    LayerSpec,
    build_layer,
    build_model,
    layer_parameters,
    parameter_sizes,
    stage_layers,
)
from gpipe_hpc.planner import check_conservation, cut_table, minimax
from gpipe_hpc.planner.report.columns import compressed
from tests.support import refusal


def test_the_table_of_a_cut():
    layers = [
        LayerSpec(nn.Linear, 10, 100),
        nn.ReLU(),
        LayerSpec(nn.Linear, 100, 10),
        nn.Softmax(dim=-1),
    ]
    table = cut_table(layers, [2, 2], holders=[(0, 3), (1, 2)], costs=[1.0, 0.5, 3.5, 0.0])
    assert table.splitlines() == [
        "stage  rank  layers                   parameters     % time",
        "    0  0,3   0-1     Linear, ReLU          1,100       30.0",
        "    1  1,2   2-3     Linear, Softmax       1,010       70.0",
        "  all        4                             2,110  max +40.0",
    ]


def test_shares_default_to_parameters_and_empty_stages_are_shown():
    lines = cut_table([LayerSpec(nn.Linear, 4, 4)], [1, 0]).splitlines()
    assert lines[0].split()[-2:] == ["%", "parameters"]
    assert lines[1].split() == ["0", "0", "0-0", "Linear", "20", "100.0"]
    assert lines[2].split() == ["1", "1", "none", "0", "0.0"]


def test_a_model_without_parameters_has_a_table():
    assert "0.0" in cut_table([nn.ReLU(), nn.ReLU()], [1, 1])


def test_a_cut_that_misses_a_layer_is_refused():
    with pytest.raises(PartitionError, match=r"expected 3 layers, got 2 in \[1, 1\]"):
        cut_table([nn.ReLU()] * 3, [1, 1])


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("", ""),
        ("a", "a"),
        ("abc", "a, b, c"),
        ("aab", "2 x a, b"),
        ("eababn", "e, 2 x (a, b), n"),
        ("aaaa", "4 x a"),
        ("abcabcab", "2 x (a, b, c), a, b"),
    ],
)
def test_repeats_are_folded(names: str, text: str):
    assert compressed(list(names)) == text


def stages_of(layers: list, counts: list[int]) -> list[dict[str, int]]:
    return [
        {
            f"layers.{i}.{name}": p.numel()
            for i in span
            for name, p in build_layer(layers[i], index=i, seed=0).named_parameters()
        }
        for span in stage_layers(counts)
    ]


def test_the_stages_of_a_cut_are_the_whole_model():
    layers = build_model("gpt", width=16, num_layers=2)
    counts = minimax(layer_parameters(layers), 3)
    stages = stages_of(layers, counts)
    assert refusal(check_conservation, parameter_sizes(layers), stages) is None
    assert len(stages) == 3 and all(stages)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([{"layers.0.w": 4}], r"expected layers\.1\.w on a stage, got none \(1 missing"),
        ([{"layers.0.w": 4}, {"layers.1.w": 6, "layers.0.w": 4}], r"got stages 0 and 1"),
        ([{"layers.0.w": 4}, {"layers.1.w": 7}], r"expected 6 elements.*got 7 on stage 1"),
        ([{"layers.0.w": 4, "layers.9.w": 1}], r"expected no such parameter of layers\.9\.w"),
    ],
)
def test_stages_that_are_not_the_model_are_refused(stages: list, message: str):
    with pytest.raises(PartitionError, match=message):
        check_conservation({"layers.0.w": 4, "layers.1.w": 6}, stages)


def test_a_factory_that_builds_something_else_each_time_is_caught():
    sizes = iter([3, 4])
    layers = [LayerSpec(lambda: nn.Linear(next(sizes), 1))]
    whole = parameter_sizes(layers)
    with pytest.raises(PartitionError, match=r"3 elements of layers\.0\.weight, got 4"):
        check_conservation(whole, stages_of(layers, [1]))


def test_the_global_generator_is_untouched_by_a_table():
    before = torch.get_rng_state()
    cut_table([LayerSpec(nn.Linear, 4, 4)], [1])
    assert torch.equal(before, torch.get_rng_state())


def test_the_share_of_a_stage_is_that_of_the_time_its_rank_takes():
    """A cut that leaves a slow rank little to do looked badly balanced."""
    table = cut_table([nn.ReLU()] * 6, [4, 2], costs=[1.0] * 6, paces=[1, 2]).splitlines()
    assert [line.split()[-1] for line in table[1:3]] == ["50.0", "50.0"]
    assert table[-1].endswith("max +0.0")
