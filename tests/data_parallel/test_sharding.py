"""Training with sharded optimizer state matches training with whole optimizers."""

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.data_parallel import FlatLayout
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.optim.optimizer import build_optimizer
from gpipe_hpc.schedule import Op, schedule_names
from gpipe_hpc.settings import LAMBConfig, LARSConfig
from gpipe_hpc.visualize import draw_svg
from gpipe_hpc.visualize.chrome_trace import chrome_trace
from tests.data_parallel.replicas import (
    MICROBATCHES,
    WIDTH,
    blocks,
    make,
    make_block,
    one_process,
)
from tests.support import batches, mean_square, product, square_sum

ROWS = 16
# One stage per rank, several stages, split backwards, two ranks per stage: gathering and reduction
# depend on nothing else in a table. schedule/passes/test_gathers.py checks the other tables.
QUICK = ("one_f_one_b", "interleaved", "zb_v", "chimera")
SCHEDULES = [
    name if name in QUICK else product(name)
    for name in sorted({*schedule_names()} - {"file", "auto"})
]


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def train_rank(plain, pipe, optimizer, steps=3, max_norm=0.5):
    """Train like `plain.train_rank`, but record gathered gradients."""
    found = plain.Training()
    for inputs, targets in batches(steps, ROWS, WIDTH):
        part = pipe.share(ROWS)
        found.losses.append(pipe.step(inputs[part], targets[part]).loss)
        found.norms.append(pipe.clip_grad_norm_(max_norm).item())
        gradients = pipe.gradients()
        found.gradients.append({n: None if g is None else g.clone() for n, g in gradients.items()})
        optimizer.step()
    found.weights = {name: p.detach().clone() for name, p in pipe.named_parameters()}
    return found


def train(plain, layers, ranks, stages, factory=adamw, outer=None, max_norm=0.5, **options):
    shard = {"shard": "flat", "bucket_bytes": 300} | (outer or {})

    def body(world):
        pipe = make(layers, world, stages, outer=shard, **options)
        return train_rank(plain, pipe, pipe.optimizer(factory), max_norm=max_norm)

    return plain.unite(run_on_threads(ranks, body), stages)


def expected(plain, layers, replicas, factory=adamw, max_norm=0.5):
    cut = {"replicas": replicas, "microbatches": MICROBATCHES}
    return one_process(plain, layers, ROWS, optimizer=factory, max_norm=max_norm, **cut)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_sharded_replicas_match_one_process_in_every_schedule(plain, schedule):
    layers = blocks(plain, 8)
    ours = train(plain, layers, 4, 2, schedule=schedule)
    assert ours.distance(expected(plain, layers, 2)) < 1e-10


@pytest.mark.parametrize("recompute", ["always", "except_last", "never"])
@pytest.mark.parametrize("factory", [adamw, sgd])
@pytest.mark.parametrize("bucket_bytes", [8, 1000, "25MB"])
def test_two_sharded_replicas_are_bitwise_equal_to_one_process(
    plain, bucket_bytes, factory, recompute
):
    """Without clipping: a norm that is added up from two parts may differ in its last bit."""
    layers, options = blocks(plain), {"schedule": "one_f_one_b", "recompute": recompute}
    outer, free = {"bucket_bytes": bucket_bytes}, float("inf")
    ours = train(plain, layers, 4, 2, factory, outer, free, **options)
    other = expected(plain, layers, 2, factory, free)
    assert all(abs(a - b) <= 1e-15 * b for a, b in zip(ours.norms, other.norms, strict=True))
    ours.norms = other.norms
    assert not ours.differences(other)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("factory", [adamw, sgd])
def test_four_sharded_replicas_match_one_process(plain, factory, overlap):
    layers = blocks(plain)
    ours = train(plain, layers, 4, 1, factory, {"overlap": overlap})
    assert ours.distance(expected(plain, layers, 4, factory)) < 1e-10


@pytest.mark.parametrize("factory", [adamw, sgd])
@pytest.mark.parametrize("bucket_bytes", [8, 1000])
def test_rank_ordered_sums_are_bitwise_equal_to_one_process(plain, factory, bucket_bytes):
    layers, free = blocks(plain), float("inf")
    outer = {"order": "rank", "bucket_bytes": bucket_bytes}
    ours = train(plain, layers, 4, 1, factory, outer, free, schedule="one_f_one_b")
    other = expected(plain, layers, 4, factory, free)
    ours.norms = other.norms
    assert not ours.differences(other)


