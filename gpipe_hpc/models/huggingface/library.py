"""Lazy imports of the optional libraries transformers and safetensors, with a version check."""

from importlib import import_module
from typing import Any, Final

from gpipe_hpc.errors import ConfigError

OLDEST: Final = (5, 5)
NEWEST_MAJOR: Final = 5
"""Tested versions: 5.5, 5.12 and 5.23. Older ones do not run models on the meta device."""

_INSTALL: Final = "pip install 'gpipe-hpc[huggingface]'"


def transformers() -> Any:
    """Import transformers; raise `ConfigError` if it is missing or its version is unsupported."""
    library = _load("transformers")
    found = tuple(int(part) for part in library.__version__.split(".")[:2] if part.isdigit())
    if not OLDEST <= found < (NEWEST_MAJOR + 1, 0):
        raise ConfigError(
            f"huggingface: unsupported version of transformers, expected {OLDEST[0]}.{OLDEST[1]} "
            f"or newer of {NEWEST_MAJOR}.x, got {library.__version__}; {_INSTALL}"
        )
    return library


def transformers_part(name: str) -> Any:
    """Import a submodule of transformers, such as ``core_model_loading``."""
    transformers()
    return _load(f"transformers.{name}")


def safetensors() -> Any:
    """Import safetensors; raise `ConfigError` if it is missing."""
    return _load("safetensors")


def safetensors_torch() -> Any:
    """Import the submodule ``safetensors.torch``."""
    safetensors()
    return _load("safetensors.torch")


def _load(name: str) -> Any:
    # Imported by name, because the libraries are optional, also for type checking.
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"huggingface: the library {name.partition('.')[0]} is missing: {error}; {_INSTALL}"
        ) from error
