"""Any two choices work together, each with its full effect, or are rejected by name."""

import dataclasses
import itertools
import re

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.comm.world.start import start_world
from gpipe_hpc.errors import ConfigError, PeerError
from gpipe_hpc.settings import Outer
from tests.support import batches, square_sum

WIDTH, ROWS, MICROBATCHES, STEPS = 4, 32, 4, 4

# Settings of each choice: those of `outer`, then those of the pipeline.
OUTER = {
    "small_buckets": {"bucket_bytes": 8},
    "no_overlap": {"overlap": False},
    "hierarchy": {"hierarchy": 2},
    "host": {"hierarchy": "host"},
    "order": {"order": "rank"},
    "bfloat16": {"compress": "bfloat16"},
    "float16": {"compress": "float16"},
    "powersgd": {"compress": "powersgd", "powersgd_rank": 1},
    "topk": {"compress": "topk", "topk_fraction": 0.25},
    "qsgd": {"compress": "qsgd", "qsgd_levels": 100},
    "flat": {"shard": "flat"},
    "local_sgd": {"every": 2},
    "diloco": {"every": 2, "lr": 0.7, "momentum": 0.9, "nesterov": True},
    "streaming": {"every": 2, "parts": 2},
    "late": {"every": 2, "behind": 1, "mix": 0.25},
    "weights": {"weights": [3, 1]},
}
PIPELINE = {
    "normalise": {"normalise_over_replicas": True},
    "noise_of_microbatches": {"noise_over": "microbatches"},
    "noise_of_replicas": {"noise_over": "replicas"},
    "half": {"precision": "float16"},
    "mirrored": {"schedule": "chimera", "stages": 2},
}
COMPRESS = {"bfloat16", "float16", "powersgd", "topk", "qsgd"}
LOCAL_SGD = {"local_sgd", "diloco", "streaming", "late"}
STRATEGIES = {"hierarchy", "host", "order"} | COMPRESS
NOISE = {"noise_of_microbatches", "noise_of_replicas"}
REFUSED = [
    (STRATEGIES, STRATEGIES, "cannot be combined, because each of them changes how"),
    (
        {"flat"},
        STRATEGIES - {"order"},
        r"outer\.shard=flat .* combined with outer\.(hierarchy|compress)",
    ),
    ({"flat", "oss"}, LOCAL_SGD, r"bad outer\.shard, expected none with outer\.every=2"),
    (LOCAL_SGD, {"normalise"}, r"outer\.every: .*normalise_over_replicas=False"),
    (LOCAL_SGD, NOISE, r"outer\.every: .* noise_over"),
    ({"weights"}, {"normalise"}, r"outer\.weights: .*BatchNorm"),
]


def share_a_setting(one, other):
    """Return whether two choices assign the same setting."""
    sets = [{**OUTER, **PIPELINE, "oss": {"shard": "oss"}}[name].keys() for name in (one, other)]
    return not sets[0].isdisjoint(sets[1])


def expected_error(pair):
    """Return the pattern of the error for a pair of choices, or None if they work together."""
    one, other = pair
    for left, right, words in REFUSED:
        if (one in left and other in right) or (one in right and other in left):
            return words
    return None


def make(world, names):
    outer, options = {}, {"stages": 1}
    for name in names:
        outer |= OUTER.get(name, {"shard": "oss"} if name == "oss" else {})
        options |= PIPELINE.get(name, {})
    dtype = torch.float32 if "half" in names else torch.float64
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH, dtype=dtype) for _ in range(4)]
    if "normalise" in names:
        layers[1] = LayerSpec(nn.BatchNorm1d, WIDTH, dtype=dtype)
    replicas = world.size // options["stages"]
    return Pipeline(
        layers,
        square_sum,
        replicas=replicas,
        microbatches=2 * MICROBATCHES // replicas,
        world=world,
        partition="uniform",
        seed=3,
        outer={"bucket_bytes": 200, **outer},
        **options,
    ), dtype


