"""The command that plans: its report, its refusals, and its numbers against a run."""

import re
import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from gpipe_hpc import Pipeline, run_on_threads
from gpipe_hpc.comm.transport.memory import MemoryTransport
from gpipe_hpc.config import build_target, check_config, compose_config
from gpipe_hpc.data import open_data
from gpipe_hpc.data.shapes import microbatch, samples_per_microbatch
from gpipe_hpc.data.text import TextConfig
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.errors import ConfigError, PartitionError
from gpipe_hpc.models import (
    build_model,
    long_skips,
    normalise_layers,
    skip_routes,
    token_cross_entropy,
)
from gpipe_hpc.models.losses import segmentation
from gpipe_hpc.optim.optimizer import build_optimizer, optimizer_memory
from gpipe_hpc.plan import make_plan
from gpipe_hpc.planner import CountedCosts, Example, lay_out
from gpipe_hpc.planner.costs.counted import count_model
from gpipe_hpc.planner.forecast import forecast
from gpipe_hpc.planner.report.reductions import ring_bytes
from gpipe_hpc.pytree import tensors_of
from gpipe_hpc.schedule import build, lower
from gpipe_hpc.settings import AdamWConfig, LAMBConfig, LARSConfig, RMSPropConfig, SGDConfig
from gpipe_hpc.trainer.pipeline_request import request_of
from gpipe_hpc.units import bytes_text
from tests.support import metrics, train_here

TOKENS = ["data=synthetic", "data.seq_len=64", "data.vocab_size=50257"]
MLP = ["model=mlp", "data=synthetic_vectors", "pipeline.stages=2"]


def planned(*overrides):
    return make_plan(compose_config(list(overrides)))


def test_gpt2_is_planned_as_published():
    text = planned("model=gpt2", *TOKENS, "pipeline.stages=4").text
    assert "27 layers, 124,439,808 parameters" in text
    assert "1-24     12 x  GPTAttention" in text
    assert "\n4 ranks, 4 stages\nmicro-batch int64[4x64]" in text
    assert "by counted FLOPs (pipeline.partition=time measures" in text


def test_a_hand_cut_is_taken_and_a_wrong_one_refused():
    assert "Cut by hand:" in planned(*MLP, "pipeline.partition=[4,1]").text
    assert "none" in planned(*MLP, "pipeline.partition=[5,0]").text
    with pytest.raises(PartitionError, match="wrong sum of layers"):
        planned(*MLP, "pipeline.partition=[4,2]")
    with pytest.raises(ConfigError, match=r"pipeline\.partition"):
        planned(*MLP, "pipeline.partition=[4,1,0]")


@pytest.mark.parametrize(
    "partition, said", [("parameters", "by parameters"), ("uniform", "uniformly by layers")]
)
def test_other_cuts_say_what_they_are(partition, said):
    assert f"Cut {said}:" in planned(*MLP, f"pipeline.partition={partition}").text


@pytest.mark.parametrize("schedule", ["zb_v", "interleaved", "chimera", "dualpipe", "auto"])
def test_schedules_with_several_stages_a_rank(schedule):
    text = planned("model=gpt", "data=synthetic", f"pipeline.schedule={schedule}").text
    assert f"{schedule}, 8 micro-batches on 4 ranks" in text


def test_the_best_placement_can_be_planned():
    """`plan` refused it: expected placement one_each, looped, mirrored, or wave."""
    best = ("pipeline.schedule=auto", "+pipeline.options.placement=best")
    text = planned("data=synthetic", "pipeline.stages=2", *best, "+pipeline.options.trials=3").text
    assert re.search(
        r"Placements compared:\nauto: one_each with 1 stage a rank: a step takes .*FLOP on", text
    )
    assert "auto: wave with 2 stages a rank" in text


def test_a_plan_says_what_it_assumes():
    """Two replicas were 4 ranks; it was not said where 4 came from, nor of which data."""
    text = planned("data=synthetic", "pipeline.replicas=2").text
    assert "\n8 ranks: 2 replicas of 4 ranks, 4 stages (pipeline.stages is not set" in text
    assert "of data SyntheticTokens (shapes only, no data is read), train.batch_size=32" in text
    named = planned("data=synthetic", "pipeline.stages=2").text
    assert "\n2 ranks, 2 stages\n" in named and "not set" not in named


