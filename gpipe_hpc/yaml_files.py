"""Read small YAML files from untrusted sources with bounds, like `small_files`.

Aliases, with which a kilobyte can expand to gigabytes, and tags, which name types to construct, are
not allowed. A separate module, because the library does not need PyYAML.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from gpipe_hpc.small_files import MOST_DIGITS, MOST_VALUES, parts_of, read_text

_MOST_BYTES: Final = 8 * 2**20  # the parser takes seconds for a megabyte
_MOST_DEPTH: Final = 40
_MOST_BITS: Final = 64
_NUMBER: Final = re.compile(r"[-+]?[0-9a-fA-FxX_.:+-]+").fullmatch


def read_yaml(path: str | Path, most_bytes: int = _MOST_BYTES) -> Any:
    """Parse a YAML file and return its content."""
    return parse_yaml(read_text(path, most_bytes))


def parse_yaml(text: str) -> Any:
    """Parse YAML as OmegaConf does; dates are strings.

    Raises ValueError for invalid YAML, aliases, tags, duplicate keys, and content that exceeds the
    bounds.
    """
    try:
        _check_events(text)
        found = _Loader(text).get_single_data()
    except (yaml.YAMLError, RecursionError, OverflowError, AttributeError, TypeError) as error:
        raise ValueError(f"no YAML: {' '.join(str(error).split())}") from None
    _check_numbers(found)
    return found


def _check_numbers(found: Any) -> None:
    """Raise ValueError for integers of more than 64 bits, which no file of gpipe_hpc needs."""
    level = [found]
    while level:
        for each in level:
            if type(each) is int and each.bit_length() > _MOST_BITS:
                raise ValueError(f"a number of {each.bit_length():,} bits")
        keys = [key for each in level if type(each) is dict for key in each]
        level = [part for each in level if type(each) in (list, dict) for part in parts_of(each)]
        level += keys


def _check_events(text: str) -> None:
    depth = num_values = 0
    for event in yaml.parse(text, _Base):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"{_line(event)}an alias (*{event.anchor}), which is not allowed")
        if not isinstance(event, yaml.NodeEvent):
            depth -= isinstance(event, yaml.CollectionEndEvent)
            continue
        num_values += 1
        if event.anchor is not None:
            raise ValueError(f"{_line(event)}an anchor (&{event.anchor}), which is not allowed")
        if event.tag is not None:
            raise ValueError(f"{_line(event)}a tag ({event.tag}), which is not allowed")
        depth += isinstance(event, yaml.CollectionStartEvent)
        if depth > _MOST_DEPTH:
            raise ValueError(f"{_line(event)}nested more than {_MOST_DEPTH} levels deep")
        if _is_long_number(event):
            raise ValueError(f"{_line(event)}a number of {len(event.value):,} characters")
        if num_values > MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES:,} values")


def _is_long_number(event: yaml.NodeEvent) -> bool:
    if not isinstance(event, yaml.ScalarEvent) or len(event.value) <= MOST_DIGITS:
        return False
    return event.implicit[0] and _NUMBER(event.value) is not None


def _line(event: yaml.Event) -> str:
    return f"line {event.start_mark.line + 1}: "


# Without libyaml, PyYAML has no loader in C.
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _construct_mapping(loader: Any, node: yaml.MappingNode, deep: bool = False) -> Any:
    """Raise ValueError for duplicate keys; PyYAML would use the last."""
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    if not all(isinstance(key, str | int | float | bool | None) for key in keys):
        raise ValueError(f"line {node.start_mark.line + 1}: a key that is no text or number")
    if len(set(keys)) < len(keys):
        twice = next(key for at, key in enumerate(keys) if key in keys[:at])
        raise ValueError(f"line {node.start_mark.line + 1}: the key {twice!r} twice")
    return _Base.construct_mapping(loader, node, deep=deep)


# Builds plain values; as in OmegaConf, 1e-6 is a number and dates are strings.
_Loader: Any = type(
    "_Loader",
    (_Base,),
    {
        "construct_mapping": _construct_mapping,
        "yaml_implicit_resolvers": {
            first: [(tag, form) for tag, form in resolvers if "timestamp" not in tag]
            for first, resolvers in _Base.yaml_implicit_resolvers.items()
        },
    },
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"""^(?:
         [-+]?[0-9]+(?:_[0-9]+)*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
        |[-+]?[0-9]+(?:_[0-9]+)*(?:[eE][-+]?[0-9]+)
        |\.[0-9]+(?:_[0-9]+)*(?:[eE][-+][0-9]+)?
        |[-+]?\.(?:inf|Inf|INF)
        |\.(?:nan|NaN|NAN))$""",
        re.X,
    ),
    list("-+0123456789."),
)


def flat_settings(text: str) -> dict[str, Any]:
    """Parse YAML and return its settings by dotted name, with interpolations unresolved.

    Returns an empty dict if the content is not a mapping. Raises ValueError for invalid YAML.
    """
    settings = parse_yaml(text)
    return flat(settings) if isinstance(settings, dict) else {}


def flat(settings: Mapping[Any, Any]) -> dict[str, Any]:
    """Return nested settings by dotted name."""
    return dict(_flat("", dict(settings)))


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict) or not value:
        yield prefix, value
        return
    for name, each in value.items():
        yield from _flat(f"{prefix}.{name}" if prefix else str(name), each)
