"""What is left of tracebacks: the user's frames, none of ours; all of them when asked for."""

import traceback

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

import gpipe_hpc
from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.comm.watchdog.tracebacks import join_cause, strip_own_frames, users_traceback
from gpipe_hpc.errors import (
    ActionError,
    CheckpointError,
    ConfigError,
    KeywordError,
    ModelError,
    PeerError,
    ScheduleError,
)


class Raising(nn.Module):
    """A layer whose forward fails two calls below."""

    def forward(self, x):
        return self.look_up(x)

    def look_up(self, x):
        return {}["missing"]


class Unbuilt(nn.Module):
    def __init__(self):
        super().__init__()
        self.size = {}["size"]


def raising_loss(output, target):
    raise ValueError("refused by the loss")


def mean_square(output, target):
    return (output - target).square().mean()


def trained(world=None, last=None, loss=mean_square, width=4, **settings):
    pipe = Pipeline([nn.Linear(4, 4), last or nn.Linear(4, 4)], loss, world=world, **settings)
    return pipe.step(torch.zeros(2, width), torch.zeros(2, 4))


def shown(error):
    """Return the names of the functions, and the text, that Python would show of an error."""
    names, each = [], error
    while each is not None:
        names.append([f.name for f in traceback.extract_tb(each.__traceback__)])
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return names, "".join(traceback.format_exception(error))


def caught(kind, **settings):
    with pytest.raises(kind) as found:
        trained(**settings)
    return shown(found.value)


def test_a_layer_that_raises_shows_the_users_frames_alone():
    """The cause came first, under forty lines of the engine."""
    names, text = caught(ActionError, last=Raising())
    ours, users = names
    assert users == ["forward", "look_up"]
    assert ours == ["caught", "trained"]
    assert "/gpipe_hpc/" not in text and "nn/modules" not in text, text
    assert "layers.1 (Raising): KeyError: 'missing'" in text.splitlines()[-1]


class Within(nn.Module):
    """A layer of layers, one of which does not fit."""

    def __init__(self):
        super().__init__()
        self.parts = nn.Sequential(nn.ReLU(), nn.Linear(3, 4))

    def forward(self, x):
        return self.parts(x)


def test_frames_of_torch_are_left_out_below_the_users():
    """How nn.Sequential calls its parts stood there in eight frames."""
    names, text = caught(ActionError, last=Within())
    assert names == [["caught", "trained"], ["forward"]]
    assert "torch/nn" not in text


def test_frames_of_torch_stay_where_nothing_of_ours_is():
    """A script's own errors are none of our business."""
    with pytest.raises(RuntimeError) as found:
        Within()(torch.zeros(2, 4))
    strip_own_frames(found.value)
    names, _ = shown(found.value)
    assert "_call_impl" in names[0]


def test_a_message_and_its_cause_become_one():
    """The script's frames came after "The above exception was the direct cause"."""
    with pytest.raises(ActionError) as found:
        trained(last=Raising())
    strip_own_frames(found.value)
    join_cause(found.value)
    name = "test_a_message_and_its_cause_become_one"
    names, text = shown(found.value)
    assert names == [[name, "trained", "forward", "look_up"]]
    assert text.count("Traceback") == 1 and text.splitlines()[-1].endswith("KeyError: 'missing'")


def chained(x):
    try:
        return {}["missing"]
    except KeyError as error:
        raise ValueError("not known") from error


class Chaining(nn.Module):
    def forward(self, x):
        return chained(x)


def test_causes_of_the_users_own_stay():
    with pytest.raises(ActionError) as found:
        trained(last=Chaining())
    join_cause(found.value)
    names, text = shown(found.value)
    assert [each[-1] for each in names] == ["chained", "chained"]
    assert text.count("direct cause") == 1 and "ValueError: not known" in text.splitlines()[-1]


def test_a_loss_that_raises_shows_the_users_frames_alone():
    names, text = caught(ActionError, loss=raising_loss)
    assert names == [["caught", "trained"], ["raising_loss"]]
    assert "loss_fn (raising_loss): ValueError: refused by the loss" in text.splitlines()[-1]


def test_a_factory_that_raises_shows_the_users_frames_alone():
    names, _ = caught(ModelError, last=LayerSpec(Unbuilt))
    assert names == [["caught", "trained"], ["__init__"]]


def test_a_wrong_shape_is_one_message():
    """It is torch's layer that raises: no frame is the user's, and our message repeats its text."""
    names, text = caught(ActionError, width=3)
    assert names == [["caught", "trained"]]
    assert "layers.0 (Linear)" in text and text.count("shapes cannot be multiplied") == 1


def test_a_mistaken_setting_is_one_message_at_the_users_line():
    names, text = caught(ScheduleError, schedule="gpip")
    assert names == [["caught", "trained"]]
    assert "did you mean gpipe?" in text


def test_a_mistaken_keyword_is_one_message_with_the_nearest():
    """It named a record inside of us, and no keyword that is like it."""
    with pytest.raises(TypeError, match=r"unknown keyword schedul, .*; did you mean schedule\?"):
        trained(schedul="gpipe")
    names, _ = caught(KeywordError, schedul="gpipe")
    assert names == [["caught", "trained"]]


