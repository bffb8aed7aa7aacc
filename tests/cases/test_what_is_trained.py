"""What a step trains: every parameter that it reads, on some rank, or an error by name."""

import copy
import logging
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads

GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(8, 6, generator=GENERATOR, dtype=torch.float64)
CLASSES = torch.randint(0, 6, (8,), generator=GENERATOR)
IDS = torch.randint(0, 7, (8,), generator=GENERATOR)
OUTPUTS = torch.randn(8, 6, generator=GENERATOR, dtype=torch.float64)


def model(*layers):
    """Return a model with equal weights at each call."""
    made = nn.Sequential(*layers).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return made


def linears(number=3):
    return model(*(nn.Linear(6, 6) for _ in range(number)))


def run(make, ranks, inputs=INPUTS, targets=CLASSES, **keywords):
    """Return the gradients of all parameters; `make` returns the layers and the loss of a rank."""
    made, stepped = [make() for _ in range(ranks)], []
    keywords = {"microbatches": 4, "partition": "uniform", **keywords}

    def body(world):
        layers, loss = made[world.rank]
        pipe = Pipeline(layers, loss, world=world, **keywords)
        own = pipe.share(len(inputs))
        pipe.step(inputs[own], targets[own])
        stepped.append(world.rank)
        return {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}

    try:
        found = run_on_threads(ranks, body)
    except Exception:
        assert not stepped  # no rank may come to its optimizer
        raise
    return {name: each for own in found for name, each in own.items()}


def assert_plain(make, ranks, inputs=INPUTS, targets=CLASSES, **keywords):
    """Check the gradients against those of the whole batch in one piece."""
    layers, loss = make()
    loss(nn.Sequential(*layers)(inputs), targets).backward()
    right = {f"layers.{n}": p.grad for n, p in nn.Sequential(*layers).named_parameters()}
    found = run(make, ranks, inputs, targets, **keywords)
    assert set(found) == {name for name, each in right.items() if each is not None}
    for name, gradient in found.items():
        assert torch.allclose(gradient, right[name], rtol=1e-10, atol=1e-12), name


class Margin(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(6, dtype=torch.float64) + 0.1)

    def forward(self, output, target):
        return F.cross_entropy(output @ self.weight, target)

    def named(self, output, target, scale):
        return scale * self(output, target)


class Plain:
    """A callable that keeps its module in a dict, and a learned number beside it."""

    def __init__(self):
        self.parts = {"margin": Margin(), "scale": torch.ones((), dtype=torch.float64)}

    def __call__(self, output, target):
        return self.parts["scale"] * self.parts["margin"](output, target)


class Slotted:
    """Another, which has no `__dict__`; its number and its weight have private names."""

    __slots__ = ("__scale", "_weight")

    def __init__(self):
        self.__scale = 2.0
        self._weight = nn.Parameter(torch.eye(6, dtype=torch.float64) + 0.1)

    def __call__(self, output, target):
        return self.__scale * F.cross_entropy(output @ self._weight, target)


class Hidden(Slotted):
    """One more, below a slot of its own."""

    __slots__ = ("__inner",)

    def __init__(self):
        self.__inner = Slotted()

    def __call__(self, output, target):
        return self.__inner(output, target)


def closure():
    margin = Margin()
    return lambda output, target: margin(output, target)


def learned_number():
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    return lambda output, target: F.cross_entropy(output, target) * scale


OF_LOSSES = {
    "module": Margin,
    "partial": lambda: partial(Margin().named, scale=2.0),
    "bound method": lambda: Margin().forward,
    "closure": closure,
    "callable": Plain,
    "slots": Slotted,
    "slots below slots": Hidden,
    "learned number": learned_number,
}


