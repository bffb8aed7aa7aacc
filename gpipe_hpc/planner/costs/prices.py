"""What a step takes beside its layers on one kind of machine, and the file that keeps it."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import yaml

from gpipe_hpc.errors import ConfigError, os_remedy
from gpipe_hpc.planner.costs.origin import doubts_of_device
from gpipe_hpc.schedule import Costs, Link
from gpipe_hpc.schedule.costs import Cost
from gpipe_hpc.yaml_files import read_yaml

_FORMAT: Final = "prices of gpipe_hpc, 3"
_OLDER: Final = "prices of gpipe_hpc, 2"
_REMEDY: Final = "measure again: python -m gpipe_hpc.preflight preflight.steps=true"
_OTHER: Final = f"give another file, leave it out, or {_REMEDY}"


class Pass(NamedTuple):
    """A pass over parameters: seconds of a call, of each tensor, and of each number in them."""

    call_s: float = 0.0
    tensor_s: float = 0.0
    element_s: float = 0.0

    def seconds(self, num_tensors: float, num_elements: float) -> float:
        """Return what it takes over so many tensors with so many numbers."""
        if not num_tensors:
            return 0.0
        return self.call_s + num_tensors * self.tensor_s + num_elements * self.element_s


class Measured(NamedTuple):
    """On what prices were measured: the type and name of the device, its host's cores, and how."""

    device: str
    name: str
    cores: int
    precision: str
    optimizer: str


@dataclass(frozen=True)
class Prices:
    """Seconds and bytes beside what layers take; nothing costs anything by default.

    `action_s`: of an action of compute, whatever its layers. `send`: between two ranks of a host.
    `summing`: of one message of a ring that sums, between two ranks of a host. `update`: of the
    optimizer; `norm`: of clipping. `step_s`: of a step, whatever is in it. `measured`: None where
    nobody measured. `process_bytes`: what a rank takes, beside the tensors that a plan counts, of
    the memory that they lie in: on CPUs the host memory of its process; on an accelerator what is
    taken of the device beside torch's tensors, and none of the host's memory. Files name the two
    apart, as `process_key` does.
    """

    action_s: float = 0.0
    send: Link = field(default_factory=Link)
    summing: Link = field(default_factory=Link)
    update: Pass = field(default_factory=Pass)
    norm: Pass = field(default_factory=Pass)
    step_s: float = 0.0
    measured: Measured | None = None
    process_bytes: int = 0

    def of_actions(self, costs: Costs) -> Costs:
        """Return costs in which each action of compute takes `action_s` more."""
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
"""In place of `process_key` in files that did not say in which memory that is."""
_LINK: Final = ("latency_s", "bandwidth_bytes_per_s")


def _more(cost: Cost | None, seconds: float) -> Cost | None:
    if cost is None:
        return None
    if isinstance(cost, float | int):
        return cost + seconds
    return [each + seconds for each in cost]


def write_prices(path: str | Path, prices: Prices) -> None:
    """Write prices as `read_prices` reads them, in the place of what is there.

    Raises ConfigError where nothing can be written.
    """
    assert prices.measured is not None, "prices that are written were measured"
    own = prices.measured
    told = {"format": _FORMAT, "measured": own._asdict(), **told_prices(prices, own.device)}
    path = Path(path)
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(
            "# What a step takes beside its layers, by python -m gpipe_hpc.preflight\n"
            + yaml.safe_dump(told, sort_keys=False),
            "utf-8",
        )
        os.replace(aside, path)
    except OSError as error:
        raise ConfigError(
            f"{path}: not writable, expected a file for prices, got {error}; "
            f"{os_remedy(error) or 'look at its folder'}, or choose another"
        ) from None


def process_key(device: str) -> str:
    """Return the name in files of what a process takes beside tensors, for a type of device."""
    return "host_process_bytes" if device == "cpu" else "device_process_bytes"


def told_prices(prices: Prices, device: str) -> dict[str, Any]:
    """Return prices as files have them, without what they were measured on but its type."""
    return {
        "action_s": prices.action_s,
        "step_s": prices.step_s,
        process_key(device): prices.process_bytes,
        "send": told_link(prices.send),
        "sum": told_link(prices.summing),
        "update": prices.update._asdict(),
        "norm": prices.norm._asdict(),
    }


