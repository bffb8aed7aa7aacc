"""Training with every schedule: gradients of a plain loop, actions in the simulated order."""

import itertools
import resource
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.comm.world.processes import ProcessWorld
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.schedule import (
    Costs,
    Op,
    build,
    dependencies,
    digest,
    lower,
    schedule_names,
    simulate,
    to_text,
)
from tests.support import class_sum, cover_of

SEED, WIDTH, CLASSES, NUM_BLOCKS = 7, 6, 5, 14
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
MAX_NORM = 0.05
NAMES = schedule_names()
COMPUTE = {Op.F, Op.B, Op.I, Op.W, Op.R}
COSTS = Costs(forward=1.0, input_gradient=1.0, weight_gradient=1.0, recompute=1.0)


class Block(nn.Module):
    def __init__(self, dropout=0.2):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(torch.tanh(self.linear(x)))


def recipes(plain):
    linear = partial(nn.Linear, dtype=torch.float64)
    blocks = [plain.Recipe(Block, ())] * NUM_BLOCKS
    return [plain.Recipe(linear, (3, WIDTH)), *blocks, plain.Recipe(linear, (WIDTH, CLASSES))]


def specs(plain):
    return [LayerSpec(factory, *args) for factory, args in recipes(plain)]


def make_batches(*sizes):
    generator = torch.Generator().manual_seed(1)
    batches = []
    for size in sizes:
        targets = torch.randint(0, CLASSES, (size,), generator=generator)
        targets[::4] = -100
        inputs = torch.randn(size, 3, dtype=torch.float64, generator=generator)
        batches.append((inputs, targets))
    return batches


BATCHES = make_batches(5, 16)  # the first batch may have fewer samples than micro-batches


@pytest.fixture(scope="module")
def reference(plain):
    """Return a function that trains in a plain loop, once for each number of micro-batches."""
    cache = {}

    def train(num_microbatches):
        if num_microbatches not in cache:
            cache[num_microbatches] = plain.train(
                recipes(plain),
                class_sum,
                BATCHES,
                seed=SEED,
                microbatches=num_microbatches,
                optimizer=ADAMW,
                max_norm=MAX_NORM,
                gradients_of=plain.scale_each,
            )
        return cache[num_microbatches]

    return train


@pytest.fixture
def options_of(tmp_path):
    """Return a function for the required options of a schedule: `file` needs a table on disk."""

    def options(name, stages, microbatches):
        if name != "file":
            return {}
        path = tmp_path / f"{stages}_{microbatches}.csv"
        path.write_text(to_text(build("dualpipe", ranks=stages, microbatches=microbatches)))
        return {"path": str(path)}

    return options


def train_rank(plain, world=None, **settings):
    """Train one rank; return its results, timeline and schedule."""
    pipe = Pipeline(
        specs(plain), class_sum, seed=SEED, partition="uniform", world=world, **settings
    )
    training = plain.train_rank(pipe, BATCHES, optimizer=ADAMW, max_norm=MAX_NORM)
    return training, pipe.timeline(), pipe.schedule


def assert_plain_on_threads(plain, reference, *, stages, replicas=1, **settings):
    """Train on threads and compare with the plain loop; return the results of all ranks."""
    body = partial(train_rank, plain, stages=stages, replicas=replicas, **settings)
    ranks = run_on_threads(stages * replicas, lambda world: body(world))
    assert_plain(plain, reference, [rank[0] for rank in ranks], stages, settings["microbatches"])
    return ranks


def assert_plain(plain, reference, ranks, stages, microbatches):
    """Assert equality with the plain loop, and bitwise equality of all copies of a parameter."""
    whole = plain.unite(ranks, stages)
    for rank in ranks:
        for name, weight in rank.weights.items():
            assert torch.equal(weight, whole.weights[name]), name
    assert len(whole.weights) == 2 * (NUM_BLOCKS + 2)
    num_microbatches = microbatches * len(ranks) // stages
    assert whole.distance(reference(num_microbatches)) < 1e-10


