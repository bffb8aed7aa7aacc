"""What a plan counts of divided optimizer states is what each rank keeps, to the byte."""

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.comm.world.start import start_world
from gpipe_hpc.models import mean_squared_error, normalise_layers
from gpipe_hpc.optim.optimizer import build_optimizer, optimizer_memory
from gpipe_hpc.planner.costs.counted import count_model
from gpipe_hpc.planner.forecast import rank_states
from gpipe_hpc.planner.memory.optimizer import OptimizerMemory
from gpipe_hpc.planner.stages import count_stages
from gpipe_hpc.settings import AdamWConfig, SGDConfig

WIDTH = 7


class Cast(nn.Module):
    """A linear layer that takes any dtype; its bias may be frozen."""

    def __init__(self, dtype, is_frozen):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.inner.bias.requires_grad_(not is_frozen)

    def forward(self, x):
        return self.inner(x.to(self.inner.weight.dtype))


def layers(tied, dtype):
    linear = LayerSpec(Cast, dtype, False)
    ends = linear.tied({"inner.weight": "w"}) if tied else linear
    return [ends, LayerSpec(Cast, torch.float32, True), linear, ends]


def storages(tensors):
    """Return the bytes of the distinct storages of tensors."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())


@pytest.mark.parametrize("config", [AdamWConfig(), SGDConfig(momentum=0.9)], ids=["adamw", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("ranks", "stages", "schedule"), [(4, 2, "gpipe"), (3, 1, "gpipe"), (4, 2, "chimera")]
)
def test_a_plan_counts_what_each_rank_keeps(ranks, stages, schedule, tied, dtype, config):
    def body(world):
        pipe = Pipeline(
            layers(tied, dtype),
            mean_squared_error,
            stages=stages,
            replicas=ranks // stages,
            microbatches=2,
            schedule=schedule,
            world=world,
            partition="uniform",
            optimizer_states=optimizer_memory(config),
            outer={"shard": "flat", "bucket_bytes": 200},
        )
        optimizer = pipe.optimizer(lambda _: build_optimizer(pipe.named_parameters(), config))
        inputs = torch.ones(2 * ranks, WIDTH)
        part = pipe.share(len(inputs))
        pipe.step(inputs[part], inputs[part])
        optimizer.step()
        held = pipe.owned_parameters().values()
        kept = sum(
            value.nbytes
            for state in optimizer.state.values()
            for key, value in state.items()
            if key != "step"
        )
        weights = storages(pipe.parameters())
        gradients = storages([h.parameter.grad for h in held if h.parameter.grad is not None])
        return pipe.layout, kept, weights, gradients

    found = run_on_threads(ranks, body)
    layout = found[0][0]
    example = torch.ones(2, WIDTH)
    model = count_model(normalise_layers(layers(tied, dtype)), example)
    counted = count_stages(model, layout.partition.counts)
    memory = OptimizerMemory.of(optimizer_memory(config))
    for rank, (_, kept, weights, gradients) in enumerate(found):
        replica, stage_rank = divmod(rank, stages)
        placement = layout.schedule.placement
        shared = layout.sharing.of_rank(model, counted, placement, stage_rank, memory, replica)
        assert shared.optimizer_bytes == kept
        whole = rank_states(model, counted, placement, stage_rank, memory, layout.sharing)
        # At most: the numbers between tensors have no state.
        fullest = max(each[1] for each in found[stage_rank::stages])
        assert kept <= fullest <= whole.optimizer_bytes <= fullest + 300
        assert whole.weight_bytes == weights
        # A buffer of which a rank has no part is not seen here; the first replica has one of each.
        assert gradients == whole.gradient_bytes or (replica and gradients < whole.gradient_bytes)


@pytest.mark.parametrize("tied", [False, True])
def test_a_plan_counts_what_oss_leaves_each_rank(processes, tmp_path, tied):
    config, dtype = AdamWConfig(), torch.bfloat16

    def body(rank):
        pipe = Pipeline(
            layers(tied, dtype),
            mean_squared_error,
            stages=2,
            replicas=2,
            microbatches=2,
            world=start_world(),
            partition="uniform",
            optimizer_states=optimizer_memory(config),
            outer={"shard": "oss"},
        )
        optimizer = pipe.optimizer(lambda _: build_optimizer(pipe.named_parameters(), config))
        inputs = torch.ones(8, WIDTH)
        part = pipe.share(len(inputs))
        pipe.step(inputs[part], inputs[part])
        optimizer.step()
        kept = sum(
            value.nbytes
            for state in optimizer.state.values()
            for key, value in state.items()
            if key != "step"
        )
        model = count_model(normalise_layers(layers(tied, dtype)), torch.ones(2, WIDTH))
        counted = count_stages(model, pipe.layout.partition.counts)
        shared = pipe.layout.sharing.of_rank(
            model,
            counted,
            pipe.schedule.placement,
            pipe.stage_rank,
            OptimizerMemory.of(optimizer_memory(config)),
            pipe.replica,
        )
        return kept, shared

    for kept, shared in processes(4, body, tmp_path):
        assert shared == (kept, 0) and kept