@pytest.mark.parametrize("name", OF_LOSSES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_with_parameters_of_its_own_is_refused(name, ranks):
    with pytest.raises(Exception, match=r"loss_fn: .*move it to the last layer"):
        run(lambda: (linears(), OF_LOSSES[name]()), ranks, stages=ranks)


@pytest.mark.parametrize("schedule", ["zb_h1", "chimera", "one_f_one_b", "gpipe"])
@pytest.mark.parametrize("recompute", ["always", "never"])
def test_loss_with_own_parameters_is_refused_under_every_schedule(schedule, recompute):
    with pytest.raises(Exception, match="loss_fn"):
        run(lambda: (linears(), Margin()), 2, stages=2, schedule=schedule, recompute=recompute)


def frozen_margin():
    return Margin().requires_grad_(False)


def teacher():
    """A teacher that nobody froze, and whose output has no graph."""
    known = linears(1)

    def loss(output, target):
        with torch.no_grad():
            soft = known(output).softmax(-1)
        return F.cross_entropy(output, target) + F.mse_loss(output.softmax(-1), soft)

    return loss


def made_as_it_runs(output, target):
    """A leaf that a loss makes for itself, as gradient penalties do."""
    noise = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    return F.cross_entropy(output + noise, target)


@pytest.mark.parametrize("loss", [frozen_margin, teacher, lambda: made_as_it_runs])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_reads_what_nobody_trains_is_fine(loss, ranks, caplog):
    assert_plain(lambda: (linears(), loss()), ranks, stages=ranks)
    assert not caplog.records


def penalised(layers, of=None):
    read = list(layers if of is None else layers[of])

    def loss(output, target):
        own = sum(p.pow(2).sum() for layer in read for p in layer.parameters())
        return F.cross_entropy(output, target) + 0.1 * own

    return loss


class Head(nn.Module):
    """A head that keeps the embedding without registering it."""

    def __init__(self, embedding):
        super().__init__()
        self.kept = [embedding]

    def forward(self, hidden):
        return hidden @ self.kept[0].weight.t()


def with_penalty():
    layers = linears(4)
    return layers, penalised(layers)


def with_hidden_tie():
    layers = model(nn.Embedding(7, 6), nn.Tanh(), nn.Linear(6, 6))
    return nn.Sequential(*layers, Head(layers[0])), F.cross_entropy


FOREIGN = {"penalty": (with_penalty, INPUTS), "hidden tie": (with_hidden_tie, IDS)}


@pytest.mark.parametrize("name", FOREIGN)
def test_parameters_of_other_ranks_are_refused_by_name(name):
    make, inputs = FOREIGN[name]
    for keywords in ({}, {"recompute": "never"}, {"schedule": "zb_h1"}):
        with pytest.raises(Exception, match=r"layers\.0\.weight: .*another rank trains it"):
            run(make, 2, inputs, stages=2, **keywords)
    with pytest.raises(Exception, match=r"layers\.0\.weight: .*another rank trains it"):
        run(make, 4, inputs, stages=2, replicas=2, microbatches=2)


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_parameters_are_accepted_if_one_rank_has_all_layers(name, caplog):
    make, inputs = FOREIGN[name]
    assert_plain(make, 1, inputs, stages=1)
    assert_plain(make, 2, inputs, stages=1, replicas=2, microbatches=2)
    assert not caplog.records


def test_a_hidden_tie_stays_one_in_the_copies_of_replicas():
    """Replicas that are threads work on copies of one model: layer by layer they lost the tie."""
    layers, loss = with_hidden_tie()
    assert_plain(lambda: (copy.deepcopy(layers), loss), 1, IDS, stages=1)
    right = run(lambda: (copy.deepcopy(layers), loss), 1, IDS, stages=1)
    found = run(lambda: (layers, loss), 2, IDS, stages=1, replicas=2, microbatches=2)
    for name, gradient in found.items():
        assert torch.allclose(gradient, right[name], rtol=1e-10, atol=1e-12), name


def test_a_penalty_on_layers_of_the_same_rank_is_fine(caplog):
    def last():
        layers = linears(4)
        return layers, penalised(layers, slice(2, 4))

    assert_plain(last, 2, stages=2)
    assert_plain(last, 2, stages=2, schedule="zb_h1")
    assert not caplog.records


def test_frozen_parameters_of_other_ranks_may_be_read(caplog):
    def frozen():
        layers = linears(4)
        layers[0].requires_grad_(False)
        return layers, penalised(layers, slice(0, 1))

    assert_plain(frozen, 2, stages=2)
    assert not caplog.records


def test_shared_modules_and_ties_are_no_outsiders(caplog):
    def shared():
        layers = linears(4)
        return nn.Sequential(*layers, layers[0]), F.cross_entropy

    for keywords in ({"stages": 2}, {"stages": 2, "schedule": "zb_h1"}):
        assert_plain(shared, 2, **keywords)
    assert not caplog.records


def test_layers_are_not_changed_by_being_watched():
    made = [with_penalty()[0] for _ in range(2)]
    before = [[dict(vars(m)) for m in layers.modules()] for layers in made]

    def body(world):
        pipe = Pipeline(made[world.rank], F.cross_entropy, world=world, stages=2)
        pipe.step(INPUTS, CLASSES)
        foreign = made[world.rank][2 - 2 * world.rank :][:2]
        return [p for p in foreign.parameters() if p.grad is not None or p._backward_hooks]

    assert run_on_threads(2, body) == [[], []]
    assert [[set(vars(m)) for m in layers.modules()] for layers in made] == [
        [set(each) for each in own] for own in before
    ]


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant=True):
        super().__init__()
        self.linear, self.use_reentrant = nn.Linear(6, 6), use_reentrant

    def forward(self, x):
        call = torch.utils.checkpoint.checkpoint
        return call(self.linear, x, use_reentrant=self.use_reentrant)


