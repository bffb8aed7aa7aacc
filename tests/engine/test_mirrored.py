"""Schedules that place copies of a stage on several ranks: the copies train as one stage."""

import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.schedule import Op
from tests.support import batches, mean_square

WIDTH = 6
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x):
        return x + nn.functional.dropout(torch.tanh(self.linear(x)), 0.2) * self.scale


def specs():
    linear = partial(LayerSpec, nn.Linear, dtype=torch.float64)
    return [linear(3, WIDTH), *[LayerSpec(Block)] * 6, linear(WIDTH, 2)]


def make(world=None, **settings):
    pipe = Pipeline(specs(), mean_square, seed=5, world=world, **settings)
    return pipe, ADAMW(pipe.parameters())


def train(pipe, optimizer, data):
    """Train; return a list of the loss and the gradient norm of each step."""
    results = []
    for inputs, targets in data:
        part = pipe.share(len(inputs))
        loss = pipe.step(inputs[part], targets[part]).loss
        results += [loss, pipe.clip_grad_norm_(0.5).item()]
        optimizer.step()
    return results


def training_state(pipe, optimizer):
    """Return the value, gradient and optimizer state of each parameter, by name."""
    return {
        name: [
            p.detach().clone(),
            p.grad.clone(),
            *(value for _, value in sorted(optimizer.state[p].items())),
        ]
        for name, p in pipe.named_parameters()
    }


def assert_copies_equal(states):
    """Assert that copies are bitwise equal; return the number of copies of each parameter."""
    holders = {}
    for name, values in itertools.chain(*(state.items() for state in states)):
        holders.setdefault(name, []).append(values)
    for name, copies in holders.items():
        for other in copies[1:]:
            assert all(map(torch.equal, copies[0], other)), name
    return [len(copies) for copies in holders.values()]


MIRRORED = [
    (2, {"schedule": "gems"}, 2),
    (4, {"schedule": "chimera"}, 2),
    (4, {"schedule": "chimera", "schedule_options": {"pipelines": 4}}, 4),
    (2, {"schedule": "dualpipe"}, 2),
]


def label(value):
    return "-".join(map(str, value.values())) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(("stages", "settings", "num_copies"), MIRRORED, ids=label)
def test_copies_are_bitwise_equal_after_eight_steps(stages, settings, num_copies, replicas):
    """Compares weights, gradients and AdamW moments; some copies get more micro-batches."""

    def body(world):
        pipe, optimizer = make(
            world, stages=stages, replicas=replicas, microbatches=5, recompute="never", **settings
        )
        start = {name: p.detach().clone() for name, p in pipe.named_parameters()}
        results = train(pipe, optimizer, batches(8, 13, 3, 2))
        moved = [not torch.equal(p, start[n]) for n, p in pipe.named_parameters()]
        return training_state(pipe, optimizer), results, all(moved)

    ranks = run_on_threads(stages * replicas, body)
    counts = assert_copies_equal([state for state, _, _ in ranks])
    assert counts == [num_copies * replicas] * (2 + 3 * 6 + 2)
    assert all(results == ranks[0][1] and moved for _, results, moved in ranks)


def test_copies_in_processes_are_bitwise_equal(processes, tmp_path):
    """Two replicas of two mirrored stages: each of four processes holds all parameters."""

    def body(rank):
        pipe, optimizer = make(stages=2, replicas=2, microbatches=4, schedule="dualpipe")
        return (
            training_state(pipe, optimizer)
            if train(pipe, optimizer, batches(8, 13, 3, 2))
            else None
        )

    assert set(assert_copies_equal(processes(4, body, tmp_path))) == {4}


def test_microbatch_of_one_copy_updates_both_copies():
    """With one micro-batch, Chimera's second pipeline is idle, but its copy must change too."""

    def body(world):
        pipe, optimizer = make(world, stages=2, microbatches=1, schedule="chimera")
        results = train(pipe, optimizer, batches(3, 13, 3, 2))
        return training_state(pipe, optimizer), results

    ranks = run_on_threads(2, body)
    assert set(assert_copies_equal([state for state, _ in ranks])) == {2}
    pipe, optimizer = run_on_threads(1, lambda world: make(world, microbatches=1))[0]
    alone = train(pipe, optimizer, batches(3, 13, 3, 2))
    assert ranks[0][1] == pytest.approx(alone, abs=1e-9)


def test_gradient_norm_counts_copies_once():
    """Losses and norms after clipping equal those of a single process."""

    def body(world, **settings):
        pipe, optimizer = make(world, microbatches=4, **settings)
        return train(pipe, optimizer, batches(2, 13, 3, 2))

    alone = run_on_threads(1, body)[0]
    for results in run_on_threads(4, partial(body, schedule="chimera")):
        assert results == pytest.approx(alone, abs=1e-9)


