"""The text form of a table: one line of comma-separated actions per rank.

This is the format that torch.distributed.pipelining writes and reads; an empty cell is a bubble. An
F and a B that form one block share a cell, as in ``(0F4;7B1)OVERLAP_F_B``. A table with long skips
ends with a line that lists them by stage, as in ``skips,0>4,1>3``.
"""

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.table.actions import (
    COMPUTE,
    COPIES,
    OF_BUCKETS,
    RECEIVES,
    SENDS,
    Action,
    Op,
    parse_action,
)
from gpipe_hpc.schedule.table.schedule import Placement, Schedule, Skip

_OVERLAP: Final = "OVERLAP_F_B"
_SKIPS: Final = "skips"
_SKIP: Final = re.compile(r"(\d{1,9})\s*>\s*(\d{1,9})")


def to_text(schedule: Schedule) -> str:
    """Return a table as text, one line per rank.

    Trailing ranks without actions become empty lines, which `from_text` does not count as ranks.
    """
    partner_of = dict(schedule.overlaps)
    lines = [",".join(_cells_of(row, partner_of)) for row in schedule.ranks]
    if schedule.skips:
        named = (f"{source}>{destination}" for source, destination in schedule.skips)
        lines.append(",".join([_SKIPS, *named]))
    return "".join(line + "\n" for line in lines)


def _cells_of(row: Sequence[Action], partner_of: Mapping[Action, Action]) -> Iterator[str]:
    """Yield the cells of one rank; an overlapped F and B share a cell with all between them."""
    if not partner_of:
        yield from map(str, row)
        return
    position = {action: at for at, action in enumerate(row)}
    first = 0
    while first < len(row):
        end = position.get(partner_of.get(row[first], row[first]), first)
        block = row[first : max(first, end) + 1]
        yield str(block[0]) if len(block) == 1 else f"({';'.join(map(str, block))}){_OVERLAP}"
        first += len(block)


def from_text(text: str, name: str = "file") -> Schedule:
    """Parse a table from text; the placement is derived from the lines on which actions occur.

    No bounds are declared. If the table has no transfers, as torch writes it, its reductions and
    all-gathers are dropped and added again by lowering.

    Raises:
        ScheduleError: the text is invalid; the message gives line and cell, counted from 1.
    """
    lines = _lines(text, name)
    skips = _take_skips(lines, name)
    cells = _read(lines, name)
    if not cells:
        raise ScheduleError(f"schedule {name!r}: the text contains no action")
    placement = _placement(cells, name)
    if _lacks_transfers(cells, placement):
        cells = [cell for cell in cells if cell.action.op not in OF_BUCKETS]
    placement = _with_idle_holders(placement, cells)
    rows: list[list[Action]] = [[] for _ in range(1 + max(cell.line for cell in cells))]
    blocks: dict[tuple[int, int], list[Action]] = {}
    for cell in cells:
        rows[cell.line].append(cell.action)
        if cell.in_block:
            blocks.setdefault((cell.line, cell.column), []).append(cell.action)
    overlaps = tuple((block[0], block[-1]) for block in blocks.values())
    schedule = Schedule(name, placement, tuple(map(tuple, rows)), overlaps=overlaps, skips=skips)
    return replace(schedule, overlaps=()) if schedule.is_lowered else schedule


def _lines(text: str, name: str) -> list[list[str]]:
    rows = csv.reader(io.StringIO(text, newline=None))  # accepts any line ending
    try:
        return list(rows)
    except csv.Error as error:
        raise ScheduleError(
            f"schedule {name!r}, line {rows.line_num}: cannot parse the line as comma-separated "
            f"actions: {error}"
        ) from None


class _ActionText(NamedTuple):
    line: int
    column: int
    action: Action
    in_block: bool = False

    def __str__(self) -> str:
        return f"line {self.line + 1}, cell {self.column + 1}"


