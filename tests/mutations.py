"""Seed faults into a copy of the package and say which of them the fast tests find.

    python tests/mutations.py --number 60 --out found.json
    python tests/mutations.py --again found.json --tests OLD/tests    # what was missed, by others

A fault is one small change: a comparison or condition turned round, a statement dropped, two
arguments swapped, a number off by one. Files are drawn evenly over the packages, by a seed. Of each
faulty file the tests that mirror it are run, from near to far, until one fails that does not fail
without the fault. A fault that none
finds is printed: a test is missing, or the change changes nothing (about one in ten does not).
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "schedule",
    "comm",
    "data_parallel",
    "data_parallel",
    "engine",
    "planner",
    "checkpoint",
    "data",
    "trainer",
)
# After those that mirror the file: tests of the whole, in which much of the package takes part.
WHOLE = ("tests/engine/test_exactness.py", "tests/pipeline", "tests/trainer/run")
LIMIT_S = 600
USAGE_ERROR = 4  # of pytest: as for a file that is not there
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


def is_told_only(node: ast.AST) -> bool:
    """Say whether this is a message, an assertion or a type: no fault of it shows in a run."""
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
        if is_told_only(node):
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


def draw(number: int, seed: int) -> list[Fault]:
    """Return faults drawn evenly over the packages, then over their files, then over kinds."""
    chance = random.Random(seed)
    found: list[Fault] = []
    files = {name: sorted((ROOT / "gpipe_hpc" / name).rglob("*.py")) for name in PACKAGES}
    while len(found) < number:
        path = chance.choice(files[PACKAGES[len(found) % len(PACKAGES)]])
        faults = list(faults_of(path))
        kinds = sorted({each.kind for each in faults})
        if kinds:
            kind = chance.choice(kinds)
            fault = chance.choice([each for each in faults if each.kind == kind])
            found += [fault] * (fault not in found)
    return found


def mirrors(path: str, tests: Path) -> list[list[str]]:
    """Return the tests of a file, nearest first: of its name, of its folder, of the whole."""
    parts = Path(path).relative_to("gpipe_hpc").with_suffix("").parts
    folder, name = tests.joinpath(*parts[:-1]), parts[-1]
    while not folder.is_dir():
        folder = folder.parent
    near = sorted(folder.glob(f"test_{name}*.py"))
    steps = [near, [folder], [tests.parent / each for each in WHOLE]]
    return [[str(each.relative_to(tests.parent)) for each in step] for step in steps if step]


def run_tests(copied: Path, which: list[str], limit_s: float) -> tuple[bool, str]:
    """Run tests in a process that has torch already; return whether all pass, and who fails."""
    report = copied / "failed.txt"
    report.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        become_pytest(copied, which, report)
    deadline = time.monotonic() + limit_s
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            break
        if time.monotonic() > deadline:
            os.killpg(pid, 9)
            os.waitpid(pid, 0)
            return False, "out of time"
        time.sleep(0.02)
    code = os.waitstatus_to_exitcode(status)
    # Also that of a conftest.py which cannot be imported: the fault is found.
    missing = [each for each in which if not each.startswith("-") and not is_there(copied, each)]
    assert code != USAGE_ERROR or not missing, f"pytest cannot find {missing}"
    said = report.read_text().strip() if report.exists() else f"ended with code {code}"
    return code in (0, 5), said


def is_there(copied: Path, test: str) -> bool:
    return (copied / test.partition("::")[0]).exists()


def become_pytest(copied: Path, which: list[str], report: Path) -> None:
    """Run pytest until a test fails; leave its name in a file."""
    os.setsid()
    os.chdir(copied)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    sys.path.insert(0, str(copied))
    os.environ["PYTHONPATH"] = str(copied)
    import pytest

    class Watch:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                self.note(report.nodeid)

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed:
                self.note(report.nodeid)

        def note(self, name: str) -> None:
            report.write_text(name)

    options = ["-x", "-q", "-m", FAST, "-p", "no:cacheprovider", "--timeout", "60"]
    code = pytest.main([*options, *which], plugins=[Watch()])
    os._exit(int(code))


def first_to_fail(
    fault: Fault, copied: Path, left_out: set[str]
) -> tuple[str | None, Sequence[str]]:
    """Run the tests of a faulty file; return who finds the fault, if anybody, and what ran."""
    path, ran = copied / fault.path, []
    text = path.read_text("utf-8")
    for step in mirrors(fault.path, copied / "tests"):
        ran += step
        while True:
            path.write_text(fault.applied(text), "utf-8")
            passed, who = run_tests(copied, [*step, *map(without, sorted(left_out))], LIMIT_S)
            path.write_text(text, "utf-8")
            if passed:
                break
            if "::" not in who and not who.endswith(".py"):
                return who, ran
            if run_tests(copied, [who], LIMIT_S)[0]:
                return who, ran
            left_out.add(who)  # it fails without the fault, too
    return None, ran


def without(name: str) -> str:
    """Return the option that leaves a test or a file out."""
    return f"--deselect={name}" if "::" in name else f"--ignore={name}"


def try_fault(fault: Fault, copied: Path, left_out: set[str]) -> dict[str, object]:
    """Return what became of a fault."""
    began = time.monotonic()
    finder, ran = first_to_fail(fault, copied, left_out)
    took_s = round(time.monotonic() - began, 1)
    return asdict(fault) | {"finder": finder, "ran": ran, "took_s": took_s}


def copy_of_the_tree(to: Path, tests: Path | None) -> Path:
    """Copy what git tracks; `tests` takes the place of the tests."""
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)
    if tests is not None:
        shutil.rmtree(to / "tests")
        shutil.copytree(tests, to / "tests")
    return to


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--number", type=int, default=60, help="how many faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", type=Path, help="another folder of tests")
    parser.add_argument("--again", type=Path, help="only what was not found there")
    parser.add_argument("--out", type=Path, default=Path("faults.json"))
    given = parser.parse_args()
    if given.again:
        kept = json.loads(given.again.read_text())
        names = Fault.__dataclass_fields__
        faults = [Fault(**{n: e[n] for n in names}) for e in kept if e["finder"] is None]
    else:
        faults = draw(given.number, given.seed)
    for name in ("torch", "numpy", "hydra", "hypothesis", "torch.distributed.checkpoint"):
        import_module(name)  # seconds that no run then pays again
    results: list[dict[str, object]] = []
    left_out: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        copied = copy_of_the_tree(Path(folder), given.tests)
        for fault in faults:
            result = try_fault(fault, copied, left_out)
            results.append(result)
            print(f"{'found' if result['finder'] else 'MISSED':7}{fault}", flush=True)
            print(f"       by {result['finder']} in {result['took_s']} s", flush=True)
            given.out.write_text(json.dumps(results, indent=1))
    missed = [each for each in results if each["finder"] is None]
    print(f"{len(results) - len(missed)} of {len(results)} found")
    for name in sorted(left_out):
        print(f"left out, as it fails without a fault: {name}")


if __name__ == "__main__":
    main()
