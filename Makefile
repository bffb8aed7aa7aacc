# Every target makes .venv from the lock file when it is missing or older than the lock.
PYTHON ?= python3
PROCESSES ?= 2
ARGS ?=
WORKERS ?= auto
# While a slow test waits for its processes another worker has the core: two for each core.
SLOW_WORKERS ?= $(shell expr 2 \* $$(getconf _NPROCESSORS_ONLN))

# What runs when, and what only the longer targets find: tests/tiers.py.
ELSEWHERE := not product and not simulated and not long and not two_hosts and not cluster and not browser
FAST := "not slow and $(ELSEWHERE)"
SLOW := "slow and $(ELSEWHERE)"
PYTEST = $(BIN)/python -m pytest -q --maxprocesses 8 --dist worksteal

BIN := .venv/bin
STAMP := .venv/.installed
# One thread a process: two ranks on two cores would only take turns with more.
export OMP_NUM_THREADS ?= 1

.PHONY: help .venv train course course-check bench test test-slow test-product test-simulated test-long test-two-hosts test-cluster test-browser test-torch test-all check docs format clean

help:
	@echo "make train      train a GPT on Python source through two stages (ARGS='train.steps=50 ...')"
	@echo "make course     open the exercises of experiments/course in Jupyter; without Jupyter, run all"
	@echo "make course-check  run all exercises, one line for each (five minutes)"
	@echo "make bench      compare speed with torch's pipelining and with stored results (five minutes)"
	@echo "make test       the fast tests (five minutes on two cores)"
	@echo "make test-slow  tests that kill ranks, start many processes or build the wheel (seven minutes)"
	@echo "make test-product    all combinations, of which make test runs a sample (an hour)"
	@echo "make test-simulated  training on the simulated accelerator (twenty minutes)"
	@echo "make test-long  soak, scale, sweeps, studies and benchmarks (twenty minutes)"
	@echo "make test-all   all of these, and make check"
	@echo "make test-two-hosts  two hosts over a slow link (Linux, root or user namespaces; minutes)"
	@echo "make test-cluster  a real Slurm, containers, Kubernetes (Debian: slurm-wlm munge podman buildah runc debootstrap; kubectl 1.29)"
	@echo "make test-browser  a report in a real browser (Debian: chromium)"
	@echo "make test-torch VERSION=2.15.0  five minutes of tests against a version of torch (PYTHON=python3.12)"
	@echo "make check      formatting, lint, types, rules of the code, links of the documents"
	@echo "make docs       build the documentation in build/site"
	@echo "make .venv      only create the environment"

.venv: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("gpipe-hpc: Python is too old, expected 3.11 or newer, got %d.%d; set PYTHON=/path/to/python3.11" % v[:2])'
	@$(BIN)/python -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

train: $(STAMP)
	$(BIN)/torchrun --standalone --nproc_per_node $(PROCESSES) -m gpipe_hpc.train $(ARGS)

# The user's own Jupyter runs the notebooks in this environment, by the kernel that is put down here.
course: $(STAMP)
	$(BIN)/python -m ipykernel install --prefix .venv --name gpipe-hpc --display-name gpipe-hpc
	$(BIN)/python -m experiments.course notebooks
	@if jupyter lab --version >/dev/null 2>&1; then \
		JUPYTER_PATH="$(CURDIR)/.venv/share/jupyter" jupyter lab experiments/course/out; \
	elif jupyter notebook --version >/dev/null 2>&1; then \
		JUPYTER_PATH="$(CURDIR)/.venv/share/jupyter" jupyter notebook experiments/course/out; \
	else \
		echo "no Jupyter on the PATH: running all exercises here (one with its text: $(BIN)/python -m experiments.course 5)"; \
		$(BIN)/python -m experiments.course all; \
	fi

course-check: $(STAMP)
	$(BIN)/python -m experiments.course all

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(ARGS)

# Tests of up to ten files that fail are run a second time, by themselves: a machine that others use
# too can starve a process for longer than any limit. What fails again has failed; what passes is
# named, because it is a race in the test or in the package.
test: $(STAMP)
	$(PYTEST) -n $(WORKERS) -m $(FAST) --ignore tests/test_fitness.py $(ARGS) || $(BIN)/python tests/rerun_failures.py -m $(FAST) $(ARGS)

test-slow: $(STAMP)
	$(PYTEST) -n $(SLOW_WORKERS) -m $(SLOW) $(ARGS) || $(BIN)/python tests/rerun_failures.py -m $(SLOW) $(ARGS)

test-product: $(STAMP)
	$(PYTEST) -n $(WORKERS) -m product $(ARGS)

test-simulated: $(STAMP)
	$(PYTEST) -n $(WORKERS) -m simulated $(ARGS)

test-long: $(STAMP)
	$(PYTEST) -n $(WORKERS) -m long $(ARGS)

test-two-hosts: $(STAMP)
	$(BIN)/python -m pytest -q -m two_hosts $(ARGS)

test-cluster: $(STAMP)
	$(BIN)/python -m pytest -q -m cluster $(ARGS)

test-browser: $(STAMP)
	$(BIN)/python -m pytest -q -m browser $(ARGS)

# Some gigabytes are downloaded and installed in build/, and removed in the end unless KEEP=1.
test-torch:
	@test -n "$(VERSION)" || { echo "make test-torch VERSION=2.15.0 [PYTHON=python3.12] [KEEP=1]" >&2; exit 2; }
	$(PYTHON) tests/with_torch.py $(VERSION) $(if $(KEEP),--keep) --workers $(WORKERS)

test-all: check test test-slow test-product test-simulated test-long

# mypy has one core for twenty seconds: the rest is done beside it.
check: $(STAMP)
	$(MAKE) --no-print-directory --jobs --output-sync=target lint types fitness site
	@$(BIN)/python tests/longest.py

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

fitness: $(STAMP)
	$(BIN)/python -m pytest -q -n $(WORKERS) --maxprocesses 8 tests/test_fitness.py

site: $(STAMP)
	$(BIN)/mkdocs build

docs: $(STAMP)
	$(BIN)/python -m docs.generate
	$(BIN)/mkdocs build

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