def assert_reductions(reductions, computed):
    for reduction in reductions:
        own = (e.start_s for e in computed if e.action.stage == reduction.action.stage)
        last = max(own, default=0.0)  # a rank may hold a stage without running it
        assert last <= reduction.start_s <= reduction.end_s
    starts = [reduction.start_s for reduction in reductions]
    assert starts == sorted(starts)


def assert_simulated_order(timeline, schedule):
    """Assert that ranks run the simulated order and that actions start after their dependencies.

    Reductions run in parallel with compute, in the table's order, and may start during the last
    backward.
    """
    simulated = simulate(schedule, COSTS)
    for ours, theirs in zip(timeline.events, simulated.events, strict=True):
        in_time = sorted(theirs, key=lambda event: event.start_s)
        expected = [event.action for event in in_time if event.action.op in COMPUTE]
        computed = [event for event in ours if event.action.op in COMPUTE]
        assert [event.action for event in computed] == expected
        for before, after in itertools.pairwise(computed):
            assert before.start_s <= before.end_s <= after.start_s
        assert_reductions([event for event in ours if event.action.op is Op.REDUCE_GRAD], computed)
    ends = {event.action: event.end_s for row in timeline.events for event in row}
    for event in itertools.chain(*timeline.events):
        if event.action.op is Op.REDUCE_GRAD:
            continue
        for needed in dependencies(event.action, schedule.num_stages, schedule.num_microbatches):
            if needed in ends:
                assert ends[needed] <= event.start_s, f"{event.action} began before {needed} ended"


def test_reference_depends_on_number_of_microbatches(reference):
    """Otherwise the tests below could not detect wrong dropout masks or missing clipping."""
    assert reference(4).distance(reference(6)) > 1e-3
    assert min(reference(4).norms) > MAX_NORM


FAST = [
    {"stages": 2, "replicas": 2, "microbatches": 3, "recompute": "always"},
    {"stages": 2, "microbatches": 1, "recompute": "never"},
    {"stages": 4, "microbatches": 6, "recompute": "except_last"},
]


def setting_id(setting):
    return "-".join(map(str, setting.values()))


@pytest.mark.parametrize("setting", FAST, ids=setting_id)
@pytest.mark.parametrize("name", NAMES)
def test_schedule_trains_as_plain_loop(plain, reference, options_of, name, setting):
    """The measured timelines must also have the simulated order."""
    options = options_of(name, setting["stages"], setting["microbatches"])
    ranks = assert_plain_on_threads(
        plain, reference, schedule=name, schedule_options=options, **setting
    )
    for _, timeline, schedule in ranks:
        assert digest(schedule) == digest(ranks[0][2])
        assert_simulated_order(timeline, ranks[0][2])  # rank 0 has the rows of all ranks


VARIANTS = [
    *((name, {}) for name in NAMES),
    ("looped_bfs", {"stages_per_rank": 3}),
    ("interleaved", {"stages_per_rank": 1}),
    ("interleaved", {"stages_per_rank": 4}),
    ("gems", {"replications": 1}),
    ("chimera", {"scaling": "forward_doubling"}),
    ("hanayo", {"waves": 1}),
]


@pytest.mark.product
@pytest.mark.timeout(600)
@cover_of(
    "variant, recompute, stages, replicas",
    range(len(VARIANTS)),
    ("never", "always", "except_last"),
    (2, 4),
    (1, 2),
)
def test_schedule_variants_train_as_plain_loop_in_all_layouts(
    plain, reference, options_of, variant, stages, replicas, recompute
):
    name, options = VARIANTS[variant]
    fewest = 2 * options.get("replications", 0) or 1
    for microbatches in sorted({fewest, 2, 3, 5, 8}):
        assert_plain_on_threads(
            plain,
            reference,
            stages=stages,
            replicas=replicas,
            microbatches=microbatches,
            schedule=name,
            schedule_options=options | options_of(name, stages, microbatches),
            recompute=recompute,
        )


