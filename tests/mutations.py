"""Mutation testing: seed faults into a copy of the package and report which the fast tests find.

    python -m tests.mutations --packages engine,config --number 60 --out faults.json
    python -m tests.mutations --again faults.json    # only those that were missed

A fault is one small change: an inverted comparison or condition, a deleted statement, two swapped
arguments, a number off by one. First the fast tests run once and record with coverage.py which
test executes which line; `--coverage` keeps this record for the next run of the same code. For each
fault those tests run that execute its line, the tests of its package first and fast ones before
slow ones, until one fails that passes without the fault. A fault that no test finds is printed:
either a test is missing, or the change has no effect (about one in ten has none).
"""

import argparse
import ast
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import coverage
import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "schedule",
    "comm",
    "settings",
    "config",
    "data_parallel",
    "engine",
    "planner",
    "checkpoint",
    "data",
    "trainer",
)
LIMIT_S = 600
TESTS_S = 90  # of tests for a fault, as recorded; the slowest are left out
FEW = 40
FAST = (
    "not slow and not product and not simulated and not long"
    " and not two_hosts and not cluster and not browser"
)
TURNED = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}


@dataclass(frozen=True)
class Fault:
    """A piece of a file and what takes its place."""

    path: str
    line: int
    kind: str
    old: str
    new: str
    start: int
    end: int

    def applied(self, text: str) -> str:
        """Return the file with the fault in it."""
        assert text[self.start : self.end] == self.old, f"{self.path} has changed"
        return text[: self.start] + self.new + text[self.end :]

    def __str__(self) -> str:
        short = [" ".join(each.split())[:70] for each in (self.old, self.new)]
        return f"{self.path}:{self.line}: {self.kind}: {short[0]}  ->  {short[1] or 'nothing'}"


# Swapped, their arguments give an error at once, which any test finds.
PLAIN = ("isinstance", "issubclass", "getattr", "setattr", "hasattr", "min", "max")


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, ast.AST | None]]:
    """Yield each way to get a node wrong: kind, what goes, what comes; None drops it."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in TURNED:
            turned = ast.Compare(node.left, [TURNED[type(op)]()], node.comparators)
            yield "turned", node, turned
        case ast.BoolOp():
            yield "turned", node, ast.BoolOp(TURNED[type(node.op)](), node.values)
        case ast.BinOp(left=ast.Constant(value=str()) | ast.JoinedStr()):
            return
        case ast.BinOp() if type(node.op) in TURNED:
            yield "turned", node, ast.BinOp(node.left, TURNED[type(node.op)](), node.right)
        case ast.If() | ast.IfExp() | ast.While():
            yield "condition turned", node.test, ast.UnaryOp(ast.Not(), node.test)
        case ast.Call(args=[first, second, *rest]):
            is_plain = isinstance(node.func, ast.Name) and node.func.id in PLAIN
            alike = type(first) is type(second) and not isinstance(first, ast.Starred)
            if alike and not is_plain and ast.dump(first) != ast.dump(second):
                swapped = ast.Call(node.func, [second, first, *rest], node.keywords)
                yield "arguments swapped", node, swapped
        case ast.Constant() if type(node.value) is int:
            yield "off by one", node, ast.Constant(node.value + 1)
        case ast.AugAssign() | ast.Expr(value=ast.Call()):
            yield "dropped", node, None


def is_message_only(node: ast.AST) -> bool:
    """Return whether a fault here shows in no run: in a message, an assertion or an import."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return ast.unparse(node.value.func).startswith(("log.", "_log.", "warnings.", "super()"))
    return False


def faults_of(path: Path) -> Iterator[Fault]:
    """Yield all faults of a file."""
    text = path.read_text("utf-8")
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    raw = text.encode()

    def visit(node: ast.AST) -> Iterator[Fault]:
        if is_message_only(node):
            return
        for kind, old, new in changes(node):
            start = starts[old.lineno - 1] + old.col_offset
            end = starts[old.end_lineno - 1] + old.end_col_offset
            yield Fault(
                path.relative_to(ROOT).as_posix(),
                old.lineno,
                kind,
                raw[start:end].decode(),
                "pass" if new is None else f"({ast.unparse(ast.fix_missing_locations(new))})",
                len(raw[:start].decode()),
                len(raw[:end].decode()),
            )
        skipped = ("annotation", "returns", "decorator_list")
        for name, value in ast.iter_fields(node):
            if name not in skipped:
                for each in value if isinstance(value, list) else [value]:
                    if isinstance(each, ast.AST):
                        yield from visit(each)

    yield from visit(ast.parse(text))


