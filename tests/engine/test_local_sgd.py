"""Local SGD: averaging in every step equals synchronous training; outer steps follow DiLoCo."""

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.errors import ConfigError, PeerError
from gpipe_hpc.schedule import Op
from tests.support import batches, buffers_of, largest, product, square_sum

WIDTH, ROWS, RATE = 4, 16, 0.05
EVERY_STEP = {"every": 1, "lr": 1.0, "momentum": 0.0}


def linears(num_layers=4):
    return [LayerSpec(nn.Linear, WIDTH, WIDTH, dtype=torch.float64) for _ in range(num_layers)]


def make(world, outer, stages=2, *, layers=None, **options):
    return Pipeline(
        layers or linears(),
        options.pop("loss_fn", square_sum),
        stages=stages,
        replicas=world.size // stages,
        microbatches=options.pop("microbatches", 2),
        world=world,
        partition="uniform",
        seed=3,
        outer={"bucket_bytes": 300, **outer},
        **options,
    )


def sgd(pipe):
    groups = pipe.parameters() or [{"params": []}]
    return torch.optim.SGD(groups, lr=RATE)


def adamw(pipe):
    return torch.optim.AdamW(pipe.parameters(), lr=RATE)


def train(pipe, optimizer, data, *, calls=True, max_norm=None, frozen_in_step=None):
    """Train; return the losses and the steps after which parameters were averaged.

    `frozen_in_step`: the step before which each of these parameters is frozen.
    """
    losses, stepped = [], []
    for inputs, targets in data:
        freeze(dict(pipe.named_parameters()), frozen_in_step, pipe.steps_done + 1)
        part = pipe.share(len(inputs))
        losses.append(pipe.step(inputs[part], targets[part]).loss)
        if max_norm is not None:
            pipe.clip_grad_norm_(max_norm)
        optimizer.step()
        if calls and pipe.outer_step():
            stepped.append(pipe.steps_done)
    return losses, stepped


def freeze(named, frozen_in_step, step):
    for name, first in (frozen_in_step or {}).items():
        if name in named and step == first:
            named[name].requires_grad_(False)


def weights(pipe):
    return {name: p.detach().clone() for name, p in pipe.named_parameters()}


def run(ranks, outer, data, stages=2, optimizer=sgd, training=None, **options):
    """Train; return losses, final weights and outer steps of each rank."""

    def body(world):
        pipe = make(world, outer, stages, **dict(options))
        losses, stepped = train(pipe, optimizer(pipe), data, **(training or {}))
        pipe.outer_state()  # waits for pending averages
        return losses, weights(pipe), stepped

    return run_on_threads(ranks, body)


def assert_near(mine, theirs, distance=1e-10):
    for (losses, named, _), (other_losses, others, _) in zip(mine, theirs, strict=True):
        assert largest(abs(a - b) for a, b in zip(losses, other_losses, strict=True)) < distance
        assert named.keys() == others.keys()
        for name in named:
            torch.testing.assert_close(named[name], others[name], rtol=0, atol=distance)


@pytest.mark.parametrize(
    ("ranks", "stages", "schedule"),
    [
        (2, 1, "gpipe"),
        (4, 1, "gpipe"),
        (4, 2, "one_f_one_b"),
        (4, 2, "interleaved"),
        (4, 2, "zb_h1"),
        (4, 2, "chimera"),
        (6, 2, "gems"),
    ],
)
def test_averaging_every_step_equals_synchronous_training(ranks, stages, schedule):
    """Includes mirrored stages, whose gradients are summed within each replica."""
    data = batches(5, ROWS, WIDTH)
    local = run(ranks, EVERY_STEP, data, stages, schedule=schedule)
    assert_near(local, run(ranks, {}, data, stages, schedule=schedule))
    assert all(stepped == [1, 2, 3, 4, 5] for _, _, stepped in local)


@pytest.mark.parametrize("rows", [1, 3, 7, 13])
def test_replicas_are_weighted_by_their_samples(rows):
    """Includes fewer samples than replicas: a replica without samples has weight 0."""
    data = batches(4, rows, WIDTH)
    assert_near(run(4, EVERY_STEP, data, 1), run(4, {}, data, 1))


