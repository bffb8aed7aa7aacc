"""A plain training loop without gpipe_hpc, the reference for its results.

`train_plain` trains in one process, one micro-batch after the other. It computes the published
random seeds itself, from the formula in the docstring of models/randomness.py.
"""

import math
from collections import namedtuple
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import add
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_map_only

from tests.support import joined, largest

GOLDEN = 0x9E3779B97F4A7C15
MASK = 2**64 - 1


def key(*words):
    """Return the published key (seed) of some integers."""
    h = 0
    for word in words:
        z = (h + GOLDEN * (word + 1)) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        h = z ^ (z >> 31)
    return h % 2**63


Recipe = namedtuple("Recipe", "factory args")  # a layer that is not built yet


CPU = torch.device("cpu")


def build_plain(recipes, seed, device=CPU):
    """Build every layer under its own seed, and move it to the device."""
    layers = []
    for index, (factory, args) in enumerate(recipes):
        torch.default_generator.manual_seed(key(1, seed, index))
        layers.append(factory(*args).to(device))
    return layers


def named(layers):
    """Return the parameters of all layers by global name."""
    return {f"layers.{i}.{n}": p for i, x in enumerate(layers) for n, p in x.named_parameters()}


def run_plain(layers, nest, seed, step, microbatch, device=CPU):
    """Run all layers on one micro-batch, setting the published seed before each layer."""
    # torch.manual_seed seeds all devices, which takes thirty times as long as seeding the CPU.
    reseed = torch.default_generator.manual_seed if device == CPU else torch.manual_seed
    for index, layer in enumerate(layers):
        reseed(key(2, seed, step, microbatch, index))
        nest = layer(nest)
    return nest


@dataclass
class Training:
    """Losses, gradient norms and gradients of each step, and the final weights, by global name."""

    losses: list = field(default_factory=list)
    norms: list = field(default_factory=list)
    gradients: list = field(default_factory=list)
    weights: dict = field(default_factory=dict)

    def differences(self, other):
        """Return the names of all values that differ from another training in any bit."""
        found = []
        for step in range(len(self.losses)):
            found += [f"loss {step}"] * (self.losses[step] != other.losses[step])
            found += [f"norm {step}"] * (self.norms[step] != other.norms[step])
            mine, theirs = self.gradients[step], other.gradients[step]
            assert mine.keys() == theirs.keys()
            found += [f"gradient {step} {n}" for n in mine if not _same(mine[n], theirs[n])]
        assert self.weights.keys() == other.weights.keys()
        return found + [n for n, w in self.weights.items() if not _same(w, other.weights[n])]

    def distance(self, other):
        """Return the largest absolute difference from another training.

        The result is infinite if a value is NaN, or if only one of the trainings has a gradient.
        """
        pairs = [*zip(self.losses, other.losses, strict=True)]
        pairs += zip(self.norms, other.norms, strict=True)
        for mine, theirs in [
            *zip(self.gradients, other.gradients, strict=True),
            (self.weights, other.weights),
        ]:
            assert mine.keys() == theirs.keys()
            pairs += [(mine[n], theirs[n]) for n in mine]
        return largest(_difference(a, b) for a, b in pairs)


def _difference(left, right):
    if left is None or right is None:
        return 0.0 if left is right else math.inf
    return torch.as_tensor(left - right).abs().max().item()


def _same(left, right):
    if left is None or right is None:
        return left is right
    return torch.equal(left, right)


def sum_then_scale(layers, loss_fn, pieces, order, seed, step, device=CPU):
    """Compute the gradients of one step: summed per replica in `order`, added, then scaled once.

    `pieces[replica][microbatch]` is (inputs, targets). Sets `grad` of all parameters; returns the
    loss.
    """
    parameters = named(layers)
    replicas, terms = [], {}
    for number, own in enumerate(pieces):
        first = sum(map(len, pieces[:number]))
        for parameter in parameters.values():
            parameter.grad = None
        for m in order(len(own)):
            inputs, targets = own[m]
            if len(targets):
                place = first + m
                output = run_plain(layers, inputs, seed, step, place, device)
                total, terms[place] = _add(loss_fn(output, targets))
                if total.requires_grad:
                    total.backward()
        replicas.append({name: p.grad for name, p in parameters.items()})
    # Not `sum`, which compensates rounding errors since Python 3.12.
    total = reduce(add, (terms[place][0] for place in sorted(terms)), 0.0)
    weight = sum(float(w) for _, w in terms.values())
    # A tensor, since a GPU divides by a host number through its reciprocal, which rounds twice.
    divisor = torch.tensor(weight if weight else math.inf, dtype=torch.float64, device=device)
    for name, parameter in parameters.items():
        parts = [part[name] for part in replicas if part[name] is not None]
        parameter.grad = sum(parts[1:], parts[0]) if parts else None
        if parts:
            parameter.grad /= divisor.to(parameter.dtype)
    return total / weight if weight else 0.0


