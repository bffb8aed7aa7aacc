"""Models with skips, ties and BatchNorm have the gradients and weights of a plain model.

The reference is a loop over micro-batches in one process, implemented here, with its own stashes
and torch's BatchNorm, whose running statistics are updated from all inputs of the step.
"""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn

from gpipe_hpc import Pipeline
from gpipe_hpc.models import (
    build_layer,
    build_model,
    classification,
    find_ties,
    microbatch_key,
    segmentation,
    token_cross_entropy,
)
from tests.support import largest

SEED, STEPS, NUM_SAMPLES, NUM_MICROBATCHES = 11, 2, 9, 4
SCHEDULES = ("gpipe", "one_f_one_b", "interleaved", "zb_v", "chimera")
MODES = ("always", "except_last", "never")


@dataclass(frozen=True)
class Case:
    name: str
    sizes: dict
    loss_fn: object
    inputs: tuple
    classes: int
    targets: tuple = ()
    tokens: bool = False

    def layers(self):
        return build_model(self.name, **self.sizes)

    def batch(self, step):
        generator = torch.Generator().manual_seed(step)
        shape = (NUM_SAMPLES, *self.inputs)
        draw = partial(torch.randint, self.classes, generator=generator)
        inputs = draw(shape) if self.tokens else torch.randn(shape, generator=generator)
        return inputs, draw((NUM_SAMPLES, *self.targets))


CASES = {
    "unet": Case(
        "unet",
        {"num_convs": 1, "base_channels": 2, "in_channels": 1, "num_classes": 3, "depth": 3},
        segmentation,
        (1, 16, 16),
        3,
        (16, 16),
    ),
    "amoebanet_d": Case(
        "amoebanet_d",
        {"num_layers": 3, "num_filters": 8, "num_classes": 4, "in_channels": 1},
        classification,
        (1, 32, 32),
        4,
    ),
    "gpt_tied": Case(
        "gpt",
        {
            "vocab_size": 11,
            "block_size": 6,
            "num_layers": 4,
            "num_heads": 2,
            "width": 8,
            "dropout": 0.2,
            "tied": True,
        },
        token_cross_entropy,
        (6,),
        11,
        (6,),
        tokens=True,
    ),
    "resnet": Case("resnet_small", {"width": 4, "num_classes": 4}, classification, (1, 8, 8), 4),
}