def test_a_keyword_of_the_command_line_names_that_of_the_library():
    """`options` was answered with the nearest spelling, which was none."""
    _, text = caught(KeywordError, options={"blocks": 2})
    assert "did you mean schedule_options?" in text


@pytest.mark.parametrize(("given", "meant"), [("alway", "always"), ("budge", "budget")])
def test_a_mistaken_recomputation_is_answered_with_all_there_are(given, meant):
    """The list lacked budget, and nothing said what was meant."""
    _, text = caught(ConfigError, recompute=given)
    assert "always, except_last, never, budget" in text and f"did you mean {meant}?" in text


def test_a_factory_called_with_too_little_shows_no_frame_of_ours():
    """The call itself stood there, as if it were the factory's mistake."""
    _, text = caught(ModelError, last=LayerSpec(nn.Linear, 32))
    assert "call_factory" not in text and "missing 1 required" in text


class Hungry(nn.Module):
    def forward(self, x):
        return torch.empty(10**15)


def test_memory_that_is_used_up_has_a_remedy():
    names, text = caught(ActionError, last=Hungry())
    assert names[1] == ["forward"]
    assert "out of memory; remedies: use more micro-batches" in text.splitlines()[-1]


def test_what_cannot_be_saved_is_one_message(tmp_path):
    pipe = Pipeline([nn.Linear(4, 4)], mean_square)
    with pytest.raises(CheckpointError) as found:
        pipe.save(tmp_path / "saved", extra={"function": print})
    names, text = shown(found.value)
    assert names == [["test_what_cannot_be_saved_is_one_message"]], text


def test_on_threads_one_message_is_raised_with_the_users_frames():
    """Other ranks' ConnectionErrors stood around it."""
    with pytest.raises(ActionError) as found:
        run_on_threads(3, lambda world: trained(world, Raising(), partition=[1, 1, 0]))
    names, text = shown(found.value)
    assert names[1:] == [["forward", "look_up"]]
    assert "PeerError" not in text and "ConnectionError" not in text


def test_a_rank_that_stops_for_another_keeps_nothing_of_its_connections():
    seen = {}

    def body(world):
        try:
            trained(world, Raising(), partition=[1, 1])
        except PeerError as error:
            seen[world.rank] = shown(error)
            raise

    with pytest.raises(ActionError):
        run_on_threads(2, body)
    names, text = seen[0]
    assert len(names) == 1 and "KeyError: 'missing'" in text


def test_the_environment_asks_for_all_frames(monkeypatch):
    monkeypatch.setenv("GPIPE_HPC_TRACEBACK", "full")
    names, _ = caught(ActionError, last=Raising())
    assert "run" in names[1] and "step" in names[0], "the engine's frames are there"


def test_a_broken_invariant_of_ours_keeps_its_traceback(monkeypatch):
    """It is nobody's message: without the place nobody could mend it."""

    def broken(self, feed):
        assert not feed, "an invariant"

    monkeypatch.setattr("gpipe_hpc.pipeline.Pipeline._run", lambda *_: broken(None, [1]))
    with pytest.raises(AssertionError) as found:
        trained()
    names, _ = shown(found.value)
    assert names[0][-1] == "broken"


def test_a_command_shows_the_frames_behind_its_message():
    with pytest.raises(ModelError) as found:
        trained(last=LayerSpec(Unbuilt))
    text = users_traceback(found.value)
    assert text.startswith("Traceback") and 'self.size = {}["size"]' in text
    assert "ModelError" not in text, "the command prints that itself"
    assert users_traceback(ScheduleError("a message of ours")) == ""


def load_what_is_not_there():
    try:
        OmegaConf.load("not_there.yaml")
    except OSError as error:
        raise ConfigError(f"a run: expected its settings, got {error}") from error


def test_what_a_library_says_of_a_file_is_not_the_users():
    """`export run.dir=nope` showed the frames of the library that reads YAML."""
    with pytest.raises(ConfigError) as found:
        load_what_is_not_there()
    cause = found.value.__cause__
    within = [f for f in traceback.extract_tb(cause.__traceback__) if "omegaconf" in f.filename]
    assert within, "the library's frames are there"
    # As it is in the package: the frame of this file, which is a user's, is not.
    cause.__traceback__ = cause.__traceback__.tb_next
    assert users_traceback(found.value) == ""
    assert found.value.__cause__ is None


def test_ctrl_c_in_a_step_shows_where_the_script_was(monkeypatch):
    names = {}
    text = "def pressed(*_):\n    raise KeyboardInterrupt"
    exec(compile(text, gpipe_hpc.__file__, "exec"), names)  # in a frame of ours
    monkeypatch.setattr("gpipe_hpc.pipeline.Pipeline._run", names["pressed"])
    names, _ = caught(KeyboardInterrupt)
    assert names == [["caught", "trained"]]


def test_what_the_system_refuses_us_is_in_our_message(tmp_path):
    """`train run.dir=/proc/run` showed where we had tried to make it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError) as found:
        Pipeline([nn.Linear(4, 4)], mean_square).save(tmp_path / "file" / "below")
    assert users_traceback(found.value) == ""
    assert found.value.__cause__ is None


def test_it_ends_on_errors_that_cause_one_another():
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    strip_own_frames(one)
    assert one.__cause__ is other and other.__cause__ is one, "both are told"