@pytest.mark.parametrize("other", [{"compress": "topk"}, {"hierarchy": 2}], ids=str)
def test_sharding_with_other_reduction_strategy_is_rejected(plain, other):
    outer = {"shard": "flat"} | other
    with pytest.raises(ConfigError, match=r"outer\.shard=flat.*cannot be combined"):
        run_on_threads(2, lambda w: make(blocks(plain), w, 1, outer=outer))


@pytest.mark.parametrize("schedule", ["gpipe", "zb_v", "chimera"])
@pytest.mark.parametrize("stages", [1, 2])
def test_tied_weights_are_not_sharded_and_train_the_same(plain, schedule, stages):
    """The gradient norm counts tied weights once."""
    specs = [
        LayerSpec(make_linear).tied({"weight": "w"}),
        *(LayerSpec(make_block, WIDTH, True) for _ in range(2)),
        LayerSpec(make_linear).tied({"weight": "w"}),
    ]

    def body(world, shard):
        pipe = Pipeline(
            specs,
            square_sum,
            stages=stages,
            replicas=2,
            microbatches=4,
            schedule=schedule if stages == 2 else "gpipe",
            partition="uniform",
            world=world,
            outer={"shard": shard, "bucket_bytes": 300},
        )
        optimizer = pipe.optimizer(adamw)
        trained = train_rank(plain, pipe, optimizer)
        held = pipe.owned_parameters().get("layers.0.weight")
        return trained, held is None or not held.is_view

    results = {}
    for shard in ("none", "flat"):
        ranks = run_on_threads(2 * stages, lambda world, shard=shard: body(world, shard))
        assert all(is_whole for _, is_whole in ranks)
        results[shard] = plain.unite([trained for trained, _ in ranks], stages)
    assert results["flat"].distance(results["none"]) < 1e-10


def make_linear():
    return nn.Linear(WIDTH, WIDTH).double()


@pytest.mark.parametrize(("ranks", "stages", "schedule"), [(2, 2, "chimera"), (2, 2, "gems")])
def test_mirrored_stage_shards_its_state_over_its_ranks(plain, ranks, stages, schedule):
    """One replica in which two ranks hold each stage; each keeps half of the state."""
    layers = [plain.Recipe(make_block, (WIDTH, True)) for _ in range(4)]

    def body(world):
        pipe = make(layers, world, stages, schedule=schedule, outer={"shard": "flat"})
        optimizer = pipe.optimizer(adamw)
        trained = train_rank(plain, pipe, optimizer)
        return trained, kept_bytes(optimizer), sum(p.nbytes for p in pipe.parameters())

    found = run_on_threads(ranks, body)
    assert plain.merge([each[0] for each in found]).distance(expected(plain, layers, 1)) < 1e-10
    assert all(kept == 2 * held / 2 for _, kept, held in found)


