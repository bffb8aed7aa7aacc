"""Settings by their full names."""

from collections.abc import Iterator, Mapping
from typing import Any

from gpipe_hpc.yaml_files import parse_yaml


def flat_settings(text: str) -> dict[str, Any]:
    """Return what a file of settings says, by full name, nothing that it refers to looked up.

    Empty where it is no mapping. Raises ValueError where it is no YAML.
    """
    told = parse_yaml(text)
    return flat(told) if isinstance(told, dict) else {}


def flat(told: Mapping[Any, Any]) -> dict[str, Any]:
    """Return settings by full name."""
    return dict(_flat("", dict(told)))


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict) or not value:
        yield prefix, value
        return
    for name, each in value.items():
        yield from _flat(f"{prefix}.{name}" if prefix else str(name), each)