@pytest.mark.parametrize(
    "settings", [{"schedule": "chimera"}, {"schedule": "gems"}, {"replicas": 2}], ids=label
)
def test_built_layers_shared_by_threads_train_as_in_one_process(settings):
    """Regression: several ranks accumulated their gradients into one module object."""
    layers = [nn.Linear(3, 3, dtype=torch.float64), nn.Linear(3, 2, dtype=torch.float64)]
    twin = [nn.Linear(3, 3, dtype=torch.float64), nn.Linear(3, 2, dtype=torch.float64)]
    for mine, other in zip(layers, twin, strict=True):
        other.load_state_dict(mine.state_dict())
    rule = torch.optim.AdamW(itertools.chain(*(x.parameters() for x in twin)), lr=1e-2)
    for inputs, targets in batches(3, 13, 3, 2):
        rule.zero_grad()
        mean_square(nn.Sequential(*twin)(inputs), targets).backward()
        rule.step()

    def body(world):
        pipe = Pipeline(layers, mean_square, stages=2, microbatches=4, world=world, **settings)
        optimizer = ADAMW(pipe.parameters())
        for inputs, targets in batches(3, 13, 3, 2):
            part = pipe.share(len(inputs))
            pipe.step(inputs[part], targets[part])
            optimizer.step()
        return training_state(pipe, optimizer)

    assert set(assert_copies_equal(run_on_threads(2 * settings.get("replicas", 1), body))) == {2}
    for mine, other in zip(layers, twin, strict=True):
        assert torch.allclose(mine.weight, other.weight, rtol=0, atol=1e-12)


class PartlyUsed(nn.Module):
    """Use the second parameter for large inputs only, and the third never."""

    def __init__(self):
        super().__init__()
        self.always = nn.Parameter(torch.ones(3))
        self.sometimes = nn.Parameter(torch.ones(3))
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.always + (self.sometimes if x.detach().max() > 5 else 0)


def test_parameter_used_by_one_copy_gets_gradient_on_all_copies():
    """One copy runs the even micro-batches, the other the odd ones; only one has large inputs."""

    def body(world):
        layers = [LayerSpec(PartlyUsed), LayerSpec(nn.Linear, 3, 2)]
        pipe = Pipeline(layers, mean_square, microbatches=4, schedule="gems", world=world)
        inputs = torch.ones(4, 3)
        inputs[1] = 9.0
        pipe.step(inputs, torch.zeros(4, 2))
        named = dict(pipe.named_parameters())
        return [named[f"layers.0.{name}"].grad for name in ("always", "sometimes", "never")]

    first, second = run_on_threads(2, body)
    assert first[2] is None and second[2] is None
    assert first[1].any() and torch.equal(first[1], second[1])
    assert torch.equal(first[0], second[0])


def test_checkpoint_stores_copies_once_and_loads_in_other_layouts(
    processes, tmp_path, stored_tensors
):
    """Saves with Chimera; loads in one process, with zb_v and with Chimera."""
    path, data = tmp_path / "checkpoint", batches(4, 13, 3, 2)

    def resume(world=None, **settings):
        pipe, optimizer = make(world, microbatches=4, **settings)
        pipe.load(path, optimizer)
        return train(pipe, optimizer, data[2:]), training_state(pipe, optimizer)

    def body(rank):
        pipe, optimizer = make(microbatches=4, schedule="chimera")
        train(pipe, optimizer, data[:2])
        pipe.save(path, optimizer)
        before = {name: p.detach().clone() for name, p in pipe.named_parameters()}
        results = train(pipe, optimizer, data[2:])
        same = resume(schedule="chimera")
        other = resume(schedule="zb_v")
        return before, (results, training_state(pipe, optimizer)), same, other

    ranks = processes(2, body, tmp_path)
    saved, (results, state), *_ = ranks[0]
    stored = stored_tensors(path)
    assert len(saved) == 2 + 3 * 6 + 2
    for name, weight in saved.items():
        assert torch.equal(stored[f"model.{name}"], weight)
    listed = FileSystemReader(path).read_metadata().storage_data.values()
    num_bytes = sum(file.stat().st_size for file in path.glob("*.distcp"))
    assert sum(entry.length for entry in listed) == num_bytes, "a tensor was written more than once"
    for _, ours, same, other in ranks:
        assert ours[0] == same[0] == results
        assert other[0] == pytest.approx(results, abs=1e-9)
        assert_copies_equal([state, ours[1], same[1]])
    alone, _ = run_on_threads(1, resume)[0]
    assert alone == pytest.approx(results, abs=1e-9)


@pytest.mark.parametrize(("stages", "settings", "num_copies"), MIRRORED, ids=label)
def test_each_copy_is_reduced_once_per_step(stages, settings, num_copies):
    def body(world):
        pipe, _ = make(world, stages=stages, microbatches=4, **settings)
        row = pipe.schedule.ranks[pipe.stage_rank]
        return [action.stage for action in row if action.op is Op.REDUCE_GRAD]

    reduced = list(itertools.chain(*run_on_threads(stages, body)))
    assert sorted(reduced) == sorted(list(range(len(set(reduced)))) * num_copies)
