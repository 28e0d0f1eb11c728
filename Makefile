# Two commands for newcomers: `make demo` and `make test`. Both set up .venv first; the second call finds it ready.
PYTHON ?= python3
BIN := .venv/bin
TORCH_INSTALLED := .venv/installed-torch
INSTALLED := .venv/installed
DEV_INSTALLED := .venv/installed-dev
COVERAGE_INSTALLED := .venv/installed-coverage
MUTANTS_INSTALLED := .venv/installed-mutants

# Tests start hundreds of processes: what they import is compiled once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test tests test-all lint bench coverage mutants wheel wheels clean

demo: $(INSTALLED)
	$(BIN)/exegpt demo

# Style and types beside the tests.
test: $(DEV_INSTALLED)
	$(MAKE) -j 2 lint tests

# Three tests at a time, each on one thread: some wait for servers. The kernels that all need are compiled once before.
tests: $(DEV_INSTALLED)
	$(BIN)/python -c "import xrunner.models"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 3 --dist loadfile -m "not slow"

test-all: lint
	EXEGPT_TESTS=all OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q

lint: $(DEV_INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(DEV_INSTALLED)
	for table in kernels fidelity cpu_policies search; do $(BIN)/python -m benchmarks.$$table || exit 1; done

# Lines that the tests of `make test` reach, in one process; what they start in others isn't counted.
coverage: $(COVERAGE_INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m coverage run -m pytest -q -m "not slow"
	$(BIN)/python -m coverage report --skip-covered

# An hour, of which the first quarter records which tests reach each line; REACHED names a file that keeps the record:
# `make mutants SEED=2 SAMPLE=20 FOLDERS=xsimulator/cost REACHED=reached.json` for others and fewer.
SEED ?= 1
SAMPLE ?= 40
FOLDERS ?= xcore/batching xcore/policies xsimulator/replay xscheduler

mutants: $(MUTANTS_INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants $(FOLDERS) --sample $(SAMPLE) --seed $(SEED) $(if $(REACHED),--reached $(REACHED))

# This Python's wheel for this machine, to dist/; `make wheels` makes those of all Pythons, in containers.
wheel: $(TORCH_INSTALLED)
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

wheels: .venv/bin/python
	$(BIN)/pip install --quiet --no-compile cibuildwheel
	$(BIN)/python -m cibuildwheel --output-dir dist

.venv/bin/python:
	$(PYTHON) -m venv .venv

# torch goes in first: later requirements are then met by it, and none asks for another build of it.
$(TORCH_INSTALLED): setup.py constraints.txt $(wildcard */*.c */*.h) | .venv/bin/python
	$(BIN)/pip install --quiet --no-compile -c constraints.txt torch
	touch $@

$(INSTALLED): $(TORCH_INSTALLED)
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e .
	touch $@

# The extensions are compiled once: a later `make demo` finds them.
$(DEV_INSTALLED): $(TORCH_INSTALLED)
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	touch $(INSTALLED) $@

$(COVERAGE_INSTALLED): $(DEV_INSTALLED)
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e '.[coverage]'
	touch $@

$(MUTANTS_INSTALLED): $(DEV_INSTALLED)
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e '.[mutants]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