def test_a_plan_says_what_is_summed_over_replicas():
    """A plan of two replicas did not say a word about their sums."""
    assert "Replicas: " not in planned(*MLP).text
    twice = planned(*MLP, "pipeline.replicas=2", "outer.bucket_bytes=1MB")
    counts = " + ".join(str(len(each)) for each in twice.layout.tables.buckets)
    said = f"gradients are reduced over 2 replicas: {counts} buckets of at most 1.00 MB or"
    assert said in twice.text
    least, most = sorted(rank.gradient_bytes for rank in twice.forecast.ranks)
    amount = f"each rank sends {bytes_text(least)} to {bytes_text(most)} per step"
    assert amount in twice.text, "2 (2 - 1) / 2 of its gradients"
    four = planned(*MLP, "pipeline.replicas=4").text
    assert f"sends {bytes_text(1.5 * least)} to {bytes_text(1.5 * most)} per step" in four
    packed = planned(*MLP, "pipeline.replicas=2", "outer.compress=powersgd").text
    assert "compressed (outer.compress=powersgd)" in packed and "each rank sends" not in packed
    apart = planned(*MLP, "pipeline.replicas=2", "outer=local_sgd").text
    assert "averaged over 2 replicas every 16 steps (outer.every=16)" in apart


def test_a_plan_says_how_long_sums_take_over_a_known_link():
    """Of gathering divided parameters, and of outer steps, it said nothing."""
    link = ("pipeline.stages=1", "pipeline.replicas=2", "plan.link_bytes_per_s=1e6")
    plain = planned(*MLP, *link)
    (total,) = ring_bytes_of(plain)
    assert f"the minimum ({total / 1e6:.3g} s at 1.00 MB/s)" in plain.text
    assert "UNSHARD" not in plain.text
    divided = planned(*MLP, *link, "outer.shard=flat").text
    assert f"gathers parameters (UNSHARD) during the next step's forwards ({total / 2e6:.3g} s" in (
        divided
    )
    apart = planned(*MLP, *link, "outer=local_sgd", "outer.every=10").text
    assert (
        f"per outer step in a ring, while all ranks wait ({total / 1e6:.3g} s at 1.00 MB/s)"
        in apart
    )
    assert f"{bytes_text(total / 10)} per training step ({total / 1e7:.3g} s at 1.00 MB/s)" in apart
    late = planned(*MLP, *link[:2], "outer=diloco", "outer.behind=3").text
    assert "per outer step in a ring, during 3 steps: " in late and " s at " not in late


def test_an_outer_step_sends_what_the_plan_says(tmp_path):
    words = ("pipeline.stages=1", "pipeline.replicas=2", "outer=local_sgd", "outer.every=2")
    found = planned(*MLP, *words)
    (said,) = ring_bytes(found.model, found.layout, is_wide=True)
    train_here(2, *MLP, *words, "train.steps=2", f"run.dir={tmp_path / 'run'}")
    sent = [line["outer_sent_bytes"] for line in metrics(tmp_path / "run") if "loss" in line]
    assert sent == [0, pytest.approx(said, abs=64)]


def test_a_hierarchy_that_does_not_fit_the_replicas_is_refused_ahead_of_a_run():
    """`plan` passed over it, and the run was refused once its ranks had met."""
    words = [*MLP, "pipeline.replicas=3", "outer.hierarchy=2"]
    with pytest.raises(ConfigError, match=r"a divisor of the 3 copies.*got 2; choose one of 1, 3"):
        make_plan(compose_config(words))


def test_mirrored_stages_and_tied_weights_are_summed_with_all_their_copies():
    tied = ("data=synthetic", "pipeline.stages=2", "model.tied=true")
    alone = planned("data=synthetic", "pipeline.stages=2", "pipeline.schedule=chimera")
    assert "reduced over mirrored stages: " in alone.text
    ranks = alone.forecast.ranks  # each has the whole model
    assert ring_bytes_of(alone) == [rank.gradient_bytes for rank in ranks]
    both = planned(*tied, "pipeline.replicas=2")
    shared = both.forecast.ranks[0].gradient_bytes + both.forecast.ranks[1].gradient_bytes
    shared -= 4 * planned(*tied, "pipeline.stages=1").forecast.ranks[0].parameters
    assert shared > 0, "the embedding is on both ranks"
    assert ring_bytes_of(both) == [
        rank.gradient_bytes + shared / 2 for rank in both.forecast.ranks
    ], "1.5 times of what is tied"


def ring_bytes_of(found):
    return ring_bytes(found.model, found.layout)


def test_more_microbatches_than_samples_are_warned_of():
    """32 samples were planned in 64 micro-batches without a word."""
    settings = ("data=synthetic", "pipeline.replicas=2", "pipeline.microbatches=32")
    said = "Warning: train.batch_size=32 is less than replicas x accumulation x microbatches = 64"
    assert said in planned(*settings).text
    assert said not in planned(*settings, "train.batch_size=64").text


