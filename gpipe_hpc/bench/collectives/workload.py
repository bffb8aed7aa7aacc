"""The workload of collectives: ranks started for each number, then tables, advice and a plot."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpipe_hpc.bench.collectives.figures import Found, advice, table
from gpipe_hpc.bench.collectives.plot import draw
from gpipe_hpc.bench.running import Failed, code_of, run_ranks
from gpipe_hpc.comm.saying import say
from gpipe_hpc.config import Config
from gpipe_hpc.config.refusal import refuse

_POINT: Final = "gpipe_hpc.bench.collectives.point"
_DEFAULT_RANKS: Final = (2, 4)


def check(config: Config) -> None:
    """Raise ConfigError for numbers with which nothing can be timed."""
    for ranks in config.bench.ranks:
        if ranks < 2:
            raise refuse("bench.ranks", "2 or more for collectives", ranks, "correct that one")
    if not config.bench.message_bytes or min(config.bench.message_bytes) < 4:
        got = config.bench.message_bytes
        raise refuse("bench.message_bytes", "numbers from 4 up, one at least", got, "correct them")


def time_collectives(config: Config, words: Sequence[str]) -> int:
    """Time, print and keep; return 0 if anything could be timed."""
    found = []
    for ranks in config.bench.ranks or _DEFAULT_RANKS:
        say(f"collectives: {ranks} ranks")
        found.append(_time(config, words, ranks))
        if found[-1].failed:
            say(f"  {found[-1].failed}")
    print(text := f"{table(found)}\n\n{advice(found)}")
    if config.bench.out is not None:
        _keep(found, text, Path(config.bench.out))
    return code_of(any(each.timings for each in found), [each.failed for each in found])


def _time(config: Config, words: Sequence[str], ranks: int) -> Found:
    threads = (config.bench.threads or [1])[0]
    told = run_ranks(
        *(_POINT, ranks, threads),
        [*words, f"train.num_threads={threads}"],
        config.bench.limit_s,
    )
    return Found(ranks, failed=told.why) if isinstance(told, Failed) else Found.of(told)


def _keep(found: Sequence[Found], text: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    told = [each.told() for each in found]
    (folder / "collectives.json").write_text(json.dumps(told, indent=1) + "\n")
    (folder / "collectives.md").write_text(text + "\n")
    if not draw(found, folder / "collectives.svg"):
        print("no plot: nothing was timed, or matplotlib is missing (pip install '.[plots]')")