class Cut(nn.Module):
    def forward(self, x):
        return x.detach()


class Untracked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        with torch.no_grad():
            return self.linear(x)


NOTHING = {
    "reentrant checkpoints": lambda: model(
        nn.Linear(6, 6).requires_grad_(False), *(Checkpointed() for _ in range(3))
    ),
    "no_grad": lambda: model(*(Untracked() for _ in range(3))),
    "detached": lambda: model(nn.Linear(6, 6), nn.Linear(6, 6), Cut()),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", NOTHING)
@pytest.mark.parametrize(
    ("ranks", "keywords"),
    [
        (1, {"stages": 1}),
        (2, {"stages": 2}),
        (2, {"stages": 2, "schedule": "zb_h1", "recompute": "never"}),
        (4, {"stages": 2, "replicas": 2, "microbatches": 2}),
        (2, {"stages": 1, "replicas": 2, "microbatches": 2, "outer": {"every": 2}}),
    ],
    ids=str,
)
def test_a_step_that_trains_nothing_is_refused_on_every_rank(name, ranks, keywords):
    with pytest.raises(Exception, match=r"training: .*parameters"):
        run(lambda: (NOTHING[name](), nn.MSELoss()), ranks, targets=OUTPUTS, **keywords)


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (2, 1), (4, 2)])
def test_a_model_that_is_frozen_is_warned_of_once(ranks, replicas, caplog):
    """Its statistics may change, so it is no error; `train` refuses it."""

    def body(world):
        layers = linears().requires_grad_(False)
        pipe = Pipeline(layers, nn.MSELoss(), world=world, replicas=replicas, microbatches=2)
        own = pipe.share(8)
        return [pipe.step(INPUTS[own], OUTPUTS[own]).loss for _ in range(2)]

    with caplog.at_level(logging.WARNING, "gpipe_hpc"):
        run_on_threads(ranks, body)
    [record] = caplog.records
    assert "none of the 6 parameters requires a gradient" in record.getMessage()


FROZEN = """
from gpipe_hpc.models import LayerSpec, build_gpt


def frozen(factory, *args, **keywords):
    return factory(*args, **keywords).requires_grad_(False)


def build():
    layers = build_gpt(vocab_size=256, block_size=16, num_heads=2, num_layers=1, width=16)
    return [LayerSpec(frozen, each.factory, *each.args, **dict(each.kwargs)) for each in layers]
"""


@pytest.mark.slow
def test_train_refuses_a_frozen_model(tmp_path, start_ranks, tiny):
    (tmp_path / "frozen_model.py").write_text(FROZEN)
    ranks = start_ranks(
        2,
        *(word for word in tiny if not word.startswith("model.")),
        "model=own",
        "model._target_=frozen_model.build",
        "train.steps=2",
        f"run.dir={tmp_path / 'run'}",
        env={"PYTHONPATH": str(tmp_path)},
    ).wait(60)
    assert 0 not in ranks.codes, ranks.outputs
    assert "parameters requires a gradient" in "".join(ranks.outputs)


def test_a_batch_with_nothing_to_learn_from_may_come_first():
    def body(world):
        pipe = Pipeline(linears(), nn.CrossEntropyLoss(), world=world, stages=2, microbatches=2)
        nothing = torch.full_like(CLASSES, -100)
        losses = [pipe.step(INPUTS, nothing).loss, pipe.step(INPUTS[:0], nothing[:0]).loss]
        return [*losses, pipe.step(INPUTS, CLASSES).loss > 0]

    assert run_on_threads(2, body) == [[0, 0, True]] * 2