def test_tied_parameters_train_as_with_synchronous_replicas():
    tied = LayerSpec(nn.Linear, WIDTH, WIDTH, bias=False, dtype=torch.float64)
    tied = tied.tied({"weight": "shared"})
    layers = [tied, *linears(2), tied]
    data = batches(3, ROWS, WIDTH)
    assert_near(run(4, EVERY_STEP, data, layers=layers), run(4, {}, data, layers=layers))


class Replica(nn.Sequential):
    """A replica in plain torch with its own inner optimizer, and the initial weights of `make`."""

    def __init__(self, initial, inner, max_norm):
        super().__init__(*(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(4)))
        self.named = {f"layers.{name}": p for name, p in self.named_parameters()}
        with torch.no_grad():
            for name, p in self.named.items():
                p.copy_(initial[name])
        self.optimizer, self.max_norm, self.norms = inner(self), max_norm or float("inf"), []

    def train_step(self, inputs, targets):
        self.optimizer.zero_grad()
        (square_sum(self(inputs), targets)[0] / len(inputs)).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), self.max_norm)
        self.norms.append(norm.item())
        self.optimizer.step()


class Average:
    """Parameters that are averaged together by algorithm 1 of DiLoCo, at once or with a delay."""

    def __init__(self, names, replicas, **settings):
        self.copies = [replica.named for replica in replicas]
        self.anchors = {n: self.copies[0][n].detach().clone().requires_grad_() for n in names}
        self.optimizer = torch.optim.SGD(self.anchors.values(), **settings)
        self.is_started = False

    def start(self):
        self.is_started = True
        for name, anchor in self.anchors.items():
            changes = [anchor.detach() - named[name].detach() for named in self.copies]
            anchor.grad = sum(changes) / len(changes)

    def finish(self, mix):
        """Apply the average; `mix` is the weight of a replica's present values."""
        if not self.is_started:
            return
        self.is_started = False
        self.optimizer.step()
        with torch.no_grad():
            for name, anchor in self.anchors.items():
                for named in self.copies:
                    named[name].copy_(mix * named[name] + (1 - mix) * anchor)