def draw(packages: Sequence[str], number: int, seed: int) -> list[Fault]:
    """Return random faults, spread evenly over the packages, then over their files and kinds."""
    chance = random.Random(seed)
    found: list[Fault] = []
    files = {name: sorted((ROOT / "gpipe_hpc" / name).rglob("*.py")) for name in packages}
    while len(found) < number:
        path = chance.choice(files[packages[len(found) % len(packages)]])
        faults = list(faults_of(path))
        kinds = sorted({each.kind for each in faults})
        if kinds:
            kind = chance.choice(kinds)
            fault = chance.choice([each for each in faults if each.kind == kind])
            found += [fault] * (fault not in found)
    return found


class Recorder:
    """Pytest plugin that records which test executes which line, and how long each test takes."""

    def __init__(self, start: Callable[..., coverage.Coverage]) -> None:
        self._start, self._recorded = start, start()
        self._test, self._exit = "", os._exit
        self.seconds: dict[str, float] = {}
        os.register_at_fork(after_in_child=self._start_in_child)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._test = nodeid
        self._recorded.switch_context(nodeid)

    def _start_in_child(self) -> None:
        """Record a forked process, as of tests with several ranks, in a file of its own."""
        self._recorded.stop()
        self._recorded = self._start(context=self._test)
        os._exit = self._save_and_exit

    def _save_and_exit(self, code: int) -> NoReturn:
        try:
            self.save()
        finally:
            self._exit(code)

    def save(self) -> None:
        """Stop recording and write the record."""
        self._recorded.stop()
        self._recorded.save()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0) + report.duration


