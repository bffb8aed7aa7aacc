"""Test gpipe_hpc with another version of torch: `make test-torch VERSION=2.15.0`.

Creates an environment of several gigabytes in build/, installs the package in it as a user would,
and runs five minutes of tests: import, training of two ranks that another run resumes, and a sample
of exactness, split backward, replicas, layer state, checkpoints and processes. The environment has
the Python version of the interpreter that runs this script; it is removed afterwards.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = (
    "tests/cases/test_torch_versions.py",
    "tests/cases/test_gloo_groups.py",
    "tests/comm/collectives/test_wide_processes.py",
    "tests/engine/test_exactness.py",
    "tests/engine/test_splitting.py",
    "tests/engine/test_splitting_limits.py",
    "tests/engine/test_splitting_hooks.py",
    "tests/engine/test_splitting_nested.py",
    "tests/engine/test_backward.py",
    "tests/engine/test_backward_draws.py",
    "tests/engine/test_kept_casts.py",
    "tests/data_parallel/test_exactness.py",
    "tests/engine/test_buffers.py",
    "tests/engine/test_random_state.py",
    "tests/engine/test_processes.py",
    "tests/planner/costs/test_counted.py",
    "tests/planner/memory/test_offload.py",
    "tests/checkpoint/test_saving.py",
    "tests/checkpoint/test_format_1.py",
    "tests/checkpoint/test_metadata.py",
)
MARKS = (
    "not product and not simulated and not long and not two_hosts and not cluster and not browser"
)
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", help="of torch, as 2.15.0")
    parser.add_argument("--keep", action="store_true", help="leave the environment in build/")
    parser.add_argument("--workers", default="auto", help="processes that run tests; 0 for one")
    args = parser.parse_args()
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    home = ROOT / "build" / f"torch-{args.version}-python{python}"
    begun = time.monotonic()
    try:
        failed = try_version(args.version, home, args.workers)
    finally:
        if not args.keep:
            shutil.rmtree(home, ignore_errors=True)
    how = f"failed: {', '.join(failed)}" if failed else "passed"
    print(f"torch {args.version}, Python {python}: {how} ({time.monotonic() - begun:.0f} s)")
    sys.exit(bool(failed))


def try_version(version: str, home: Path, workers: str) -> list[str]:
    """Create the environment and run all tests in it; return the names of the failed steps."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
    constraint = home / "constraint.txt"
    constraint.write_text(f"torch=={version}\n")
    # Variables of this machine may select another torch.
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    environment |= {"PIP_CONSTRAINT": str(constraint), "OMP_NUM_THREADS": "1"}
    bin_ = home / "bin"
    pip = [bin_ / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # Install torch first; the installation of the package must not replace it.
    subprocess.run([*pip, f"torch=={version}"], env=environment, check=True)
    before = installed_torch(bin_ / "python", environment)
    subprocess.run([*pip, ROOT, *TOOLS], env=environment, check=True)
    after = installed_torch(bin_ / "python", environment)
    print(f"installed beside torch {before}: torch is {after}", flush=True)

    away = home / "away"  # a folder from which the checkout cannot be imported
    away.mkdir()
    train = [bin_ / "torchrun", "--standalone", "--nproc_per_node", "2", "-m", "gpipe_hpc.train"]
    train += ["run.dir=run", "checkpoint.every=10"]
    tests = [bin_ / "python", "-m", "pytest", "-q", "-m", MARKS, "-p", "no:cacheprovider"]
    if workers != "0":
        tests += ["-n", workers, "--maxprocesses", "8", "--dist", "worksteal"]
    in_checkout = environment | {"PYTHONPATH": str(ROOT)}
    steps: list[tuple[str, Sequence[object], Path, Mapping[str, str]]] = [
        ("import", [bin_ / "python", "-c", "from gpipe_hpc import Pipeline"], away, environment),
        ("two ranks", [*train, "train.steps=20"], away, environment),
        ("resume", [*train, "train.steps=30"], away, environment),
        ("tests", [*tests, *SAMPLE], ROOT, in_checkout),
    ]
    failed = [] if before == after else ["torch was replaced"]
    for name, command, place, variables in steps:
        done = subprocess.run([str(word) for word in command], cwd=place, env=variables)
        print(f"{name}: exit code {done.returncode}", flush=True)
        if done.returncode != 0:
            failed.append(name)
    lines = (away / "run" / "metrics.jsonl").read_text().splitlines() if not failed else ["30"]
    if not re.search(r"\b30\b", lines[-1]):
        failed.append("last step")
    return failed


def installed_torch(python: Path, environment: Mapping[str, str]) -> str:
    """Return the version of torch that is installed for a Python interpreter."""
    code = "from importlib.metadata import version; print(version('torch'))"
    done = subprocess.run([python, "-c", code], env=environment, stdout=subprocess.PIPE, check=True)
    return done.stdout.decode().strip()


if __name__ == "__main__":
    main()
