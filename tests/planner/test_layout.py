"""One lay-out: `plan` and `train` decide the same for the same settings and figures."""

import pickle
import threading
import time
from dataclasses import fields, replace
from importlib import import_module
from itertools import cycle, product

import pytest
import torch
from torch import nn

import gpipe_hpc.pipeline
import gpipe_hpc.planner.costs.cost_models
from gpipe_hpc import Pipeline, run_on_threads
from gpipe_hpc.comm.net.pickling import dumps, loads
from gpipe_hpc.config import build_target, compose_config, conf_dir
from gpipe_hpc.data.shapes import microbatch, samples_per_microbatch
from gpipe_hpc.errors import ConfigError, ModelError
from gpipe_hpc.models import LayerSpec, loss_function
from gpipe_hpc.plan import make_plan
from gpipe_hpc.planner import LayerTimes, MeasuredCosts, Partition, Request, cut, lay_out, ordering
from gpipe_hpc.planner.costs.counted import count_model
from gpipe_hpc.planner.forecast import peak_bytes_of_ranks
from gpipe_hpc.pytree import tensors_of
from gpipe_hpc.schedule import build, schedule_names, simulate, to_text
from gpipe_hpc.settings import PipelineConfig
from gpipe_hpc.trainer.pipeline_request import request_of
from gpipe_hpc.trainer.start import building

FOREIGN = {"huggingface", "own"}  # models that are not of the zoo
PRESETS = sorted({path.stem for path in (conf_dir() / "model").glob("*.yaml")} - FOREIGN)
# What else may decide a layout; the numbers of choices have no common divisor.
OTHERS = zip(
    cycle(["time", "parameters", "uniform"]),
    cycle(["except_last", "always", "never", "budget"]),
    cycle([1, 1, 2, 1, 1]),
    strict=False,
)
BOTH = dict(zip(product(PRESETS, schedule_names()), OTHERS, strict=False))
# Each schedule once, on presets that are quickly counted; skips, ties, BatchNorm are among them.
QUICK = ["mlp", "gpt", "unet_tiny", "resnet_small", "gpt2", "vgg16"]
SOME = list(zip(cycle(QUICK), schedule_names(), strict=False))


def data_for(preset):
    if preset == "mlp":
        return ["data=synthetic_vectors", f"model.widths={[64] * 12}"]
    if preset.startswith("unet"):
        return ["data=synthetic_masks"]
    return [
        "data=synthetic"
        if preset.startswith(("gpt", "bert", "transformer"))
        else "data=synthetic_images"
    ]


def settings(preset, schedule, folder):
    partition, recompute, replicas = BOTH[preset, schedule]
    options = {"auto": ["+pipeline.options.trials=3"], "file": [f"+pipeline.options.path={folder}"]}
    if schedule == "file":
        folder.write_text(to_text(build("zb_v", ranks=2, microbatches=4)))
    return [
        *(f"model={preset}", f"pipeline.schedule={schedule}", f"pipeline.partition={partition}"),
        *("pipeline.stages=2", "pipeline.microbatches=2", "train.accumulation=2"),
        *(f"pipeline.recompute={recompute}", "pipeline.memory_bytes=1e13", "train.batch_size=8"),
        *(f"pipeline.replicas={replicas}", f"pipeline.offload={str(replicas == 2).lower()}"),
        *options.get(schedule, []),
        *data_for(preset),
    ]


@pytest.fixture(scope="module")
def counts():
    """Return what was counted of the preset of late; tests of one preset come in a row."""
    return {}


@pytest.fixture
def same_gauge(monkeypatch, request, counts):
    """Let a run count, too, and build nothing; equal models are counted once."""
    preset, lock = request.node.callspec.params["preset"], threading.Lock()
    if preset not in counts:
        counts.clear()
    known = counts.setdefault(preset, {})

    def counted(layers, *example, **how):
        shapes = [each.shape for each in tensors_of(example[:2])]
        key = repr((shapes, how))
        with lock:
            if key not in known:
                known[key] = count_model(layers, *example, **how)
            return known[key]

    monkeypatch.setattr(gpipe_hpc.planner.costs.cost_models, "count_model", counted)
    monkeypatch.setattr(gpipe_hpc.pipeline, "MeasuredCosts", lambda counted: counted)
    monkeypatch.setattr(Pipeline, "_build", lambda self, *_: None)


