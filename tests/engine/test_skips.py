"""Skip connections between ranks: gradients of the plain model, and the messages sent."""

from collections import defaultdict
from functools import partial

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.comm.transport.memory import MemoryTransport
from gpipe_hpc.errors import ActionError, ModelError, ScheduleError
from gpipe_hpc.models import build_layer
from gpipe_hpc.pytree import tensors_of
from gpipe_hpc.schedule import build, lower, schedule_names

SEED, WIDTH = 3, 6
NAMES = [name for name in schedule_names() if name != "file"]


class Block(nn.Module):
    """Use popped tensors as further inputs, and return up to two tensors to stash."""

    def __init__(self, num_popped, num_stashed, dropout=0.2):
        super().__init__()
        self.num_popped, self.num_stashed = num_popped, num_stashed
        self.linear = nn.Linear(WIDTH * (1 + num_popped), WIDTH, dtype=torch.float64)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, *popped):
        assert len(popped) == self.num_popped
        y = x + self.dropout(torch.tanh(self.linear(torch.cat([x, *popped], -1))))
        return (y, *(y, x * 2)[: self.num_stashed]) if self.num_stashed else y


# Names stashed and popped by layer: nested as in a U-Net, crossing, adjacent and within a stage.
SKIPS = {0: "a b", 1: "c", 3: "d", 4: "e f"}, {5: "e", 6: "f", 9: "c a", 13: "b", 4: "d"}
NUM_LAYERS = 16


def layers():
    stashes, pops = SKIPS
    return [
        LayerSpec(Block, len(popped), len(stashed)).stashing(*stashed).popping(*popped)
        for stashed, popped in (
            (stashes.get(i, "").split(), pops.get(i, "").split()) for i in range(NUM_LAYERS)
        )
    ]


def loss_fn(output, target):
    return (output - target).square().sum(), target.numel()


BATCH = tuple(torch.randn(2, 7, WIDTH, dtype=torch.float64).unbind())


def reference(plain, num_microbatches, seed=SEED):
    """Return loss and gradients of a plain loop that keeps stashes in a dict."""
    modules = [build_layer(each, index=i, seed=seed) for i, each in enumerate(layers())]
    total, weight = 0.0, 0
    pieces = zip(*(torch.tensor_split(x, num_microbatches) for x in BATCH), strict=True)
    for m, (x, target) in enumerate(pieces):
        if len(x) == 0:
            continue
        stashed = {}
        for i, (module, spec) in enumerate(zip(modules, layers(), strict=True)):
            torch.manual_seed(plain.key(2, seed, 0, m, i))
            x = module(x, *(stashed.pop(name) for name in spec.pops))
            if spec.stashes:
                x, *more = x
                stashed |= zip(spec.stashes, more, strict=True)
        assert not stashed
        part, count = loss_fn(x, target)
        part.backward()
        total, weight = total + part.item(), weight + count
    named = {f"layers.{i}.{n}": p for i, x in enumerate(modules) for n, p in x.named_parameters()}
    return total / weight, {name: p.grad / weight for name, p in named.items()}


def trained(world, **settings):
    """Run one step on this rank; return its loss, gradients and evaluation loss."""
    pipe = Pipeline(layers(), loss_fn, seed=SEED, partition="uniform", world=world, **settings)
    part = pipe.share(len(BATCH[0]))
    loss = pipe.step(*(x[part] for x in BATCH)).loss
    evaluated = pipe.evaluate(*(x[part] for x in BATCH)).loss
    return loss, {name: p.grad.clone() for name, p in pipe.named_parameters()}, evaluated


def options_of(name):
    return {"stages_per_rank": 2} if name == "interleaved" else {}


def sizes_of(name, full):
    """Yield the numbers of micro-batches in `full` that a schedule accepts."""
    for num in full:
        try:
            build(name, ranks=4, microbatches=num, **options_of(name))
        except ScheduleError:
            continue
        yield num


@pytest.mark.parametrize("name", NAMES)
def test_model_with_skips_has_gradients_of_plain_model(plain, name):
    num = next(sizes_of(name, (4, 8)))
    step = partial(trained, schedule=name, microbatches=num, recompute="always", stages=4)
    assert_plain_gradients(plain, run_on_threads(4, step), num)


@pytest.mark.product
@pytest.mark.parametrize("name", NAMES)
def test_model_with_skips_trains_with_replicas_and_few_ranks(plain, name):
    for ranks, replicas, recompute in ((4, 1, "except_last"), (2, 2, "never")):
        for num in (1, 4, 10):
            try:
                build(name, ranks=ranks, microbatches=num, **options_of(name))
            except ScheduleError:
                continue
            step = partial(
                trained,
                schedule=name,
                microbatches=num,
                recompute=recompute,
                stages=ranks,
                replicas=replicas,
            )
            assert_plain_gradients(plain, run_on_threads(ranks * replicas, step), num * replicas)


def assert_plain_gradients(plain, answers, num_microbatches):
    loss, gradients = reference(plain, num_microbatches)
    seen = set()
    for got, own, evaluated in answers:
        assert abs(got - loss) < 1e-12
        assert evaluated == answers[0][2] and evaluated != got
        for name, gradient in own.items():
            assert (gradient - gradients[name]).abs().max() < 1e-12, name
            seen.add(name)
    assert seen == gradients.keys()


