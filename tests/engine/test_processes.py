"""Training with one process per rank, over shared memory and over Gloo."""

import gc
import re
import time
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.comm.world.start import start_world
from gpipe_hpc.errors import ActionError, GpipeError, PeerError
from tests.support import class_sum, mean_square, resident_bytes

SEED, WIDTH, LENGTH, VOCAB = 5, 8, 6, 11
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
MAX_NORM = 0.05
both_transports = pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "gloo"])


class DataDependentLength(nn.Module):
    """Return a dict with a tensor whose length depends on the data, a mask, an integer and None."""

    def forward(self, x):
        length = 1 + int(x.detach().abs().sum() * 1000) % LENGTH
        return {"x": x[:, :length], "length": length, "none": None, "mask": x[:, :length] > 0}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, nest):
        x = F.dropout(torch.tanh(self.linear(nest["x"])), 0.3, self.training)
        return nest | {"x": x * nest["mask"] + nest["length"]}


class Head(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, 3, dtype=torch.float64)

    def forward(self, nest):
        return super().forward(nest["x"].mean(1))


def recipes(plain):
    embedding = plain.Recipe(partial(nn.Embedding, dtype=torch.float64), (VOCAB, WIDTH))
    block = plain.Recipe(Block, ())
    return [embedding, plain.Recipe(DataDependentLength, ()), block, block, plain.Recipe(Head, ())]


def specs(plain):
    return [LayerSpec(factory, *args) for factory, args in recipes(plain)]


def make_batches(*sizes):
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randint(0, VOCAB, (size, LENGTH), generator=generator),
            torch.randint(0, 3, (size,), generator=generator),
        )
        for size in sizes
    ]


def reference_outputs(plain, weights, pieces):
    """Return the plain model's output for each micro-batch, in evaluation mode."""
    layers = plain.build(recipes(plain), SEED)
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            parameter.data.copy_(weights[f"layers.{index}.{name}"])
    with torch.no_grad():
        model = nn.Sequential(*layers).eval()
        return [model(piece) for piece in pieces]


@both_transports
def test_two_stages_and_two_replicas_train_as_plain_loop(plain, processes, tmp_path, shares_memory):
    """Five steps of changing shapes, the fourth with empty micro-batches; then evaluation."""
    batches = make_batches(12, 12, 11, 4, 12)
    inputs, targets = make_batches(17)[0]
    settings = {"replicas": 2, "microbatches": 3}

    expected = plain.train(
        recipes(plain),
        class_sum,
        batches,
        seed=SEED,
        optimizer=ADAMW,
        max_norm=MAX_NORM,
        **settings,
    )

    def body(rank):
        pipe = Pipeline(
            specs(plain),
            class_sum,
            stages=2,
            seed=SEED,
            schedule="one_f_one_b",
            world=start_world(shares_memory=shares_memory),
            **settings,
        )
        training = plain.train_rank(pipe, batches, optimizer=ADAMW, max_norm=MAX_NORM)
        part = pipe.share(len(inputs))
        answers = pipe.predict(inputs[part])
        nothing = pipe.predict(inputs[:0])
        return training, pipe.evaluate(inputs[part], targets[part]).loss, answers, nothing

    ranks = processes(4, body, tmp_path)
    trained = plain.unite([rank[0] for rank in ranks], 2)
    assert trained.differences(expected) == []
    outputs = reference_outputs(plain, trained.weights, inputs.tensor_split(6))
    for rank, (_, loss, answers, nothing) in enumerate(ranks):
        assert torch.equal(answers, torch.cat(outputs[:3] if rank < 2 else outputs[3:]))
        assert nothing is None
        assert loss == pytest.approx(F.cross_entropy(torch.cat(outputs), targets).item(), abs=1e-12)


def test_checkpoint_resumes_in_other_layouts(plain, processes, tmp_path):
    """From 4 stages to 4 stages and one process (bitwise equal) and to 2 stages x 2 replicas."""
    batches = make_batches(8, 8, 9, 7)
    path = tmp_path / "checkpoint"

    def continued(world=None, *, load=True, **layout):
        pipe = Pipeline(specs(plain), class_sum, seed=SEED, world=world, **layout)
        optimizer = ADAMW(pipe.parameters()) if pipe.parameters() else None
        if load:
            assert pipe.load(path, optimizer) == {"epoch": 3}
            assert pipe.steps_done == 2
        else:
            plain.train_rank(pipe, batches[:2], optimizer=lambda _: optimizer)
            pipe.save(path, optimizer, {"epoch": 3})
        return plain.train_rank(pipe, batches[2:], optimizer=lambda _: optimizer)

    def body(rank):
        return (
            continued(load=False, stages=4, microbatches=4),
            continued(stages=4, microbatches=4),
            continued(stages=2, replicas=2, microbatches=2),
        )

    ranks = processes(4, body, tmp_path)
    never_stopped = plain.unite([rank[0] for rank in ranks], 4)
    again = plain.unite([rank[1] for rank in ranks], 4)
    two_by_two = plain.unite([rank[2] for rank in ranks], 2)
    alone = plain.unite(run_on_threads(1, partial(continued, microbatches=4)), 1)
    assert never_stopped.differences(again) == []
    assert never_stopped.differences(alone) == []
    assert never_stopped.distance(two_by_two) < 1e-10