@pytest.mark.parametrize("samples, empty", [(32, 32), (48, 16), (64, 0)])
def test_samples_are_counted_as_they_are_cut(samples, empty):
    """64 micro-batches of 32 samples were planned with twice the FLOPs, as if none were empty."""
    size = ("data=synthetic", f"train.batch_size={samples}", "pipeline.recompute=never")
    whole = planned(*size, "pipeline.microbatches=1").text
    cut = planned(*size, "pipeline.microbatches=64").text
    assert step_flops(cut) == pytest.approx(step_flops(whole), rel=0.01)
    assert (f"64 micro-batches ({empty} of them empty) on" in cut) == bool(empty)


def test_micro_batches_of_unlike_sizes_are_counted_by_their_samples():
    """12 samples in 8 micro-batches are four of two and four of one, not eight of two."""
    size = ("data=synthetic", "pipeline.microbatches=8", "pipeline.recompute=never")
    uneven, even = (planned(*size, f"train.batch_size={n}").text for n in (12, 16))
    assert step_flops(uneven) == pytest.approx(0.75 * step_flops(even), rel=0.01)
    activations = [most_activations(text) for text in (uneven, even)]
    assert activations[0] == pytest.approx(0.75 * activations[1], rel=0.01)


def most_activations(text):
    return max(float(line.split()[-8]) for line in rank_lines(text))


def test_memory_is_shown_in_the_units_it_is_given_in():
    """8GB were shown as 7.45 GiB."""
    text = planned(*MLP, "pipeline.memory_bytes=8GB").text
    assert "every rank fits, with 8.00 GB a rank" in text and "iB" not in text
    assert "with 8.59 GB a rank" in planned(*MLP, "pipeline.memory_bytes=8GiB").text


AUTO = ("data=synthetic", "pipeline.stages=4", "pipeline.schedule=auto", "train.batch_size=64")


@pytest.mark.parametrize("recompute", ["never", "except_last"])
def test_auto_keeps_within_the_memory(recompute):
    """It planned 80 GB where gpipe, recomputing, needed 23: its search knew no memory."""
    size = (*AUTO, "pipeline.microbatches=16", f"pipeline.recompute={recompute}")
    size = (*size, "+pipeline.options.trials=20")
    free = planned(*size)
    most, least = most_held(free.text), most_held(planned(*size, "pipeline.memory_bytes=1").text)
    assert least < most
    between = planned(*size, f"pipeline.memory_bytes={(least + 2 * most) / 3:.0f}e6")
    assert between.fits and most_held(between.text) < most
    assert not planned(*size, f"pipeline.memory_bytes={0.9 * least:.3f}e6").fits


def most_held(text):
    """Return the MB of the fullest rank."""
    scale = {"kB": 1e-3, "MB": 1.0, "GB": 1e3}
    held = []
    for line in map(str.split, rank_lines(text)):
        at = -5 if line[-1] in ("yes", "NO") else -4
        held.append(float(line[at]) * scale[line[at + 1]])
    return max(held)


def test_a_budget_goes_with_a_searched_order():
    """`budget` with `auto` said that nothing fits: the order that it was given kept everything."""
    size = (*AUTO, "pipeline.microbatches=16", "+pipeline.options.trials=10")
    kept = planned(*size, "pipeline.recompute=never").text
    limit = f"pipeline.memory_bytes={0.5 * most_held(kept):.3f}e6"
    found = planned(*size, "pipeline.recompute=budget", limit)
    assert found.fits and "nothing fits" not in found.text


def test_placements_are_compared_with_their_memory():
    """The comparison had times alone, and took what did not fit."""
    best = (*AUTO, "pipeline.microbatches=4", "+pipeline.options.placement=best")
    best = (*best, "+pipeline.options.trials=1", "pipeline.stages=2")
    text = planned(*best, "pipeline.recompute=never").text
    line = r"auto: (\w+) with \d stages? a rank: .* on one rank, ([\d.]+) MB on the fullest rank"
    held = {name: float(amount) for name, amount in re.findall(line, text)}
    assert set(held) == {"one_each", "wave", "looped"}
    for recompute in ("never", "budget"):
        limit = 0.9 * min(held.values())
        tight = planned(
            *best, f"pipeline.recompute={recompute}", f"pipeline.memory_bytes={limit:.3f}e6"
        )
        assert tight.fits, recompute


