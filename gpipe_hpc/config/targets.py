"""Resolve ``_target_`` in settings: a user's own model, data or loss.

Hydra's `instantiate` is used for targets from the command line and its presets only. Settings in a
run folder may come from somebody else: see `build_stored_model`.
"""

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, Final, get_type_hints

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from gpipe_hpc.errors import ConfigError, GpipeError, ModelError, words_of
from gpipe_hpc.settings import Setting, suggestion

_TRUSTED: Final = ("gpipe_hpc.models", "gpipe_hpc.models.huggingface")


def build_target(section: str, settings: Mapping[str, Any]) -> Any:
    """Call ``<section>._target_`` with the other settings of the section; return the result.

    Only for settings from the command line. Raises ConfigError for a target that cannot be
    imported, does not accept a keyword, or fails; the cause has the user's traceback.
    """
    target = locate(section, settings["_target_"])
    _check_types(section, target, settings)
    try:
        return instantiate(dict(settings), _convert_="all")
    except InstantiationException as error:
        raise _failed(section, settings, error) from _root(error)


def bind_loss(settings: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the loss that ``loss._target_`` names, with its keywords.

    A class such as ``torch.nn.CrossEntropyLoss`` is instantiated with the keywords and called as
    ``loss(output, target)``. A function receives the keywords at each call.
    """
    target = locate("loss", settings["_target_"])
    if isinstance(target, type):
        made: Callable[..., Any] = build_target("loss", settings)
        return made
    return partial(target, **{name: v for name, v in settings.items() if name != "_target_"})


def build_stored_model(settings: Mapping[str, Any], source: str, *, trusts: bool) -> Any:
    """Build the model that the settings of a run folder describe.

    Such settings may come from somebody else, and a target may be any function. Without `trusts`,
    only functions that `gpipe_hpc.models` exports are called, directly, so that nested targets are
    not called. Raises ConfigError.

    Args:
        settings: The section ``model``.
        source: The file, for messages.
        trusts: Whether the user trusts the settings.
    """
    if trusts:
        return build_target("model", settings)
    target = trusted_function(settings, source)
    keywords = {name: value for name, value in settings.items() if name != "_target_"}
    _check_types("model", target, keywords)
    with own_call(f"config: the model of {source}", ConfigError):
        return target(**keywords)


def trusted_function(settings: Mapping[str, Any], source: str) -> Callable[..., Any]:
    """Return the function of `gpipe_hpc.models` that stored settings name, or raise ConfigError."""
    path = settings.get("_target_")
    module, _, name = path.rpartition(".") if isinstance(path, str) else ("", "", "")
    if module in _TRUSTED:
        shown = import_module(module)
        target = getattr(shown, name, None) if name in shown.__all__ else None
        if inspect.isfunction(target) and target.__module__.startswith("gpipe_hpc.models."):
            return target
    raise ConfigError(
        f"export: model._target_ of {source} is not called, expected a function of "
        f"{' or '.join(_TRUSTED)}, got {path!r}, which could execute arbitrary code; if you trust "
        f"the settings of the run, set export.trust=true"
    )


def locate(section: str, path: str) -> Callable[..., Any]:
    """Return the function or class that ``<section>._target_`` names.

    Raises ConfigError if there is none, or if importing its module fails.
    """
    # Modules of the current folder come last, however the command was started.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    where = f"config: {section}._target_={path}"
    module, _, name = path.rpartition(".")
    try:
        found = getattr(_holder(module), name)
    except Exception as error:
        hint = "correct it, or add its folder to PYTHONPATH"
        if isinstance(error, AttributeError):
            names = [each for each in dir(error.obj) if not each.startswith("_")]
            hint = f"{suggestion(name, names)}correct it"
        expected = "" if module else "expected MODULE.FUNCTION: "
        raise ConfigError(f"{where}: {expected}{words_of(error)}; {hint}") from error
    if not callable(found):
        raise ConfigError(
            f"{where} cannot be called, expected a function or class, got {path!r} of type "
            f"{type(found).__name__}; name the function that builds it"
        )
    called: Callable[..., Any] = found
    return called


def _holder(path: str) -> Any:
    """Return the module, or the class in a module, with this dotted path."""
    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        module, _, name = path.rpartition(".")
        if error.name != path or not module:
            raise
        try:
            return getattr(import_module(module), name)
        except AttributeError:
            raise error from None


def _failed(section: str, settings: Mapping[str, Any], error: Exception) -> ConfigError:
    cause = _root(error)
    if isinstance(cause, ModelError):  # sizes that cannot work are settings that cannot work
        return ConfigError(f"config: {section}: {cause}")
    keywords = ", ".join(f"{name}={v!r}" for name, v in settings.items() if name != "_target_")
    return ConfigError(
        f"config: {section}._target_={settings['_target_']} ({keywords}) failed: "
        f"{words_of(cause)}; correct it, or its settings"
    )


def _root(error: BaseException) -> BaseException:
    """Return the error of the user's code that Hydra's error was raised from."""
    while isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _check_types(section: str, target: Callable[..., Any], keywords: Mapping[str, Any]) -> None:
    """Raise ConfigError for a keyword of another type than a built-in function declares.

    Annotations of users' functions are not checked.
    """
    if not getattr(target, "__module__", "").startswith("gpipe_hpc."):
        return
    hints = get_type_hints(target)
    for name in keywords.keys() & hints.keys():
        setting = f"{section}.{name}"
        Setting(setting, hints[name]).check_kind(keywords[name], setting)


@contextmanager
def own_call(
    where: str, kind: type[GpipeError], remedy: str = "correct it, or its arguments"
) -> Iterator[None]:
    """Return a context manager that converts an exception of the user's code into a GpipeError.

    Exceptions of gpipe_hpc are not converted. The cause has the user's traceback.

    Args:
        where: What was called, for the message.
        kind: Class of the new error.
        remedy: What to do, for the message.
    """
    try:
        yield
    except GpipeError:
        raise
    except Exception as error:
        raise kind(f"{where} failed: {words_of(error)}; {remedy}") from error
