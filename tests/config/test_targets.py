"""A user's own functions, named by `_target_`: the keywords they get, and what is none."""

import subprocess
import sys

import pytest
import torch

from gpipe_hpc.comm.watchdog.tracebacks import users_traceback
from gpipe_hpc.config import bind_loss, build_target, check_config, compose_config
from gpipe_hpc.errors import ConfigError


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """Put a module with a user's own targets on the path."""
    (tmp_path / "own_targets.py").write_text(
        "def build(width=256, depth=1): return ('built', width, depth)\n"
        "def everything(**keywords): return keywords\n"
        "def loss(output, target, beta): return (output, target, beta)\n"
        "text = 'no function'\n"
        "def helper(): raise KeyError('lost')\n"
        "def fails(width=3): helper()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_targets"
    sys.modules.pop("own_targets", None)


def test_own_model_gets_the_keywords_alone_that_the_user_has_set(own_module):
    """The preset behind it, model=gpt, turned a default width of 256 into 128."""
    target = f"model._target_={own_module}.build"
    assert compose_config([target, "model.depth=3"]).model == {
        "_target_": f"{own_module}.build",
        "depth": 3,
    }
    built = build_target("model", compose_config([target, "model.depth=3"]).model)
    assert built == ("built", 256, 3)
    # What is set counts, also where it is what the preset says; and as one word.
    same = compose_config([target, "model.width=128"]).model
    assert build_target("model", same) == ("built", 128, 1)
    whole = compose_config([f"model={{_target_:{own_module}.build,width:128}}"]).model
    assert build_target("model", whole) == ("built", 128, 1)


def test_a_preset_of_ones_own_keeps_its_keywords(own_module, tmp_path):
    """Keywords in a YAML file of the user's are his, whatever presets of ours say."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "mine.yaml").write_text(f"_target_: {own_module}.build\nwidth: 128\n")
    words = ["model=mine", f"hydra.searchpath=[file://{tmp_path}]"]
    assert build_target("model", compose_config(words).model) == ("built", 128, 1)


def test_a_name_that_a_module_lacks_is_answered_with_one_it_has(own_module):
    """The advice was PYTHONPATH, though the module was found."""
    with pytest.raises(ConfigError, match=r"did you mean build\?") as found:
        build_target("model", {"_target_": f"{own_module}.buidl"})
    assert "PYTHONPATH" not in str(found.value)
    with pytest.raises(ConfigError, match="PYTHONPATH"):
        build_target("model", {"_target_": f"{own_module}_absent.build"})


def test_own_model_needs_no_preset_of_another(own_module):
    config = compose_config(["model=own", f"model._target_={own_module}.build"])
    assert build_target("model", config.model) == ("built", 256, 1)
    with pytest.raises(ConfigError, match=r"model, expected a _target_.*my\.module\.build"):
        check_config(compose_config(["model=own"]), 1)


def test_own_model_that_takes_everything_gets_everything(own_module):
    model = compose_config([f"model._target_={own_module}.everything", "model.depth=3"]).model
    assert build_target("model", model) == {"depth": 3}


def test_own_model_needs_no_data_of_tokens(own_module):
    """The preset behind it, model=gpt, refers to data.vocab_size; it took the whole run down."""
    overrides = [f"model._target_={own_module}.build", "data=synthetic_vectors", "model.depth=3"]
    model = compose_config(overrides).model
    assert "vocab_size" not in model
    assert build_target("model", model)[2] == 3
    with pytest.raises(ConfigError, match=r"model\.size refers to a setting"):
        compose_config([*overrides, "model.size=${data.no_such}"])


def test_keyword_that_own_model_does_not_take_is_refused(own_module):
    model = compose_config([f"model._target_={own_module}.build", "model.dept=3"]).model
    with pytest.raises(ConfigError, match=r"unexpected keyword argument .dept.; correct"):
        build_target("model", model)


def test_a_keyword_of_another_preset_is_refused():
    """`depth` is U-Net's; a GPT with it once trained as if nothing had been said."""
    model = compose_config(["model=gpt", "model.depth=3"]).model
    with pytest.raises(
        ConfigError, match=r"build_gpt.. got an unexpected keyword argument .depth."
    ):
        build_target("model", model)


def test_own_loss_keeps_its_keywords(own_module):
    loss = bind_loss({"_target_": f"{own_module}.loss", "beta": 2})
    assert loss("a", "b") == ("a", "b", 2)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_such_module.build", "No module named"),
        ("own_targets.bild", "has no attribute"),
        ("build", "expected MODULE.FUNCTION"),
        ("own_targets.text", "cannot be called"),
    ],
)
def test_target_that_is_none_is_refused(own_module, path, words):
    with pytest.raises(ConfigError, match=words):
        build_target("model", {"_target_": path})