def test_a_plan_that_does_not_fit_says_which_other_settings_do():
    """`budget` was advised, which advised `auto`, which advised `budget`; none of them fitted."""
    size = ("data=synthetic", "pipeline.stages=2", "pipeline.recompute=never")
    text = planned(*size, "pipeline.memory_bytes=20MB").text
    assert "need up to" in text and "pipeline.memory_bytes allows 20.0 MB" in text
    assert "to reduce it" not in text and "other settings fit, the fastest first:" in text
    fitting = [line.removeprefix("fits: ") for line in text.splitlines() if "fits: " in line]
    assert 1 < len(fitting) <= 5 and any("microbatches=16" in line for line in fitting)
    for line in fitting:
        *overrides, number, unit = line.partition(" as long")[0].split()
        found = planned(*size, "pipeline.memory_bytes=20MB", *overrides)
        assert found.fits and f" {number} {unit} " in found.text, "as it is planned by itself"
    slow = planned(*size, "pipeline.memory_bytes=20MB", "plan.flops_per_s=1e9").text
    times_s = [float(each) for each in re.findall(r"fits: .* ([0-9.e+]+) s$", slow, re.M)]
    assert times_s == sorted(times_s) and len(times_s) == len(fitting)
    single = planned(*size, "pipeline.memory_bytes=20MB", "pipeline.microbatches=32").text
    assert "other settings fit" in single and "fits: pipeline.microbatches" not in single
    hopeless = planned(*size, "pipeline.memory_bytes=1MB").text
    assert "optimizer alone take" in hopeless and "recompute=budget" not in hopeless
    assert "other settings" not in hopeless


def test_what_fits_with_holes_is_told_in_the_numbers_of_the_settings():
    """Of three rows `twice as many` was told three times too large."""
    size = ("data=synthetic", "pipeline.ranks=4", "pipeline.stages=3", "train.batch_size=256")
    size = (*size, "pipeline.recompute=never", "pipeline.microbatches=8")
    text = planned(*size, "pipeline.memory_bytes=40MB").text
    fitting = [line.removeprefix("fits: ") for line in text.splitlines() if "fits: " in line]
    assert any("microbatches=16" in line for line in fitting)
    for line in fitting:
        *overrides, number, unit = line.partition(" as long")[0].split()
        found = planned(*size, "pipeline.memory_bytes=40MB", *overrides)
        assert found.fits and f" {number} {unit} " in found.text


@pytest.mark.parametrize("words", [["pipeline.schedule=chimera"], ["pipeline.replicas=2"]])
def test_compression_keeps_residuals_wherever_a_stage_has_copies(words):
    size = (*MLP, "pipeline.recompute=never", *words)
    plain, compressed = planned(*size), planned(*size, "outer.compress=topk")
    for less, more in zip(plain.forecast.ranks, compressed.forecast.ranks, strict=True):
        assert more.optimizer_bytes - less.optimizer_bytes == 4 * less.parameters
    apart = planned(*size, "outer=diloco")
    states = 2 if "pipeline.replicas=2" in words else 0  # one replica has none to go apart from
    for less, more in zip(plain.forecast.ranks, apart.forecast.ranks, strict=True):
        assert more.optimizer_bytes - less.optimizer_bytes == 4 * states * less.parameters
    alone = planned(*MLP, "outer.compress=topk").forecast.ranks
    assert [e.total_bytes for e in alone] == [e.total_bytes for e in planned(*MLP).forecast.ranks]


def test_stages_fit_knows_states_that_are_divided():
    size = ("model=mlp", "data=synthetic_vectors", "pipeline.stages=fit", "pipeline.ranks=4")
    alone = planned(
        "model=mlp",
        "data=synthetic_vectors",
        "pipeline.stages=1",
        "outer.shard=flat",
        "pipeline.replicas=4",
    )
    limit = 1.01 * max(rank.total_bytes for rank in alone.forecast.ranks)
    whole = planned("model=mlp", "data=synthetic_vectors", "pipeline.stages=1")
    assert max(rank.total_bytes for rank in whole.forecast.ranks) > limit
    found = planned(*size, "outer.shard=flat", f"pipeline.memory_bytes={limit:.0f}")
    assert found.fits
    assert "this one needs the least memory" not in found.text


