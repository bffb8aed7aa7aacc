"""Cost of starting: real small ranks on this machine, and one rank of a world of thousands.

    python -m experiments.scale.startup                    # about two minutes of two cores
    python -m experiments.scale.startup --most-ranks 8     # tries it

Writes startup.md and startup.json into the folder of --out.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.scale.startup.rank_0 import DEVICES, RankCosts
from experiments.scale.startup.ranks import Rank, check_alone, run
from experiments.scale.startup.session import Part

HERE = Path(__file__).parent
REAL = (4, 8, 16, 32, 64)
SIMULATED = (64, 512, 4096, 16384)


def main() -> None:
    """Run the measurements; print and write the results."""
    given = _arguments()
    check_alone()
    real = {number: run(number) for number in REAL if number <= given.most_ranks}
    simulated = [_one(size, given.stages, kind) for kind in DEVICES for size in SIMULATED]
    opened = {size: _session(size, given.stages) for size in SIMULATED}
    tables = _table_of_real(real), _table_of_simulated(simulated), _table_of_parts(opened)
    text = "\n\n".join([_machine(), *tables]) + "\n"
    print(text)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "startup.md").write_text(text)
    rows = {
        "real": {number: [rank._asdict() for rank in ranks] for number, ranks in real.items()},
        "simulated": [row._asdict() for row in simulated],
        "opened": {
            size: {name: part._asdict() for name, part in parts.items()}
            for size, parts in opened.items()
        },
    }
    (given.out / "startup.json").write_text(json.dumps(rows, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most-ranks", type=int, default=max(REAL), help="real ranks at most")
    parser.add_argument("--stages", type=int, default=4, help="stages of a simulated pipeline")
    parser.add_argument("--out", type=Path, default=HERE / "out", help="folder to write into")
    return parser.parse_args()


def _one(size: int, stages: int, kind: str) -> RankCosts:
    """Measure one rank in a separate process, so that its memory can be attributed."""
    given = [str(size), str(stages), kind]
    command = [sys.executable, "-m", "experiments.scale.startup.rank_0", *given]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return RankCosts(**json.loads(told.splitlines()[-1]))


def _session(size: int, stages: int) -> dict[str, Part]:
    """Open a run in a separate process."""
    command = [sys.executable, "-m", "experiments.scale.startup.session", str(size), str(stages)]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    parts = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    return {part.pop("part"): Part(**part) for part in parts}


def _machine() -> str:
    return (
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, Python {platform.python_version()}"
    )


def _table_of_real(found: dict[int, list[Rank]]) -> str:
    rows = []
    for number, ranks in found.items():
        others = ranks[1:]
        rows.append(
            [
                number,
                f"{max(each.joined_s for each in ranks):.2f}",
                f"{max(each.built_s for each in ranks):.2f}",
                f"{sum(each.cpu_s for each in ranks) / number:.2f}",
                f"{max(each.private_mb for each in ranks):.0f}",
                ranks[0].files,
                max(each.files for each in others),
                max(each.sockets for each in others),
                max(each.threads for each in ranks),
            ]
        )
    head = (
        "real ranks",
        "joined, s",
        "model built, s",
        "CPU of a rank, s",
        "own memory of a rank, MB",
        "open files of rank 0",
        "of another",
        "sockets among them",
        "threads",
    )
    return _table(head, rows)


def _table_of_simulated(found: Sequence[RankCosts]) -> str:
    rows = [
        [
            f"{one.size:,}",
            one.device,
            f"{one.joined_s:.2f}",
            f"{one.joined_mb:.1f}",
            f"{one.built_s:.2f}",
            f"{one.built_mb:.1f}",
            one.keys,
            one.groups,
            one.peers,
            one.copies,
            one.collectives,
            f"{one.num_bytes:,}",
        ]
        for one in found
    ]
    head = (
        "simulated ranks",
        "device",
        "joined, s",
        "MB",
        "model built, s",
        "MB more",
        "keys of the store",
        "groups",
        "connected with",
        "replicas",
        "collectives",
        "bytes",
    )
    return _table(head, rows)


def _table_of_parts(found: dict[int, dict[str, Part]]) -> str:
    rows = [
        [f"{size:,}", name, *(f"{each:,}" for each in part)]
        for size, parts in found.items()
        for name, part in parts.items()
    ]
    head = (
        "simulated ranks",
        "part",
        "collectives of all",
        "of groups",
        "sent to all",
        "sent to groups",
        "keys",
        "connected with",
        "messages",
        "their bytes",
        "received",
    )
    return _table(head, rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---:"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


if __name__ == "__main__":
    main()
