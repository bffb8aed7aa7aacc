"""The libraries behind this package: optional, loaded on first use, of a known range."""

from importlib import import_module
from typing import Any, Final

from gpipe_hpc.errors import ConfigError

OLDEST: Final = (5, 5)
NEWEST_MAJOR: Final = 5
"""Tested: 5.5, 5.12 and 5.23. Before, models do not run on the meta device."""

_INSTALL: Final = "pip install 'gpipe-hpc[huggingface]'"


def transformers() -> Any:
    """Return the transformers library; raise `ConfigError` where it is missing or unknown."""
    library = _load("transformers")
    found = tuple(int(part) for part in library.__version__.split(".")[:2] if part.isdigit())
    if not OLDEST <= found < (NEWEST_MAJOR + 1, 0):
        raise ConfigError(
            f"huggingface: this transformers is unknown, expected {OLDEST[0]}.{OLDEST[1]} or newer "
            f"of {NEWEST_MAJOR}.x, got {library.__version__}; {_INSTALL}"
        )
    return library


def transformers_part(name: str) -> Any:
    """Return a module of transformers, such as ``core_model_loading``."""
    transformers()
    return _load(f"transformers.{name}")


def safetensors() -> Any:
    """Return the safetensors library; raise `ConfigError` where it is missing."""
    return _load("safetensors")


def safetensors_torch() -> Any:
    """Return the part of safetensors that knows torch's tensors."""
    safetensors()
    return _load("safetensors.torch")


def _load(name: str) -> Any:
    # By name: neither library is a requirement, nor need its types be known.
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"huggingface: expected the library {name.partition('.')[0]}, got {error}; {_INSTALL}"
        ) from error