def laid_out_by_a_run(config):
    """Return the layout of each rank, as `train` has them decided."""
    sample = microbatch(config.data, samples_per_microbatch(config))
    layers, loss_fn = build_target("model", config.model), loss_function(sample.loss)

    def body(world):
        # Rank 0 alone reads an example.
        example = (sample.inputs, sample.targets) if world.rank == 0 else None
        return building.build_pipeline(config, world, layers, loss_fn, None, example).layout

    return run_on_threads(config.pipeline.stages * config.pipeline.replicas, body)


def assert_planned_as_run(preset, schedule, folder):
    config = compose_config(settings(preset, schedule, folder / "table.txt"))
    planned = make_plan(config).layout
    for ran in laid_out_by_a_run(config):
        assert ran.digest() == planned.digest()
        assert ran.partition == planned.partition and ran.recomputed == planned.recomputed
    assert planned.tables.training.num_microbatches == 4 and planned.tables.training.is_lowered


@pytest.mark.parametrize(("preset", "schedule"), SOME)
def test_a_plan_is_what_is_run(preset, schedule, same_gauge, tmp_path):
    """`plan` had a lay-out of its own, which refused what `train` accepted."""
    assert_planned_as_run(preset, schedule, tmp_path)


def test_every_schedule_is_planned():
    assert {schedule for _, schedule in SOME} == set(schedule_names())


@pytest.mark.product
@pytest.mark.timeout(600)  # on a busy machine, for the models of a thousand layers
@pytest.mark.parametrize("schedule", schedule_names())
@pytest.mark.parametrize("preset", PRESETS)
def test_every_plan_is_what_is_run(preset, schedule, same_gauge, tmp_path):
    """All schedules of a model in one test took longer than its limit, for a thousand layers."""
    assert_planned_as_run(preset, schedule, tmp_path)


FLOPS = (LayerTimes.alike(1.0, 2.0, 1.0, 1.0), LayerTimes.alike(3.0, 6.0, 3.0, 3.0))
LAYERS = [LayerSpec(nn.Linear, 4, 4) for _ in range(8)]


class Given:
    """A gauge that knows the times of the layers, and cannot be asked for more."""

    measure, layers, times = "FLOPs", LAYERS, FLOPS * 4

    @property
    def count(self):
        raise ModelError("layers.0: cannot be counted")


def test_a_layout_travels_as_it_is():
    """Rank 0 tells it to the others: nothing in it may need code of a user's."""
    request = Request(stages=2, microbatches=4, schedule="zb_v", partition="time", offload=True)
    layout = lay_out(request, Given())
    for copy in (loads(dumps(layout, "a layout"), "a layout"), pickle.loads(pickle.dumps(layout))):
        assert copy == layout and copy.digest() == layout.digest()


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": "zb_v"},
        {"schedule": "auto", "schedule_options": {"trials": 5}},
        {"schedule": "auto", "schedule_options": {"trials": 5, "placement": "best"}},
    ],
    ids=str,
)
def test_a_cut_that_is_known_gives_the_same_layout_unmeasured(settings):
    """A resumed run keeps the cut of its checkpoint, whatever the layers take today."""
    request = Request(stages=2, microbatches=4, partition="time", **settings)
    layout = lay_out(request, Given())

    class Silent(Given):
        times = None  # nobody asks

    for known in (layout.partition, cut(request, Given())):
        again = lay_out(replace(request, partition=known), Silent())
        assert again.digest() == layout.digest() and again.partition == layout.partition


