"""Part: a trace of one step with offloading, in which copies overlap with compute."""

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile

from experiments.gpu.devices import the_device
from experiments.gpu.running import Findings, enter, options, timed
from experiments.gpu.sizes import SIZES
from gpipe_hpc.device.device import Device

COLUMNS = 120
KINDS = {"kernel": "#", "gpu_memcpy": "c", "gpu_memset": "s"}


class Work(NamedTuple):
    """A kernel or copy on a stream of the device; times in microseconds."""

    stream: str
    kind: str
    name: str
    start_us: float
    end_us: float

    @property
    def is_copy(self) -> bool:
        """Return whether it is a copy between host and device."""
        return self.kind == "gpu_memcpy" and ("HtoD" in self.name or "DtoH" in self.name)


def work_of(events: Iterable[dict[str, Any]]) -> list[Work]:
    """Return the work of all streams from the events of a Chrome trace, sorted by time."""
    found = [
        Work(
            stream=str(event.get("args", {}).get("stream", event.get("tid"))),
            kind=event["cat"],
            name=event.get("name", ""),
            start_us=float(event["ts"]),
            end_us=float(event["ts"]) + float(event["dur"]),
        )
        for event in events
        if event.get("ph") == "X" and event.get("cat") in KINDS
    ]
    return sorted(found, key=lambda each: each.start_us)


def united(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of time spans, sorted."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def covered_us(spans: Sequence[tuple[float, float]], by: Sequence[tuple[float, float]]) -> float:
    """Return the duration of the intersection of two unions of spans."""
    return sum(max(0.0, min(e, end) - max(s, start)) for s, e in spans for start, end in by)


def beside(work: Sequence[Work]) -> dict[str, Any]:
    """Return how long copies ran while a kernel of another stream ran.

    The share is relative to the possible overlap: the time of the copies, or of the kernels if that
    is less.
    """
    copies = [each for each in work if each.is_copy]
    by_stream = defaultdict(list)
    for each in work:
        if each.kind == "kernel":
            by_stream[each.stream].append((each.start_us, each.end_us))
    covered = total = 0.0
    for stream in {each.stream for each in copies}:
        own = united((c.start_us, c.end_us) for c in copies if c.stream == stream)
        others = united(s for other, spans in by_stream.items() if other != stream for s in spans)
        total += sum(end - start for start, end in own)
        covered += covered_us(own, others)
    kernels = united(span for spans in by_stream.values() for span in spans)
    compute = sum(end - start for start, end in kernels)
    least = min(total, compute)
    return {
        "copies": len(copies),
        "copies_ms": total / 1e3,
        "kernels_ms": compute / 1e3,
        "copies_beside_kernels_ms": covered / 1e3,
        "share_beside": covered / least if least else None,
    }


def lanes(work: Sequence[Work], columns: int = COLUMNS) -> list[str]:
    """Return a line for each stream: ``#`` a kernel, ``>`` a copy to the device, ``<`` from it."""
    if not work:
        return []
    begin, end = work[0].start_us, max(each.end_us for each in work)
    width = max(end - begin, 1e-9) / columns
    rows: dict[str, list[str]] = defaultdict(lambda: [" "] * columns)
    for each in work:
        mark = KINDS[each.kind]
        if each.is_copy:
            mark = ">" if "HtoD" in each.name else "<"
        first = int((each.start_us - begin) / width)
        last = min(columns - 1, int((each.end_us - begin) / width))
        rows[each.stream][first : last + 1] = mark * (last + 1 - first)
    return [f"stream {stream:>4} |{''.join(row)}|" for stream, row in sorted(rows.items())]


def traced(device: Device, settings: dict[str, Any]) -> dict[str, Any]:
    """Train three steps with a trace of the last; return the work of its streams."""
    size = SIZES["small" if device.is_accelerator else "tiny"]
    inputs, targets = map(device.to_device, size.batch())
    pipe = size.pipeline(device, **settings)
    for _ in range(2):
        pipe.step(inputs, targets)
    untraced_s = timed(lambda: pipe.step(inputs, targets), device.synchronize)
    activities = [ProfilerActivity.CPU]
    if device.is_accelerator:
        activities.append(getattr(ProfilerActivity, device.type.upper()))
    with profile(activities=activities) as profiler:
        traced_s = timed(lambda: pipe.step(inputs, targets), device.synchronize)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        work = work_of(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])
    return {
        "step_s": untraced_s,
        "traced_step_s": traced_s,
        **beside(work),
        "streams": lanes(work),
        "longest": longest(work),
    }


def longest(work: Sequence[Work], most: int = 12) -> list[str]:
    """Return the work with the longest total time, by name."""
    totals: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for each in work:
        spent, count = totals[each.name]
        totals[each.name] = spent + each.end_us - each.start_us, count + 1
    ordered = sorted(totals.items(), key=lambda pair: -pair[1][0])[:most]
    return [f"{us / 1e3:8.3f} ms {count:5} x {name[:90]}" for name, (us, count) in ordered]


MODES: dict[str, dict[str, Any]] = {
    "gpipe, offload": {"schedule": "gpipe", "recompute": "never", "offload": True},
    "one_f_one_b": {"schedule": "one_f_one_b", "recompute": "never"},
}


def main() -> None:
    args = options(__doc__).parse_args()
    enter()
    findings = Findings(args.found)
    device = the_device(args.device)
    failed = []
    for name, settings in MODES.items():
        try:
            findings.add(name, traced(device, settings))
        except Exception as error:
            findings.add(name, {"failed": f"{type(error).__name__}: {error}"})
            failed.append(error)
    if failed:
        raise failed[0]


if __name__ == "__main__":
    main()