def test_no_order_is_searched_where_one_micro_batch_does_not_fit(capsys):
    """A search of 54 s ended with an order that did not fit; none could have."""
    size = ("data=synthetic", "pipeline.stages=2", "pipeline.microbatches=4")
    auto = ("pipeline.schedule=auto", "+pipeline.options.trials=0", "pipeline.recompute=never")
    named = planned(*size, "pipeline.schedule=one_f_one_b", "pipeline.recompute=never")
    last = named.forecast.ranks[1]  # holds one micro-batch at a time
    hopeless = planned(*size, *auto, f"pipeline.memory_bytes={last.total_bytes - 1}")
    assert not hopeless.fits and "no order fits: in addition to" in hopeless.text
    assert "searching" not in capsys.readouterr().err
    enough = max(each.total_bytes for each in named.forecast.ranks)
    roomy = planned(*size, *auto, f"pipeline.memory_bytes={enough}")
    assert roomy.fits and "no order fits" not in roomy.text
    assert "searching for an order of 4 micro-batches on 2 ranks" in capsys.readouterr().err


def test_where_no_other_settings_fit_the_nearest_is_named():
    size = ("data=synthetic", "pipeline.stages=2", "pipeline.microbatches=32")
    most = max(each.total_bytes - each.activation_bytes for each in planned(*size).forecast.ranks)
    text = planned(*size, f"pipeline.memory_bytes={most + 1000}").text
    assert re.search(
        r"none of \d+ other settings fits; pipeline\.\S+.* needs the least memory, ", text
    )


def test_memory_decides():
    small = planned(*MLP, "pipeline.memory_bytes=100000")
    assert not small.fits and "memory: ranks 0-1 need up to" in small.text
    assert planned(*MLP, "pipeline.memory_bytes=1e9").fits
    assert planned(*MLP).fits


def test_a_budget_recomputes_the_least_that_fits():
    def text(recompute, *more):
        return planned(
            "data=synthetic", "pipeline.stages=2", f"pipeline.recompute={recompute}", *more
        )

    never, always = text("never"), text("always")
    assert "Recomputed" not in never.text
    limits = [f"pipeline.memory_bytes={amount}" for amount in ("1e6", "26e6", "1e9")]
    none, some, ample = (text("budget", limit) for limit in limits)
    assert "stage 0: nothing\nstage 1: nothing" in ample.text and ample.fits
    assert some.fits and not text("never", limits[1]).fits
    assert re.search(r"stage 0: \d of 5 layers \(.*\), keeps .* a micro-batch, costs .*", some.text)
    flops = [step_flops(each.text) for each in (never, some, always)]
    assert flops[0] < flops[1] < flops[2] and step_flops(ample.text) == flops[0]
    assert not none.fits and "recompute: nothing fits: " in none.text
    assert step_flops(none.text) >= flops[2] - 1


def step_flops(text):
    return float(re.search(r"([\d.]+) GFLOP a step", text)[1])


def test_offload_leaves_little_on_the_device():
    def most(offload):
        text = planned(
            "data=synthetic", "pipeline.recompute=never", f"pipeline.offload={offload}"
        ).text
        return max(float(line.split()[-8]) for line in rank_lines(text))

    assert most("true") < 0.7 * most("false")


def test_what_an_accelerator_offloads_is_told_of_its_host():
    words = ("data=synthetic", "pipeline.recompute=never", "pipeline.schedule=gpipe")
    words = (*words, "pipeline.stages=1", "pipeline.microbatches=8")
    device = planned(*words, "pipeline.offload=true", "train.device=cuda")
    kept = planned(*words, "train.device=cuda").forecast.ranks[0].activation_bytes
    (rank,) = device.forecast.ranks
    # The last micro-batch stays, and what came back first is gone before the last one leaves.
    assert 0.7 * kept < rank.offloaded_bytes < kept
    assert "offloaded to host  sent a step" in device.text
    assert "Offloaded: activations in pinned host memory" in device.text
    on_host = planned(*words, "pipeline.offload=true").text
    assert "offloaded to host" not in on_host
    assert planned(*words).forecast.ranks[0].offloaded_bytes == 0


def test_a_budget_knows_what_is_offloaded():
    """It recomputed as if nothing left the device, or said that nothing fits."""
    words = ("data=synthetic", "pipeline.stages=2", "pipeline.microbatches=32")
    words = (*words, "pipeline.schedule=gpipe", "pipeline.offload=true")
    most = {
        way: max(e.total_bytes for e in planned(*words, f"pipeline.recompute={way}").forecast.ranks)
        for way in ("never", "always")
    }
    assert most["always"] < most["never"]
    budget = (*words, "pipeline.recompute=budget")
    for share in (1.0, 0.7, 0.4, 0.1):
        limit = round(most["always"] + share * (most["never"] - most["always"]))
        found = planned(*budget, f"pipeline.memory_bytes={limit}")
        assert found.fits, share
        again = [layers for layers in found.layout.recomputed or () if layers]
        assert bool(again) == (share < 1)
    with pytest.raises(PartitionError, match="nothing fits"):
        lay_out_of(*budget, f"pipeline.memory_bytes={round(0.5 * most['always'])}")