@pytest.mark.parametrize("stages", [1, 2])
def test_layers_that_are_cut_off_are_warned_of(stages, caplog):
    def make():
        return model(nn.Linear(6, 6), nn.Linear(6, 6), Cut(), nn.Linear(6, 6)), nn.MSELoss()

    with caplog.at_level(logging.WARNING, "gpipe_hpc"):
        run(make, stages, targets=OUTPUTS, stages=stages)
    [record] = caplog.records
    assert "layers 0, 1 got a gradient" in record.getMessage().replace("of layers", "layers")


def test_layers_that_are_not_used_or_frozen_are_not_warned_of(caplog):
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            return self.used(x)

    def make():
        layers = model(nn.Linear(6, 6), Sometimes(), nn.Linear(6, 6), Sometimes())
        layers[0].requires_grad_(False)
        return layers, nn.MSELoss()

    assert_plain(make, 2, targets=OUTPUTS, stages=2)
    assert not caplog.records


class Twice(nn.Module):
    """A weight in a linear layer and in another way."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.linear(x)) + 0.1 * self.linear.weight.diagonal()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("ranks", "keywords"),
    [
        (2, {"stages": 1, "replicas": 2, "microbatches": 2, "schedule": "zb_h1"}),
        (2, {"stages": 2, "schedule": "dualpipe"}),
        (4, {"stages": 2, "replicas": 2, "microbatches": 2, "schedule": "zb_h1"}),
    ],
    ids=str,
)
def test_weights_used_in_two_ways_under_split_backwards(ranks, keywords, overlap):
    """Our own hook, that tells when a bucket may leave, was taken for the user's."""

    def make():
        return model(*(Twice() for _ in range(4))), nn.MSELoss()

    assert_plain(make, ranks, targets=OUTPUTS, outer={"overlap": overlap}, **keywords)


def test_a_hook_of_the_users_on_such_a_weight_is_still_refused():
    def make():
        layers = model(*(Twice() for _ in range(2)))
        layers[0].linear.weight.register_hook(lambda gradient: gradient)
        return layers, nn.MSELoss()

    with pytest.raises(Exception, match="remove the hook"):
        run(make, 1, targets=OUTPUTS, stages=1, schedule="zb_h1")


def optimizers(make, ranks=2, layers=None, **keywords):
    keywords = {"stages": 2, "microbatches": 2, **keywords}

    def body(world):
        made = [nn.Flatten(), nn.Tanh(), nn.Linear(6, 6)] if layers is None else layers()
        pipe = Pipeline([each.double() for each in made], nn.MSELoss(), world=world, **keywords)
        optimizer = make(pipe)
        own = pipe.share(8)
        pipe.step(INPUTS[own], OUTPUTS[own])
        optimizer.step()
        return sum(p.numel() for p in pipe.parameters()), optimizer

    return run_on_threads(ranks, body)


@pytest.mark.parametrize(
    "make",
    [
        lambda pipe: torch.optim.AdamW(pipe.parameters()),
        lambda pipe: torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9),
        lambda pipe: torch.optim.Adagrad(pipe.parameters()),
        lambda pipe: pipe.optimizer(torch.optim.AdamW),
    ],
)
def test_a_rank_with_nothing_to_train_may_have_an_optimizer(make):
    assert [size for size, _ in optimizers(make, partition=[2, 1])] == [0, 42]


def test_optimizer_without_parameters_is_saved_and_loaded(tmp_path):
    def body(world):
        layers = [nn.Flatten(), nn.Tanh(), nn.Linear(6, 6).double()]
        pipe = Pipeline(layers, nn.MSELoss(), world=world, stages=2, partition=[2, 1])
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.25)
        pipe.step(INPUTS, OUTPUTS)
        optimizer.step()
        pipe.save(tmp_path / "saved", optimizer)
        again = torch.optim.AdamW(pipe.parameters(), lr=0.5)
        pipe.load(tmp_path / "saved", again)
        return again.param_groups[0]["lr"], dict(pipe.named_parameters()).keys()

    assert run_on_threads(2, body) == [(0.25, set()), (0.25, {"layers.2.weight", "layers.2.bias"})]


