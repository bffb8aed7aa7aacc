"""A worker process shared by contestants, which serves requests from a socket.

Messages are JSON, one per line. ``open`` builds a cell, checks its gradients and measures its
memory; ``run`` times steps from a given time of the system's clock; ``close`` drops all cells;
``weigh`` builds a cell alone and returns the memory of its tensors.
"""

import gc
import importlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.cells import Cell
from benchmarks.peak_memory import weigh
from benchmarks.probes import end_with_parent, forget_peak, memory, usage
from benchmarks.workloads import Workload, make_workload, plain_gradients

# Seconds before the start time at which a process stops sleeping and polls the clock.
_WATCH_S = 0.001
# The first step may need less memory, because state kept between steps does not exist yet.
_STEPS_WEIGHED = 2


class Entrant(Protocol):
    """One cell, ready to run on this rank."""

    def __init__(self, workload: Workload, cell: Cell) -> None:
        """Build this rank's part of the model."""

    def step(self) -> None:
        """Run a whole step on the workload's batch: forward, backward, optimizer."""

    def gradients(self) -> Iterable[tuple[str, Tensor]] | None:
        """Return this rank's gradients of the mean loss by global name, or None if not comparable.

        Called after the first step.
        """

    def notes(self) -> dict[str, Any]:
        """Return additional information on this cell for the table."""

    def close(self) -> None:
        """Release resources that would outlive this object."""


class Worker:
    """The open cells of this process."""

    def __init__(self, entrants: Mapping[str, type[Entrant]], size: str, rank: int = 0) -> None:
        self.entrants = entrants
        self.size = size
        self.rank = rank
        self.cells: dict[str, Entrant] = {}
        self.warm: set[str] = set()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Serve one request."""
        match request["do"]:
            case "open":
                return self._open(Cell(**request["cell"]), request["reference"])
            case "run":
                return self._run(self.cells[request["cell"]], request["at_s"], request["steps"])
            case "close":
                return self._close(request["cells"])
            case "weigh":
                return self._weigh(Cell(**request["cell"]))
            case "reference":
                return self._write_reference(request["workload"], Path(request["path"]))
        raise AssertionError(f"unknown request {request}")

    def _open(self, cell: Cell, reference: str) -> dict[str, Any]:
        if cell.contestant not in self.warm:
            self._warm(cell)
        forget_peak()
        before = memory()
        make = self.entrants[cell.contestant]
        entrant = make(make_workload(cell.workload, self.size), cell)
        self.cells[cell.key] = entrant
        entrant.step()
        difference = _difference(entrant.gradients(), reference)
        forget_peak()
        begin_s = time.monotonic()
        entrant.step()
        step_s = time.monotonic() - begin_s
        peak_bytes = memory().peak_bytes - before.now_bytes
        return {"peak_bytes": peak_bytes, "step_s": step_s, **difference, **entrant.notes()}

    def _warm(self, cell: Cell) -> None:
        """Run once what the first cell of a contestant would pay for: libraries, process groups."""
        cell = replace(cell, workload="T")
        entrant = self.entrants[cell.contestant](make_workload("T", "tiny"), cell)
        for _ in range(3):
            entrant.step()
        entrant.close()
        self.warm.add(cell.contestant)

    def _weigh(self, cell: Cell) -> dict[str, Any]:
        """Return the peak bytes of tensors in two steps; memory shared by ranks counts half."""
        if cell.contestant not in self.warm:
            self._warm(cell)
        workload = make_workload(cell.workload, self.size)

        def run() -> Entrant:
            entrant = self.entrants[cell.contestant](workload, cell)
            for _ in range(_STEPS_WEIGHED):
                entrant.step()
            return entrant

        before = memory()
        entrant, num_bytes = weigh(run)
        shared_bytes = memory().shared_bytes - before.shared_bytes
        entrant.close()
        gc.collect()
        return {"tensor_bytes": num_bytes + shared_bytes // 2}

    def _run(self, entrant: Entrant, at_s: float, num_steps: int) -> dict[str, Any]:
        wait_until(at_s)
        begin = usage()
        for _ in range(num_steps):
            entrant.step()
        end_s = time.monotonic()
        end = usage()
        return {
            "end_s": end_s,
            "cpu_s": end.cpu_s - begin.cpu_s,
            "num_preempted": end.num_preempted - begin.num_preempted,
        }

    def _close(self, names: list[str]) -> dict[str, Any]:
        for name in names:
            entrant = self.cells.pop(name, None)
            if entrant is not None:
                entrant.close()
        gc.collect()
        forget_peak()
        return {}

    def _write_reference(self, workload: str, path: Path) -> dict[str, Any]:
        # Written by one rank and renamed, so that the file is complete once it exists.
        if self.rank == 0:
            partial = path.with_name(f"{path.name}.partial")
            torch.save(plain_gradients(make_workload(workload, self.size)), partial)
            partial.replace(path)
        return {}


def wait_until(at_s: float) -> None:
    """Return at the given time of the system's monotonic clock."""
    left_s = at_s - time.monotonic()
    if left_s > _WATCH_S:
        time.sleep(left_s - _WATCH_S)
    while time.monotonic() < at_s:
        pass


def _difference(gradients: Iterable[tuple[str, Tensor]] | None, reference: str) -> dict[str, Any]:
    """Return the squared norms of the error of this rank's gradients and of the reference."""
    if gradients is None:
        return {"names": None, "error": 0.0, "norm": 0.0}
    plain = torch.load(reference, mmap=True)
    names, error, norm = [], 0.0, 0.0
    for name, gradient in gradients:
        names.append(name)
        expected = plain[name].double()
        error += float((gradient.double() - expected).square().sum())
        norm += float(expected.square().sum())
    return {"names": names, "num_plain": len(plain), "error": error, "norm": norm}


def _load(addresses: Mapping[str, str]) -> tuple[dict[str, type[Entrant]], dict[str, str]]:
    """Return the contestants' classes by name, and the reasons why others cannot be loaded."""
    entrants, absent = {}, {}
    for contestant, address in addresses.items():
        module, name = address.split(":")
        try:
            entrants[contestant] = getattr(importlib.import_module(module), name)
        except Exception as error:
            traceback.print_exc()
            absent[contestant] = f"{type(error).__name__}: {error}"
    return entrants, absent


def main() -> None:
    """Serve requests on the inherited socket until it closes."""
    end_with_parent()
    descriptor, addresses, size = sys.argv[1:]
    stream = socket.socket(fileno=int(descriptor)).makefile("rw", encoding="utf-8", newline="\n")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    entrants, absent = _load(json.loads(addresses))
    worker = Worker(entrants, size, int(os.environ["RANK"]))
    answer: dict[str, Any] = {"version": torch.__version__, "absent": absent}
    while True:
        stream.write(json.dumps(answer) + "\n")
        stream.flush()
        line = stream.readline()
        if not line:
            break
        try:
            answer = worker.answer(json.loads(line))
        except Exception as error:
            traceback.print_exc()
            answer = {"failed": f"{type(error).__name__}: {error}"}
    # Skip the interpreter's shutdown, in which some peers wait for each other.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
