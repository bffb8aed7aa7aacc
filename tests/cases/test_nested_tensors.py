"""Nested tensors between layers of a stage, also where their forward is run again.

The comparison of a recomputation with its forward asked them for what they cannot give.
"""

import pytest
import torch
from torch import nn

from tests.cases.state_support import (
    assert_as_plain,
    assert_refused,
    by_a_plain_loop,
    by_ranks,
    linear,
)
from tests.support import batches

DATA = batches(3)


class Jagged(nn.Module):
    """Makes a jagged tensor of two rows: the first sample, and all others."""

    def __init__(self):
        super().__init__()
        self.inner = linear()

    def nested(self, x):
        return torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, len(x)]))

    def forward(self, x):
        return self.nested(self.inner(x))


class Strided(Jagged):
    def nested(self, x):
        return torch.nested.as_nested_tensor([x[:1], x[1:]])


class InDict(Jagged):
    def forward(self, x):
        return {"rows": super().forward(x)}


class OnEach(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = linear()

    def forward(self, given):
        if isinstance(given, dict):
            return {"rows": self.inner(given["rows"])}
        return self.inner(given)


class Joined(nn.Module):
    def forward(self, given):
        rows = given["rows"] if isinstance(given, dict) else given
        return torch.cat(list(rows.unbind()))


KINDS = [Jagged, Strided, InDict]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("recompute", ["always", "except_last", "never"])
@pytest.mark.parametrize("kind", KINDS)
def test_nested_tensors_within_a_stage(kind, recompute, schedule):
    def make():
        return [kind(), OnEach(), Joined(), linear()]

    layout = {"stages": 2, "microbatches": 4, "partition": [3, 1], "schedule": schedule}
    ranks = by_ranks(make, DATA, 2, recompute=recompute, **layout)
    assert_as_plain(ranks, by_a_plain_loop(make, DATA))


@pytest.mark.parametrize("recompute", ["always", "never"])
@pytest.mark.parametrize("kind", KINDS)
def test_nested_tensors_at_a_cut_are_refused_by_name(kind, recompute):
    def make():
        return [kind(), OnEach(), Joined(), linear()]

    ranks = by_ranks(make, DATA, 2, stages=2, microbatches=4, recompute=recompute)
    assert_refused(ranks, "stage 0", "expected plain (dense, strided) tensors", "nested")