def reference(
    data,
    *,
    every,
    inner=sgd,
    max_norm=None,
    frozen_in_step=None,
    parts=None,
    behind=0,
    united_after=(),
    **outer,
):
    """Train two replicas with DiLoCo in plain torch, as `run` does; return them.

    `parts`: names of parameters that are averaged together; None: all.
    `united_after`: steps after which replicas are made equal.
    """
    (initial,) = run_on_threads(1, lambda world: weights(make(world, {}, 1)))
    replicas = [Replica(initial, inner, max_norm) for _ in range(2)]
    averages = [Average(names, replicas, **outer) for names in parts or [initial]]
    for step, batch in enumerate(data, start=1):
        for replica, inputs, targets in zip(
            replicas, *(each.tensor_split(2) for each in batch), strict=True
        ):
            freeze(replica.named, frozen_in_step, step)
            replica.train_step(inputs, targets)
        starts = [step + part * every // len(averages) for part in range(len(averages))]
        for average, start in zip(averages, starts, strict=True):
            if behind and (start - behind) % every == 0:
                average.finish(0.5)
            if start % every == 0:
                average.start()
                if not behind:
                    average.finish(0.0)
        if step in united_after:
            unite(averages, starts, every)
    return replicas


def unite(averages, starts, every):
    """Finish each average; average the parts once more that were trained since."""
    for average, start in zip(averages, starts, strict=True):
        is_trained = start % every != 0
        average.finish(0.5 if is_trained else 0.0)
        if is_trained:
            average.start()
            average.finish(0.0)


def assert_equals_reference(ranks, replicas):
    """Assert that the final weights of all ranks equal those of their replicas."""
    for rank, named in enumerate(ranks):
        expected = replicas[rank * len(replicas) // len(ranks)].named
        for name, weight in named.items():
            torch.testing.assert_close(weight, expected[name].detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("steps", [9, 10])
@pytest.mark.parametrize(
    ("lr", "momentum", "nesterov"), [(1.0, 0.0, False), (0.7, 0.9, True), (0.5, 0.5, False)]
)
def test_outer_steps_follow_the_diloco_algorithm(lr, momentum, nesterov, steps, stages):
    """AdamW is the inner optimizer, SGD the outer one; replicas differ between outer steps."""
    data = batches(steps, ROWS, WIDTH)
    outer = {"every": 3, "lr": lr, "momentum": momentum, "nesterov": nesterov}
    ours = run(2 * stages, outer, data, stages, optimizer=adamw)
    assert all(stepped == [3, 6, 9] for *_, stepped in ours)
    assert_equals_reference([named for _, named, _ in ours], reference(data, inner=adamw, **outer))
    first, other = ours[0][1], ours[stages][1]
    is_equal = all(torch.equal(first[name], other[name]) for name in first)
    assert is_equal == (steps == 9)


@pytest.mark.parametrize("stages", [1, 2])
def test_each_replica_clips_by_the_norm_of_its_own_gradients(stages):
    """The norm is over all stages of the replica; clipping by a common norm would differ."""
    data, outer = batches(5, ROWS, WIDTH), {"every": 3, "lr": 0.7, "momentum": 0.9}
    training = {"max_norm": 0.1}
    ours = run(2 * stages, outer, data, stages, training=training)
    replicas = reference(data, **outer, **training)
    assert_equals_reference([named for _, named, _ in ours], replicas)
    for norm, other in zip(*(replica.norms for replica in replicas), strict=True):
        assert min(norm, other) > 0.1 and abs(norm - other) > 0.01


@pytest.mark.parametrize("stages", [1, 2])
def test_frozen_parameters_are_averaged_only_with_earlier_changes(stages):
    """One parameter is frozen from the start, one between two outer steps."""
    data, outer = batches(7, ROWS, WIDTH), {"every": 3, "lr": 0.7, "momentum": 0.9}
    training = {"frozen_in_step": {"layers.1.weight": 1, "layers.2.weight": 5}}
    ours = run(2 * stages, outer, data, stages, optimizer=adamw, training=training)
    replicas = reference(data, inner=adamw, **outer, **training)
    assert_equals_reference([named for _, named, _ in ours], replicas)
    initial = reference([], **outer)[0].named["layers.1.weight"]
    found = [named["layers.1.weight"] for _, named, _ in ours if "layers.1.weight" in named]
    assert len(found) == 2 and all(torch.equal(each, initial) for each in found)


@pytest.mark.parametrize("every", [1, 3])
def test_missing_call_of_outer_step_is_made_up_by_the_next_step(every):
    data = batches(7, ROWS, WIDTH)
    outer = {"every": every, "lr": 0.7, "momentum": 0.9}

    def body(calls):
        def on(world):
            pipe = make(world, outer)
            optimizer = sgd(pipe)
            train(pipe, optimizer, data, calls=calls)
            inputs, targets = data[0]
            part = pipe.share(ROWS)
            loss = pipe.evaluate(inputs[part], targets[part]).loss
            return [loss], weights(pipe), []

        return run_on_threads(4, on)

    assert_near(body(calls=True), body(calls=False), 1e-15)


def test_outer_step_waits_for_the_optimizer_step():
    """Otherwise an evaluation before optimizer.step() would average parameters without the step."""

    def body(world):
        pipe = make(world, {"every": 1}, 1)
        inputs, targets = batches(1, ROWS, WIDTH)[0]
        part = pipe.share(ROWS)
        pipe.step(inputs[part], targets[part])
        pipe.evaluate(inputs[part], targets[part])
        sgd(pipe).step()
        return pipe.outer_step(), pipe.outer_step()

    assert run_on_threads(2, body) == [(True, False)] * 2


def test_tables_contain_reductions_and_averages():
    def body(world):
        local = make(world, {"every": 2}, schedule="one_f_one_b").layout.tables
        mirrored = make(world, {"every": 2}, schedule="chimera", microbatches=2).layout.tables
        return local, mirrored

    (local, mirrored), *_ = run_on_threads(4, body)

    def ops(table):
        return [a.op for row in table.ranks for a in row if a.op in (Op.REDUCE_GRAD, Op.AVERAGE)]

    assert ops(local.training) == []
    assert set(ops(local.averaging)) == {Op.AVERAGE}
    assert len(ops(local.averaging)) == sum(map(len, local.buckets)) > 2
    assert set(ops(mirrored.training)) == {Op.REDUCE_GRAD}, (
        "other actions than sums over mirrored copies"
    )
    assert set(ops(mirrored.averaging)) == {Op.REDUCE_GRAD, Op.AVERAGE}
    for table in (local, mirrored):
        for row in table.averaging.ranks:
            first = next(i for i, a in enumerate(row) if a.op is Op.AVERAGE)
            assert {a.op for a in row[first:]} == {Op.AVERAGE}, "another action follows an average"


@pytest.mark.parametrize("outer", [{}, {"compress": "bfloat16"}, {"parts": 2}])
def test_bytes_are_sent_only_in_outer_steps(outer):
    def body(world):
        pipe = make(world, {"every": 4, **outer}, 1, layers=linears(2))
        sent, optimizer = [], sgd(pipe)
        for batch in batches(8, ROWS, WIDTH):
            before = pipe.outer_sent_bytes
            train(pipe, optimizer, [batch])
            sent.append(pipe.outer_sent_bytes - before)
        return sent

    numbers = 2 * (WIDTH * WIDTH + WIDTH)
    per_number = 2 if outer.get("compress") else 8
    for sent in run_on_threads(2, body):
        assert sum(sent[:4]) == sum(sent[4:]) == numbers * per_number
        assert sum(count > 0 for count in sent) == 2 * outer.get("parts", 1)


class Counting(nn.Module):
    """Keep a running mean of the input in a buffer, besides those of BatchNorm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.seen.lerp_(x.detach().mean(0), 0.5)
        return self.norm(x)


@pytest.mark.parametrize("stages", [1, 2])
def test_buffers_are_averaged_in_outer_steps(stages):
    layers = [*linears(1), LayerSpec(Counting), *linears(1), LayerSpec(Counting)]

    def body(world):
        pipe = make(world, {"every": 2}, stages, layers=layers)
        found, optimizer = [], sgd(pipe)
        for batch in batches(4, ROWS, WIDTH):
            train(pipe, optimizer, [batch])
            found.append({name: b.clone() for name, b in buffers_of(pipe).items()})
        return found

    ranks = run_on_threads(2 * stages, body)
    for first, other in zip(ranks[:stages], ranks[stages:], strict=True):
        for step, (mine, theirs) in enumerate(zip(first, other, strict=True)):
            for name in mine:
                is_equal = torch.equal(mine[name], theirs[name])
                counts = name.endswith("num_batches_tracked")
                assert is_equal == (step % 2 == 1 or counts), (step, name)


@pytest.mark.parametrize(
    ("behind", "compress"), [(0, "qsgd"), (1, "none"), product(0, "none"), product(1, "qsgd")]
)
def test_streaming_diloco_converges(behind, compress):
    """Two parts, each averaged every 4 steps, with a delay of no or one step."""
    outer = {"every": 4, "parts": 2, "behind": behind, "lr": 0.7, "momentum": 0.9}
    outer |= {"nesterov": True, "compress": compress}
    generator = torch.Generator().manual_seed(8)
    truth = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)
    inputs = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    data = [(inputs, inputs @ truth)] * 240
    ours = run(2, outer, data, 1, layers=linears(2))
    alone = run(1, {}, data, 1, layers=linears(2))
    assert ours[0][0][-1] < 2 * alone[0][0][-1] + 1e-3
    assert ours[0][2][:4] == [2 + behind, 4 + behind, 6 + behind, 8 + behind]
    assert len(ours[0][0]) == 240 and ours[0][0][-1] < 0.01 * ours[0][0][0]


ENDS = [
    {"every": 4, "parts": 2},
    {"every": 4, "parts": 2, "behind": 1},
    {"every": 4, "behind": 2},
    {"every": 4, "parts": 2, "compress": "qsgd", "lr": 0.7, "momentum": 0.9},
    {"every": 4},
]


@pytest.mark.parametrize("steps", [7, 8, 9, 10])
@pytest.mark.parametrize("outer", ENDS, ids=str)
def test_united_replicas_are_bitwise_equal(outer, steps):
    """Regression: with parts that are averaged in turn, replicas differed when training ended."""
    data = batches(steps, ROWS, WIDTH)

    def body(world):
        pipe = make(world, outer)
        train(pipe, sgd(pipe), data, calls=False)
        united = pipe.unite_replicas()
        assert pipe.last_outer_step == steps
        assert not pipe.replicas_differ and not pipe.unite_replicas()
        return weights(pipe), united

    ranks = run_on_threads(4, body)
    assert len({united for _, united in ranks}) == 1
    for (mine, united), (theirs, _) in zip(ranks[:2], ranks[2:], strict=True):
        assert united == (steps != 8 or len(outer) > 1)
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("outer", [{"every": 8}, {"every": 6, "parts": 3}])
def test_united_replicas_have_the_weighted_mean(outer):
    """Outer learning rate 1 and no momentum; replicas are weighted by their samples."""
    data = batches(3, ROWS, WIDTH)

    def body(world):
        pipe = make(world, {**outer, "weights": [3, 1]}, 1)
        train(pipe, sgd(pipe), data[:2])
        before = weights(pipe)
        return before, pipe.unite_replicas(), weights(pipe), pipe.outer_step()

    (mine, united, after, stepped), (theirs, *_) = run_on_threads(2, body)
    assert united and not stepped
    # One of three parts was averaged after step 2, so it is equal before.
    num_equal = sum(torch.equal(mine[name], theirs[name]) for name in mine)
    assert (0 < num_equal < len(mine)) if "parts" in outer else num_equal == 0
    for name, weight in after.items():
        mean = 0.75 * mine[name] + 0.25 * theirs[name]
        torch.testing.assert_close(weight, mean, rtol=0, atol=1e-12)


def test_unite_replicas_does_nothing_in_synchronous_training():
    def body(world):
        pipe = make(world, {}, 1)
        train(pipe, sgd(pipe), batches(1, ROWS, WIDTH))
        return pipe.unite_replicas()

    assert run_on_threads(2, body) == [False, False]


def test_training_continues_after_unite_replicas():
    """The united weights are the new anchors, and later averages are delayed as before.

    After step 6, the average of the second part has just started; after step 11, it has started,
    and its parameters were trained since.
    """
    data = batches(17, ROWS, WIDTH)
    outer = {"every": 4, "behind": 2, "lr": 0.7, "momentum": 0.5}
    second_buckets = ["layers.0.weight", "layers.2.weight"]

    def body(world):
        pipe = make(world, outer | {"parts": 2})
        for buckets in pipe.layout.tables.buckets:
            assert len(buckets) == 2 and {*buckets[1]} <= {*second_buckets}
        optimizer = sgd(pipe)
        for start, end in ((0, 6), (6, 11), (11, 17)):
            train(pipe, optimizer, data[start:end])
            if end < 17:
                assert pipe.unite_replicas()
        return weights(pipe)

    ranks = run_on_threads(4, body)
    first_buckets = [f"layers.{i}.{kind}" for i in range(4) for kind in ("weight", "bias")]
    first_buckets = [name for name in first_buckets if name not in second_buckets]
    parts = [first_buckets, second_buckets]
    assert_equals_reference(ranks, reference(data, parts=parts, united_after=(6, 11), **outer))
    assert any(not torch.equal(ranks[0][name], ranks[2][name]) for name in ranks[0])


def test_delayed_average_with_mix_0_restores_the_anchor():
    """With mix 0 the training during the delay is discarded, so both replicas have the anchor."""
    data = batches(5, ROWS, WIDTH)
    late = run(2, {"every": 4, "behind": 1, "mix": 0.0}, data, 1)
    prompt = run(2, {"every": 4}, data[:4], 1)
    for (_, mine, stepped), (_, theirs, _) in zip(late, prompt, strict=True):
        assert stepped == [5]
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=1e-12)


def test_float16_overflow_on_one_replica_skips_step_on_all():
    def body(world):
        layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(2)]
        pipe = make(world, {"every": 2}, 1, layers=layers, precision="float16")
        skipped = []
        for step, (inputs, targets) in enumerate(batches(6, ROWS, WIDTH, dtype=torch.float32)):
            if step == 4:
                inputs[0] = 6e4
            part = pipe.share(ROWS)
            skipped.append(pipe.step(inputs[part], targets[part]).is_skipped)
            sgd(pipe).step()
            pipe.outer_step()
        return skipped, weights(pipe)

    (skipped, mine), (other, theirs) = run_on_threads(2, body)
    assert skipped == other and skipped[3:] == [False, True, False]
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(
    ("outer", "message"),
    [
        ({"every": -1}, r"outer\.every"),
        ({"lr": 0.7}, r"outer\.lr, expected the default.*outer\.every=64"),
        ({"every": 4, "parts": 5}, r"outer\.parts, expected 1 to outer\.every=4"),
        ({"every": 64, "parts": 40}, r"outer\.parts: expected at most 4, the number"),
        ({"every": 4, "behind": 4}, r"outer\.behind"),
        ({"every": 4, "nesterov": True}, r"outer\.nesterov"),
        ({"every": 4, "momentum": 1.0}, r"momentum"),
        ({"evry": 4}, r"unknown setting evry.*every"),
    ],
)
def test_invalid_outer_setting_raises_error_on_every_rank(outer, message):
    def body(world):
        with pytest.raises((ConfigError, PeerError), match=message):
            make(world, outer)
        return "refused"

    assert run_on_threads(4, body) == ["refused"] * 4


def test_outer_settings_do_not_affect_a_single_replica():
    data = batches(3, ROWS, WIDTH)
    assert_near(run(2, {"every": 2, "lr": 0.5}, data), run(2, {}, data), 1e-15)


def test_normalise_over_replicas_raises_error():
    layers = [LayerSpec(nn.BatchNorm1d, WIDTH, dtype=torch.float64), *linears(1)]

    def body(world):
        with pytest.raises((ConfigError, PeerError), match="normalise_over_replicas=False"):
            make(world, {"every": 2}, 1, layers=layers, normalise_over_replicas=True)
        return "refused"

    assert run_on_threads(2, body) == ["refused"] * 2


def test_unequal_replica_weights_equal_synchronous_training():
    data = batches(4, ROWS, WIDTH)
    unequal = {"weights": [3, 1]}
    assert_near(run(2, EVERY_STEP | unequal, data, 1), run(2, unequal, data, 1))


@pytest.mark.parametrize("how", [{"hierarchy": 2}, {"order": "rank"}])
def test_hierarchical_and_ordered_averages_equal_synchronous_training(how):
    data = batches(3, ROWS, WIDTH)
    assert_near(run(4, EVERY_STEP | how, data, 1), run(4, {}, data, 1))


class Last(nn.Module):
    """Store the first number of the last training input in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.seen.copy_(x[0, 0].detach())
        return x


def test_rank_without_the_first_part_weights_buffers_since_last_average():
    """Regression: such a rank added up weights of all steps, so buffers had outdated weights.

    The first part is averaged after steps 2 and 4. The second stage has no parameters of it.
    """

    def body(world):
        layers = [*linears(2), LayerSpec(Last), *linears(1)]
        pipe = make(
            world,
            {"every": 2, "parts": 2, "bucket_bytes": 1e6},
            layers=layers,
            loss_fn=lambda output, weights: (0 * output.sum(), weights.sum()),
            microbatches=1,
        )
        buffers = buffers_of(pipe).values()
        replica, optimizer, found = world.rank // 2, sgd(pipe), []
        for weight in (1.0, 2.0, 4.0, 8.0):
            x = torch.full((2, WIDTH), weight - 3 * replica, dtype=torch.float64)
            half = 0.5 if replica else weight / 2
            pipe.step(x, torch.tensor([half, half], dtype=torch.float64))
            optimizer.step()
            own = [each.item() for each in buffers]
            pipe.outer_step()
            found.append((*own, *(each.item() for each in buffers)))
        return found

    _, first, _, other = run_on_threads(4, body)
    pairs = list(zip(first, other, strict=True))
    for (own, after), (others, others_after) in pairs[::2]:
        assert (after, others_after) == (own, others) and own != others
    for weights, ((own, after), (others, others_after)) in zip((3, 12), pairs[1::2], strict=True):
        assert after == others_after == pytest.approx((weights * own + 2 * others) / (weights + 2))
