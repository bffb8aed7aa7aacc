"""The calibration file: layer and step times that a run measured, for later plans."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NoReturn

import yaml

from gpipe_hpc.errors import ConfigError, os_remedy
from gpipe_hpc.planner.costs.cost_models import LayerTimes
from gpipe_hpc.planner.costs.counted import ModelCount
from gpipe_hpc.planner.costs.origin import device_warnings
from gpipe_hpc.planner.costs.prices import (
    FREE,
    OLDER_KEY,
    Prices,
    PricesContext,
    PricesReader,
    link_content,
    prices_content,
    process_key,
)
from gpipe_hpc.schedule import Link
from gpipe_hpc.yaml_files import read_yaml

_FORMAT: Final = "calibration of gpipe_hpc, "
_VERSION: Final = 4
_NO_MEMORY_NAMED: Final = 3  # files up to this version do not name the memory of process_bytes
_LAYERS_ALONE: Final = 2  # files up to this version have no transfers, all-reduces or steps
_FORWARDS_ALIKE: Final = 1  # files of this version have one time for both kinds of forwards
_REMEDY: Final = "pass the file of a run with these settings, or omit plan.calibration"
_PARTS: Final = LayerTimes._fields
_OLDER_PARTS: Final = tuple(name for name in _PARTS if name != "bare_forward")
_ALWAYS: Final = (
    "device",
    "device_name",
    "precision",
    "hosts",
    "ranks",
    "versions",
    "input_bytes",
    "model",
    "layers",
)
_NEWER_KEYS: Final = ("optimizer", "cores", "prices", "links", "notes")
_FREE_LINK: Final = Link()
_LINKS: Final = ("within", "between")


@dataclass(frozen=True)
class Calibration:
    """Measured seconds of each layer for a micro-batch, and the conditions of the measurement.

    Attributes:
      model: parameters and forward FLOPs of each layer, for a micro-batch of `input_bytes`.
      prices: overheads of a step in addition to its layers.
      within, between: links between ranks of one host and of two hosts; free if not measured.
      notes: quantities that could not be measured, and why.
    """

    device: str
    device_name: str
    precision: str
    hosts: int
    ranks: int
    versions: dict[str, str]
    input_bytes: int
    model: tuple[tuple[int, int], ...]
    layers: tuple[LayerTimes, ...]
    prices: Prices = FREE
    within: Link = _FREE_LINK
    between: Link = _FREE_LINK
    notes: tuple[str, ...] = ()

    @property
    def is_crowded(self) -> bool:
        """Return whether a CPU host had more ranks than cores, which slows all measured times."""
        known = self.prices.measured
        if known is None or known.device != "cpu":
            return False
        return -(-self.ranks // self.hosts) > known.cores


def shape_of(count: ModelCount) -> tuple[tuple[int, int], ...]:
    """Return parameters and forward FLOPs of each layer, which identify a model."""
    return tuple((each.parameters, each.forward_flops) for each in count.layers)


def write_calibration(path: Path, found: Calibration) -> None:
    """Write a calibration file atomically, replacing an existing one."""
    measured = found.prices.measured
    assert measured is not None, "only measured times are written"
    content: dict[str, Any] = {"format": f"{_FORMAT}{_VERSION}"}
    content |= {name: getattr(found, name) for name in _ALWAYS}
    content["model"] = [list(each) for each in found.model]
    content["layers"] = [dict(each._asdict()) for each in found.layers]
    content["optimizer"], content["cores"] = measured.optimizer, measured.cores
    content["prices"] = prices_content(found.prices, found.device)
    content["links"] = {name: link_content(getattr(found, name)) for name in _LINKS}
    content["notes"] = list(found.notes)
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")
    aside.write_text(
        "# Times of layers, transfers, all-reduces and the rest of a step, for plan.calibration\n"
        + yaml.safe_dump(content, sort_keys=False),
        "utf-8",
    )
    os.replace(aside, path)


def read_calibration(path: str | Path) -> Calibration:
    """Read a calibration file; raise ConfigError, naming the key, if it is invalid."""
    try:
        read = read_yaml(path)
    except (OSError, ValueError) as error:
        remedy = os_remedy(error) if isinstance(error, OSError) else None
        raise ConfigError(
            f"plan.calibration: cannot read {path}, the calibration file of a run: {error}; "
            f"{remedy or _REMEDY}"
        ) from None
    file = _CalibrationReader(f"plan.calibration: {path}", _REMEDY)
    if not isinstance(read, Mapping) or not str(read.get("format", "")).startswith(_FORMAT):
        file.refuse("format", f"{_FORMAT}{_VERSION}", _shown(read))
    known = {f"{_FORMAT}{number}": number for number in range(1, _VERSION + 1)}
    version = known.get(str(read["format"]))
    if version is None:
        file.refuse("format", f"version {_VERSION}", f"{read['format']}, another version")
    top = file.keys(read, "", "format", *_ALWAYS, *(_NEWER_KEYS if version > _LAYERS_ALONE else ()))
    parts = _OLDER_PARTS if version == _FORWARDS_ALIKE else _PARTS
    versions = top["versions"]
    if not isinstance(versions, Mapping):
        file.refuse("versions", "a mapping from package names to versions", versions)
    model, layers = file.rows(top, "model"), file.rows(top, "layers")
    if len(model) != len(layers) or not layers:
        file.refuse("layers", f"{len(model)} entries, as many as in model", len(layers))
    device, name = file.text(top, "device"), file.text(top, "device_name")
    found = Calibration(
        device=device,
        device_name="" if name == device else name,  # older files have no CPU names
        precision=file.text(top, "precision"),
        hosts=file.number(top["hosts"], "hosts", 0),
        ranks=file.number(top["ranks"], "ranks", 0),
        input_bytes=file.number(top["input_bytes"], "input_bytes", 0),
        versions={str(name): str(each) for name, each in versions.items()},
        model=tuple(file.pair(each, f"model[{at}]") for at, each in enumerate(model)),
        layers=tuple(file.times(each, f"layers[{at}]", parts) for at, each in enumerate(layers)),
    )
    if version <= _LAYERS_ALONE:
        note = f"{read['format']}: an older version, with times of layers only"
        return replace(found, notes=(note,))
    links = file.keys(top["links"], "links", *_LINKS)
    measured = PricesContext(
        device,
        found.device_name,
        file.cores(top["cores"], "cores"),
        found.precision,
        file.text(top, "optimizer"),
    )
    return replace(
        found,
        prices=file.prices(
            top["prices"],
            "prices",
            measured,
            OLDER_KEY if version <= _NO_MEMORY_NAMED else process_key(device),
        ),
        within=file.link(links["within"], "links.within"),
        between=file.link(links["between"], "links.between"),
        notes=tuple(map(str, file.rows(top, "notes"))),
    )


def check_calibration(
    found: Calibration,
    path: str | Path,
    count: ModelCount,
    *,
    device: str,
    name: str | None,
    precision: str,
) -> list[str]:
    """Check that a calibration fits this model, micro-batch, precision and device.

    Returns warnings; raises ConfigError if the calibration must not be used. `name` is the name of
    this machine's device of type `device`, None if it has none.
    """
    own = shape_of(count)
    size = sum(count.inputs.tensors)
    if len(own) != len(found.model):
        _mismatch(path, "model", f"{len(own)} layers", f"{len(found.model)}")
    for at, (mine, its) in enumerate(zip(own, found.model, strict=True)):
        if mine[0] != its[0]:
            _mismatch(path, "model", f"{mine[0]} parameters in layers.{at}", str(its[0]))
    if precision != found.precision:
        _mismatch(path, "precision", precision, found.precision)
    if device != found.device:
        _mismatch(path, "device", device, found.device)
    if size != found.input_bytes:
        sizes = f"inputs of {size} bytes", f"{found.input_bytes} bytes"
        _mismatch(path, "micro-batch", *sizes)
    if own != found.model:
        at = next(at for at, pair in enumerate(own) if pair != found.model[at])
        _mismatch(path, "model", f"{own[at][1]} FLOPs in layers.{at}", str(found.model[at][1]))
    return device_warnings("plan.calibration", path, device, found.device_name, name, _REMEDY)


def _mismatch(path: str | Path, what: str, expected: str, got: str) -> NoReturn:
    raise ConfigError(
        f"plan.calibration: {path} was measured with another {what}: expected {expected}, got "
        f"{got}; {_REMEDY}"
    )


def _shown(read: object) -> object:
    return read.get("format") if isinstance(read, Mapping) else type(read).__name__


class _CalibrationReader(PricesReader):
    """Validating reader of parts of a calibration file; its errors name the key."""

    def text(self, read: Mapping[str, Any], name: str) -> str:
        """Return the value of a key, which must be a string."""
        if not isinstance(read[name], str):
            self.refuse(name, "a text", read[name])
        return str(read[name])

    def rows(self, read: Mapping[str, Any], name: str) -> Sequence[Any]:
        """Return the value of a key, which must be a list."""
        if not isinstance(read[name], list):
            self.refuse(name, "a list", read[name])
        return list(read[name])

    def pair(self, value: object, key: str) -> tuple[int, int]:
        """Return a value, which must be a list of two nonnegative integers."""
        if not isinstance(value, list) or len(value) != 2:
            self.refuse(key, "a list of parameters and FLOPs", value)
        return self.number(value[0], key, 0), self.number(value[1], key, 0)

    def times(self, value: object, key: str, parts: Sequence[str]) -> LayerTimes:
        """Return the nonnegative seconds of a layer; a missing bare_forward equals forward."""
        if not isinstance(value, Mapping) or set(value) != set(parts):
            self.refuse(key, f"the keys {', '.join(parts)}", value)
        seconds = {name: self.seconds(each, f"{key}.{name}") for name, each in value.items()}
        return LayerTimes(*(seconds[name if name in parts else "forward"] for name in _PARTS))
