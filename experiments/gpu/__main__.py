"""Run all measurements that need one accelerator, and write one file, within ten minutes.

    python -m experiments.gpu                        # on the accelerator that torch finds
    python -m experiments.gpu --device cpu           # tries the command with small models

Each part runs in its own processes with a time limit; a part that fails or takes too long is
recorded and does not stop the others. The file is rewritten after each part.
"""

import argparse
import datetime
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.gpu.running import LEFT, ROOT, Claim, Outcome, Part, run_part, write_json
from gpipe_hpc.device.device import automatic_kind, refuse_old_torch
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.torch_compat import refuse_unfit_torch

MOST_S = 570.0
# A part is skipped if less time is left.
LEAST_S = 10.0
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
# A fixed cuBLAS workspace, so that equal products give equal bits.
EXACT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

Outcomes = Mapping[str, Outcome]


def parts(kind: str, in_little: bool) -> list[Part]:
    """Return the parts in order: short and most informative ones first."""
    device = ("--device", kind)
    size = ("--size", "tiny" if in_little else "auto")
    few = ("--select", "do_not_change_dropout or gpt_tied-zb_v") if in_little else ()
    return [
        Part(
            "environment",
            "versions, rates, and one call of every device function that the package uses",
            "experiments.gpu.environment",
            30,
            device,
            environment=EXACT,
        ),
        Part(
            "one rank",
            "ours and a plain loop, without compilation",
            "experiments.gpu.one_rank",
            60,
            (*device, *size, "--most", "medium"),
        ),
        Part(
            "two ranks, one device",
            "boundaries through pinned memory and Gloo",
            "experiments.gpu.ranks",
            50,
            (*device, "--over", "staged"),
            ranks=2,
        ),
        Part(
            "own backend, one rank",
            "the device's own backend (NCCL) with one rank",
            "experiments.gpu.ranks",
            40,
            (*device, "--over", "own"),
            environment=LOOPBACK,
        ),
        Part(
            "own backend, two ranks",
            "the device's own backend (NCCL) between two devices",
            "experiments.gpu.ranks",
            80,
            (*device, "--over", "own"),
            ranks=2,
            needs_devices=2,
        ),
        Part(
            "memory",
            "peak memory of a step and its plan",
            "experiments.gpu.memory",
            120,
            (*device, "--size", "tiny" if in_little else "medium"),
        ),
        Part(
            "trace",
            "the streams of the device in a step, and copies in parallel with kernels",
            "experiments.gpu.trace",
            70,
            device,
        ),
        Part(
            "exactness",
            "tests that compare training with a plain loop, on the device",
            "experiments.gpu.exactness",
            140,
            (*device, *few),
            environment=EXACT,
        ),
        Part(
            "one rank, compiled",
            "ours and a plain loop, each layer compiled",
            "experiments.gpu.one_rank",
            300,
            (*device, *size, "--most", "medium", "--backend", "eager" if in_little else "inductor"),
        ),
        Part(
            "large model",
            "6.9 billion parameters, or the most that fit, and a loop that recomputes by layer",
            "experiments.gpu.large",
            150,
            (*device, "--size", "tiny" if in_little else "auto"),
        ),
    ]


def claims(found: Outcomes) -> list[Claim]:
    """Return the claims with the measured values."""

    def of(part: str, *path: str) -> float | None:
        value: Any = found[part].found if part in found else None
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return float(value) if isinstance(value, int | float) else None

    told: list[Claim] = []
    for part in (each for each in ("one rank", "one rank, compiled") if each in found):
        at_most = {
            "ours over the plain loop": (("contestants", "ours", "over plain"), 1.02),
            "virtual stages over plain accumulation": (
                ("contestants", "ours, virtual stages", "over ours"),
                1.03,
            ),
            "relative difference of gradients": (("gradient difference of ours",), 0.02),
            "waits for the device in a step of ours": (("number of waits of ours",), 1),
        }
        told += [
            Claim(f"{part}: {what}", of(part, *way), most) for what, (way, most) in at_most.items()
        ]
    for mode in found["memory"].found if "memory" in found else ():
        if mode == LEFT:
            told.append(Claim(f"memory: {LEFT}", of("memory", LEFT), 0))
        elif mode != "size":
            over = of("memory", mode, "over_plan")
            told.append(Claim(f"memory: peak over plan, {mode}", over, 1.03))
            told.append(Claim(f"memory: peak over plan, {mode}", over, 0.97, at_least=True))
            active = of("memory", mode, "active_over_plan")
            what = f"memory: peak with memory that copies still read, over plan, {mode}"
            told.append(Claim(what, active, 1.03))
    if "trace" in found:
        share = of("trace", "gpipe, offload", "share_beside")
        what = "trace: share of possible overlap of offload's copies with kernels"
        told.append(Claim(what, share, 0.5, at_least=True))
    if "large model" in found:
        told += [
            Claim(
                "large model: seconds to build", of("large model", "ours", "seconds to build"), 10
            ),
            Claim(
                "large model: ours over the plain loop",
                of("large model", "ours", "over plain"),
                1.02,
            ),
        ]
    if "exactness" in found:
        told.append(Claim("exactness: tests that fail", of("exactness", "failed"), 0))
    return told