def _add(pair):
    total, weight = pair
    return total, (total.item(), float(weight))


def scale_each(layers, loss_fn, pieces, order, seed, step, device=CPU):
    """Compute the gradients of one step as in a common loop: each loss is divided, then summed."""
    flat = [piece for own in pieces for piece in own]
    kept = [(m, inputs, targets) for m, (inputs, targets) in enumerate(flat) if len(targets)]
    run = partial(run_plain, device=device)
    weight = sum(float(loss_fn(run(layers, x, seed, step, m), t)[1]) for m, x, t in kept)
    for parameter in named(layers).values():
        parameter.grad = None
    loss = 0.0
    for m, inputs, targets in kept:
        part = loss_fn(run(layers, inputs, seed, step, m), targets)[0] / weight
        part.backward()
        loss += part.item()
    return loss


def train_plain(
    recipes,
    loss_fn,
    batches,
    *,
    seed,
    replicas=1,
    microbatches=1,
    order=range,
    optimizer=None,
    max_norm=float("inf"),
    gradients_of=sum_then_scale,
    cut=torch.tensor_split,
    shares=None,
    device=CPU,
):
    """Train in one process; return losses, gradients and weights.

    Args:
        recipes: the layers, before they are built.
        loss_fn: function from (output, target) to (sum, weight).
        batches: (inputs, targets) of each step.
        seed: seed of the run.
        replicas: number of replicas to imitate.
        microbatches: number of micro-batches of each replica.
        order: function from a number of micro-batches to the order of a replica's backwards.
        optimizer: function from parameters to an optimizer; None to keep the weights.
        max_norm: limit for gradient clipping.
        gradients_of: `sum_then_scale` or `scale_each`.
        cut: function that splits a batch into micro-batches.
        shares: number of micro-batches of each replica, if they differ.
        device: torch device on which the layers run.
    """
    layers = build_plain(recipes, seed, device)
    parameters = named(layers)
    steps = Training()
    shares = shares or [microbatches] * replicas
    rule = optimizer(list(parameters.values())) if optimizer else None
    for step, batch in enumerate(batches):
        inputs, targets = tree_map_only(torch.Tensor, lambda t: t.to(device), batch)
        flat = list(
            zip(
                cut(inputs, sum(shares)),
                torch.tensor_split(targets, sum(shares)),
                strict=True,
            )
        )
        pieces = [flat[sum(shares[:r]) : sum(shares[: r + 1])] for r in range(len(shares))]
        steps.losses.append(gradients_of(layers, loss_fn, pieces, order, seed, step, device))
        norm = torch.nn.utils.clip_grad_norm_(list(parameters.values()), max_norm)
        steps.norms.append(norm.item())
        steps.gradients.append(
            {n: None if p.grad is None else p.grad.clone() for n, p in parameters.items()}
        )
        if rule:
            rule.step()
    steps.weights = {name: p.detach().clone() for name, p in parameters.items()}
    return steps


def train_rank(pipe, batches, *, optimizer=None, max_norm=float("inf")):
    """Train the rank of a Pipeline on its part of the batches; return this rank's results."""
    steps = Training()
    rule = optimizer(pipe.parameters()) if optimizer and pipe.parameters() else None
    for inputs, targets in batches:
        part = pipe.share(len(targets))
        own = tree_map_only(torch.Tensor, lambda t, p=part: t[p], inputs)
        steps.losses.append(pipe.step(own, targets[part]).loss)
        steps.norms.append(pipe.clip_grad_norm_(max_norm).item())
        steps.gradients.append(
            {n: None if p.grad is None else p.grad.clone() for n, p in pipe.named_parameters()}
        )
        if rule:
            rule.step()
    steps.weights = {name: p.detach().clone() for name, p in pipe.named_parameters()}
    return steps


def unite(ranks, stages):
    """Merge the results of all ranks; assert that replicas are bitwise equal."""
    first = [merge(ranks[start : start + stages]) for start in range(0, len(ranks), stages)]
    for other in first[1:]:
        assert not first[0].differences(other), "replicas differ"
    return first[0]


def merge(ranks):
    """Merge the results of the ranks of one replica; assert that losses and norms are equal."""
    whole = Training(ranks[0].losses, ranks[0].norms)
    assert all((r.losses, r.norms) == (whole.losses, whole.norms) for r in ranks)
    for step in range(len(whole.losses)):
        whole.gradients.append(joined([r.gradients[step] for r in ranks]))
    whole.weights = joined([r.weights for r in ranks])
    return whole


@pytest.fixture(scope="session")
def plain(device, on_threads):
    """Return the plain loop and functions to compare with it, on the device given by `--device`."""
    return SimpleNamespace(
        Recipe=Recipe,
        Training=Training,
        device=device,
        build=partial(build_plain, device=device.torch),
        key=key,
        on_threads=on_threads,
        merge=merge,
        scale_each=scale_each,
        train=partial(train_plain, device=device.torch),
        train_rank=train_rank,
        unite=unite,
    )
