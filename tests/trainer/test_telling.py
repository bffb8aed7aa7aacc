"""What fails on one rank outside of what all do together is told to the others in its own words."""

import threading

import pytest
from torch.optim.optimizer import register_optimizer_step_post_hook

from gpipe_hpc.comm.world.threads import run_on_threads
from gpipe_hpc.config import compose_config
from gpipe_hpc.data import ShuffledSampler
from gpipe_hpc.trainer import loop, one_step
from gpipe_hpc.trainer.figures.results import Results
from gpipe_hpc.trainer.loop import run_training
from gpipe_hpc.trainer.session import Session
from gpipe_hpc.trainer.signals import StopRequest
from gpipe_hpc.trainer.start import opening
from gpipe_hpc.trainer.summary.reporting import Reporter

OWN_WORDS = "these words are its own"

# Where it fails, and on which rank.
PLACES = {
    "the log file": (loop, "rank_log", 1),
    "building the model": (opening, "build_target", 1),
    "building the pipeline": (opening, "build_pipeline", 1),
    "making the optimizer": (opening, "build_optimizer", 1),
    "where the metrics go": (loop, "open_metrics", 0),
    "reading data": (ShuffledSampler, "batches", 1),
    "the learning rate": (one_step, "set_lr", 1),
    "the results of a step": (Results, "add", 0),
    "saving": (Session, "save", 1),
    "validating": (loop, "validate", 1),
    "the last report": (Reporter, "finish", 1),
    "an optimizer's hook": (None, "", 1),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_has_told_before_it_ends(tiny, tmp_path, monkeypatch, place):
    """It told where it ended, behind what it closed on the way there: another cause was found."""
    where, name, guilty = PLACES[place]
    config = compose_config(
        [
            *(*tiny, f"run.dir={tmp_path}/run", "train.steps=3", "train.validate_every=2"),
            *("checkpoint.every=2", "pipeline.stages=2", "model.num_layers=2"),
        ]
    )
    threads, reports = {}, {}

    def fail(*_, **__):
        if threads.get(guilty) == threading.get_ident():
            raise RuntimeError(OWN_WORDS)

    def body(world):
        threads[world.rank] = threading.get_ident()
        try:
            return run_training(config, world, StopRequest())
        except BaseException:
            reports[world.rank] = world.hub.report.words if world.hub.report else ""
            raise

    if where is None:
        hook = register_optimizer_step_post_hook(fail)
    else:
        known = getattr(where, name)

        def first_fail(*args, **given):
            fail()
            return known(*args, **given)

        monkeypatch.setattr(where, name, first_fail)
    try:
        with pytest.raises(RuntimeError, match=OWN_WORDS):
            run_on_threads(2, body)
    finally:
        if where is None:
            hook.remove()
    assert reports[guilty].startswith(f"rank {guilty}: ") and OWN_WORDS in reports[guilty]


HOOKED = """
import os

from torch.optim.optimizer import register_optimizer_step_post_hook

from gpipe_hpc.models import build_gpt


def build(**own):
    steps = []

    def fail(*_):
        steps.append(1)
        if os.environ["RANK"] == "1" and len(steps) == 3:
            raise RuntimeError("these words are its own")

    register_optimizer_step_post_hook(fail)
    return build_gpt(vocab_size=256, block_size=16, num_heads=4, **own)
"""


@pytest.mark.slow
def test_an_optimizers_hook_that_fails_under_torchrun_is_the_cause_on_all_ranks(
    torchrun, tiny, tmp_path
):
    """The other rank told of a connection that was lost, seconds later."""
    (tmp_path / "hooked.py").write_text(HOOKED)
    settings = (*tiny, "model._target_=hooked.build", "train.steps=50", "run.dir=run")
    flags = ["--standalone", "--nproc_per_node=2"]
    launch = torchrun(flags, *settings, env={"PYTHONPATH": str(tmp_path)})
    assert launch.wait() == 1, launch.output
    (told,) = [
        line for line in launch.output.splitlines() if line.startswith("gpipe_hpc: PeerError")
    ]
    assert "rank 1 on" in told and f"RuntimeError: {OWN_WORDS}" in told
    assert "the optimizer's step: " in told and "hooked.py:15: " in told
