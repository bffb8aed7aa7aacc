"""GPipe's table 1: the largest model that fits on a number of accelerators.

Huang et al., NeurIPS 2019. Memory is computed by gpipe_hpc's planner (`rank_forecasts`): weights,
gradients, one state of RMSProp, activations under GPipe's schedule with recomputation, and
workspace.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from experiments.papers.table import Figure, Table
from gpipe_hpc.models import token_cross_entropy
from gpipe_hpc.models.zoo.names import build_model
from gpipe_hpc.planner.costs.counted import ModelCount, count_model
from gpipe_hpc.planner.cutting.minimax import minimax
from gpipe_hpc.planner.forecast import rank_forecasts
from gpipe_hpc.planner.stages import count_stages
from gpipe_hpc.schedule import build, lower

BATCH: Final = 32
TOKENS: Final = 1024
TPU_V3_BYTES: Final = 16 * 2**30
TPU_V2_BYTES: Final = 8 * 2**30
# Accelerators -> the L of Transformer-L that table 1 has for them.
LARGEST: Final = {1: 13, 8: 103, 32: 415, 128: 1663}
# Accelerators, (L, D) of AmoebaNet-D.
AMOEBAS: Final = ((1, 18, 416), (2, 18, 544), (4, 36, 544), (8, 72, 512))
IMAGES: Final = 4  # of a micro-batch


def fullest_bytes(model: ModelCount, balance: Sequence[int], microbatches: int) -> int:
    """Return the memory of the fullest accelerator for given numbers of layers per stage."""
    table = build("gpipe", ranks=len(balance), microbatches=microbatches, recompute="always")
    stages = count_stages(model, balance)
    return max(rank.total_bytes for rank in rank_forecasts(model, stages, lower(table), 1))


def _lasting(model: ModelCount) -> list[float]:
    """Return the permanent memory of each layer: 12 bytes per parameter, and activations."""
    return [12.0 * each.parameters + each.activation_bytes for each in model.layers]


def transformer(num_layers: int, dropout: float) -> ModelCount:
    """Return Transformer-L for one sequence, built from the layers of the smallest size."""
    tokens = torch.empty((1, TOKENS), dtype=torch.long, device="meta")
    layers = build_model("transformer_l", num_layers=1, dropout=dropout)
    one = count_model(layers, tokens, tokens, token_cross_entropy)

    def repeated(parts: Sequence[Any]) -> tuple[Any, ...]:
        return (parts[0], *(tuple(parts[1:3]) * num_layers), *parts[3:])

    return replace(
        one,
        layers=repeated(one.layers),
        names=repeated(one.names),
        parameter_names=repeated(one.parameter_names),
    )


def largest_transformer(accelerators: int, dropout: float) -> int:
    """Return the largest L with at most 16 GiB on each accelerator."""

    def fits(num_layers: int) -> bool:
        model = transformer(num_layers, dropout)
        embedding, *blocks = _lasting(model)[:-2]
        head = sum(_lasting(model)[-2:])
        # Attention and MLP, two of our layers, are one of the paper's.
        pairs = [a + b for a, b in zip(blocks[::2], blocks[1::2], strict=True)]
        cut = minimax([embedding, *pairs, head], accelerators)
        balance = [2 * each for each in cut]
        balance[0] -= 1  # the embedding is one layer, norm and head are two
        return fullest_bytes(model, balance, BATCH) <= TPU_V3_BYTES

    lower_end, upper_end = max(0, accelerators - 2), 40 * accelerators
    while upper_end - lower_end > 1:
        middle = (lower_end + upper_end) // 2
        lower_end, upper_end = (middle, upper_end) if fits(middle) else (lower_end, middle)
    return lower_end


def transformers() -> Table:
    """Table 1: the largest Transformer-L."""
    figures = [
        Figure(f"largest L on {number} of 16 GiB", paper, largest_transformer(number, 0.1))
        for number, paper in LARGEST.items()
    ]
    figures += [
        Figure(f"largest L on {number}, fused attention", LARGEST[number], found, is_given=False)
        for number in (1, 8)
        for found in [largest_transformer(number, 0.0)]
    ]
    return Table(
        "Table 1: the largest Transformer-L for so many accelerators",
        "16 GB per TPUv3 core, batch 32, 1,024 tokens, 12 bytes per parameter, all recomputed",
        "at most 16 GiB; 32 micro-batches of one sequence; float32; attention that stores its "
        "matrix of scores, as before fused kernels (our plan does so with dropout on a CPU); the "
        "partition into whole layers of the paper with the smallest maximum of memory",
        tuple(figures),
        "the paper has 13 layers on each accelerator. Ours also has 13 on one, and 14 on those "
        "without embedding and head. Fused attention, which came later, stores no scores: the same "
        "memory holds 60 to 80 % more layers. Naive-1 (3 layers) is left out: its 32 sequences "
        "would need 67 GB without recomputation, so its batch was smaller, and is not given",
    )


def amoebas() -> Table:
    """Table 1: the largest image models fit."""
    figures: list[Figure] = []
    for number, layers, filters in AMOEBAS:
        images = torch.empty((IMAGES, 3, 224, 224), device="meta")
        built = build_model("amoebanet_d", num_layers=layers, num_filters=filters)
        model = count_model(built, images)
        held = fullest_bytes(model, minimax(_lasting(model), number), 128 // IMAGES)
        what = f"AmoebaNet-D ({layers}, {filters}) fits on {number} of 8 GiB (1: yes)"
        figures.append(Figure(what, 1, float(held <= TPU_V2_BYTES)))
    return Table(
        "Table 1: the AmoebaNet-D of so many accelerators fits",
        "8 GB per TPUv2 core, batch 128 of 224 x 224 pixels, 12 bytes per parameter, recomputation",
        f"8 GiB; {128 // IMAGES} micro-batches of {IMAGES} images, which table 1 does not give; "
        "the partition with the smallest maximum of memory",
        tuple(figures),
    )