def test_skip_is_sent_once_directly_to_the_rank_that_pops_it(monkeypatch):
    sent = defaultdict(int)
    original = MemoryTransport.send

    def send(self, channel, lane, microbatch, nest, num_samples):
        if lane == "training":
            ends = channel.channel.source, channel.channel.destination
            sent[ends] += sum(t.nbytes for t in tensors_of(nest) if t is not None)
        original(self, channel, lane, microbatch, nest, num_samples)

    monkeypatch.setattr(MemoryTransport, "send", send)
    run_on_threads(4, partial(trained, schedule="gpipe", microbatches=4, stages=4))
    one = BATCH[0].nbytes
    # Stages have layers 0-3, 4-7, 8-11 and 12-15. d is the output of stage 0 and is sent once with
    # it; e and f are stashed and popped in the same stage.
    boundary = {(s, s + 1): one for s in range(3)} | {(s + 1, s): one for s in range(3)}
    # b depends on the batch only, so no gradient is sent for it.
    skips = {(0, 2): 2 * one, (2, 0): 2 * one, (0, 3): one, (3, 0): 0}
    assert sent == boundary | skips


def test_lowered_table_without_skips_of_the_model_is_refused():
    table = lower(build("gpipe", ranks=4, microbatches=2))
    with pytest.raises(
        ScheduleError, match=r"expected stages 0 to 2, 0 to 3, got none.*without communication"
    ):
        run_on_threads(4, partial(trained, schedule=table, microbatches=2, stages=4))


def test_layer_that_returns_no_stash_is_refused_by_name():
    class Forgets(Block):
        def forward(self, x):
            return x

    model = [LayerSpec(Forgets, 0, 1).stashing("a"), LayerSpec(Block, 1, 0).popping("a")]
    pipe = Pipeline(model, loss_fn)
    with pytest.raises(Exception, match=r"layers\.0: stashes a, so its forward must return"):
        pipe.step(*BATCH)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ([("a", ""), ("", "")], r"layers\.0 \(Block\): stashes 'a', but no later layer pops it"),
        ([("a", ""), ("", "a"), ("", "a")], r"layers\.2 .*pops 'a'.*already popped by layers\.1 "),
        (
            [("a", ""), ("a", ""), ("", "a")],
            r"layers\.1 .*stashes 'a'.*already stashed by layers\.0 ",
        ),
        ([("", ""), ("", "a")], r"layers\.1 .*pops 'a', but no earlier layer stashes it"),
        ([("", "a"), ("a", "")], r"layers\.0 .*pops 'a', but layers\.1 .* is not an earlier layer"),
        ([("a", "a"), ("", "")], r"layers\.0 .*pops 'a', but layers\.0 .* is not an earlier layer"),
    ],
)
def test_mismatched_stashes_and_pops_are_refused_at_build_time(model, message):
    specs = [
        LayerSpec(Block, len(pops), len(stashes)).stashing(*stashes).popping(*pops)
        for stashes, pops in model
    ]
    with pytest.raises(ModelError, match=message):
        Pipeline(specs, loss_fn)


def test_in_place_write_to_a_stashed_tensor_is_refused():
    class StashesItsOutput(Block):
        def forward(self, x):
            y = super().forward(x)
            return y, y

    # Within one stage the write would change the stash; with a stage boundary it would not.
    model = [
        LayerSpec(StashesItsOutput, 0, 0).stashing("a"),
        LayerSpec(nn.ReLU, inplace=True),
        LayerSpec(Block, 1, 0).popping("a"),
    ]
    with pytest.raises(ActionError, match=r"layers\.1: modified in place .* stashed as a; "):
        Pipeline(model, loss_fn).step(*BATCH)


def test_built_modules_declare_skips_by_attributes():
    first, second = Block(0, 1, 0.0), Block(1, 0, 0.0)
    first.stashes, second.pops = ("a",), ("a",)
    x, target = BATCH
    y = first(x)
    expected = loss_fn(second(*y), target)[0] / target.numel()
    expected.backward()
    gradients = [p.grad.clone() for m in (first, second) for p in m.parameters()]
    pipe = Pipeline(nn.Sequential(first, second), loss_fn)
    assert pipe.step(x, target).loss == pytest.approx(expected.item(), abs=1e-12)
    for p, g in zip(pipe.parameters(), gradients, strict=True):
        assert (p.grad - g).abs().max() < 1e-12


@pytest.mark.parametrize("writes_popped", [True, False])
def test_layer_that_overwrites_input_shared_with_pop_is_refused(writes_popped):
    """Regression: with a stage boundary a copy was overwritten, so the layout changed the loss."""

    class Both(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y, y

    class Overwrites(nn.Identity):
        def forward(self, x, popped):
            (popped if writes_popped else x).mul_(2)
            return x + popped

    model = [LayerSpec(Both, WIDTH, WIDTH).stashing("a"), LayerSpec(Overwrites).popping("a")]
    with pytest.raises(Exception, match=r"layers\.1.*modified its input in place, which shares"):
        Pipeline(model, lambda y, t: y.sum()).step(*(x.float() for x in BATCH))