def told_link(link: Link) -> dict[str, float]:
    """Return a link as files have it."""
    return dict(zip(_LINK, (link.latency, link.bandwidth), strict=True))


def read_prices(path: str | Path) -> Prices:
    """Read what `write_prices` wrote; ConfigError, which names file and key, for anything else."""
    try:
        read = read_yaml(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: not readable, expected prices that a preflight wrote, got {error}; correct "
            f"the path, or {_REMEDY}"
        ) from None
    file = Reader(str(path), _REMEDY)
    told = read if isinstance(read, Mapping) else {}
    if told.get("format", _FORMAT) not in (_FORMAT, _OLDER):
        file.refuse("format", repr(_FORMAT), told["format"])
    given = told.get("measured")
    device = given.get("device") if isinstance(given, Mapping) else None
    key = process_key(device if isinstance(device, str) else "cpu")  # no text is refused below
    process = OLDER_KEY if told.get("format") == _OLDER else key
    top = file.keys(read, "", "format", "measured", process, *_PARTS)
    own = file.keys(top["measured"], "measured", *Measured._fields)
    texts = {name: own[name] for name in own if name != "cores"}
    for name, text in texts.items():
        if not isinstance(text, str):
            file.refuse(f"measured.{name}", "a text", text)
    measured = Measured(**texts, cores=file.cores(own["cores"], "measured.cores"))
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
    """Refuse prices that were measured on another device or for other settings; return doubts.

    `name`: of this machine's device of that kind, None where it has none.
    """
    known = prices.measured
    assert known is not None, "prices that were read were measured"
    asked = {"device": device, "precision": precision, "optimizer": optimizer}
    for what, expected in asked.items():
        got = getattr(known, what)
        if got != expected:
            raise ConfigError(
                f"plan.prices: {path} does not match these settings, expected prices for {what} "
                f"{expected}, got those for {got}; {_OTHER}"
            )
    return doubts_of_device("plan.prices", path, device, known.name, name, _OTHER)


class Reader:
    """Reads parts of a file; refuses what is not as it should be, by its key.

    `where`: what a message begins with, the file's path in it.
    """

    def __init__(self, where: str, remedy: str) -> None:
        self._where, self._remedy = where, remedy

    def refuse(self, key: str, expected: str, got: object) -> NoReturn:
        """Raise for one key."""
        raise ConfigError(
            f"{self._where}: {key or 'top'}, expected {expected}, got {got!r:.200}; {self._remedy}"
        )

    def prices(self, value: object, key: str, measured: Measured, process: str) -> Prices:
        """Return prices that were measured on something; `process`: see `process_key`."""
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
        """Return a number of cores."""
        return self.number(value, key, 1)

    def keys(self, value: object, key: str, *names: str) -> Mapping[str, Any]:
        """Return what has these keys and no others."""
        if not isinstance(value, Mapping) or set(value) != set(names):
            got = ", ".join(map(str, value)) if isinstance(value, Mapping) else value
            self.refuse(key, f"the keys {', '.join(names)}", got)
        return value

    def number(self, value: object, key: str, least: int) -> int:
        """Return a whole number."""
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.refuse(key, f"a whole number from {least} up", value)
        return value

    def seconds(self, value: object, key: str) -> float:
        """Return an amount of 0 or more."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(key, "a number of seconds", value)
        if not 0 <= value < math.inf:
            self.refuse(key, "0 or more seconds", value)
        return float(value)

    def link(self, value: object, key: str) -> Link:
        """Return a link."""
        found = self.keys(value, key, *_LINK)
        bandwidth = found[_LINK[1]]
        if isinstance(bandwidth, bool) or not isinstance(bandwidth, int | float):
            self.refuse(f"{key}.{_LINK[1]}", "a number", bandwidth)
        if not bandwidth > 0:
            self.refuse(f"{key}.{_LINK[1]}", "more than 0 bytes a second", bandwidth)
        return Link(self.seconds(found[_LINK[0]], f"{key}.{_LINK[0]}"), float(bandwidth))

    def over(self, value: object, key: str) -> Pass:
        """Return a pass over parameters."""
        found = self.keys(value, key, *Pass._fields)
        return Pass(*(self.seconds(found[name], f"{key}.{name}") for name in Pass._fields))