def lay_out_of(*words):
    config = compose_config(list(words))
    layers = build_target("model", config.model)
    sample = microbatch(config.data, samples_per_microbatch(config))
    example = Example(sample.inputs, sample.targets, token_cross_entropy, 0, HostDevice())
    return lay_out(request_of(config), CountedCosts(normalise_layers(layers), example))


def rank_lines(text):
    return re.split(r"sent a step.*\n", text)[1].split("\n\n")[0].splitlines()


def test_a_budget_needs_a_limit():
    for refuse in (planned, lambda *overrides: check_config(compose_config(list(overrides)), 1)):
        with pytest.raises(ConfigError, match=r"pipeline\.memory_bytes.*recompute=budget"):
            refuse("data=synthetic", "pipeline.stages=1", "pipeline.recompute=budget")


def test_skips_are_shown():
    text = planned("model=unet", "data=synthetic_masks", "model.base_channels=4").text
    assert re.search(
        r"Skips, for one micro-batch: 5, of which \d within a stage, \d to the next", text
    )
    assert re.search(r"level0 +\d+ to \d+ +\d to 3 +262 kB", text)


def test_precision_is_counted():
    def activations(precision):
        text = planned("data=synthetic", f"train.precision={precision}").text
        return float(re.search(r"^all .* ([\d.]+) MB$", text, re.MULTILINE)[1])

    assert activations("bfloat16") < 0.8 * activations("float32")


@pytest.mark.parametrize(
    "setting", ["pipeline.memory_bytes=0", "plan.flops_per_s=-1", "plan.flops_per_s=inf"]
)
def test_settings_out_of_range_are_refused(setting):
    with pytest.raises(ConfigError, match=setting.split("=")[0]):
        planned(*MLP, setting)
    with pytest.raises(ConfigError, match=setting.split("=")[0]):
        check_config(compose_config([*MLP[:2], setting]), 1)


def test_a_model_that_does_not_take_the_data_is_refused():
    with pytest.raises(ConfigError, match=r"model\.widths, expected first of data\.width=64"):
        planned(*MLP, "model.widths=[65,8,10]")


@pytest.mark.parametrize(
    "overrides",
    [
        ["data=synthetic", "data.seq_len=7"],
        ["data=python_source"],
        ["data=synthetic_vectors", "model=mlp"],
        [
            "data=synthetic_images",
            "data.height=33",
            "data.width=35",
            "model=mlp",
            "model.widths=[1,2]",
        ],
    ],
)
def test_shapes_are_those_of_the_data(overrides):
    config = compose_config(overrides)
    planned_sample, source = microbatch(config.data, 2), open_data(config.data)
    inputs, targets = source.train.read_inputs([0, 1]), source.train.read_targets([0, 1])
    for foreseen, real in ((planned_sample.inputs, inputs), (planned_sample.targets, targets)):
        assert foreseen.is_meta and (foreseen.shape, foreseen.dtype) == (real.shape, real.dtype)
    assert planned_sample.loss == source.loss


def test_text_that_is_not_there_can_be_planned_for():
    assert microbatch(TextConfig(paths=[], seq_len=5), 3).inputs.shape == (3, 5)


def test_samples_of_the_largest_microbatch():
    config = compose_config(
        ["train.batch_size=33", "pipeline.microbatches=8", "pipeline.replicas=2"]
    )
    assert samples_per_microbatch(config) == 3


@pytest.mark.parametrize(
    "config",
    [
        AdamWConfig(),
        SGDConfig(momentum=0.9),
        SGDConfig(momentum=0.0),
        RMSPropConfig(),
        RMSPropConfig(momentum=0.5, centered=True),
        LARSConfig(),
        LARSConfig(momentum=0.0),
        LAMBConfig(),
    ],
    ids=str,
)
def test_optimizer_states_are_those_the_optimizer_keeps(config):
    parameter = nn.Parameter(torch.ones(5, 5))
    optimizer = build_optimizer([("weight", parameter)], config)
    parameter.grad = torch.ones(5, 5)
    optimizer.step()
    kept = [t for t in optimizer.state[parameter].values() if t is not None and t.numel() == 25]
    assert optimizer_memory(config).states == len(kept)