class OutputTracker(nn.Module):
    """Linear layer that keeps weak references to its outputs, none of which autograd saves."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.made = []

    def forward(self, x):
        output = self.linear(x)
        self.made.append(weakref.ref(output.untyped_storage()))
        return output

    def num_alive(self):
        return sum(ref() is not None for ref in self.made)


class _Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.call()
        return gradient, None


class Probe(nn.Linear):
    """Linear layer that calls a function in every backward."""

    def __init__(self, call=bool):
        super().__init__(WIDTH, WIDTH)
        self.call = call

    def forward(self, x):
        return _Probe.apply(super().forward(x), self.call)


@both_transports
def test_sent_outputs_are_released(processes, tmp_path, shares_memory):
    """Otherwise, without recomputation, GPipe would keep the outputs of all micro-batches."""

    def body(rank):
        layer, most = OutputTracker(), []

        def wait_and_count():
            deadline = time.monotonic() + 10
            while layer.num_alive() and time.monotonic() < deadline:
                time.sleep(0.001)  # the sending thread releases the last one asynchronously
            most.append(layer.num_alive())

        first = nn.Sequential(Probe(wait_and_count), layer)
        pipe = Pipeline(
            [first, nn.Linear(WIDTH, WIDTH)],
            mean_square,
            microbatches=4,
            recompute="never",
            world=start_world(shares_memory=shares_memory),
        )
        gc.disable()
        for _ in range(2):
            pipe.step(torch.randn(8, WIDTH), torch.randn(8, WIDTH))
        return most

    first, second = processes(2, body, tmp_path)
    assert first == [0] * 8 and second == []


@pytest.mark.parametrize("shares_memory", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_memory_does_not_grow_over_steps(processes, tmp_path, shares_memory):
    """Shapes change between steps. A leak of one boundary tensor per step would add 24 MB."""

    def body(rank):
        layers = [nn.Linear(64, 256), nn.Linear(256, 1)]
        world = start_world(shares_memory=shares_memory)
        pipe = Pipeline(layers, mean_square, microbatches=2, world=world)
        batches = [(torch.randn(n, 64), torch.randn(n, 1)) for n in (200, 203, 197)]
        measured = []
        gc.collect()
        gc.disable()
        for step in range(151):
            pipe.step(*batches[step // 2 % 3])
            if step in (30, 150):
                measured.append((len(gc.get_objects()), resident_bytes()))
        return measured

    for before, after in processes(2, body, tmp_path):
        assert after[0] - before[0] < 100
        assert after[1] - before[1] < 12e6


def test_object_collectives_transfer_values_of_different_sizes(processes, tmp_path):
    def body(rank):
        world = start_world()
        most = torch.tensor([rank, -rank], dtype=torch.float64)
        world.world_group.all_reduce_max(most)
        own, group = [rank] * rank * 1000, world.world_group
        gathered = group.gather_object(own, 0), group.broadcast_object(own, 1)
        return most.tolist(), *gathered, group.scatter_object(values if rank == 0 else None, 0)

    values = [[rank] * rank * 1000 for rank in range(3)]
    expected = [
        ([2.0, 0.0], values if rank == 0 else None, values[1], values[rank]) for rank in range(3)
    ]
    assert processes(3, body, tmp_path) == expected


class _FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError("in the backward")


class FailingBackward(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        return _FailingBackward.apply(super().forward(x))


@both_transports
def test_failing_backward_is_reported_on_all_ranks(processes, tmp_path, shares_memory):
    def body(rank):
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        layers[2] = FailingBackward()
        world = start_world(shares_memory=shares_memory)
        pipe = Pipeline(layers, mean_square, stages=4, microbatches=2, world=world)
        with pytest.raises(GpipeError) as caught:
            pipe.step(torch.randn(4, WIDTH), torch.randn(4, WIDTH))
        return type(caught.value), str(caught.value)

    ranks = processes(4, body, tmp_path)
    assert [kind for kind, _ in ranks] == [PeerError, PeerError, ActionError, PeerError]
    for _, text in ranks:
        assert re.search(r"rank 2( on \S+)?, stage 2, micro-batch 1, action 2B1", text)
        assert "ZeroDivisionError: in the backward" in text
