"""AdamW in one pass: torch's steps, the same bits in pieces, and no temporaries."""

import copy
import itertools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpipe_hpc.optim.adamw import AdamW
from gpipe_hpc.optim.optimizer import build_optimizer
from gpipe_hpc.settings import AdamWConfig

OPTIONS = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1}
STEPS = 5


def normal(*sizes, seed=0, dtype=torch.float64):
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def trained(weight, kind):
    """Return a weight after some steps."""
    own = nn.Parameter(weight.clone())
    optimizer = kind([own], **OPTIONS)
    for step in range(1, STEPS + 1):
        own.grad = (own.detach() * step).sin()
        optimizer.step()
    return own.detach()


@pytest.mark.parametrize(
    "weight",
    [
        normal(3, 5),
        normal(64),
        normal(70),
        normal(0),
        torch.tensor(0.5, dtype=torch.float64),
        normal(9, 8, 3, 3).to(memory_format=torch.channels_last),
        normal(40, 7).t(),
        normal(33, dtype=torch.complex128),
        normal(7, 9, dtype=torch.complex128).t(),
    ],
    ids=["small", "whole", "tail", "empty", "scalar", "channels", "turned", "complex", "both"],
)
def test_steps_are_those_of_torch(weight):
    ours, plain = (trained(weight, kind) for kind in (AdamW, torch.optim.AdamW))
    assert ours.stride() == plain.stride()
    torch.testing.assert_close(ours, plain, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_pieces_of_a_weight_come_out_as_the_whole_does(dtype):
    """Replicas that share the optimizer's work cut weights anywhere.

    Torch's fused form gives some numbers behind the last whole vector another last bit.
    """
    whole, pulls = normal(7000).to(dtype), [normal(7000, seed=s).to(dtype) for s in (1, 2, 3)]

    def stepped(cuts):
        pairs = list(itertools.pairwise(cuts))
        own = [nn.Parameter(whole[start:end].clone()) for start, end in pairs]
        optimizer = AdamW(own, **OPTIONS)
        for pull in pulls:
            for parameter, (start, end) in zip(own, pairs, strict=True):
                parameter.grad = pull[start:end]
            optimizer.step()
        return torch.cat([parameter.detach() for parameter in own])

    expected = stepped([0, 7000])
    assert torch.equal(stepped([0, 1, 8, 3003, 3006, 5000, 7000]), expected)
    assert torch.equal(stepped(range(0, 7001, 7)), expected)


class Operators(TorchDispatchMode):
    """Keeps how many numbers what is called returns."""

    def __init__(self):
        super().__init__()
        self.made = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and not func.is_view:
            self.made[func.overloadpacket.__name__] += found.numel()
        return found


def test_no_temporaries_of_a_weight_s_size():
    """Two of the embedding of a GPT-2 took 300 MB."""
    weights = [nn.Parameter(normal(1000, 7)), nn.Parameter(normal(3))]
    optimizer = AdamW(weights)
    for weight in weights:
        weight.grad = weight.detach().clone()
    optimizer.step()
    with Operators() as operators:
        optimizer.step()
    assert sum(operators.made.values()) < 1000, operators.made


def test_it_goes_on_from_a_state_of_torch_s_other_forms():
    """Checkpoints of earlier versions have one."""
    plain, ours = (nn.Parameter(normal(50)) for _ in range(2))
    theirs, optimizer = torch.optim.AdamW([plain], **OPTIONS), AdamW([ours], **OPTIONS)
    for step in range(6):
        plain.grad = normal(50, seed=step)
        theirs.step()
        if step == 2:
            optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
            ours.data.copy_(plain.data)
        if step > 2:
            ours.grad = plain.grad.clone()
            optimizer.step()
    torch.testing.assert_close(ours, plain, rtol=1e-14, atol=1e-15)


def test_a_weight_without_a_gradient_stays_and_begins_later():
    weights = [nn.Parameter(normal(5)), nn.Parameter(normal(6))]
    before = weights[1].detach().clone()
    optimizer = AdamW(weights, **OPTIONS)
    weights[0].grad = torch.ones_like(weights[0])
    optimizer.step()
    assert torch.equal(weights[1], before) and weights[1] not in optimizer.state
    weights[1].grad = torch.ones_like(weights[1])
    optimizer.step(lambda: 1.0)
    assert [optimizer.state[w]["step"].item() for w in weights] == [2, 1]


def test_settings_build_it():
    optimizer = build_optimizer([("w", nn.Parameter(normal(2, 2)))], AdamWConfig(lr=0.25))
    assert type(optimizer) is AdamW and optimizer.param_groups[0]["lr"] == 0.25
