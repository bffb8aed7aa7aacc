"""Few Python calls of ours stand between an action of the table and the layers that it runs."""

import os
import sys

import pytest
import torch
from torch import nn

import gpipe_hpc
from gpipe_hpc import Pipeline, run_on_threads

HOME = os.path.dirname(gpipe_hpc.__file__) + os.sep
EXECUTOR = HOME + os.path.join("engine", "executor.py")
ACTIONS = {"_forward": "F", "_recompute": "R", "_backward": "B"}
MOST_CALLS, MOST_FILES = 40, 8
WIDTH, STAGES, MICROBATCHES = 4, 3, 4


class Profile:
    """Collects, of each action that runs on this thread, the functions of ours it calls."""

    def __init__(self):
        self.actions = []
        self._frame = None

    def __call__(self, frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(HOME):
            if self._frame is None and code.co_filename == EXECUTOR and code.co_name in ACTIONS:
                self._frame = frame
                self.actions.append((ACTIONS[code.co_name], []))
            if self._frame is not None:
                self.actions[-1][1].append((code.co_filename[len(HOME) :], code.co_qualname))
        elif event == "return" and frame is self._frame:
            self._frame = None


def third_step(recompute):
    """Return the profile of each rank's third step; two layers on each of three stages."""

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
    """Return whether it looks, again and again, whether another rank has sent something."""
    file, function = call
    return file == "comm/transport/thread_hub.py" or "wait.<locals>" in function


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_an_action_of_a_plain_stage_takes_few_calls_in_few_files(recompute):
    """There were 102 calls in 18 files before the first layer of a stage had run."""
    kinds = "FRB" if recompute == "always" else "FB"
    for stage, actions in enumerate(third_step(recompute)):
        assert sorted(op for op, _ in actions) == sorted(kinds * MICROBATCHES), stage
        for op, calls in actions:
            own = [call for call in calls if not is_waiting(call)]
            files = {file for file, _ in own}
            assert 5 < len(own) <= MOST_CALLS, (stage, op, own)
            assert len(files) <= MOST_FILES, (stage, op, files)