def _take_skips(lines: list[list[str]], name: str) -> tuple[Skip, ...]:
    """Remove the line of skips from the end of `lines` and return its skips."""
    while lines and not any(map(str.strip, lines[-1])):
        lines.pop()  # blank lines at the end do not count as ranks
    if not lines or lines[-1][0].strip() != _SKIPS:
        return ()
    skips: list[Skip] = []
    for column, entry in enumerate(lines.pop()[1:], 2):
        match = _SKIP.fullmatch(entry.strip())
        if match:
            skips.append((int(match[1]), int(match[2])))
        elif entry.strip():
            raise ScheduleError(
                f"schedule {name!r}, line {len(lines) + 1}, cell {column}: expected a skip such "
                f"as 0>4, got {entry!r:.80}"
            )
    return tuple(sorted(skips))


def _read(lines: list[list[str]], name: str) -> list[_ActionText]:
    cells: list[_ActionText] = []
    for line, row in enumerate(lines):
        for column, entry in enumerate(row):
            if not entry.strip():
                continue  # a bubble: a table defines order, not time
            try:
                actions = _parse(entry.strip())
                cells += [_ActionText(line, column, action, len(actions) > 1) for action in actions]
            except ScheduleError as error:
                raise ScheduleError(
                    f"schedule {name!r}, line {line + 1}, cell {column + 1}: {error}"
                ) from None
    return cells


def _parse(entry: str) -> list[Action]:
    """Parse one cell: an action, or an F and a B as a block with only R and copies between them."""
    if not entry.startswith("("):
        return [parse_action(entry)]
    inner, _, op = entry[1:].partition(")")
    block = [parse_action(part) for part in inner.split(";")] if op == _OVERLAP else []
    between = {*COPIES, Op.R}
    ops = [action.op for action in block if action.op not in between]
    if ops != [Op.F, Op.B] or block[0].op in between or block[-1].op in between:
        raise ScheduleError(
            f"action: expected a block such as (0F4;7B1){_OVERLAP}, got {entry!r:.80}"
        )
    return block


def _lacks_transfers(cells: list[_ActionText], placement: Placement) -> bool:
    """Return whether a table spans several ranks but contains no transfers (compute only)."""
    crosses = any(len(set(route)) > 1 for route in placement.routes)
    return crosses and not any(cell.action.op in SENDS | RECEIVES for cell in cells)


def _with_idle_holders(placement: Placement, cells: list[_ActionText]) -> Placement:
    """Add a route for each rank that reduces or gathers a stage but runs no micro-batch of it."""
    first, idle = placement.routes[0], []
    for line, _, (op, stage, _, _), _ in cells:
        if op in OF_BUCKETS and stage < len(first) and line not in placement.holders(stage):
            idle.append((*first[:stage], line, *first[stage + 1 :]))
    return replace(placement, routes=placement.routes + tuple(idle))


def _placement(cells: list[_ActionText], name: str) -> Placement:
    """Derive the placement from the cells; micro-batches run by the same ranks share a route."""
    places: dict[tuple[int, int], _ActionText] = {}
    for cell in cells:
        op, stage, microbatch, _ = cell.action
        if op not in COMPUTE or microbatch is None:
            continue
        first = places.setdefault((stage, microbatch), cell)
        if first.line != cell.line:
            raise ScheduleError(
                f"schedule {name!r}, {cell}: {cell.action} is on a different rank than "
                f"{first.action} ({first}); one rank must run a micro-batch on a stage"
            )
    if not places:
        raise ScheduleError(f"schedule {name!r}: the text contains no compute action such as 0F0")
    num_stages = 1 + max(stage for stage, _ in places)
    routes: dict[tuple[int, ...], int] = {}
    route_of: list[int] = []
    for microbatch in range(1 + max(microbatch for _, microbatch in places)):
        route: list[int] = []
        for stage in range(num_stages):
            if (stage, microbatch) not in places:
                raise ScheduleError(
                    f"schedule {name!r}: {Action(Op.F, stage, microbatch)} is missing; every "
                    f"micro-batch must run on each of the {num_stages} stages"
                )
            route.append(places[stage, microbatch].line)
        route_of.append(routes.setdefault(tuple(route), len(routes)))
    return Placement(tuple(routes), tuple(route_of))