@pytest.mark.parametrize("schedule", ["zb_v", "dualpipe_v"])
def test_ranks_with_several_stages_get_the_cut_whose_steps_are_shortest(schedule):
    """By stages alone a rank had the two that are dearest, and another one the two cheapest."""

    class Uneven(Given):
        times = tuple(LayerTimes.alike(n, 2 * n, n, n) for n in (1, 2, 1, 1, 2, 1, 1, 5))

    request = Request(stages=2, microbatches=8, schedule=schedule, partition="simulated")
    layout = lay_out(replace(request, recompute="never"), Uneven())
    kept = layout.partition
    even = kept.cut_anew(len(kept.counts))
    took = [simulate(layout.schedule, each.stage_costs()).makespan for each in (kept, even)]
    assert not kept.is_open and took[0] < took[1]
    assert lay_out(replace(request, partition="time"), Uneven()).partition.counts == even.counts
    stored = Partition.stored(kept._asdict())
    assert lay_out(replace(request, partition=stored), Uneven()).partition == kept
    elsewhere = replace(request, partition=stored, schedule="interleaved")
    found = lay_out(elsewhere, Uneven()).partition
    anew = lay_out(replace(elsewhere, partition="simulated"), Uneven()).partition
    assert found.counts == anew.counts, "a cut for other ranks is made anew"
    before = Partition.stored({"counts": even.counts, "costs": even.costs, "measure": "FLOPs"})
    again = lay_out(replace(request, partition=before._replace(times=even.times)), Uneven())
    assert again.partition.counts == even.counts, "a resumed run keeps the cut it had"


def test_cuts_for_a_large_table_are_compared_on_one_of_fewer_microbatches(monkeypatch):
    sizes = []
    own = ordering.simulate

    def simulated(table, costs):
        sizes.append(table.num_microbatches)
        return own(table, costs)

    monkeypatch.setattr(ordering, "simulate", simulated)

    class Uneven(Given):
        times = tuple(LayerTimes.alike(n, 2 * n, n, n) for n in (1, 2, 1, 1, 2, 1, 1, 5))

    request = Request(stages=2, microbatches=400, schedule="zb_v", partition="simulated")
    lay_out(request, Uneven())
    assert sizes.count(8) > 5 and 400 not in sizes[:-2]


def test_a_faster_cut_that_does_not_fit_is_left():
    class Large(nn.Sequential):  # the faster cut has it on the fuller rank
        def __init__(self) -> None:
            super().__init__(nn.Linear(64, 64), nn.Linear(64, 64))

    layers = [LayerSpec(nn.Linear, 64, 64) for _ in range(8)]
    layers[1] = LayerSpec(Large)

    class Uneven:
        measure = "FLOPs"
        times = tuple(LayerTimes.alike(n, 2 * n, n, n) for n in (1, 2, 1, 1, 2, 1, 1, 5))
        count = count_model(layers, torch.ones(1, 64))

    Uneven.layers = layers
    request = Request(stages=2, microbatches=8, schedule="zb_v", recompute="never")
    held, cuts = {}, {}
    for policy in ("time", "simulated"):
        layout = lay_out(replace(request, partition=policy), Uneven())
        cuts[policy] = layout.partition.counts
        held[policy] = max(
            peak_bytes_of_ranks(Uneven.count, cuts[policy], layout.schedule, request.kept_states)
        )
    assert cuts["time"] != cuts["simulated"] and held["time"] < held["simulated"]
    tight = replace(request, partition="simulated", memory_bytes=held["simulated"] - 1)
    assert lay_out(tight, Uneven()).partition.counts == cuts["time"]


def test_layers_are_measured_on_the_thread_that_runs_them(monkeypatch):
    """On a thread of its own glibc gives memory from another arena, and torch's settings differ."""
    noted = []

    def times(self):
        noted.append(threading.current_thread().name)
        return FLOPS * 4

    monkeypatch.setattr(MeasuredCosts, "times", property(times))

    def body(world):
        Pipeline(LAYERS, nn.functional.mse_loss, partition="time", world=world)

    run_on_threads(2, body)
    assert set(noted) == {"rank0"}


@pytest.mark.slow
def test_measuring_may_take_longer_than_a_rank_waits_for_another(monkeypatch):
    """The others waited in one collective: measuring a big model ended with a time-out."""

    def times(self):
        time.sleep(4)
        return FLOPS * 4

    monkeypatch.setattr(MeasuredCosts, "times", property(times))

    def body(world):
        pipe = Pipeline(LAYERS, nn.functional.mse_loss, partition="time", world=world)
        return pipe.layout.digest()

    assert len(set(run_on_threads(2, body, timeout_s=3.0))) == 1