def test_a_loss_may_be_a_class(own_module):
    """Each call made a new CrossEntropyLoss of output and target, and returned it as the loss."""
    loss = bind_loss({"_target_": "torch.nn.CrossEntropyLoss", "label_smoothing": 0.1})
    output, target = torch.randn(3, 4), torch.tensor([0, 3, 1])
    expected = torch.nn.functional.cross_entropy(output, target, label_smoothing=0.1)
    assert torch.equal(loss(output, target), expected)
    function = bind_loss({"_target_": f"{own_module}.loss", "beta": 2})
    assert function("a", "b") == ("a", "b", 2)


def test_what_fails_in_the_users_code_is_named_and_keeps_his_frames(own_module):
    with pytest.raises(
        ConfigError, match=r"model\._target_=own_targets\.fails \(width=5\) failed: KeyError"
    ) as it:
        build_target("model", {"_target_": f"{own_module}.fails", "width": 5})
    told = users_traceback(it.value)
    assert "in helper" in told and "KeyError: 'lost'" in told
    assert told.index("in fails") < told.index("in helper")
    assert "targets.py" not in told.replace("own_targets.py", "")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("import no_such_package", "No module named 'no_such_package'"),
        ("def build(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("from math import no_such_name", "cannot import name"),
        ("import math; math.no_such_name", "no attribute 'no_such_name'"),
    ],
)
def test_what_fails_when_the_users_module_is_imported_is_no_wrong_path(
    tmp_path, monkeypatch, text, word
):
    """It said that the path names nothing, and where in the file it failed was lost."""
    (tmp_path / "broken_module.py").write_text(f"{text}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"_target_=broken_module\.build: ") as raised:
        build_target("model", {"_target_": "broken_module.build"})
    assert word in str(raised.value)
    assert "broken_module.py" in users_traceback(raised.value) or "SyntaxError" in word


def test_a_module_in_the_current_folder_is_found_however_we_were_started(tmp_path, repository):
    (tmp_path / "here.py").write_text("def build(): return 'found'\n")
    code = (
        f"import sys; sys.path[:] = [p for p in sys.path if p] + [{str(repository)!r}]\n"
        "from gpipe_hpc.config import build_target\n"
        "print(build_target('model', {'_target_': 'here.build'}))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == "found\n", done.stderr


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model.width=abc", r"bad model\.width, expected a whole number, got 'abc'; correct"),
        ("model.width=1.5", r"bad model\.width, expected a whole number, got 1\.5"),
        ("model.num_layers=true", r"bad model\.num_layers, expected a whole number, got True"),
        ("model.dropout=[1]", r"bad model\.dropout, expected a number, got \[1\]"),
        ("model.tied=3", r"bad model\.tied, expected true or false, got 3"),
        ("model.block_size=18446744073709551616", r"bad model\.block_size, expected at most 92"),
    ],
)
def test_types_of_our_models_settings_are_checked(word, message):
    """A text was told as ``'<' not supported between instances of 'str' and 'int'``."""
    with pytest.raises(ConfigError, match=message):
        build_target("model", compose_config(["model=gpt", "data=synthetic", word]).model)


def test_lists_of_our_models_are_checked():
    with pytest.raises(ConfigError, match=r"bad model\.widths, expected a list, each a whole"):
        build_target("model", compose_config(["model=mlp", "model.widths=3"]).model)
    with pytest.raises(ConfigError, match=r"bad model\.widths, expected a whole number, got \[4,"):
        build_target("model", compose_config(["model=mlp", "model.widths=[4,a]"]).model)


def test_annotations_of_a_users_function_are_his(tmp_path, monkeypatch):
    """They may say more than he means: nothing is refused for them."""
    (tmp_path / "annotated.py").write_text("def build(width: int): return width\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert build_target("model", {"_target_": "annotated.build", "width": "wide"}) == "wide"
