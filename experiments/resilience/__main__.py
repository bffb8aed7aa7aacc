"""Simulate the goodput of a job of 1,000 ranks with failing hosts, under several policies.

    python -m experiments.resilience              # three minutes of one core
    python -m experiments.resilience --tables     # simulates tables with holes anew, too
    python -m experiments.resilience --seeds 1 --days 5   # tries it

Writes two tables in Markdown, the rows as JSON, and a picture into the folder of --out.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev

from experiments.resilience.formulas import daly_goodput, daly_s
from experiments.resilience.inputs import DAY_S, HOUR_S, Inputs
from experiments.resilience.job import Policy, goodput
from experiments.resilience.plot import Line, draw
from experiments.resilience.steps import (
    LOST_HOSTS,
    Slowdowns,
    as_they_fell,
    cut_anew,
    replanned,
    whole_replicas,
)

HERE = Path(__file__).parent
SLOWDOWNS = HERE / "slowdowns.json"
ROOM = 12  # a quarter of the stages; 1 is the default of the schedule
DRAWS = 2
MTBF_S = {
    "12 h": 12 * HOUR_S,
    "1 day": DAY_S,
    "3 days": 3 * DAY_S,
    "10 days": 10 * DAY_S,
    "1 month": 30 * DAY_S,
    "3 months": 91 * DAY_S,
    "1 year": 365 * DAY_S,
    "3 years": 1095 * DAY_S,
}
Points = dict[str, tuple[float, float]]


def simulated_tables(inputs: Inputs) -> dict[str, dict[int, float]]:
    """Return the slowdowns of partial replicas, by method and number of missing hosts."""
    ways = {
        "replanned": partial(replanned, inputs, room=ROOM),
        "replanned, room 1": partial(replanned, inputs, room=1),
        "cut anew": partial(cut_anew, inputs, room=ROOM),
        "as they fell": partial(as_they_fell, inputs, room=ROOM, draws=DRAWS),
    }
    found: dict[str, dict[int, float]] = {}
    for name, way in ways.items():
        found[name] = {}
        for lost in LOST_HOSTS:
            found[name][lost] = round(way(lost=lost), 4)
            print(
                f"{name}: {lost} hosts missing, {found[name][lost]:.3f} times as long", flush=True
            )
    return found


def stored_slowdowns(inputs: Inputs) -> dict[str, Slowdowns]:
    """Return the results of an earlier run with --tables."""
    told = json.loads(SLOWDOWNS.read_text())
    return {
        way: Slowdowns(inputs.num_hosts, {int(lost): slow for lost, slow in known.items()})
        for way, known in told.items()
    }


def policies(inputs: Inputs) -> list[Policy]:
    """Return the compared policies, all with copies in the memory of neighbouring hosts."""
    slow = stored_slowdowns(inputs)
    return [
        Policy("wait for the repair"),
        *(Policy(f"{count} spare hosts", spare_hosts=count) for count in (1, 4, 12)),
        Policy("fewer whole replicas", partial(whole_replicas, inputs)),
        Policy("re-route by a restart", slow["replanned"]),
        Policy("re-route by a restart, room 1", slow["replanned, room 1"]),
        Policy("re-route by a restart, cut anew", slow["cut anew"]),
        Policy("re-route without a restart", slow["as they fell"], stays=True),
    ]


def checkpointing(inputs: Inputs) -> list[Policy]:
    """Return the compared ways to save work, all with a restart on the remaining hosts."""
    slow = stored_slowdowns(inputs)["replanned"]
    return [
        Policy("copies in memory, Daly's interval", slow),
        Policy("on disk, Daly's interval", slow, in_memory=False),
        *(
            Policy(f"on disk, every {text}", slow, in_memory=False, interval_s=seconds)
            for text, seconds in (("10 min", 600.0), ("1 h", HOUR_S), ("6 h", 6 * HOUR_S))
        ),
    ]


def points(inputs: Inputs, policy: Policy, seeds: int) -> Points:
    """Return the goodput of a policy over failure rates: mean and standard deviation."""
    found: Points = {}
    for text, mtbf_s in MTBF_S.items():
        at = replace(inputs, mtbf_s=mtbf_s)
        each = [goodput(at, policy, seed) for seed in range(seeds)]
        found[text] = mean(each), stdev(each) if seeds > 1 else 0.0
    return found


def formula(inputs: Inputs) -> Points:
    """Return Daly's goodput, for hosts that return at once and checkpoints on disk."""
    recovery_s = sum(inputs.detection_s) / 2 + inputs.restart_s + inputs.load_s
    found = {}
    for text, mtbf_s in MTBF_S.items():
        job_s = mtbf_s / inputs.num_hosts
        interval_s = daly_s(job_s, inputs.save_s)
        found[text] = daly_goodput(job_s, interval_s, inputs.save_s, recovery_s), 0.0
    return found


def table_of(rows: dict[str, Points]) -> str:
    """Return the rows as Markdown, in percent."""
    lines = [f"| policy | {' | '.join(MTBF_S)} |", f"|---|{len(MTBF_S) * '---:|'}"]
    for name, own in rows.items():
        cells = [f"{100 * got:.1f} ±{100 * spread:.1f}" for got, spread in own.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def lines_of(rows: dict[str, Points]) -> Sequence[Line]:
    """Return the rows as lines of a plot."""
    return [
        Line(name, {MTBF_S[text]: point for text, point in own.items()})
        for name, own in rows.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--days", type=float, default=90)
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--out", type=Path, default=HERE / "out")
    args = parser.parse_args()
    begin_s = time.process_time()
    inputs = Inputs(horizon_s=args.days * DAY_S)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.tables:
        SLOWDOWNS.write_text(json.dumps(simulated_tables(inputs), indent=1) + "\n")
    panels: dict[str, dict[str, Points]] = {"policies": {}, "checkpoints": {}}
    for name, compared in (("policies", policies(inputs)), ("checkpoints", checkpointing(inputs))):
        for policy in compared:
            panels[name][policy.name] = points(inputs, policy, args.seeds)
            print(f"{policy.name}: {time.process_time() - begin_s:.0f} s of one core", flush=True)
    panels["checkpoints"]["Daly's formula, hosts back at once"] = formula(inputs)
    for name, rows in panels.items():
        (args.out / f"{name}.md").write_text(table_of(rows))
    (args.out / "rows.json").write_text(json.dumps(panels, indent=1))
    titles = {
        "policies": "copies in neighbours' memory",
        "checkpoints": "re-routing by a restart",
    }
    drawn = draw({titles[name]: lines_of(rows) for name, rows in panels.items()})
    (args.out / "goodput.svg").write_text(drawn)
    print(f"see {args.out}")


if __name__ == "__main__":
    main()