class Live:
    """Bytes of distinct storages that autograd saved and that stages were given, now and most."""

    def __init__(self, parameters):
        self.own = {p.untyped_storage().data_ptr() for p in parameters}
        self.saved = {}
        self.inputs = []
        self.peak = 0

    def update(self):
        given = [each for ref in self.inputs if (each := ref()) is not None]
        sizes = dict(self.part(each) for each in [*self.saved.values(), *given])
        self.peak = max(self.peak, sum(sizes.values()))

    def give(self, tensor):
        """Note the input of a stage; its forward and its recomputation have one memory."""
        self.inputs.append(
            weakref.ref(tensor.untyped_storage() if tensor.is_floating_point() else tensor)
        )

    def part(self, tensor):
        """Return where a tensor's memory is, or a storage, and its bytes."""
        if isinstance(tensor, torch.UntypedStorage):
            return tensor.data_ptr(), tensor.nbytes()
        if not tensor.is_floating_point():
            return tensor.data_ptr(), tensor.nbytes  # its micro-batch's part of the batch
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()


class Saved:
    """One tensor that autograd keeps."""

    def __init__(self, tensor, live):
        self.tensor, self.live = tensor, live
        if tensor.untyped_storage().data_ptr() not in live.own:
            live.saved[id(self)] = tensor
            live.update()

    def __del__(self):
        self.live.saved.pop(id(self), None)


def live_bytes(layers, loss_fn, counts, ranks, schedule, microbatches, recompute, batch):
    """Return for each rank the most bytes of activations that live within a step."""

    def body(world):
        pipe = Pipeline(
            layers,
            loss_fn,
            microbatches=microbatches,
            schedule=schedule,
            recompute=recompute,
            partition=counts,
            world=world,
        )
        pipe.step(*batch)  # the first one copies, to see whether layers write in place
        live = Live(pipe.parameters())
        for stage in pipe.stages.values():
            guard = stage.whole._guard

            def noted(state, protect=guard.protect, **modes):
                for tensor in tensors_of(state):
                    live.give(tensor)
                return protect(state, **modes)

            guard.protect = noted
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: Saved(tensor, live), lambda saved: saved.tensor
        )
        with hooks:
            pipe.step(*batch)
        return live.peak

    return run_on_threads(ranks, body)


def as_counted(layers, loss_fn, counts, table, example):
    given = [torch.empty_like(part, device="meta") for part in example]
    model = count_model(layers, given[0], given[1], loss_fn)
    skips = long_skips(skip_routes(model.skips, counts))
    return forecast(model, counts, lower(replace(table, skips=skips)), 2)


def small_unet():
    layers = build_model("unet", num_convs=1, base_channels=4, num_classes=2, depth=3, dropout=0.0)
    images, masks = torch.rand(8, 3, 16, 16), torch.randint(2, (8, 16, 16))
    return layers, (images, masks)


UNET_CUTS = [
    ("gpipe", 4, [8, 10, 10, 13]),
    ("one_f_one_b", 3, [11, 14, 16]),
    ("zb_v", 2, [8, 10, 10, 13]),
    ("interleaved", 2, [8, 10, 10, 13]),
    ("chimera", 2, [20, 21]),
]


@pytest.mark.parametrize("schedule, ranks, counts", UNET_CUTS)
def test_bytes_sent_are_those_of_a_run(schedule, ranks, counts, monkeypatch):
    """Each skip once, straight from the rank that stashes to the one that pops."""
    layers, batch = small_unet()
    sent = Counter()
    original = MemoryTransport.send

    def send(self, channel, lane, microbatch, nest, num_samples):
        sent[channel.source_rank] += sum(t.nbytes for t in tensors_of(nest))
        original(self, channel, lane, microbatch, nest, num_samples)

    monkeypatch.setattr(MemoryTransport, "send", send)

    def body(world):
        pipe = Pipeline(
            layers, segmentation, microbatches=4, schedule=schedule, partition=counts, world=world
        )
        pipe.step(*batch)

    run_on_threads(ranks, body)
    table = build(schedule, ranks=ranks, microbatches=4, recompute="except_last")
    found = as_counted(layers, segmentation, counts, table, [part[:2] for part in batch])
    assert dict(sent) == {rank: each.sent_bytes for rank, each in enumerate(found.ranks)}


