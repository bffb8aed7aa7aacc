"""The text form of a table: a line of comma-separated actions for each rank.

The format that torch.distributed.pipelining dumps and loads; empty cells are bubbles there.
"""

import csv
import io
from dataclasses import replace
from typing import NamedTuple

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.actions import COMPUTE, RECEIVES, SENDS, Action, Op, parse_action
from gpipe_hpc.schedule.table import Placement, Schedule


def to_text(schedule: Schedule) -> str:
    """Return a table as text, one line a rank."""
    return "".join(",".join(map(str, actions)) + "\n" for actions in schedule.ranks)


def from_text(text: str, name: str = "file") -> Schedule:
    """Read a table from text; who holds which stage follows from where its actions stand.

    No bounds are declared. Reductions in a table without transfers, as torch dumps them, are left
    to lowering. Raises `ScheduleError` naming line and cell, both counted from 1.
    """
    cells = _read(text, name)
    if not cells:
        raise ScheduleError(f"schedule {name!r}: no action in the text, expected one at least")
    placement = _placement(cells, name)
    if _lacks_transfers(cells, placement):
        cells = [cell for cell in cells if cell.action.op is not Op.REDUCE_GRAD]
    placement = _with_idle_holders(placement, cells)
    rows: list[list[Action]] = [[] for _ in range(1 + max(cell.line for cell in cells))]
    for cell in cells:
        rows[cell.line].append(cell.action)
    return Schedule(name, placement, tuple(map(tuple, rows)))


class _Cell(NamedTuple):
    line: int
    column: int
    action: Action

    def __str__(self) -> str:
        return f"line {self.line + 1}, cell {self.column + 1}"


def _read(text: str, name: str) -> list[_Cell]:
    cells: list[_Cell] = []
    for line, row in enumerate(csv.reader(io.StringIO(text))):
        for column, entry in enumerate(row):
            if not entry.strip():
                continue  # a bubble: time is a result of running a table, no part of it
            try:
                cells.append(_Cell(line, column, parse_action(entry)))
            except ScheduleError as error:
                raise ScheduleError(
                    f"schedule {name!r}, line {line + 1}, cell {column + 1}: {error}"
                ) from None
    return cells


def _lacks_transfers(cells: list[_Cell], placement: Placement) -> bool:
    """Say whether values cross ranks and no transfer is in the table: it is one of compute."""
    crosses = any(len(set(route)) > 1 for route in placement.routes)
    return crosses and not any(cell.action.op in SENDS | RECEIVES for cell in cells)


def _with_idle_holders(placement: Placement, cells: list[_Cell]) -> Placement:
    """Add a route for each rank that reduces a stage of which it runs no micro-batch."""
    first, idle = placement.routes[0], []
    for line, _, (op, stage, _) in cells:
        if op is Op.REDUCE_GRAD and stage < len(first) and line not in placement.holders(stage):
            idle.append((*first[:stage], line, *first[stage + 1 :]))
    return replace(placement, routes=placement.routes + tuple(idle))


def _placement(cells: list[_Cell], name: str) -> Placement:
    """Return where each micro-batch runs; micro-batches that go one way share a route."""
    places: dict[tuple[int, int], _Cell] = {}
    for cell in cells:
        op, stage, microbatch = cell.action
        if op not in COMPUTE or microbatch is None:
            continue
        first = places.setdefault((stage, microbatch), cell)
        if first.line != cell.line:
            raise ScheduleError(
                f"schedule {name!r}, {cell}: {cell.action} on another rank than "
                f"{first.action} ({first}), expected one rank for a stage of a micro-batch"
            )
    if not places:
        raise ScheduleError(f"schedule {name!r}: no compute in the text, expected F at least")
    num_stages = 1 + max(stage for stage, _ in places)
    routes: dict[tuple[int, ...], int] = {}
    route_of: list[int] = []
    for microbatch in range(1 + max(microbatch for _, microbatch in places)):
        route: list[int] = []
        for stage in range(num_stages):
            if (stage, microbatch) not in places:
                raise ScheduleError(
                    f"schedule {name!r}: {Action(Op.F, stage, microbatch)} is missing, expected "
                    f"every micro-batch on each of {num_stages} stages, got it on no line; add it"
                )
            route.append(places[stage, microbatch].line)
        route_of.append(routes.setdefault(tuple(route), len(routes)))
    return Placement(tuple(routes), tuple(route_of))