def test_the_digest_knows_all_that_decides_a_run():
    request = Request(stages=2, microbatches=4, partition="time")
    layout = lay_out(request, Given())
    others = [
        lay_out(replace(request, **change), Given())
        for change in (
            {"partition": [5, 3]},
            {"schedule": "one_f_one_b"},
            {"recompute": "never"},
            {"offload": True},
            {"microbatches": 5},
            {"replicas": 2},
        )
    ]
    others += [replace(layout, recomputed=again) for again in ((), (frozenset({1}),) * 2)]
    assert len({each.digest() for each in (layout, *others)}) == 1 + len(others)
    assert replace(layout, searched="words").digest() == layout.digest()


def test_rank_0_alone_searches(monkeypatch):
    """With schedule=auto every rank searched, twice: once for the number of stages."""
    module, searched = import_module("gpipe_hpc.schedule.search.auto"), []
    search = module.search

    def noted(*args, **options):
        searched.append(threading.current_thread().name)
        return search(*args, **options)

    monkeypatch.setattr(module, "search", noted)

    def body(world):
        pipe = Pipeline(LAYERS, nn.functional.mse_loss, schedule="auto", world=world)
        return pipe.layout.digest()

    assert len(set(run_on_threads(3, body))) == 1
    assert searched == ["rank0 at work"]


UNLIKE = {
    "stages": (1, 2),
    "microbatches": (2, 3),
    "recompute": ("never", "always"),
    "schedule": ("gpipe", build("gpipe", ranks=2, microbatches=1)),
    "partition": ("uniform", [4, 4]),
}


@pytest.mark.parametrize("setting", UNLIKE)
def test_ranks_that_ask_for_different_things_are_refused(setting):
    """Only the table was compared, after each rank had made its own; stages let them hang.

    Another partition than rank 0's went unnoticed.
    """

    def body(world):
        given = {setting: UNLIKE[setting][world.rank]}
        with pytest.raises(ConfigError, match=f"expected the same {setting} on every rank"):
            Pipeline(LAYERS, nn.functional.mse_loss, world=world, **given)

    run_on_threads(2, body, timeout_s=30.0)


def test_ranks_with_other_losses_are_refused():
    """The last rank's was taken, whatever the others had."""

    def body(world):
        loss_fn = (nn.functional.mse_loss, nn.functional.l1_loss)[world.rank]
        with pytest.raises(ConfigError, match=r"same loss_fn .* mse_loss on rank 0 and l1_loss"):
            Pipeline(LAYERS, loss_fn, world=world)

    run_on_threads(2, body, timeout_s=30.0)


@pytest.mark.parametrize(
    "given",
    [
        [{"partition": [4, 4]}, {"partition": (4, 4)}],
        [{"partition": "time"}, {"partition": cut(Request(partition="time", stages=2), Given())}],
    ],
    ids=["a list and a tuple", "a cut that only one rank knows"],
)
def test_the_same_cut_said_otherwise_is_none_other(given, monkeypatch):
    monkeypatch.setattr(MeasuredCosts, "times", property(lambda self: FLOPS * 4))

    def body(world):
        loss_fn = None if world.rank == 0 else nn.functional.mse_loss
        return Pipeline(LAYERS, loss_fn, world=world, **given[world.rank]).layout.digest()

    assert len(set(run_on_threads(2, body, timeout_s=30.0))) == 1


def test_the_best_placement_is_found_for_whatever_the_gauge_tells():
    options = {"placement": "best", "trials": 5}
    request = Request(
        stages=2, microbatches=4, schedule="auto", schedule_options=options, partition="time"
    )
    layout = lay_out(request, Given())
    assert layout.searched.count("\n") == 2 and "FLOP on one rank" in layout.searched
    with pytest.raises(ConfigError, match="use partition 'time'"):
        lay_out(replace(request, partition="uniform"), Given())
    with pytest.raises(ConfigError, match="costs are set"):
        lay_out(replace(request, schedule_options={**options, "costs": {}}), Given())


def test_every_setting_of_a_pipeline_is_one_of_a_request_by_name():
    """So a new one is written in the schema, in conf/ and where it is used."""
    named = {each.name for each in fields(Request)}
    assert {each.name for each in fields(PipelineConfig)} - named == {"options", "ranks", "layout"}
    changed = compose_config(["pipeline.buffers=first", "train.seed=3", "train.accumulation=2"])
    asked = request_of(changed)
    assert (asked.buffers, asked.seed, asked.microbatches) == ("first", 3, 16)