@pytest.mark.parametrize("schedule, ranks, counts", [UNET_CUTS[k] for k in (0, 1, 4)])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_activations_with_skips_are_those_of_a_run(schedule, ranks, counts, recompute):
    """No cut is right behind a stash: threads would share what it passes on and what it stashes.

    Stages of one rank would share what they hand over; counted is one tensor for each of them.
    """
    layers, batch = small_unet()
    measured = live_bytes(layers, segmentation, counts, ranks, schedule, 4, recompute, batch)
    table = build(schedule, ranks=ranks, microbatches=4, recompute=recompute)
    example = [part[:2] for part in batch]
    found = as_counted(layers, segmentation, counts, table, example)
    model = count_model(layers, *[part.to("meta") for part in example], segmentation)
    # A skip's memory is shared with the thread that sent it, which keeps it until its own backward.
    shared = Counter()
    for (_, stage), skips in skip_routes(model.skips, counts).items():
        shared[stage] += sum(sum(model.carried(skip).tensors) for skip in skips)
    widest = max(sum(stage.input.tensors) for stage in found.stages[1:])
    for most, rank in zip(measured, found.ranks, strict=True):
        more = max(widest, *(shared[stage] for stage in rank.stages))
        assert rank.activation_bytes <= most <= rank.activation_bytes + 2 * more


@pytest.mark.parametrize(
    "schedule, ranks, counts",
    [
        ("gpipe", 3, [3, 3, 3]),
        ("one_f_one_b", 3, [2, 3, 4]),
        ("interleaved", 2, [2, 2, 2, 3]),
        ("chimera", 2, [5, 4]),
    ],
)
@pytest.mark.parametrize("recompute", ["never", "always", "except_last"])
def test_activations_are_those_of_a_run(schedule, ranks, counts, recompute):
    """To the byte but for a race, for what autograd saved and what stages were given.

    A run holds some more: boundaries that came early, outputs on their way, gradients. Under a
    split backward it holds up to a third less than is counted, which frees nothing at an I.
    """
    layers = build_model("gpt", width=32, num_layers=3, block_size=16)
    samples, microbatches = 2, 6
    tokens = torch.randint(256, (samples * microbatches, 16))
    batch = tokens, tokens
    measured = live_bytes(
        layers, token_cross_entropy, counts, ranks, schedule, microbatches, recompute, batch
    )
    table = build(schedule, ranks=ranks, microbatches=microbatches, recompute=recompute)
    example = [part[:samples] for part in batch]
    found = as_counted(layers, token_cross_entropy, counts, table, example)
    # Threads share a boundary: one that a rank is done with, its sender may still hold.
    boundary = samples * 16 * 32 * 4
    for most, rank in zip(measured, found.ranks, strict=True):
        assert rank.activation_bytes <= most <= rank.activation_bytes + 2 * boundary


def test_exit_codes(start):
    too_much = start(*MLP, "pipeline.memory_bytes=1e5", module="gpipe_hpc.plan").wait()
    assert too_much.code == 3 and "allows 100 kB" in too_much.output
    wrong = start(*MLP, "pipeline.partition=[9]", module="gpipe_hpc.plan").wait()
    assert wrong.code == 2
    assert wrong.output.startswith("gpipe_hpc: config: bad pipeline.partition")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("partition=time", "no cut gives the most loaded rank less work"),
        ("partition=[4,1]", r"the most loaded rank has [\d.]+ % more work than in the best cut"),
        ("schedule=interleaved", r"the most loaded rank has at most [\d.]+ % more work"),
    ],
)
def test_the_plan_says_how_far_the_cut_is_from_the_best(word, said):
    text = make_plan(compose_config([*MLP, f"pipeline.{word}"])).text
    assert re.search(f"^by FLOPs, {said}", text, re.MULTILINE)


def test_the_plan_says_what_is_pinned():
    words = [*MLP, "pipeline.partition=uniform", "pipeline.schedule=interleaved"]
    pinned = make_plan(compose_config([*words, "pipeline.pins={1:0,-1:-1}"]))
    assert pinned.layout.partition.counts[0] >= 2
    last = len(pinned.model.layers) - 1
    line = next(each for each in pinned.text.splitlines() if each.startswith("pinned"))
    assert f"layers.{last} " in line and "on stage 3" in line and "layers.1 " in line
    assert make_plan(compose_config([*words, "pipeline.pins.1=0"])).layout.partition.counts[0] >= 2
    assert "pinned" not in make_plan(compose_config(words)).text


def test_a_simulated_cut_is_planned_and_named():
    words = ["model=gpt2_untied", "data=synthetic", "pipeline.stages=4", "pipeline.schedule=zb_v"]
    words += ["pipeline.microbatches=16", "pipeline.recompute=never"]
    even, found = (
        planned(*words, f"pipeline.partition={policy}") for policy in ("time", "simulated")
    )
    assert "the fastest cut found in simulation:" in found.text
    assert "the fastest cut found" not in even.text
    assert found.forecast.timeline.makespan < 0.9 * even.forecast.timeline.makespan
