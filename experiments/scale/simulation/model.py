"""The simulated model: a GPT of 26 billion parameters, counted layer by layer."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from gpipe_hpc.data_parallel import GradientSize, fill_buckets
from gpipe_hpc.models import build_gpt, sizes_of_layers, stage_layers, token_cross_entropy
from gpipe_hpc.planner.costs.counted import ModelCount, count_model
from gpipe_hpc.planner.cutting.minimax import minimax
from gpipe_hpc.planner.forecast import flop_costs
from gpipe_hpc.planner.stages import count_stages
from gpipe_hpc.schedule import Costs
from gpipe_hpc.schedule.costs import Cost

SEQ_LEN = 2048
NUM_BLOCKS = 128
WIDTH = 4096
# A typical rate of large bfloat16 matrix products on a current accelerator.
FLOPS_PER_S = 400e12
BUCKET_BYTES = 25e6  # the default of outer.bucket_bytes


@dataclass(frozen=True)
class Work:
    """Costs of a partition: times in seconds, gradients in bytes, and the buckets of each stage."""

    costs: Costs
    gradient_bytes: list[float]
    buckets: dict[int, int]


class Model:
    """The model; a micro-batch is one sample of 2,048 tokens, and weights are bfloat16."""

    def __init__(self) -> None:
        self.layers = build_gpt(
            vocab_size=50304, block_size=SEQ_LEN, num_layers=NUM_BLOCKS, num_heads=32, width=WIDTH
        )

    @cached_property
    def count(self) -> ModelCount:
        """Return the counts of the layers, computed on the meta device."""
        tokens = torch.zeros(1, SEQ_LEN, dtype=torch.long, device="meta")
        return count_model(
            self.layers,
            tokens,
            tokens,
            token_cross_entropy,
            device_type="cuda",
            precision="bfloat16",
        )

    @cached_property
    def _sizes(self) -> list[dict[str, GradientSize]]:
        return [
            {name: GradientSize(*size) for name, size in layer.items()}
            for layer in sizes_of_layers(self.layers)
        ]

    def work(self, num_stages: int) -> Work:
        """Return the costs of the partition whose slowest stage is the fastest."""
        flops = [layer.forward_flops + layer.backward_flops for layer in self.count.layers]
        counts = minimax(flops, num_stages)
        counted = flop_costs(count_stages(self.count, counts))
        spans = stage_layers(counts)
        filled = [
            fill_buckets(
                {f"{at}.{name}": size for at in span for name, size in self._sizes[at].items()},
                BUCKET_BYTES,
            )
            for span in spans
        ]
        sizes = [
            [sum(self._bytes(name) for name in bucket) for bucket in buckets] for buckets in filled
        ]
        costs = Costs(
            forward=_seconds(counted.forward),
            backward=_seconds(counted.backward),
            input_gradient=_seconds(counted.input_gradient),
            weight_gradient=_seconds(counted.weight_gradient),
            boundary_bytes=counted.boundary_bytes,
            bucket_shares=dict(enumerate(sizes)),
            reduces_within=True,
        )
        return Work(
            costs=costs,
            gradient_bytes=[math.fsum(each) for each in sizes],
            buckets={stage: len(each) for stage, each in enumerate(sizes)},
        )

    def _bytes(self, name: str) -> float:
        at, _, own = name.partition(".")
        return float(self._sizes[int(at)][own].num_bytes)


def _seconds(flops: Cost | None) -> list[float]:
    assert isinstance(flops, list), "FLOPs of each stage"
    return [each / FLOPS_PER_S for each in flops]
