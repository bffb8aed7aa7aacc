"""From a ``_target_`` in the settings to the object it names: a user's own model or loss."""

import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

from gpipe_hpc.config.refusal import refuse
from gpipe_hpc.config.spelling import suggestion
from gpipe_hpc.errors import ConfigError, GpipeError, ModelError, words_of

_BY_NAME: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

_TRUSTED: Final = ("gpipe_hpc.models", "gpipe_hpc.models.huggingface")


def build_target(section: str, settings: Mapping[str, Any]) -> Any:
    """Call what ``<section>._target_`` names with the section's other settings as keywords.

    Raises ConfigError for a target that cannot be imported or does not take a keyword, and where
    it fails: then the user's traceback is its cause. A ModelError of ours is one, too.
    """
    built = bind_target(section, settings)
    keywords = ", ".join(f"{name}={value!r}" for name, value in built.keywords.items())
    with own_call(f"config: {section}._target_={settings['_target_']} ({keywords})", ConfigError):
        try:
            return built()
        except ModelError as error:
            # Sizes that cannot be are settings that cannot be.
            raise ConfigError(f"config: {section}: {error}") from error


def bind_target(section: str, settings: Mapping[str, Any]) -> "partial[Any]":
    """Return what ``<section>._target_`` names with the section's other settings bound to it."""
    path = settings["_target_"]
    target = locate(section, path)
    keywords = {name: value for name, value in settings.items() if name != "_target_"}
    try:
        parameters = inspect.signature(target).parameters.values()
    except ValueError:  # written in C, without a signature
        return partial(target, **keywords)
    kinds = {each.kind for each in parameters}
    names = [each.name for each in parameters if each.kind in _BY_NAME]
    unknown = [name for name in keywords if name not in names]
    if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
        raise ConfigError(
            f"config: {section}._target_={path} does not take {unknown[0]}, expected some of "
            f"{', '.join(names) or 'no keywords'}, got "
            f"{section}.{unknown[0]}={keywords[unknown[0]]!r}; correct or remove it"
        )
    _check_types(section, target, keywords)
    return partial(target, **keywords)


_SIMPLE: Final = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_LARGEST: Final = 2**63 - 1  # of an integer of torch


def _check_types(section: str, target: Callable[..., Any], keywords: Mapping[str, Any]) -> None:
    """Refuse values of another type than a function of ours says; ConfigError names the setting.

    What users' functions are annotated with may say more than it means.
    """
    if not getattr(target, "__module__", "").startswith("gpipe_hpc."):
        return
    hints = get_type_hints(target)
    for name, value in keywords.items():
        expected = _misfit(hints.get(name, Any), value)
        if expected is not None:
            setting = f"{section}.{name}"
            raise refuse(setting, expected, value, f"correct {setting}")


def _misfit(hint: Any, value: object) -> str | None:
    """Return what a value should be by its annotation; None where it is, or nobody can tell."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        wrong = [_misfit(each, value) for each in inner]
        return None if None in wrong else next(filter(None, wrong))
    if hint is type(None):
        return None if value is None else "null"
    if isinstance(value, int) and not -_LARGEST <= value <= _LARGEST:
        return f"at most {_LARGEST}"
    if hint in _SIMPLE:
        taken = (int, float) if hint is float else hint
        fits = isinstance(value, taken) and (hint is bool or not isinstance(value, bool))
        return None if fits else _SIMPLE[hint]
    if origin in (list, Sequence) and inner:
        if not isinstance(value, list):
            return f"a list, each {_SIMPLE.get(inner[0], 'of what it takes')}"
        return next(filter(None, (_misfit(inner[0], each) for each in value)), None)
    return None


def bind_loss(settings: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the loss that ``loss._target_`` names: a function, or what a class makes.

    ``loss._target_=torch.nn.CrossEntropyLoss`` is made with the keywords, then called as
    ``loss(output, target)``; a function gets the keywords at each call.
    """
    bound = bind_target("loss", settings)
    if not isinstance(bound.func, type):
        return bound
    made: Callable[..., Any] = build_target("loss", settings)
    return made


