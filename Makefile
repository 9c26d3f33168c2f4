# `make demo` and `make test` work on a fresh machine: they make .venv and install what they need.
# Stamp files in .venv record what is installed, so that a second run starts at once.

PYTHON ?= python3
PYTEST_ARGS ?=
WORKERS ?= 2
BENCH_ARGS ?=
BASE ?=
SPHINX_ARGS ?=
COMPARE_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
LOWEST := build/lowest
# One thread per test process: tests are small, and workers must not fight over cores.
RUN := OMP_NUM_THREADS=1 MPLBACKEND=Agg
PYTEST := $(RUN) $(BIN)/python -m pytest
CORE := -n $(WORKERS) -m "not extensive and not slow and not gpu" $(PYTEST_ARGS)

.PHONY: help demo test test-all test-slow test-lowest test-gpu lint format bench bench-peers bench-report compare docs notebooks clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       train a small CNN on digits and analyze its curvature, in less than 40 s"
	@echo "make test       the core tests, in less than four minutes (PYTEST_ARGS=..., WORKERS=2)"
	@echo "make test-all   the rest: tests marked extensive"
	@echo "make test-slow  tests marked slow: notebooks and examples in full"
	@echo "make test-lowest  the core tests on the lowest versions in pyproject.toml, in build/lowest:"
	@echo "                needs Python 3.11 and, as torch is the one for CUDA on Linux, 8 GB"
	@echo "make test-gpu   tests marked gpu"
	@echo "make lint       ruff check and format check ('make format' applies both), types"
	@echo "make bench      benchmarks against peers, if installed by 'make bench-peers' (BENCH_ARGS=...)"
	@echo "                ('make bench-report' writes tables and pictures of its results anew)"
	@echo "make compare    numbers, times and memory against the commit where the branch left main"
	@echo "                (BASE=<another commit>, COMPARE_ARGS=...)"
	@echo "make docs       the site, in docs/_build/html; without running the gallery by"
	@echo "                SPHINX_ARGS='-D sphinx_gallery_conf.plot_gallery=0'"
	@echo "make notebooks  the notebooks in docs_src/notebooks, executed"
	@echo "make clean      remove everything that was built, .venv included"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The constraints hold for every install, so that no extra ever moves torch.
$(VENV)/.stamp-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing the package with its extra '$*' into $(VENV): minutes at the first time"
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[$*]"
	@touch $@

demo: $(VENV)/.stamp-test
	@$(RUN) $(BIN)/python docs_src/examples/plot_digits_cnn.py

test: $(VENV)/.stamp-test
	$(PYTEST) $(CORE)

test-all: $(VENV)/.stamp-test
	$(PYTEST) -n $(WORKERS) -m "extensive and not slow and not gpu" $(PYTEST_ARGS)

test-slow: $(VENV)/.stamp-test
	$(PYTEST) -n $(WORKERS) -m "slow and not gpu" $(PYTEST_ARGS)

# Constraints are the lower bounds themselves. A download that breaks off is tried once more.
$(LOWEST)/.stamp: pyproject.toml
	@echo "Installing the lowest versions into $(LOWEST): minutes at the first time"
	@$(PYTHON) -m venv $(LOWEST)
	@sed -nE 's/^ *"([^"]+)>=([^"]+)".*/\1==\2/p' pyproject.toml > $(LOWEST)/constraints.txt
	@echo 'pyparsing<3.3' >> $(LOWEST)/constraints.txt # warns of what the matplotlib of then calls
	@install="$(LOWEST)/bin/python -m pip install -qq --disable-pip-version-check --no-cache-dir"; \
	install="$$install -c $(LOWEST)/constraints.txt -e .[test]"; \
	$$install || $$install || { \
		echo "The lowest versions cannot be installed: they need the network, Python 3.11, and"; \
		echo "8 GB of disk. Here:"; df -h .; $(PYTHON) --version; exit 1; }
	@touch $@

test-lowest: $(LOWEST)/.stamp
	$(RUN) $(LOWEST)/bin/python -m pytest $(CORE)

test-gpu: $(VENV)/.stamp-test
	$(PYTEST) -m gpu $(PYTEST_ARGS)

lint: $(VENV)/.stamp-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.stamp-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.stamp-test
	MPLBACKEND=Agg $(BIN)/python docs_src/benchmarks/bench.py $(BENCH_ARGS)

bench-report: $(VENV)/.stamp-test
	MPLBACKEND=Agg $(BIN)/python docs_src/benchmarks/report.py

# An environment of their own: some have the import name of this package.
bench-peers:
	$(PYTHON) -m venv build/peers
	build/peers/bin/python -m pip install -qq -c constraints.txt torch \
		-r docs_src/benchmarks/peers.txt
	@# a build for another PyTorch, with which transformers cannot be imported; no peer needs it
	build/peers/bin/python -m pip uninstall -qq -y torchvision

compare: $(VENV)/.stamp-test
	$(BIN)/python docs_src/benchmarks/compare.py $(if $(BASE),--base $(BASE)) $(COMPARE_ARGS)

notebooks: $(VENV)/.stamp-docs
	$(BIN)/python docs_src/notebooks/make.py

docs: $(VENV)/.stamp-docs
	$(BIN)/python -m sphinx -W --keep-going -b html $(SPHINX_ARGS) docs docs/_build/html

clean:
	rm -rf $(VENV) build *.egg-info docs/_build docs/gallery-generated docs/sg_execution_times.rst
	rm -rf .pytest_cache .ruff_cache .hypothesis *.png docs_src/examples/*.png
	find curvlinops test docs docs_src -name __pycache__ -type d -prune -exec rm -rf {} +