def summary(found: Outcomes, claimed: Sequence[Claim], kind: str) -> list[str]:
    """Return the summary at the head of the file."""
    told = [
        f"{name}: {each.state} ({each.seconds:.0f} s) {each.reason}".rstrip()
        for name, each in found.items()
    ]
    if kind == "cpu":
        told.insert(0, "RUN ON A CPU: the numbers are not those of an accelerator")
    broken = {name: text for name, text in _checks(found).items() if str(text).startswith("FAILED")}
    told += [f"the device lacks a required function: {n}: {t}" for n, t in broken.items()]
    return told + [str(claim) for claim in claimed]


def _checks(found: Outcomes) -> dict[str, Any]:
    environment = found.get("environment")
    checks = environment.found.get("one of everything", {}) if environment else {}
    return checks if isinstance(checks, dict) else {}


def run_all(
    chosen: Sequence[Part], kind: str, out: Path, most_s: float, say: Callable[[str], None]
) -> dict[str, Outcome]:
    """Run the parts one after the other; write the file after each."""
    begin_s = time.monotonic()
    found: dict[str, Outcome] = {}
    devices = 0 if kind == "cpu" else torch.accelerator.device_count()
    for part in chosen:
        left_s = most_s - (time.monotonic() - begin_s)
        if left_s < LEAST_S:
            found[part.name] = Outcome("left out", reason="no time was left")
        elif part.needs_devices > devices:
            wanted = f"needs {part.needs_devices} devices, there are {devices}"
            found[part.name] = Outcome("left out", reason=wanted)
        else:
            say(f"{part.name}: {part.what} (at most {min(part.limit_s, left_s):.0f} s)")
            try:
                found[part.name] = run_part(part, min(part.limit_s, left_s))
            except Exception as error:
                found[part.name] = Outcome("failed", reason=f"{type(error).__name__}: {error}")
            outcome = found[part.name]
            say(f"  {outcome.state} after {outcome.seconds:.0f} s {outcome.reason}".rstrip())
        claimed = claims(found)
        whole = {
            "summary": summary(found, claimed, kind),
            "command": "python -m experiments.gpu",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - begin_s, 1),
            "claims": [{**vars(claim), "holds": claim.holds} for claim in claimed],
            "parts": {
                each.name: {"what": each.what, **found[each.name].as_dict()}
                for each in chosen
                if each.name in found
            },
        }
        write_json(out, whole)
    return found


def accelerator() -> str:
    """Return the kind of this machine's accelerator, cpu if torch finds none."""
    return automatic_kind().type


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", help="auto, cpu, or as torch calls it: cuda")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "experiments" / "gpu" / "out" / "gpu.json"
    )
    parser.add_argument("--only", nargs="*", help="parts by name; all if left out")
    parser.add_argument("--most-s", type=float, default=MOST_S, help="for all parts together")
    args = parser.parse_args()
    kind = accelerator() if args.device == "auto" else args.device
    try:
        refuse_unfit_torch()
        if kind != "cpu":
            refuse_old_torch(kind)
    except ConfigError as error:
        parser.error(str(error))
    if kind == "cpu" and args.device == "auto":
        parser.error("torch finds no accelerator; --device cpu tries the command without one")
    chosen = parts(kind, in_little=kind == "cpu")
    names = [part.name for part in chosen]
    for name in args.only or ():
        if name not in names:
            parser.error(f"no part {name!r}, expected some of {', '.join(names)}")
    chosen = [part for part in chosen if args.only is None or part.name in args.only]
    args.out.parent.mkdir(parents=True, exist_ok=True)

    def say(line: str) -> None:
        print(line, flush=True)

    found = run_all(chosen, kind, args.out, args.most_s, say)
    print("\n".join(["", *summary(found, claims(found), kind), "", f"all of it: {args.out}"]))
    sys.exit(any(each.state in ("failed", "out of time") for each in found.values()))


if __name__ == "__main__":
    main()
