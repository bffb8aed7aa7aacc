"""Overhead of one action of a schedule, counted in Python calls of gpipe_hpc."""

import os
import sys

import pytest
import torch
from torch import nn

import gpipe_hpc
from gpipe_hpc import Pipeline, run_on_threads

PACKAGE = os.path.dirname(gpipe_hpc.__file__) + os.sep
EXECUTOR = PACKAGE + os.path.join("engine", "executor.py")
ACTIONS = {"_forward": "F", "_recompute": "R", "_backward": "B"}
MOST_CALLS, MOST_FILES = 40, 8
WIDTH, STAGES, MICROBATCHES = 4, 3, 4


class Profile:
    """Profiler that records the gpipe_hpc functions called by each action on this thread."""

    def __init__(self):
        self.actions = []
        self._frame = None

    def __call__(self, frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            if self._frame is None and code.co_filename == EXECUTOR and code.co_name in ACTIONS:
                self._frame = frame
                self.actions.append((ACTIONS[code.co_name], []))
            if self._frame is not None:
                self.actions[-1][1].append((code.co_filename[len(PACKAGE) :], code.co_qualname))
        elif event == "return" and frame is self._frame:
            self._frame = None


def profile_third_step(recompute):
    """Profile the third step of each rank; each of three stages has two layers."""

    def body(world):
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2 * STAGES)]
        pipe = Pipeline(
            layers, nn.MSELoss(), microbatches=MICROBATCHES, recompute=recompute, world=world
        )
        x = torch.ones(2 * MICROBATCHES, WIDTH)
        for _ in range(2):
            pipe.step(x, x)
        profile = Profile()
        sys.setprofile(profile)
        try:
            pipe.step(x, x)
        finally:
            sys.setprofile(None)
        return profile.actions

    return run_on_threads(STAGES, body)


def is_waiting(call):
    """Return whether a call polls for a message of another rank, so that its count varies."""
    file, function = call
    return file == "comm/transport/thread_hub.py" or "wait.<locals>" in function


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_action_of_plain_stage_takes_few_calls_in_few_files(recompute):
    """Regression: 102 calls in 18 files came before the first layer of a stage."""
    kinds = "FRB" if recompute == "always" else "FB"
    for stage, actions in enumerate(profile_third_step(recompute)):
        assert sorted(op for op, _ in actions) == sorted(kinds * MICROBATCHES), stage
        for op, calls in actions:
            own = [call for call in calls if not is_waiting(call)]
            files = {file for file, _ in own}
            assert 5 < len(own) <= MOST_CALLS, (stage, op, own)
            assert len(files) <= MOST_FILES, (stage, op, files)