def test_chimera_with_four_pipelines_trains_as_plain_loop(plain, reference):
    """Four ranks hold each stage in each of two replicas, so eight copies are reduced together."""
    settings = {"stages": 4, "replicas": 2, "microbatches": 4, "recompute": "never"}
    options = {"pipelines": 4}
    assert_plain_on_threads(
        plain, reference, schedule="chimera", schedule_options=options, **settings
    )


def process_world(shares_memory):
    return ProcessWorld(HostDevice(), 60.0, shares_memory=shares_memory)


def test_schedules_train_on_two_processes_with_shared_memory(
    plain, reference, processes, options_of, tmp_path
):
    """Recomputation alternates between schedules; the order of timelines is also checked."""
    runs = [
        {
            "schedule": name,
            "schedule_options": options_of(name, 2, 4),
            "recompute": ("never", "always")[place % 2],
        }
        for place, name in enumerate(NAMES)
    ]

    def body(rank):
        world = process_world(shares_memory=True)
        return [train_rank(plain, world, microbatches=4, **run) for run in runs]

    for one, other in zip(*processes(2, body, tmp_path), strict=True):
        assert_plain(plain, reference, [one[0], other[0]], 2, 4)
        assert one[1] == other[1]
        assert_simulated_order(one[1], one[2])


ON_FOUR = [("interleaved", 2, 2), ("zb_v", 4, 1), ("dualpipe", 4, 1)]


@pytest.mark.parametrize("shares_memory", [False, True])
def test_some_schedules_train_on_four_processes(
    plain, reference, processes, tmp_path, shares_memory
):
    """Four stages, or two stages with two replicas; over Gloo and over shared memory."""

    def body(rank):
        world = process_world(shares_memory)
        return [
            train_rank(
                plain, world, stages=stages, replicas=replicas, microbatches=4, schedule=name
            )[0]
            for name, stages, replicas in ON_FOUR
        ]

    ranks = processes(4, body, tmp_path)
    for place, trainings in enumerate(zip(*ranks, strict=True)):
        assert_plain(plain, reference, list(trainings), ON_FOUR[place][1], 4)


@pytest.mark.parametrize("shares_memory", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_looped_schedule_sends_many_microbatches_before_receiving(
    processes, tmp_path, shares_memory
):
    """Regression: so many messages exceeded socket buffers and the limit of open files."""

    def body(rank):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
        layers = [LayerSpec(nn.Linear, 1, 1, bias=False) for _ in range(4)]
        pipe = Pipeline(
            layers,
            lambda output, target: (output - target).square().mean(),
            microbatches=150,
            schedule="looped_bfs",
            recompute="never",
            world=process_world(shares_memory),
        )
        batch = torch.arange(150.0).view(-1, 1), torch.zeros(150, 1)
        return [pipe.step(*batch).microbatch_losses for _ in range(2)][1]

    for losses in processes(2, body, tmp_path):
        scale = losses[1]
        assert losses == pytest.approx([scale * n * n for n in range(150)], rel=1e-4)


def test_evaluation_and_prediction_work_with_every_placement(plain):
    """The forward-only table of each schedule must give the outputs of the plain model."""
    inputs, targets = BATCHES[0]
    model = nn.Sequential(*plain.build(recipes(plain), SEED)).eval()
    with torch.no_grad():
        outputs = model(inputs)
        expected = F.cross_entropy(outputs, targets).item()

    def body(world):
        results = []
        for name in NAMES:
            if name != "file":
                pipe = Pipeline(
                    specs(plain), class_sum, microbatches=3, schedule=name, seed=SEED, world=world
                )
                loss = pipe.evaluate(inputs, targets).loss
                results.append((name, pipe.predict(inputs), loss))
        return results

    for results in run_on_threads(2, body):
        for name, predicted, loss in results:
            assert (predicted - outputs).abs().max() < 1e-12, name
            assert abs(loss - expected) < 1e-12, name


def test_lowered_table_runs_unchanged(plain, reference):
    table = lower(build("zb_v", ranks=2, microbatches=4, recompute="always"))
    ranks = assert_plain_on_threads(plain, reference, stages=2, microbatches=4, schedule=table)
    assert ranks[0][2] == table
