"""Overheads of a step apart from its layers, and the file that stores them."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import yaml

from gpipe_hpc.errors import ConfigError, os_remedy
from gpipe_hpc.planner.costs.origin import device_warnings
from gpipe_hpc.schedule import Costs, Link
from gpipe_hpc.schedule.costs import Cost
from gpipe_hpc.yaml_files import read_yaml

_FORMAT: Final = "prices of gpipe_hpc, 3"
_OLDER: Final = "prices of gpipe_hpc, 2"
_REMEDY: Final = "measure again: python -m gpipe_hpc.preflight preflight.steps=true"
_OTHER: Final = f"pass another file, omit it, or {_REMEDY}"


class PassCost(NamedTuple):
    """Cost of a pass over parameters: seconds per call, per tensor and per element."""

    call_s: float = 0.0
    tensor_s: float = 0.0
    element_s: float = 0.0

    def seconds(self, num_tensors: float, num_elements: float) -> float:
        """Return the seconds of a pass over tensors with a total of `num_elements` elements."""
        if not num_tensors:
            return 0.0
        return self.call_s + num_tensors * self.tensor_s + num_elements * self.element_s


class PricesContext(NamedTuple):
    """Conditions of a measurement: device type and name, cores of the host, and settings."""

    device: str
    name: str
    cores: int
    precision: str
    optimizer: str


@dataclass(frozen=True)
class Prices:
    """Overheads of a step apart from its layers, in seconds and bytes; zero by default.

    Attributes:
      action_s: overhead of each compute action.
      send: link between two ranks of a host.
      summing: link for one message of a ring all-reduce between two ranks of a host.
      update: optimizer step.
      norm: gradient clipping.
      step_s: constant overhead of a step.
      measured: conditions of the measurement, None if nothing was measured.
      process_bytes: memory of a rank besides the tensors that a plan counts. On CPUs: host memory
        of the process. On an accelerator: device memory besides torch's tensors. Files use one key
        for each, see `process_key`.
    """

    action_s: float = 0.0
    send: Link = field(default_factory=Link)
    summing: Link = field(default_factory=Link)
    update: PassCost = field(default_factory=PassCost)
    norm: PassCost = field(default_factory=PassCost)
    step_s: float = 0.0
    measured: PricesContext | None = None
    process_bytes: int = 0

    def of_actions(self, costs: Costs) -> Costs:
        """Return the costs with `action_s` added to each compute action."""
        if not self.action_s:
            return costs
        more = {name: _more(getattr(costs, name), self.action_s) for name in _COMPUTE}
        return Costs(**{**vars(costs), **more})


FREE: Final = Prices()
_COMPUTE: Final = (
    "forward",
    "bare_forward",
    "backward",
    "input_gradient",
    "weight_gradient",
    "recompute",
)
_PARTS: Final = ("action_s", "step_s", "send", "sum", "update", "norm")
OLDER_KEY: Final = "process_bytes"
"""Replaces `process_key` in older files, which do not name the kind of memory."""
_LINK: Final = ("latency_s", "bandwidth_bytes_per_s")


def _more(cost: Cost | None, seconds: float) -> Cost | None:
    if cost is None:
        return None
    if isinstance(cost, float | int):
        return cost + seconds
    return [each + seconds for each in cost]


def write_prices(path: str | Path, prices: Prices) -> None:
    """Write the overheads in the format of `read_prices`, replacing an existing file.

    Raises ConfigError if the file cannot be written.
    """
    assert prices.measured is not None, "only measured prices are written"
    own = prices.measured
    told = {"format": _FORMAT, "measured": own._asdict(), **prices_content(prices, own.device)}
    path = Path(path)
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(
            "# Overheads of a step besides its layers, by python -m gpipe_hpc.preflight\n"
            + yaml.safe_dump(told, sort_keys=False),
            "utf-8",
        )
        os.replace(aside, path)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot write the prices: {error}; "
            f"{os_remedy(error) or 'check its folder'}, or choose another path"
        ) from None


def process_key(device: str) -> str:
    """Return the name of `process_bytes` in files, which depends on the type of device."""
    return "host_process_bytes" if device == "cpu" else "device_process_bytes"


def prices_content(prices: Prices, device: str) -> dict[str, Any]:
    """Return the content of a file of overheads, without the conditions of the measurement."""
    return {
        "action_s": prices.action_s,
        "step_s": prices.step_s,
        process_key(device): prices.process_bytes,
        "send": link_content(prices.send),
        "sum": link_content(prices.summing),
        "update": prices.update._asdict(),
        "norm": prices.norm._asdict(),
    }


def link_content(link: Link) -> dict[str, float]:
    """Return a link in the form used in files."""
    return dict(zip(_LINK, (link.latency, link.bandwidth), strict=True))


def read_prices(path: str | Path) -> Prices:
    """Read a file of step overheads; raise ConfigError, naming file and key, if it is invalid."""
    try:
        read = read_yaml(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: cannot read the prices that a preflight wrote: {error}; correct the path, or "
            f"{_REMEDY}"
        ) from None
    file = PricesReader(str(path), _REMEDY)
    told = read if isinstance(read, Mapping) else {}
    if told.get("format", _FORMAT) not in (_FORMAT, _OLDER):
        file.refuse("format", repr(_FORMAT), told["format"])
    given = told.get("measured")
    device = given.get("device") if isinstance(given, Mapping) else None
    key = process_key(device if isinstance(device, str) else "cpu")  # other types are refused below
    process = OLDER_KEY if told.get("format") == _OLDER else key
    top = file.keys(read, "", "format", "measured", process, *_PARTS)
    own = file.keys(top["measured"], "measured", *PricesContext._fields)
    texts = {name: own[name] for name in own if name != "cores"}
    for name, text in texts.items():
        if not isinstance(text, str):
            file.refuse(f"measured.{name}", "a string", text)
    measured = PricesContext(**texts, cores=file.cores(own["cores"], "measured.cores"))
    parts = {name: top[name] for name in (process, *_PARTS)}
    return file.prices(parts, "", measured, process)


def check_prices(
    prices: Prices,
    path: str | Path,
    *,
    device: str,
    name: str | None,
    precision: str,
    optimizer: str,
) -> list[str]:
    """Check that measured overheads fit this device and these settings; return warnings.

    `name` is the name of this machine's device of that type, None if it has none. Raises
    ConfigError if the overheads must not be used.
    """
    known = prices.measured
    assert known is not None, "prices from a file are measured"
    asked = {"device": device, "precision": precision, "optimizer": optimizer}
    for what, expected in asked.items():
        got = getattr(known, what)
        if got != expected:
            raise ConfigError(
                f"plan.prices: {path} does not match these settings: expected {what} {expected}, "
                f"got {got}; {_OTHER}"
            )
    return device_warnings("plan.prices", path, device, known.name, name, _OTHER)


class PricesReader:
    """Validating reader of parts of a YAML file; its errors name the key.

    `where` begins each message and contains the path of the file.
    """

    def __init__(self, where: str, remedy: str) -> None:
        self._where, self._remedy = where, remedy

    def refuse(self, key: str, expected: str, got: object) -> NoReturn:
        """Raise ConfigError that names the key, the expected value and the value found."""
        raise ConfigError(
            f"{self._where}: {key or 'top level'}, expected {expected}, got {got!r:.200}; "
            f"{self._remedy}"
        )

    def prices(self, value: object, key: str, measured: PricesContext, process: str) -> Prices:
        """Parse step overheads; `process` is the key of process_bytes, see `process_key`."""
        found, at = self.keys(value, key, process, *_PARTS), f"{key}." if key else ""
        return Prices(
            self.seconds(found["action_s"], f"{at}action_s"),
            self.link(found["send"], f"{at}send"),
            self.link(found["sum"], f"{at}sum"),
            self.over(found["update"], f"{at}update"),
            self.over(found["norm"], f"{at}norm"),
            self.seconds(found["step_s"], f"{at}step_s"),
            measured,
            self.number(found[process], f"{at}{process}", 0),
        )

    def cores(self, value: object, key: str) -> int:
        """Return a number of cores, which must be at least 1."""
        return self.number(value, key, 1)

    def keys(self, value: object, key: str, *names: str) -> Mapping[str, Any]:
        """Return a mapping after checking that it has exactly these keys."""
        if not isinstance(value, Mapping) or set(value) != set(names):
            got = ", ".join(map(str, value)) if isinstance(value, Mapping) else value
            self.refuse(key, f"the keys {', '.join(names)}", got)
        return value

    def number(self, value: object, key: str, least: int) -> int:
        """Return an integer of at least `least`."""
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.refuse(key, f"an integer of at least {least}", value)
        return value

    def seconds(self, value: object, key: str) -> float:
        """Return a number of seconds, which must be nonnegative and finite."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(key, "a number of seconds", value)
        if not 0 <= value < math.inf:
            self.refuse(key, "0 or more seconds", value)
        return float(value)

    def link(self, value: object, key: str) -> Link:
        """Parse a link, given as latency in seconds and bandwidth in bytes/s."""
        found = self.keys(value, key, *_LINK)
        bandwidth = found[_LINK[1]]
        if isinstance(bandwidth, bool) or not isinstance(bandwidth, int | float):
            self.refuse(f"{key}.{_LINK[1]}", "a number", bandwidth)
        if not bandwidth > 0:
            self.refuse(f"{key}.{_LINK[1]}", "more than 0 bytes a second", bandwidth)
        return Link(self.seconds(found[_LINK[0]], f"{key}.{_LINK[0]}"), float(bandwidth))

    def over(self, value: object, key: str) -> PassCost:
        """Parse the cost of a pass over parameters."""
        found = self.keys(value, key, *PassCost._fields)
        return PassCost(*(self.seconds(found[name], f"{key}.{name}") for name in PassCost._fields))
