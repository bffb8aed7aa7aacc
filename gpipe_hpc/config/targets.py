"""From a ``_target_`` in the settings to the object it names: a user's own model or loss."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, Final

from omegaconf import OmegaConf

from gpipe_hpc.config.composing import conf_dir
from gpipe_hpc.errors import ConfigError, GpipeError, ModelError

_TRUSTED: Final = ("gpipe_hpc.models", "gpipe_hpc.models.huggingface")


def build_target(section: str, settings: Mapping[str, Any]) -> Any:
    """Call what ``<section>._target_`` names with the section's other settings as keywords.

    With a target of one's own (``model._target_=my.module.build``) the keywords of the presets in
    ``conf/<section>/`` are passed only where the target takes them; any other keyword that it does
    not take is refused with ConfigError. A ModelError of the target is one, too; anything else
    that is not ours becomes a ModelError.
    """
    target = bind_target(section, settings)
    try:
        return target()
    except ModelError as error:
        # Sizes that cannot be are settings that cannot be.
        raise ConfigError(f"config: {section}: {error}") from error
    except GpipeError:
        raise
    except Exception as error:
        raise ModelError(
            f"{section}._target_={settings['_target_']}: failed, expected it to return what it "
            f"builds, got {type(error).__name__}: {error}; correct it, or the settings of {section}"
        ) from error


def bind_target(section: str, settings: Mapping[str, Any]) -> Callable[..., Any]:
    """Return what ``<section>._target_`` names with the section's other settings bound to it."""
    target = _locate(section, settings["_target_"])
    keywords = {name: value for name, value in settings.items() if name != "_target_"}
    parameters = inspect.signature(target).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return partial(target, **keywords)
    passed_over = _preset_keywords(section, settings["_target_"])
    unknown = [name for name in keywords if name not in parameters and name not in passed_over]
    if unknown:
        raise ConfigError(
            f"config: {section}._target_={settings['_target_']} does not take {unknown[0]}, "
            f"expected some of {', '.join(parameters) or 'no keywords'}, got "
            f"{section}.{unknown[0]}={keywords[unknown[0]]!r}; correct or remove it"
        )
    return partial(target, **{name: keywords[name] for name in keywords if name in parameters})


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


def _preset_keywords(section: str, target: str) -> set[str]:
    """Return what presets may have left behind where another target stands in for theirs."""
    presets: list[Any] = [OmegaConf.load(path) for path in (conf_dir() / section).glob("*.yaml")]
    if target in [preset["_target_"] for preset in presets]:
        return set()
    return {str(name) for preset in presets for name in preset}


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


def _locate(section: str, path: str) -> Callable[..., Any]:
    module, _, name = path.rpartition(".")
    try:
        target = getattr(_holder(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"config: {section}._target_ names nothing that can be imported, expected "
            f"MODULE.FUNCTION, got {path!r} ({type(error).__name__}: {error}); correct it, or put "
            f"its folder on PYTHONPATH"
        ) from error
    if not callable(target):
        raise ConfigError(
            f"config: {section}._target_ cannot be called, expected a function or class, got "
            f"{path!r} of type {type(target).__name__}; name the function that builds it"
        )
    found: Callable[..., Any] = target
    return found