@pytest.fixture(autouse=True, scope="module")
def double_precision():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def optimizer_of(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


class PlainModel:
    """The whole model in one process, without the engine."""

    def __init__(self, case, device):
        self.specs = case.layers()
        built = (build_layer(each, index=i, seed=SEED) for i, each in enumerate(self.specs))
        self.modules = [module.to(device) for module in built]
        for tie in find_ties(self.specs):
            (first, name), *others = tie.places
            shared = self.modules[first].get_parameter(name)
            for index, other in others:
                owner, _, leaf = other.rpartition(".")
                setattr(self.modules[index].get_submodule(owner), leaf, shared)
        self.norms, self.inputs = {}, {}
        for index, module in enumerate(self.modules):
            for name, part in module.named_modules():
                if isinstance(part, nn.BatchNorm2d):
                    where = f"layers.{index}.{name}".rstrip(".")
                    self.norms[where], self.inputs[where] = part, []
                    part.register_forward_pre_hook(
                        lambda _, args, where=where: self.inputs[where].append(args[0].detach())
                    )

    def named_parameters(self):
        named, seen = {}, set()
        for index, module in enumerate(self.modules):
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    named[f"layers.{index}.{name}"] = parameter
        return named

    def forward(self, x, step, microbatch):
        stashed = {}
        for index, (module, spec) in enumerate(zip(self.modules, self.specs, strict=True)):
            torch.manual_seed(microbatch_key(SEED, step, microbatch, index))
            x = module(x, *(stashed.pop(name) for name in spec.pops))
            if spec.stashes:
                x, *more = x
                stashed |= zip(spec.stashes, more, strict=True)
        assert not stashed
        return x

    def statistics(self):
        return {
            f"{where}.{name}": getattr(norm, name).clone()
            for where, norm in self.norms.items()
            for name in ("running_mean", "running_var")
        }

    def pool(self, before):
        """Update the running statistics from the inputs of all micro-batches at once."""
        for where, norm in self.norms.items():
            seen = torch.cat([x.transpose(0, 1).flatten(1) for x in self.inputs[where]], 1)
            for name, pooled in (("running_mean", seen.mean(1)), ("running_var", seen.var(1))):
                old = before[f"{where}.{name}"]
                getattr(norm, name).copy_((1 - norm.momentum) * old + norm.momentum * pooled)
            self.inputs[where].clear()


def train_plain(case, device):
    """Train; return loss and gradients of each step, and the final weights and statistics."""
    model = PlainModel(case, device)
    parameters = model.named_parameters()
    optimizer, steps = optimizer_of(parameters.values()), []
    for step in range(STEPS):
        before = model.statistics()
        optimizer.zero_grad()
        total, weight = 0.0, 0
        moved = (x.to(device) for x in case.batch(step))
        pieces = (torch.tensor_split(x, NUM_MICROBATCHES) for x in moved)
        for m, (x, target) in enumerate(zip(*pieces, strict=True)):
            part, count, *_ = case.loss_fn(model.forward(x, step, m), target)
            part.backward()
            total, weight = total + part.item(), weight + int(count)
        # A GPU divides by a host number through its reciprocal, which rounds twice.
        divisor = torch.tensor(weight, device=device)
        for parameter in parameters.values():
            parameter.grad /= divisor.to(parameter.dtype)
        steps.append((total / weight, {n: p.grad.clone() for n, p in parameters.items()}))
        model.pool(before)
        optimizer.step()
    weights = {name: p.detach() for name, p in parameters.items()}
    return steps, weights, model.statistics()


@pytest.fixture(scope="module")
def plain(device):
    known = {}

    def train(name):
        if name not in known:
            known[name] = train_plain(CASES[name], device.torch)
        return known[name]

    return train


def train(world, case, **settings):
    """Train on this rank; return the results of `train_plain` for the rank's own stages."""
    settings = {"microbatches": NUM_MICROBATCHES, **settings}
    pipe = Pipeline(
        case.layers(), case.loss_fn, partition="uniform", seed=SEED, world=world, **settings
    )
    assert pipe.num_microbatches == NUM_MICROBATCHES
    assert case.name != "unet" or pipe.schedule.skips, "no skip connection passes over a stage"
    optimizer, steps = optimizer_of(pipe.parameters()), []
    for step in range(STEPS):
        loss = pipe.step(*case.batch(step)).loss
        steps.append((loss, {n: p.grad.clone() for n, p in pipe.named_parameters()}))
        optimizer.step()
    weights = {name: p.detach() for name, p in pipe.named_parameters()}
    buffers = {}
    for stage in pipe.stages.values():
        buffers |= stage.named_buffers()
    return steps, weights, buffers


def largest_difference(mine, theirs):
    """Return the largest difference, relative to the largest value of its tensor if that exceeds 1.

    Gradients here reach 58; the last bits of their sums differ between processors.
    """
    return largest(
        (mine[name] - theirs[name]).abs().max().item() / max(1.0, theirs[name].abs().max().item())
        for name in mine
    )


def assert_plain_model(plain, on_threads, name, schedule, recompute, ranks=4, **settings):
    steps, weights, statistics = plain(name)
    run = partial(train, case=CASES[name], schedule=schedule, recompute=recompute, **settings)
    answers = on_threads(ranks, run)
    seen = set()
    for own_steps, own_weights, own_buffers in answers:
        for (loss, gradients), (own_loss, own) in zip(steps, own_steps, strict=True):
            assert abs(own_loss - loss) < 1e-10
            assert largest_difference(own, gradients) < 1e-10
        assert largest_difference(own_weights, weights) < 1e-10
        own_buffers = {
            n: b for n, b in own_buffers.items() if not n.endswith("num_batches_tracked")
        }
        assert largest_difference(own_buffers, statistics) < 1e-10
        seen |= own_weights.keys() | own_buffers.keys()
    assert seen == weights.keys() | statistics.keys()


FAST = {
    ("unet", "zb_v", "always"),
    ("unet", "chimera", "except_last"),
    ("amoebanet_d", "one_f_one_b", "always"),
    ("gpt_tied", "interleaved", "never"),
    ("gpt_tied", "zb_v", "except_last"),
    ("resnet", "chimera", "always"),
    ("resnet", "gpipe", "except_last"),
}
GRID = [(name, s, mode) for name in CASES for s in SCHEDULES for mode in MODES]


@pytest.mark.parametrize(("name", "schedule", "recompute"), sorted(FAST))
def test_training_equals_plain_model(plain, on_threads, name, schedule, recompute):
    assert_plain_model(plain, on_threads, name, schedule, recompute)


@pytest.mark.parametrize(
    ("name", "ranks", "stages", "schedule", "recompute"),
    [
        ("unet", 7, 4, "zb_h1", "always"),
        ("amoebanet_d", 5, 3, "one_f_one_b", "except_last"),
        ("gpt_tied", 7, 4, "one_f_one_b", "always"),
        ("gpt_tied", 3, 2, "zb_h1", "never"),
        ("resnet", 5, 4, "gpipe", "except_last"),
        ("resnet", 7, 4, "zb_h1", "never"),
    ],
)
def test_training_with_partial_replica_equals_plain_model(
    plain, on_threads, name, ranks, stages, schedule, recompute
):
    """The second of two pipelines lacks some of its ranks."""
    assert_plain_model(
        plain, on_threads, name, schedule, recompute, ranks, stages=stages, microbatches=2
    )


@pytest.mark.product
@pytest.mark.parametrize(("name", "schedule", "recompute"), [c for c in GRID if c not in FAST])
def test_training_equals_plain_model_in_all_other_settings(
    plain, on_threads, name, schedule, recompute
):
    assert_plain_model(plain, on_threads, name, schedule, recompute)