def train(world, names):
    """Train, check that each choice takes effect, and return the final weights."""
    pipe, dtype = make(world, names)
    optimizer = pipe.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.02))
    local_sgd, outer_steps = LOCAL_SGD & {*names}, []
    for inputs, targets in batches(STEPS, ROWS, WIDTH, dtype=dtype):
        part = pipe.share(ROWS)
        result = pipe.step(inputs[part], targets[part])
        assert torch.isfinite(torch.tensor(result.loss))
        assert (result.parts is not None) == bool(NOISE & {*names})
        pipe.clip_grad_norm_(100.0)
        optimizer.step()
        if pipe.outer_step():
            outer_steps.append(pipe.steps_done)
    expected = {"streaming": [1, 2, 3, 4], "late": [3]}.get(*local_sgd, [2, 4]) if local_sgd else []
    assert outer_steps == expected
    assert pipe.unite_replicas() == bool(local_sgd & {"streaming", "late"})
    if world.size > 1:
        assert pipe.outer_sent_bytes > 0
        assert pipe.is_sharded == bool({"flat", "oss"} & {*names})
        shares = [6, 2] if "weights" in names else [4, 4]
        assert pipe.num_microbatches == shares[pipe.replica]
    return {name: p.detach().clone() for name, p in pipe.named_parameters()}


def assert_weights_match(ranks, wanted, names):
    """Assert that ranks have equal weights, near `wanted` (within rounding for exact choices)."""
    stages = 2 if "mirrored" in names else 1
    assert all(
        torch.equal(ranks[0 if name in ranks[0] else stages - 1][name], weight)
        for rank in ranks
        for name, weight in rank.items()
    ), "replicas differ"
    distance = 1e-5 if "half" in names else 1e-11
    is_exact = not (LOCAL_SGD | COMPRESS) & {*names}
    near = distance if is_exact else 0.2
    for rank in ranks:
        for name, weight in rank.items():
            torch.testing.assert_close(weight, wanted[name], rtol=0, atol=near)


@pytest.fixture(scope="module")
def reference():
    """Return a function that trains on one rank, or on two if BatchNorm pools over replicas."""
    known = {}

    def find(names):
        basis = tuple(name for name in ("normalise", "half") if name in names)
        if basis not in known:
            ranks = 2 if "normalise" in names else 1
            known[basis] = run_on_threads(ranks, lambda world: train(world, basis))[0]
        return known[basis]

    return find


@pytest.mark.parametrize("one", [*OUTER, *PIPELINE])
def test_two_choices_work_together_or_are_rejected_by_name(one, reference):
    names = [*OUTER, *PIPELINE]
    for other in names[names.index(one) :]:
        pair = (one,) if one == other else (one, other)
        if len(pair) == 2 and share_a_setting(*pair):
            continue
        words = expected_error(pair) if len(pair) == 2 else None
        ranks = 4 if "mirrored" in pair else 2
        if words is None:
            found = run_on_threads(ranks, lambda world, pair=pair: train(world, pair))
            assert_weights_match(found, reference(pair), pair)
            continue
        with pytest.raises((ConfigError, PeerError)) as caught:
            run_on_threads(ranks, lambda world, pair=pair: make(world, pair))
        assert re.search(words, str(caught.value)), pair


def test_oss_sharding_works_with_all_choices_but_local_sgd(processes, tmp_path, reference):
    """`oss` needs processes; one launch runs all pairs with it."""
    pairs = [("oss", n) for n in [*OUTER, *PIPELINE] if n not in ("flat", "mirrored")]

    def body(rank):
        world = start_world()
        return {pair: train(world, pair) for pair in pairs if expected_error(pair) is None}

    first, second = processes(2, body, tmp_path)
    for pair in pairs:
        if words := expected_error(pair):
            with pytest.raises(ConfigError, match=words):
                Outer(shard="oss", **OUTER[pair[1]]).checked()
        else:
            assert_weights_match([first[pair], second[pair]], reference(pair), pair)


SETTINGS = [
    ({"mix": 0.1}, r"bad outer\.mix, .*set outer\.every=64"),
    ({"nesterov": True}, r"bad outer\.nesterov, .*set outer\.every=64"),
    ({"parts": 2}, r"bad outer\.parts, .*set outer\.every=64"),
]


@pytest.mark.parametrize(("outer", "words"), SETTINGS, ids=str)
def test_local_sgd_setting_is_rejected_without_local_sgd(outer, words):
    with pytest.raises(ConfigError, match=words):
        Pipeline([nn.Linear(2, 2)], square_sum, outer=outer)


def test_choices_cover_every_outer_setting():
    made = {key for each in OUTER.values() for key in each} | {"shard"}
    outer = Pipeline([nn.Linear(2, 2)], square_sum).request.outer
    assert made == {field.name for field in dataclasses.fields(outer)}
    assert len(list(itertools.combinations([*OUTER, *PIPELINE], 2))) == 210