class Coupled(torch.optim.SGD):
    """It clips by the norm of all gradients it knows of."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, partial(Coupled, lr=0.1)])
def test_optimizers_that_look_across_parameters_are_refused(kind):
    with pytest.raises(Exception, match="combines parameters"):
        optimizers(lambda pipe: pipe.optimizer(kind))


class Ascent(torch.optim.SGD):
    """An optimizer that cannot step without a closure."""

    def step(self, closure):
        closure()
        return super().step()


class CoupledAscent(Ascent):
    def step(self, closure):
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        return super().step(closure)


def test_optimizer_that_needs_a_closure_is_tried_with_one():
    def body(world, kind):
        pipe = Pipeline(linears(), nn.MSELoss(), world=world, stages=2)
        return type(pipe.optimizer(partial(kind, lr=0.1)))

    assert run_on_threads(2, lambda world: body(world, Ascent)) == [Ascent, Ascent]
    with pytest.raises(Exception, match="combines parameters"):
        run_on_threads(2, lambda world: body(world, CoupledAscent))


def test_trying_an_optimizer_calls_no_hook_and_changes_no_parameter():
    calls = []

    class Hooked(torch.optim.SGD):
        def __init__(self, parameters):
            super().__init__(parameters, lr=0.1)
            self.register_step_pre_hook(lambda *_: calls.append("before"))
            self.register_step_post_hook(lambda *_: calls.append("after"))

    def body(world):
        pipe = Pipeline(linears(), nn.MSELoss(), world=world, stages=2)
        before = [p.detach().clone() for p in pipe.parameters()]
        pipe.optimizer(Hooked)
        return all(map(torch.equal, before, pipe.parameters()))

    assert run_on_threads(2, body) == [True, True]
    assert not calls


def test_optimizer_of_a_rank_without_parameters_is_empty():
    def body(world):
        layers = [nn.Flatten(), nn.Tanh(), nn.Linear(6, 6).double()]
        pipe = Pipeline(layers, nn.MSELoss(), world=world, stages=2, partition=[2, 1])
        optimizer = pipe.optimizer(torch.optim.AdamW)
        return [len(group["params"]) for group in optimizer.param_groups]

    assert run_on_threads(2, body) == [[0], [2]]


def test_coupled_optimizer_is_accepted_if_each_rank_has_all_parameters():
    made = optimizers(lambda pipe: pipe.optimizer(partial(Coupled, lr=0.1)), stages=1, replicas=2)
    assert {type(optimizer) for _, optimizer in made} == {Coupled}


def test_lbfgs_goes_the_same_way_on_replicas():
    def body(world, replicas):
        pipe = Pipeline(linears(), nn.MSELoss(), world=world, stages=1, replicas=replicas)
        optimizer = pipe.optimizer(partial(torch.optim.LBFGS, max_iter=4))
        own = pipe.share(8)

        def closure():
            return pipe.step(INPUTS[own], OUTPUTS[own]).loss

        return [float(optimizer.step(closure)) for _ in range(3)]

    [right] = run_on_threads(1, lambda world: body(world, 1))
    for losses in run_on_threads(2, lambda world: body(world, 2)):
        assert losses == pytest.approx(right, rel=1e-9)


KINDS = {
    "Adagrad": torch.optim.Adagrad,
    "Adam, fused": partial(torch.optim.Adam, fused=True),
    "AdamW, amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "Adafactor": torch.optim.Adafactor,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Rprop": torch.optim.Rprop,
    "SGD, nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("name", KINDS)
def test_optimizer_that_updates_each_parameter_alone_is_accepted(name):
    made = optimizers(lambda pipe: pipe.optimizer(KINDS[name]), layers=lambda: [*linears(4)])
    assert [size for size, _ in made] == [84, 84]


def test_sparse_adam_is_refused_by_name():
    with pytest.raises(Exception, match="SparseAdam"):
        optimizers(lambda pipe: pipe.optimizer(torch.optim.SparseAdam))


def test_a_described_model_has_no_outsiders(caplog):
    specs = [LayerSpec(nn.Linear, 6, 6, dtype=torch.float64) for _ in range(4)]
    found = run(lambda: (specs, nn.MSELoss()), 2, targets=OUTPUTS, stages=2)
    assert len(found) == 8 and not caplog.records