def kept_bytes(optimizer):
    """Return the size of an optimizer's state in bytes, without step counters."""
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for key, value in state.items()
        if key != "step"
    )


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_rank_keeps_only_its_shard_of_the_state(plain, replicas):
    def body(world):
        outer = {"shard": "flat", "bucket_bytes": 500}
        pipe = make(blocks(plain, 2), world, 1, outer=outer)
        optimizer = pipe.optimizer(adamw)
        train_rank(plain, pipe, optimizer)
        rows = [bucket_elements(pipe, bucket) for bucket in pipe.layout.tables.buckets[0]]
        padded = sum(8 * -(-length // replicas) for length in rows)
        return kept_bytes(optimizer), padded, sum(p.nbytes for p in pipe.parameters())

    # Parameters that no layer uses have no state, as in plain torch.
    found = run_on_threads(replicas, body)
    unused = 2 * 8 * WIDTH
    total = 2 * found[0][2]
    assert sum(kept for kept, _, _ in found) == total - unused
    assert all(kept <= 2 * padded for kept, padded, _ in found)
    assert all(kept > 0.7 * total / replicas for kept, _, _ in found)


def bucket_elements(pipe, bucket):
    """Return the number of elements in the flat buffer of a bucket."""
    sizes = {name: p.numel() for name, p in pipe.named_parameters()}
    return FlatLayout({name: sizes[name] for name in bucket}).num_elements


@pytest.mark.parametrize(("ranks", "stages"), [(4, 2), (4, 1), (3, 1)])
def test_rank_sends_only_gradients_and_parameters_of_its_stage(plain, ranks, stages):
    """(R-1)/R of the stage's bytes to reduce gradients, and as much to gather parameters."""

    def body(world):
        outer = {"shard": "flat", "bucket_bytes": 500}
        pipe = make(blocks(plain), world, stages, outer=outer)
        optimizer = pipe.optimizer(sgd)
        (inputs, targets), part = batches(1, ROWS, WIDTH)[0], pipe.share(ROWS)
        (group,) = {id(g): g for g in pipe._steps._wiring.reductions.values()}.values()
        sent = []
        for work in (lambda: pipe.step(inputs[part], targets[part]), optimizer.step):
            before = group.sent.num_bytes
            work()
            pipe.await_parameters()
            sent.append(group.sent.num_bytes - before)
        (stage,) = pipe.stages
        padded = [
            -(-bucket_elements(pipe, bucket) // group.size) * group.size
            for bucket in pipe.layout.tables.buckets[stage]
        ]
        theory = 8 * sum(padded) * (group.size - 1) // group.size
        own = sum(p.nbytes for p in pipe.parameters()) * (group.size - 1) / group.size
        return sent, theory, own

    for sent, theory, own in run_on_threads(ranks, body):
        assert sent == [theory, theory]
        assert own <= theory <= 1.3 * own  # tensors start at multiples of 16 elements


class HalvingSGD(torch.optim.SGD):
    """SGD that halves the parameters after the step of its base class."""

    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            torch._foreach_mul_([p for group in self.param_groups for p in group["params"]], 0.5)


def test_optimizer_step_may_call_its_base_class_step(plain):
    """Torch runs post-step hooks after both steps if the base class was instantiated, too."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])

    def body(world):
        outer = {"shard": "flat", "bucket_bytes": 500}
        pipe = make(blocks(plain), world, 1, outer=outer)
        before = {name: p.detach().clone() for name, p in pipe.named_parameters()}
        optimizer = pipe.optimizer(lambda own: HalvingSGD(own, lr=0.0))
        train_rank(plain, pipe, optimizer)
        pipe.await_parameters()
        return before, {name: p.detach().clone() for name, p in pipe.named_parameters()}

    for before, after in run_on_threads(2, body):
        assert before.keys() == after.keys()
        halves = {n: torch.log2(before[n] / after[n]).unique() for n in before if before[n].any()}
        assert all(len(each) == 1 and each > 0 for each in halves.values()), halves


def test_parameters_are_gathered_during_the_first_forward(plain):
    """A layer waits for its own bucket only; those of later layers may be in flight."""

    def body(world):
        pipe = make(blocks(plain), world, 1, outer={"shard": "flat", "bucket_bytes": 8})
        optimizer = pipe.optimizer(sgd)
        (inputs, targets), part = batches(1, ROWS, WIDTH)[0], pipe.share(ROWS)
        pipe.step(inputs[part], targets[part])
        optimizer.step()
        shards, seen = pipe.stages[0].gradients.shards, []
        for index, layer in pipe.stages[0].layers.items():
            layer.register_forward_pre_hook(
                lambda *_, index=index: seen.append((index, len(shards._gathering)))
            )
        pipe.step(inputs[part], targets[part])
        return seen[:4], len(shards.buckets)

    for seen, count in run_on_threads(2, body):
        assert [index for index, _ in seen] == [0, 1, 2, 3]
        in_flight = [number for _, number in seen]
        assert count > in_flight[0] > in_flight[1] > in_flight[2] > in_flight[3] == 0


def test_table_gathers_buckets_just_before_the_first_forward(plain):
    def body(world):
        pipe = make(blocks(plain), world, 2, outer={"shard": "flat", "bucket_bytes": 300})
        tables = pipe.layout.tables
        return [table.ranks[pipe.stage_rank] for table in (tables.training, tables.evaluation)]

    for rows in run_on_threads(4, body):
        for row in rows:
            ops = [action.op for action in row]
            gathers = [at for at, op in enumerate(ops) if op is Op.UNSHARD]
            numbers = [row[at].bucket for at in gathers]
            assert numbers == sorted(numbers, reverse=True) and numbers[-1] == 0
            assert gathers[-1] + 1 == ops.index(Op.F)


@pytest.mark.parametrize("overlap", [True, False])
def test_measured_timeline_shows_parameter_gathering(plain, overlap):
    """From the second step on. Regression: the timeline showed reductions only."""

    def body(world):
        outer = {"shard": "flat", "bucket_bytes": 300, "overlap": overlap}
        pipe = make(blocks(plain), world, 2, outer=outer)
        optimizer, found = pipe.optimizer(sgd), []
        for inputs, targets in batches(2, ROWS, WIDTH):
            part = pipe.share(ROWS)
            pipe.step(inputs[part], targets[part])
            found.append(pipe.timeline())
            optimizer.step()
        own = pipe.schedule.ranks[pipe.stage_rank]
        return found, {action for action in own if action.op is Op.UNSHARD}

    ((first, second), wanted), (_, others), *_ = run_on_threads(4, body)
    wanted |= others
    assert not any(event.action.op is Op.UNSHARD for row in first.events for event in row)
    shown = [event for row in second.events for event in row if event.action.op is Op.UNSHARD]
    assert {event.action for event in shown} == wanted and len(wanted) > 2
    for event in shown:
        forwards = [e for e in second.events[event.rank] if e.action.op is Op.F]
        assert event.start_s <= forwards[0].start_s and event.duration_s >= 0
    assert "UNSHARD" in chrome_trace([second]) and "parameters gathered" in draw_svg(second)


def test_reads_evaluation_and_prediction_wait_for_parameters(plain):
    """Otherwise they would use the weights before the step, as parameters are gathered later."""

    def body(world, shard):
        pipe = make(blocks(plain), world, 1, outer={"shard": shard})
        optimizer = pipe.optimizer(sgd)
        (inputs, targets), part = batches(1, ROWS, WIDTH)[0], pipe.share(ROWS)
        found = []
        for read in (
            lambda: pipe.evaluate(inputs[part], targets[part]).loss,
            lambda: pipe.predict(inputs[:8]),
            lambda: torch.cat([p.flatten() for p in pipe.parameters()]),
        ):
            pipe.step(inputs[part], targets[part])
            optimizer.step()
            found.append(torch.as_tensor(read()))
        return found

    expected = run_on_threads(2, lambda world: body(world, "none"))[0]
    for found in run_on_threads(2, lambda world: body(world, "flat")):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_unused_and_frozen_parameters_do_not_change(plain):
    """As in plain torch, weight decay and momentum skip parameters without a gradient."""
    frozen = {"layers.0.first.weight", "layers.3.second.bias"}
    later = {"layers.0.second.weight", "layers.2.first.bias"}

    def body(world, shard):
        pipe = make(blocks(plain), world, 1, outer={"shard": shard, "bucket_bytes": 300})
        named = dict(pipe.named_parameters())
        for name in frozen:
            named[name].requires_grad_(False)
        optimizer = pipe.optimizer(sgd)
        start = {name: p.detach().clone() for name, p in named.items()}
        train_rank(plain, pipe, optimizer)
        for name in later:
            named[name].requires_grad_(False)
        between = {name: p.detach().clone() for name, p in pipe.named_parameters()}
        train_rank(plain, pipe, optimizer)
        after = {name: p.detach().clone() for name, p in pipe.named_parameters()}
        return start, between, after

    start, between, after = run_on_threads(2, lambda world: body(world, "flat"))[0]
    unused = {name for name in start if name in ("layers.1.scale", "layers.3.scale")}
    for name in start:
        assert torch.equal(start[name], between[name]) == (name in frozen | unused)
        assert torch.equal(between[name], after[name]) == (name in frozen | unused | later)
    unsharded = run_on_threads(2, lambda world: body(world, "none"))[0]
    for name, value in after.items():
        torch.testing.assert_close(value, unsharded[2][name], rtol=0, atol=1e-12)


def test_parameter_unfrozen_after_optimizer_creation_raises(plain):
    def body(world):
        pipe = make(blocks(plain), world, 1, outer={"shard": "flat"})
        first = dict(pipe.named_parameters())["layers.0.first.weight"].requires_grad_(False)
        optimizer = pipe.optimizer(sgd)
        train_rank(plain, pipe, optimizer, steps=1)
        first.requires_grad_(True)
        train_rank(plain, pipe, optimizer, steps=1)

    with pytest.raises(ConfigError, match=r"layers\.0\.first\.weight was frozen when"):
        run_on_threads(2, body)


def test_fewer_elements_than_replicas_match_one_process(plain):
    """Some replicas then have nothing to update."""
    layers = [plain.Recipe(make_scale, ())]
    ours = train(plain, layers, 4, 1)
    assert ours.distance(expected(plain, layers, 4)) < 1e-12


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x):
        return x * self.scale


def make_scale():
    return Scale()


def test_step_without_an_optimizer_of_the_pipeline_raises(plain):
    """Otherwise a plain optimizer would find no gradients and silently never change a weight."""

    def body(world):
        pipe = make(blocks(plain), world, 1, outer={"shard": "flat"})
        torch.optim.SGD(pipe.parameters(), lr=0.1)
        (inputs, targets), part = batches(1, ROWS, WIDTH)[0], pipe.share(ROWS)
        pipe.step(inputs[part], targets[part])

    with pytest.raises(ConfigError, match=r"the optimizer must be created by pipe\.optimizer"):
        run_on_threads(2, body)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.Adagrad, {}),
        (torch.optim.Adafactor, {}),
        (torch.optim.LBFGS, {}),
        (torch.optim.Muon, {}),
    ],
)
def test_optimizer_that_needs_whole_tensors_is_rejected_by_name(plain, kind, options):
    def body(world):
        pipe = make(blocks(plain), world, 2, outer={"shard": "flat"})
        pipe.optimizer(lambda ps: kind([p for p in ps if p.ndim == 2], **options))

    with pytest.raises(ConfigError, match=rf"{kind.__name__}.*use outer\.shard=oss"):
        run_on_threads(4, body)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.SGD, {"lr": 0.1, "nesterov": True, "momentum": 0.9}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.NAdam, {}),
        (torch.optim.RAdam, {}),
        (torch.optim.Adamax, {}),
        (torch.optim.Adadelta, {}),
        (torch.optim.ASGD, {}),
        (torch.optim.Rprop, {}),
    ],
)
def test_elementwise_optimizer_matches_one_process(plain, kind, options):
    layers = blocks(plain, 2)
    factory = lambda parameters: kind(parameters, **options)  # noqa: E731
    ours = train(plain, layers, 2, 1, factory)
    assert ours.distance(expected(plain, layers, 2, factory)) < 1e-10


@pytest.mark.parametrize(
    "config", [LARSConfig(), LAMBConfig(), LARSConfig(lr=0.0)], ids=["lars", "lamb", "still"]
)
def test_norm_based_optimizer_is_rejected_by_name(plain, config):
    """Even if its steps are small, or zero because of lr=0."""

    def body(world):
        pipe = make(blocks(plain), world, 1, outer={"shard": "flat"})
        pipe.optimizer(lambda _: build_optimizer(pipe.named_parameters(), config))

    kind = type(config).__name__.removesuffix("Config")
    with pytest.raises(ConfigError, match=rf"got {kind}: .*use outer\.shard=oss"):
        run_on_threads(2, body)


def test_unequal_sharded_replicas_match_one_process(plain):
    """One replica runs three times as many micro-batches and keeps half of the state."""
    layers = blocks(plain)
    ours = train(plain, layers, 2, 1, outer={"weights": [3, 1]})
    assert ours.distance(expected(plain, layers, 2)) < 1e-10


def test_parameter_groups_keep_options_and_names(plain):
    def body(world):
        pipe = make(blocks(plain), world, 1, outer={"shard": "flat", "bucket_bytes": 300})
        optimizer = pipe.optimizer(
            lambda _: torch.optim.AdamW(
                [
                    {"params": [(n, p) for n, p in pipe.named_parameters() if p.ndim > 1]},
                    {
                        "params": [(n, p) for n, p in pipe.named_parameters() if p.ndim == 1],
                        "lr": 0.5,
                    },
                ],
                lr=0.1,
            )
        )
        held = pipe.owned_parameters()
        found = {}
        for group in optimizer.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                assert held[name].parameter is parameter and parameter.ndim == 1
                found[name] = group["lr"], held[name].whole.ndim
        return found

    parts = run_on_threads(2, body)
    united = parts[0] | parts[1]
    assert all(rate == (0.1 if ndim > 1 else 0.5) for rate, ndim in united.values())
    assert len(united) == 4 * 5


def test_parameter_group_added_later_is_rejected(plain):
    def body(world):
        pipe = make(blocks(plain), world, 1, outer={"shard": "flat"})
        first, *others = pipe.parameters()
        optimizer = pipe.optimizer(lambda _: torch.optim.SGD(others, lr=0.1))
        optimizer.add_param_group({"params": [first]})
        optimizer.step()

    with pytest.raises(ConfigError, match=r"group 1 was added after pipe\.optimizer"):
        run_on_threads(2, body)


def test_two_optimizers_with_disjoint_parameters_match_one_process(plain):
    """Each gathers the buckets that it updates."""
    layers = blocks(plain)

    class Both:
        def __init__(self, parts):
            self.parts = parts

        def step(self):
            for part in self.parts:
                part.step()

    def split(make_one, parameters):
        matrices = [p for p in parameters if p.ndim > 1]
        rest = [p for p in parameters if p.ndim == 1]
        return make_one(sgd, matrices), make_one(adamw, rest)

    def body(world):
        pipe = make(layers, world, 1, outer={"shard": "flat", "bucket_bytes": 300})
        pair = split(lambda kind, ps: pipe.optimizer(lambda _: kind(ps)), pipe.parameters())
        return train_rank(plain, pipe, Both(pair))

    ours = plain.unite(run_on_threads(2, body), 1)
    other = expected(plain, layers, 2, lambda ps: Both(split(lambda kind, own: kind(own), ps)))
    assert ours.distance(other) < 1e-10


def test_float16_overflow_skips_step_on_all_replicas(plain):
    def body(world, shard):
        pipe = Pipeline(
            [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(2)],
            square_sum,
            stages=1,
            replicas=2,
            microbatches=2,
            precision="float16",
            world=world,
            outer={"shard": shard},
        )
        optimizer = pipe.optimizer(adamw)
        skipped, weights = [], []
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(8, WIDTH, generator=generator)
            inputs[0] *= 1e4 if step == 1 else 1  # on the first replica only
            part = pipe.share(8)
            result = pipe.step(inputs[part], torch.zeros(8, WIDTH)[part])
            skipped.append(result.is_skipped)
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            weights.append(torch.cat([p.detach().flatten().clone() for p in pipe.parameters()]))
        return skipped, weights

    unsharded = run_on_threads(2, lambda world: body(world, "none"))
    sharded = run_on_threads(2, lambda world: body(world, "flat"))
    assert any(unsharded[0][0]) and not all(unsharded[0][0])
    for (skipped, weights), (others, wanted) in zip(sharded, unsharded, strict=True):
        assert skipped == others
        for weight, other in zip(weights, wanted, strict=True):
            torch.testing.assert_close(weight, other, rtol=1e-5, atol=1e-7)


def test_single_replica_is_not_sharded(plain):
    """Any optimizer works then."""

    def body(world):
        pipe = make(blocks(plain), world, 1, outer={"shard": "flat"})
        assert not pipe.is_sharded
        optimizer = torch.optim.Adagrad(pipe.parameters())
        return train_rank(plain, pipe, optimizer)

    ours = plain.unite(run_on_threads(1, body), 1)
    other = expected(plain, blocks(plain), 1, torch.optim.Adagrad)
    assert ours.distance(other) < 1e-12


def test_rank_without_parameters_takes_part_in_sharding(plain):
    layers = [*blocks(plain, 2), plain.Recipe(nn.Identity, ()), plain.Recipe(nn.Identity, ())]
    ours = train(plain, layers, 4, 2, schedule="gpipe")
    assert ours.distance(expected(plain, layers, 2)) < 1e-10


def test_unknown_shard_name_error_lists_known_names(plain):
    with pytest.raises(ConfigError, match=r"outer\.shard, expected one of .*oss, got 'zero'"):
        run_on_threads(1, lambda w: make(blocks(plain), w, 1, outer={"shard": "zero"}))


@pytest.mark.parametrize("shard", ["none", "flat"])
def test_tensors_in_buckets_start_at_aligned_offsets(plain, shard):
    """Regression: on a GPU, a gradient norm after a bias of 5 elements differed in its last bit."""

    def body(world):
        layers = [LayerSpec(nn.Linear, WIDTH, 5), LayerSpec(nn.Linear, 5, WIDTH)]
        outer = {"shard": shard, "bucket_bytes": 1e6}
        pipe = Pipeline(layers, mean_square, replicas=2, microbatches=2, world=world, outer=outer)
        optimizer = pipe.optimizer(sgd)
        part = pipe.share(ROWS)
        pipe.step(torch.ones(ROWS, WIDTH)[part], torch.ones(ROWS, WIDTH)[part])
        optimizer.step()
        pipe.await_parameters()
        tensors = [p if shard == "flat" else p.grad for p in pipe.parameters()]
        assert len({each.untyped_storage().data_ptr() for each in tensors}) == 1
        return [each.storage_offset() for each in tensors]

    for offsets in run_on_threads(2, body):
        assert len(offsets) == 4 and all(offset % 16 == 0 for offset in offsets)
