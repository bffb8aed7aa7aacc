"""Sharded optimizers in processes: flat over Gloo, and fairscale's OSS, which needs processes."""

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.comm.world.start import start_world
from gpipe_hpc.data_parallel import assign_owners
from gpipe_hpc.errors import ConfigError
from tests.support import batches, square_sum

WIDTH, ROWS, MICROBATCHES = 4, 16, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH, bias=False, dtype=torch.float64)
        self.second = nn.Linear(2 * WIDTH, WIDTH, bias=False, dtype=torch.float64)
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x):
        return x + self.second(torch.tanh(self.first(x)))


def specs(tied=False):
    ends = LayerSpec(nn.Linear, WIDTH, WIDTH, bias=False, dtype=torch.float64)
    ends = ends.tied({"weight": "w"}) if tied else ends
    return [ends, LayerSpec(Block), LayerSpec(Block), ends]


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def muon(parameters):
    return torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.01)


FACTORIES = {"adamw": adamw, "muon": muon, "adagrad": torch.optim.Adagrad}


def make(stages, size, shard, kind="adamw", tied=False, world=None, **options):
    pipe = Pipeline(
        specs(tied),
        square_sum,
        stages=stages,
        replicas=size // stages,
        microbatches=MICROBATCHES,
        seed=5,
        partition="uniform",
        world=world or start_world(),
        outer={"shard": shard, "bucket_bytes": 300},
        **options,
    )
    return pipe, pipe.optimizer(FACTORIES[kind])


def train(pipe, optimizer, first=0, last=3, max_norm=0.5):
    norms = []
    for inputs, targets in batches(last, ROWS, WIDTH)[first:]:
        part = pipe.share(ROWS)
        pipe.step(inputs[part], targets[part])
        norms.append(pipe.clip_grad_norm_(max_norm).item())
        optimizer.step()
    return norms, {name: p.detach().clone() for name, p in pipe.named_parameters()}


def kept_bytes(optimizer):
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for key, value in state.items()
        if key != "step"
    )


def assert_near(one, other, atol):
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=atol)


def test_flat_sharding_over_gloo_is_bitwise_equal_and_halves_state(processes, tmp_path):
    """2 stages x 2 replicas, compared with whole optimizers."""

    def body(rank):
        found = []
        world = start_world()
        for shard in ("none", "flat"):
            pipe, optimizer = make(2, 4, shard, world=world, schedule="one_f_one_b")
            found.append((train(pipe, optimizer, max_norm=float("inf")), kept_bytes(optimizer)))
        return found

    ranks = processes(4, body, tmp_path)
    for (plain, _), (flat, _) in ranks:
        assert_near(flat[1], plain[1], 0.0)
    for stage_rank in range(2):
        parts = [ranks[r][1][1] for r in (stage_rank, stage_rank + 2)]
        assert sum(parts) == ranks[stage_rank][0][1]
        assert max(parts) <= 0.6 * sum(parts)


def test_process_may_exit_right_after_an_optimizer_step(processes, tmp_path):
    """Its gathering must finish first, because others wait for its shard."""

    def body(rank):
        pipe, optimizer = make(1, 2, "flat")
        inputs, targets = batches(1, ROWS, WIDTH)[0]
        part = pipe.share(ROWS)
        pipe.step(inputs[part], targets[part])
        optimizer.step()
        if rank == 1:
            return None
        return [p.detach().clone() for p in pipe.parameters()]

    assert processes(2, body, tmp_path)[0]


@pytest.mark.parametrize("kind", ["adamw", "muon", "adagrad"])
@pytest.mark.parametrize("tied", [False, True])
def test_oss_sharding_is_bitwise_equal_to_whole_optimizers(processes, tmp_path, kind, tied):
    """Also for optimizers that need whole matrices, such as Muon."""

    def body(rank):
        found = []
        world = start_world()
        for shard in ("none", "oss"):
            pipe, optimizer = make(2, 4, shard, kind, tied, world)
            found.append((train(pipe, optimizer), kept_bytes(optimizer)))
        own = {
            name: (p.numel(), p.requires_grad)
            for name, p in pipe.named_parameters()
            if name not in next(iter(pipe.stages.values())).tied and (kind != "muon" or p.ndim == 2)
        }
        sharded = assign_owners({n: c for n, (c, _) in own.items()}, 2)
        held = {n for n in pipe.owned_parameters() if n in own}
        return found, held == {n for n, owner in sharded.items() if owner == pipe.replica}

    ranks = processes(4, body, tmp_path)
    for (plain, whole), (sharded, part) in (found for found, _ in ranks):
        assert sharded[0] == plain[0]
        assert_near(sharded[1], plain[1], 0.0)
        assert part < whole
    assert all(owners_match for _, owners_match in ranks)


def test_oss_checkpoint_resumes_with_oss_unsharded_and_flat(processes, tmp_path):
    path = tmp_path / "kept"

    def saved(rank):
        pipe, optimizer = make(1, 2, "oss")
        train(pipe, optimizer, 0, 3)
        pipe.save(path, optimizer)
        again, fresh = make(1, 2, "oss", world=pipe.world)
        again.load(path, fresh)
        return train(pipe, optimizer, 3, 6), train(again, fresh, 3, 6)

    ranks = processes(2, saved, tmp_path)
    for (_, whole), (_, again) in ranks:
        assert_near(whole, again, 0.0)

    def resumed(world, stages, shard):
        pipe, optimizer = make(stages, world.size, shard, world=world)
        pipe.load(path, optimizer)
        return train(pipe, optimizer, 3, 6)

    for size, stages, shard in ((1, 1, "none"), (4, 2, "flat")):
        parts = run_on_threads(size, lambda w, s=stages, d=shard: resumed(w, s, d))
        found = {name: value for _, part in parts for name, value in part.items()}
        assert_near(found, ranks[0][0][1], 1e-10)


def test_parameter_frozen_mid_run_does_not_change_under_oss(processes, tmp_path):
    def body(rank):
        world, found = start_world(), []
        for shard in ("none", "oss"):
            pipe, optimizer = make(1, 2, shard, world=world)
            train(pipe, optimizer, 0, 2)
            named = dict(pipe.named_parameters())
            named["layers.1.first.weight"].requires_grad_(False)
            between = named["layers.1.first.weight"].detach().clone()
            _, weights = train(pipe, optimizer, 2, 4)
            assert torch.equal(weights["layers.1.first.weight"], between)
            named["layers.1.first.weight"].requires_grad_(True)
            found.append(train(pipe, optimizer, 4, 6)[1])
        return found

    for plain, sharded in processes(2, body, tmp_path):
        assert_near(sharded, plain, 0.0)


def test_oss_on_threads_is_rejected():
    with pytest.raises(ConfigError, match=r"outer\.shard=oss needs process groups"):
        run_on_threads(2, lambda world: make(1, 2, "oss", world=world))
