"""User functions named by `_target_`: which keywords they get, and invalid targets."""

import subprocess
import sys

import pytest
import torch

from gpipe_hpc.comm.watchdog.tracebacks import users_traceback
from gpipe_hpc.config import bind_loss, build_target, check_config, compose_config
from gpipe_hpc.errors import ConfigError


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """Write a module with a user's targets to the import path and return its name."""
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


def test_own_model_gets_only_keywords_set_by_the_user(own_module):
    """Regression: the replaced preset, model=gpt, changed a default width of 256 to 128."""
    target = f"model._target_={own_module}.build"
    assert compose_config([target, "model.depth=3"]).model == {
        "_target_": f"{own_module}.build",
        "depth": 3,
    }
    built = build_target("model", compose_config([target, "model.depth=3"]).model)
    assert built == ("built", 256, 3)
    # A set value counts even if it equals the preset's, also within one override of the model.
    same = compose_config([target, "model.width=128"]).model
    assert build_target("model", same) == ("built", 128, 1)
    whole = compose_config([f"model={{_target_:{own_module}.build,width:128}}"]).model
    assert build_target("model", whole) == ("built", 128, 1)


def test_preset_of_the_user_keeps_its_keywords(own_module, tmp_path):
    """Keywords in a user's YAML file count, even if they equal those of a built-in preset."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "mine.yaml").write_text(f"_target_: {own_module}.build\nwidth: 128\n")
    words = ["model=mine", f"hydra.searchpath=[file://{tmp_path}]"]
    assert build_target("model", compose_config(words).model) == ("built", 128, 1)


def test_name_missing_in_a_module_suggests_the_nearest_name(own_module):
    """Regression: the error advised setting PYTHONPATH, although the module was found."""
    with pytest.raises(ConfigError, match=r"did you mean build\?") as found:
        build_target("model", {"_target_": f"{own_module}.buidl"})
    assert "PYTHONPATH" not in str(found.value)
    with pytest.raises(ConfigError, match="PYTHONPATH"):
        build_target("model", {"_target_": f"{own_module}_absent.build"})


def test_own_model_works_without_a_preset_of_another_model(own_module):
    config = compose_config(["model=own", f"model._target_={own_module}.build"])
    assert build_target("model", config.model) == ("built", 256, 1)
    with pytest.raises(ConfigError, match=r"model, expected a _target_.*my\.module\.build"):
        check_config(compose_config(["model=own"]), 1)


def test_own_model_with_variable_keywords_gets_them(own_module):
    model = compose_config([f"model._target_={own_module}.everything", "model.depth=3"]).model
    assert build_target("model", model) == {"depth": 3}


def test_own_model_needs_no_token_data(own_module):
    """Regression: the run failed, because the replaced preset, model=gpt, needs data.vocab_size."""
    overrides = [f"model._target_={own_module}.build", "data=synthetic_vectors", "model.depth=3"]
    model = compose_config(overrides).model
    assert "vocab_size" not in model
    assert build_target("model", model)[2] == 3
    with pytest.raises(ConfigError, match=r"model\.size refers to a setting"):
        compose_config([*overrides, "model.size=${data.no_such}"])


def test_keyword_that_own_model_does_not_accept_is_rejected(own_module):
    model = compose_config([f"model._target_={own_module}.build", "model.dept=3"]).model
    with pytest.raises(ConfigError, match=r"unexpected keyword argument .dept.; correct"):
        build_target("model", model)


def test_keyword_of_another_preset_is_rejected():
    """Regression: `depth` belongs to the U-Net; a GPT ignored it silently."""
    model = compose_config(["model=gpt", "model.depth=3"]).model
    with pytest.raises(
        ConfigError, match=r"build_gpt.. got an unexpected keyword argument .depth."
    ):
        build_target("model", model)


def test_own_loss_gets_its_keywords(own_module):
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
def test_invalid_target_is_rejected(own_module, path, words):
    with pytest.raises(ConfigError, match=words):
        build_target("model", {"_target_": path})


def test_loss_may_be_a_class(own_module):
    """Regression: each call returned a new CrossEntropyLoss(output, target) as the loss."""
    loss = bind_loss({"_target_": "torch.nn.CrossEntropyLoss", "label_smoothing": 0.1})
    output, target = torch.randn(3, 4), torch.tensor([0, 3, 1])
    expected = torch.nn.functional.cross_entropy(output, target, label_smoothing=0.1)
    assert torch.equal(loss(output, target), expected)
    function = bind_loss({"_target_": f"{own_module}.loss", "beta": 2})
    assert function("a", "b") == ("a", "b", 2)


def test_error_in_user_code_names_target_and_keeps_traceback(own_module):
    with pytest.raises(
        ConfigError, match=r"model\._target_=own_targets\.fails \(width=5\) failed: KeyError"
    ) as raised:
        build_target("model", {"_target_": f"{own_module}.fails", "width": 5})
    traceback = users_traceback(raised.value)
    assert "in helper" in traceback and "KeyError: 'lost'" in traceback
    assert traceback.index("in fails") < traceback.index("in helper")
    assert "targets.py" not in traceback.replace("own_targets.py", "")


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
def test_error_while_importing_a_user_module_is_reported(tmp_path, monkeypatch, text, word):
    """Regression: the error blamed the path and hid where in the file the import failed."""
    (tmp_path / "broken_module.py").write_text(f"{text}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"_target_=broken_module\.build: ") as raised:
        build_target("model", {"_target_": "broken_module.build"})
    assert word in str(raised.value)
    assert "broken_module.py" in users_traceback(raised.value) or "SyntaxError" in word


def test_module_in_the_current_folder_is_found_with_python_p(tmp_path, repository):
    """`python -P` leaves the current folder out of sys.path."""
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
def test_types_of_built_in_model_settings_are_checked(word, message):
    """Regression: a string gave ``'<' not supported between instances of 'str' and 'int'``."""
    with pytest.raises(ConfigError, match=message):
        build_target("model", compose_config(["model=gpt", "data=synthetic", word]).model)


def test_lists_of_built_in_model_settings_are_checked():
    with pytest.raises(ConfigError, match=r"bad model\.widths, expected a list, each a whole"):
        build_target("model", compose_config(["model=mlp", "model.widths=3"]).model)
    with pytest.raises(ConfigError, match=r"bad model\.widths, expected a whole number, got \[4,"):
        build_target("model", compose_config(["model=mlp", "model.widths=[4,a]"]).model)


def test_annotations_of_a_user_function_are_not_enforced(tmp_path, monkeypatch):
    """They may be stricter than what the function accepts."""
    (tmp_path / "annotated.py").write_text("def build(width: int): return width\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert build_target("model", {"_target_": "annotated.build", "width": "wide"}) == "wide"
