"""Build the tables of one schedule in this process; print the costs as one line of JSON.

python -m experiments.scale.table.one one_f_one_b 64 512
"""

import json
import resource
import sys
import time
from itertools import pairwise
from typing import NamedTuple

from gpipe_hpc.schedule import (
    Row,
    add_recompute,
    build,
    check,
    forward_only,
    lower,
    with_row,
    without_rows,
)


class TableCosts(NamedTuple):
    """Costs of a schedule's two tables: CPU seconds, megabytes, and the data for another rank."""

    schedule: str
    ranks: int
    microbatches: int
    num_actions: int
    build_s: float
    lower_s: float
    check_s: float
    evaluation_s: float
    digest_s: float
    peak_mb: float
    row_bytes: int
    row_s: float

    @property
    def total_s(self) -> float:
        """Return the CPU seconds of rank 0."""
        parts = self.build_s, self.lower_s, self.check_s, self.evaluation_s, self.digest_s
        return sum(parts)

    @property
    def s_per_million(self) -> float:
        """Return the CPU seconds of rank 0 per million actions of the training table."""
        return self.total_s / self.num_actions * 1e6


def make(schedule: str, ranks: int, microbatches: int) -> TableCosts:
    """Build, recompute, lower and check a table as a layout does, then distribute it."""
    before_mb = _peak_mb()
    marks = [time.process_time()]

    def mark() -> None:
        marks.append(time.process_time())

    bare = add_recompute(build(schedule, ranks=ranks, microbatches=microbatches), "except_last")
    mark()
    training = lower(bare, dict.fromkeys(range(bare.num_stages), 2))
    mark()
    check(training)
    mark()
    evaluation = lower(forward_only(bare))
    check(evaluation)
    mark()
    tables = training, evaluation
    heads = [without_rows(table) for table in tables]
    mark()
    took = [end - start for start, end in pairwise(marks)]
    peak_mb = _peak_mb() - before_mb
    fullest = max(range(ranks), key=lambda rank: len(training.rows[rank]))
    sent = [
        (row.kinds, row.which.tobytes(), row.numbers.tobytes())
        for row in (table.rows[fullest] for table in tables)
    ]
    mark()
    for head, (kinds, which, numbers) in zip(heads, sent, strict=True):
        list(with_row(head, fullest, Row.of_bytes(kinds, which, numbers)).ranks[fullest])
    mark()
    return TableCosts(
        schedule,
        ranks,
        microbatches,
        training.num_actions,
        *took,
        peak_mb=peak_mb,
        row_bytes=sum(len(which) + len(numbers) for _, which, numbers in sent),
        row_s=marks[-1] - marks[-2],
    )


def _peak_mb() -> float:
    """Return the peak memory of this process in MB (Linux reports kilobytes, macOS bytes)."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


if __name__ == "__main__":
    name, *size = sys.argv[1:]
    print(json.dumps(make(name, *map(int, size))._asdict()))
