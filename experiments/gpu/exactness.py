"""Part: tests that compare training with a plain loop, run on the device by pytest."""

import importlib.util
import os
import sys
import time

import pytest

from experiments.gpu.running import ROOT, Findings, enter, options

TESTS = (
    "tests/engine/test_exactness.py",
    "tests/engine/test_exactness_models.py",
    "tests/engine/test_exactness_random.py",
    "tests/data_parallel/test_exactness.py::test_two_replicas_are_bitwise_equal_to_one_process",
    "tests/data_parallel/test_exactness.py::test_each_reduction_strategy_matches_one_process",
    "tests/data_parallel/test_exactness.py::test_two_replicas_match_one_process_in_every_schedule",
    "tests/data_parallel/test_exactness.py"
    "::test_four_replicas_match_one_process_up_to_summation_order",
    "tests/data_parallel/test_exactness.py"
    "::test_rank_ordered_sums_are_bitwise_equal_for_any_bucket_size",
    "tests/data_parallel/test_exact_choices.py",
)
# Reserve for the test that runs when the time ends.
MARGIN_S = 25.0
MOST_WORKERS = 12


class ResultWriter:
    """pytest plugin that writes the result of each test as it ends, so that a kill loses nothing.

    With pytest-xdist, it gets the results of the workers, and no test is skipped for lack of time.
    """

    def __init__(self, findings: Findings, end_s: float) -> None:
        self.findings, self.end_s = findings, end_s
        self.passed = self.skipped = 0
        self.failed: dict[str, str] = {}

    def pytest_runtest_setup(self) -> None:
        """Skip a test if there is no time left."""
        if time.monotonic() > self.end_s:
            pytest.skip("no time left")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test, and store the reason of a failure."""
        if report.failed:
            text = str(getattr(report.longrepr, "reprcrash", None) or report.longrepr)
            self.failed[report.nodeid] = text[-1500:]
        elif report.when == "call" and report.passed:
            self.passed += 1
        self.skipped += report.skipped
        if report.when == "teardown":
            self.findings.add("passed", self.passed)
            self.findings.add("failed", len(self.failed))
            self.findings.add("left out for time", self.skipped)
            self.findings.add("failures", self.failed)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--select", default="", help="as pytest's -k")
    args = parser.parse_args()
    end_s = time.monotonic() + enter() - MARGIN_S
    os.chdir(ROOT)
    told = ResultWriter(Findings(args.found), end_s)
    chosen = ["-k", args.select] if args.select else []
    words = ["-q", "--device", args.device, "-p", "no:cacheprovider", *_side_by_side(), *chosen]
    codes = []
    # The fast tests first, then the rest, as far as time allows.
    for marks in ("not slow and not product", "not slow and product"):
        codes.append(int(pytest.main([*words, "-m", marks, *TESTS], plugins=[told])))
        told.findings.add(f"exit code of {marks}", codes[-1])
    nothing = int(pytest.ExitCode.NO_TESTS_COLLECTED)
    sys.exit(max(code for code in (0, *codes) if code != nothing))


def _side_by_side() -> list[str]:
    """Return options to run several processes on the device, if pytest-xdist is installed.

    A test with small ranks on threads uses one core and little of the device.
    """
    workers = min(MOST_WORKERS, 3 * len(os.sched_getaffinity(0)) // 4)
    return ["-n", str(workers)] if workers > 1 and importlib.util.find_spec("xdist") else []


if __name__ == "__main__":
    main()
