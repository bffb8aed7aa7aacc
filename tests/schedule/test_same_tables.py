"""Tables do not change unless somebody means it: digests of many, as they once were.

Whoever changes tables on purpose writes the digests anew, and says in the change why:

    python -m tests.schedule.test_same_tables
"""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule import (
    Schedule,
    add_offload,
    add_recompute,
    build,
    digest,
    forward_only,
    lower,
)
from gpipe_hpc.schedule.passes.gathers import add_gathers
from tests.schedule.conftest import VARIANTS, label

KEPT = Path(__file__).with_name("tables.txt")
SIZES = ((1, 3), (2, 2), (4, 3), (4, 8), (6, 7), (8, 24))


def tables_of(name, options) -> Iterator[Schedule]:
    """Yield what a schedule becomes at all sizes that it can be made for."""
    for ranks, microbatches in SIZES:
        try:
            bare = build(name, ranks=ranks, microbatches=microbatches, **options)
        except ScheduleError:
            continue
        yield bare
        buckets = dict.fromkeys(range(0, bare.num_stages, 2), 2)
        for mode in ("always", "except_last", "never"):
            dressed = add_recompute(bare, mode)
            yield lower(dressed, buckets)
            yield add_gathers(lower(dressed, buckets), buckets)
        yield lower(forward_only(bare))
        yield lower(add_offload(add_recompute(bare, "except_last")))
        yield lower(_with_skips(bare))


def _with_skips(bare: Schedule) -> Schedule:
    """Lead skips past some stages, crossing one another."""
    last = bare.num_stages - 1
    pairs = {(0, last), (0, last // 2), (last // 3, last)}
    return replace(bare, skips=tuple(sorted(pair for pair in pairs if pair[0] + 2 <= pair[1])))


def orders_by_chance(number: int) -> Schedule | None:
    """Return a lowered table whose ranks have odd orders, with circles of blocked sends.

    None where the order drawn is one in which ranks wait for one another for ever.
    """
    draw = random.Random(number)
    bare = build("gpipe", ranks=draw.randint(2, 5), microbatches=draw.randint(2, 6))
    if draw.random() < 0.5:
        bare = build("interleaved", ranks=3, microbatches=6)
    rows = []
    for row in bare.ranks:
        actions = list(row)
        for _ in range(draw.randint(0, 6)):
            at = draw.randrange(len(actions) - 1)
            actions[at : at + 2] = reversed(actions[at : at + 2])
        rows.append(actions)
    try:
        return lower(replace(bare, ranks=tuple(rows), max_activations=None))
    except ScheduleError:
        return None


def digest_of(tables) -> str:
    sha = hashlib.sha256()
    for table in tables:
        sha.update(("none" if table is None else digest(table)).encode())
    return sha.hexdigest()[:16]


def kept() -> dict[str, str]:
    return dict(line.split() for line in KEPT.read_text().splitlines())


@pytest.mark.parametrize("variant", VARIANTS, ids=label)
def test_tables_of_a_schedule_are_as_they_were(variant):
    assert digest_of(tables_of(*variant)) == kept()[label(variant)], "see the top of this file"


def test_tables_of_odd_orders_are_as_they_were():
    """Orders that nobody would choose: which circle is broken first is part of the table, too."""
    tables = [orders_by_chance(number) for number in range(300)]
    assert 30 < sum(table is None for table in tables) < 270, "both kinds are tried"
    assert digest_of(tables) == kept()["odd-orders"], "see the top of this file"


def test_a_table_that_differs_has_another_digest():
    """A test of digests that took all tables for one could not fail."""
    bare = build("one_f_one_b", ranks=4, microbatches=8)
    rows = [list(row) for row in lower(bare).ranks]
    rows[0][0], rows[0][1] = rows[0][1], rows[0][0]
    changed = replace(lower(bare), ranks=tuple(rows))
    assert digest_of([changed]) != digest_of([lower(bare)])


def _write() -> None:
    lines = [f"{label(variant)} {digest_of(tables_of(*variant))}" for variant in VARIANTS]
    odd = digest_of(orders_by_chance(number) for number in range(300))
    KEPT.write_text("\n".join([*lines, f"odd-orders {odd}"]) + "\n")


if __name__ == "__main__":
    _write()