class Selection:
    """Pytest plugin that runs the given tests in the given order and stores who failed."""

    def __init__(self, tests: Sequence[str], failed: Path) -> None:
        self._order = {name: place for place, name in enumerate(tests)}
        self._failed = failed

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [each for each in items if each.nodeid in self._order]
        items.sort(key=lambda each: self._order[each.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.write_text(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed.write_text(report.nodeid)


def forked(copied: Path, body: Callable[[], int]) -> int:
    """Run a function in a process that has torch already; return the pid."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    os.chdir(copied)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    sys.path.insert(0, str(copied))
    os.environ["PYTHONPATH"] = str(copied)
    code = 70
    try:
        code = body()
    finally:
        os._exit(code)


def run_pytest(options: Sequence[str], plugin: object) -> int:
    usual = ["-q", "-m", FAST, "-p", "no:cacheprovider", "--timeout", "60"]
    return int(pytest.main([*usual, *options], plugins=[plugin]))


class Coverage:
    """Which fast test executes which line of the package, and the seconds that each test takes.

    Args:
        folder: Folder of the record; it is written if the folder does not exist.
        copied: Copy of the repository, in which the tests run.
        packages: Packages whose lines are recorded.
        tests: Folders of the tests.
    """

    def __init__(
        self, folder: Path, copied: Path, packages: Sequence[str], tests: Sequence[str]
    ) -> None:
        # Lines of other code would select other tests, and faults would count as missed.
        of_code = folder / "digest"
        digest = hashlib.sha256(
            b"".join(path.read_bytes() for path in sorted((copied / "gpipe_hpc").rglob("*.py")))
        ).hexdigest()
        if not folder.exists():
            self._record(folder, copied, packages, tests)
            of_code.write_text(digest, "utf-8")
        if of_code.read_text("utf-8") != digest:
            raise SystemExit(f"{folder} is the coverage of other code; remove the folder")
        self.seconds: dict[str, float] = {}
        for each in sorted(folder.glob("seconds.*")):
            self.seconds |= json.loads(each.read_text("utf-8"))
        self._data = coverage.CoverageData(no_disk=True)
        for each in sorted(folder.glob("lines.*")):
            part = coverage.CoverageData(basename=str(each))
            part.read()
            self._data.update(part)

    def _record(
        self, folder: Path, copied: Path, packages: Sequence[str], tests: Sequence[str]
    ) -> None:
        found = [each for name in tests for each in (copied / name).rglob("test_*.py")]
        files = sorted(each.relative_to(copied).as_posix() for each in found)
        folder.mkdir(parents=True)
        folder = folder.resolve()
        num_workers = os.cpu_count() or 1

        def start(context: str | None = None) -> coverage.Coverage:
            recorded = coverage.Coverage(
                data_file=str(folder / f"lines.{os.getpid()}"),
                source=[str(copied / "gpipe_hpc" / name) for name in packages],
                config_file=False,
                context=context,
            )
            recorded.set_option("run:relative_files", True)
            recorded.start()
            return recorded

        def record(worker: int) -> int:
            recorder = Recorder(start)
            run_pytest(files[worker::num_workers], recorder)
            recorder.save()
            (folder / f"seconds.{worker}").write_text(json.dumps(recorder.seconds), "utf-8")
            return 0

        pids = [forked(copied, lambda worker=each: record(worker)) for each in range(num_workers)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        assert not any(codes), f"the tests could not be recorded, exit codes {codes}"

    def tests_of(self, fault: Fault, text: str) -> list[list[str]]:
        """Return the tests that execute a fault's line, in batches; then others of their files."""
        first = min(
            (
                each
                for each in ast.walk(ast.parse(text))
                if isinstance(each, ast.stmt)
                and each.lineno <= fault.line <= (each.end_lineno or each.lineno)
            ),
            key=lambda each: (each.end_lineno or each.lineno) - each.lineno,
        ).lineno
        by_line = self._data.contexts_by_lineno(fault.path)
        names = {name for line in range(first, fault.line + 1) for name in by_line.get(line, ())}
        if names == {""}:  # executed by an import: any test of the file may depend on it
            names = {name for contexts in by_line.values() for name in contexts}
        mirrored = "tests/" + "/".join(Path(fault.path).parts[1:-1])

        def order(name: str) -> tuple[bool, float]:
            return not name.startswith(mirrored), self.seconds[name]

        # Of what tests/conftest.py imports, no test is recorded.
        mirroring = {name for name in self.seconds if name.startswith(mirrored)}
        own = sorted(names & self.seconds.keys() or mirroring, key=order)
        # What a shared fixture executes is recorded for the first test only that needs it.
        files = {name.partition("::")[0] for name in own}
        others = [name for name in self.seconds if name.partition("::")[0] in files]
        more = sorted(set(others) - set(own), key=order)
        own, more = self._within(own, TESTS_S), self._within(more, TESTS_S / 2)
        return [each for each in (own[:FEW], own[FEW:], more) if each]

    def _within(self, tests: list[str], limit_s: float) -> list[str]:
        chosen, total_s = [], 0.0
        for name in tests:
            total_s += self.seconds[name]
            if total_s <= limit_s:
                chosen.append(name)
        return chosen


def run_tests(copied: Path, which: list[str]) -> str | None:
    """Run tests until one fails; return the one that fails, None if all pass."""
    failed = copied / "failed.txt"
    failed.unlink(missing_ok=True)
    files = list(dict.fromkeys(name.partition("::")[0] for name in which))
    selection = Selection(which, failed)
    pid = forked(copied, lambda: run_pytest(["-x", *files], selection))
    deadline = time.monotonic() + LIMIT_S
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            break
        if time.monotonic() > deadline:
            os.killpg(pid, 9)
            os.waitpid(pid, 0)
            return "out of time"
        time.sleep(0.02)
    code = os.waitstatus_to_exitcode(status)
    if code in (0, 5):
        return None
    return failed.read_text().strip() if failed.exists() else f"ended with code {code}"


def finder_of(fault: Fault, copied: Path, covered: Coverage, left_out: set[str]) -> str | None:
    """Return the test that finds a fault; None if no test does."""
    path = copied / fault.path
    text = path.read_text("utf-8")
    for batch in covered.tests_of(fault, text):
        while left := [name for name in batch if name not in left_out]:
            path.write_text(fault.applied(text), "utf-8")
            who = run_tests(copied, left)
            path.write_text(text, "utf-8")
            if who is None:
                break
            if who not in covered.seconds or run_tests(copied, [who]) is None:
                return who
            left_out.add(who)
            print(f"left out, as it fails without a fault: {who}", flush=True)
    return None


def copy_of_the_tree(to: Path) -> Path:
    """Copy the files that git tracks."""
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)
    return to


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--number", type=int, default=60, help="number of faults")
    parser.add_argument("--packages", default=",".join(PACKAGES), help="packages that get faults")
    parser.add_argument("--tests", default="tests", help="folders of tests that may find them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--coverage", type=Path, help="folder of the record of coverage")
    parser.add_argument("--again", type=Path, help="only faults that were not found there")
    parser.add_argument("--out", type=Path, default=Path("faults.json"))
    given = parser.parse_args()
    packages = given.packages.split(",")
    if given.again:
        kept = json.loads(given.again.read_text())
        names = Fault.__dataclass_fields__
        faults = [Fault(**{n: e[n] for n in names}) for e in kept if e["finder"] is None]
    else:
        faults = draw(packages, given.number, given.seed)
    for name in ("torch", "numpy", "hydra", "hypothesis", "torch.distributed.checkpoint"):
        import_module(name)  # seconds that no run then pays again
    results: list[dict[str, object]] = []
    left_out: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        copied = copy_of_the_tree(Path(folder) / "tree")
        record = given.coverage or Path(folder) / "coverage"
        covered = Coverage(record, copied, packages, given.tests.split(","))
        for fault in faults:
            began = time.monotonic()
            finder = finder_of(fault, copied, covered, left_out)
            took_s = round(time.monotonic() - began, 1)
            results.append(asdict(fault) | {"finder": finder, "took_s": took_s})
            print(f"{'found' if finder else 'MISSED':7}{fault}", flush=True)
            print(f"       by {finder} in {took_s} s", flush=True)
            given.out.write_text(json.dumps(results, indent=1))
    missed = [each for each in results if each["finder"] is None]
    print(f"{len(results) - len(missed)} of {len(results)} found")


if __name__ == "__main__":
    main()