@contextmanager
def own_call(
    where: str, kind: type[GpipeError], remedy: str = "correct it, or what it is called with"
) -> Iterator[None]:
    """Return a block that calls the user's code: what it raises becomes our error of a `kind`.

    The message names `where` it was called, and what to do; the cause keeps the user's traceback.
    Errors of ours pass.
    """
    try:
        yield
    except GpipeError:
        raise
    except Exception as error:
        raise kind(
            f"{where}: failed, expected it to return, got {words_of(error)}; {remedy}"
        ) from error


def check_stored_target(section: str, settings: Mapping[str, Any], source: str) -> None:
    """Refuse a ``_target_`` of settings that were stored, unless it is a function of our models.

    Settings that lie in a folder may come from somebody else, and a target may be any function, so
    nothing is imported for them but `gpipe_hpc.models`, and only what it shows is called.
    `source`: where they were read, for the message. Raises ConfigError.
    """
    path = settings.get("_target_")
    module, _, name = path.rpartition(".") if isinstance(path, str) else ("", "", "")
    if module in _TRUSTED:
        shown = import_module(module)
        target = getattr(shown, name, None) if name in shown.__all__ else None
        if inspect.isfunction(target) and target.__module__.startswith("gpipe_hpc.models."):
            return
    raise ConfigError(
        f"export: {section}._target_ of {source} is not called, expected a function of "
        f"{' or '.join(_TRUSTED)}, got {path!r}: stored settings may be anybody's, and it could "
        f"do anything; if you trust them, set export.trust=true"
    )


def _holder(path: str) -> object:
    """Return a module, or what a package shows by that name (a class, a module that has moved)."""
    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        package, _, name = path.rpartition(".")
        if error.name != path or not package:
            raise
        shown: object = getattr(import_module(package), name, None)
        if shown is None:
            raise
        return shown


def locate(section: str, path: str) -> Callable[..., Any]:
    """Return the function or class that ``<section>._target_`` names.

    Raises ConfigError where there is none, or importing its module fails.
    """
    module, _, name = path.rpartition(".")
    _see_current_folder()
    with own_call(f"config: {section}._target_={path}: importing {module}", ConfigError):
        try:
            target = getattr(_holder(module), name)
        except (ModuleNotFoundError, AttributeError, ValueError) as error:
            if not _is_absence(error, path):
                raise
            raise ConfigError(
                f"config: {section}._target_ names nothing that can be imported, expected "
                f"MODULE.FUNCTION, got {path!r} ({type(error).__name__}: {error}); "
                f"{_remedy(error, name)}"
            ) from error
    if not callable(target):
        raise ConfigError(
            f"config: {section}._target_ cannot be called, expected a function or class, got "
            f"{path!r} of type {type(target).__name__}; name the function that builds it"
        )
    found: Callable[..., Any] = target
    return found


def _remedy(error: Exception, name: str) -> str:
    """Return what to do where a name was not found: of a module that was, one like it."""
    if isinstance(error, AttributeError):
        return f"{suggestion(name, [each for each in dir(error.obj) if each[0] != '_'])}correct it"
    return "correct it, or put its folder on PYTHONPATH"


def _see_current_folder() -> None:
    """Let modules of the current folder be found, behind all others, however we were started."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())


def _is_absence(error: Exception, path: str) -> bool:
    """Say whether an import failed since nothing has this name, not within the user's module."""
    if isinstance(error, ModuleNotFoundError):
        return error.name is None or f"{path}.".startswith(f"{error.name}.")
    # Raised here, not further down in what was imported.
    trace = error.__traceback__
    return trace is not None and (trace.tb_next is None or not path.rpartition(".")[0])
