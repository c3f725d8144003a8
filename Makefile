# Everything runs in .venv, made from constraints.txt. Only `setup` and, once, `test-triton` and `test-lowest` use the network.
PYTHON ?= python3
PY := .venv/bin/python
PIP_INSTALL := -m pip install --disable-pip-version-check --no-input
# One thread per process: several ranks or test workers share the cores. Offline: no test may download. Bytecode is kept,
# whatever the shell says: hundreds of the tests' processes import the same modules.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=
PYTEST := $(TEST_ENV) $(PY) -m pytest
FILES := --dist loadfile --no-loadscope-reorder
EXAMPLES := tests/e2e/test_examples.py tests/e2e/test_wheel.py
PYTEST_ARGS ?=
CHAOS ?=
GPU ?=

.PHONY: help setup clean demo etcd test test-slow test-examples test-gpu test-root test-slurm test-triton test-lowest lint wheel docs gpu-report chaos
.DEFAULT_GOAL := help

help:
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {print "\n" substr($$0, 5)} /^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' \
	  $(firstword $(MAKEFILE_LIST))

##@ Set-up
setup: .venv/.installed ## make .venv and install the pinned packages

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "setup: '$(PYTHON)' is not Python 3.11 or newer; name one: make setup PYTHON=python3.11" >&2; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) $(PIP_INSTALL) -c constraints.txt -e '.[all]'
	$(PY) -c 'import yapf' # writes its grammar cache at the first import, where the ranks of mmengine would race
	@touch $@

clean: ## remove caches and build output; keeps .venv and run folders
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

##@ Try
demo: setup ## train digits with ddp, slowmo and co2 (the paper's, the recommended) over a throttled link; prints a table
	$(PY) -m vision.demo

etcd: setup ## start three members of etcd on this machine, for elastic runs with --store (apt's etcd-server)
	$(PY) -m bench.cluster.etcd

##@ Test
test: setup ## run the fast tests (PYTEST_ARGS adds options)
	$(PYTEST) -n 3 $(FILES) $(PYTEST_ARGS)

test-slow: setup ## run the slow tests, but not the tests of test-examples
	$(PYTEST) -n 2 $(FILES) -m "slow and not gpu and not root and not slurm" $(EXAMPLES:%=--ignore %) $(PYTEST_ARGS)

test-examples: setup ## run every script of examples/ under torchrun, and the package in an environment of its own
	$(PYTEST) -m "" -n 2 $(EXAMPLES) $(PYTEST_ARGS)

# also on a machine without .venv: docs/gpus.md. Other files may need packages that such a machine lacks
test-gpu: ## run the tests that need a CUDA device
	$(TEST_ENV) $(if $(wildcard $(PY)),$(PY),$(PYTHON)) -m pytest -m gpu $$(grep -rlE --include='*.py' 'mark\.gpu|test_triton import' tests) $(PYTEST_ARGS)

test-root: setup ## run the tests that make network namespaces
	$(PYTEST) -m root $(PYTEST_ARGS)

test-slurm: setup ## start a Slurm cluster on this machine and run jobs on it (root; apt's slurm-wlm and munge)
	$(PYTEST) -m slurm -rs $(PYTEST_ARGS)

test-triton: setup ## run Triton's kernels in its interpreter, beside the plain passes, and compile them for sm_80 and sm_90
	$(PY) -c 'import triton' 2>/dev/null || $(PY) $(PIP_INSTALL) -c constraints.txt -e '.[triton]'
	TRITON_INTERPRET=1 $(PYTEST) -m triton -n 2 tests/core $(PYTEST_ARGS)

# torch>=2.6 of pyproject.toml becomes torch==2.6, and so on; the others are what the tests import
LOWEST := $(shell sed -n 's/^dependencies = \[\([^]]*\)\].*/\1/p' pyproject.toml | tr -d '",' | sed 's/>=/==/g')
test-lowest: ## run core's fast tests with the lowest torch and numpy that it allows, in .venv-lowest (a download of 3 GB)
	test -x .venv-lowest/bin/python || $(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python $(PIP_INSTALL) -q $(LOWEST) pytest packaging tensorboard tqdm tyro
	$(TEST_ENV) .venv-lowest/bin/python -m pytest tests/core $(PYTEST_ARGS)

##@ Check
lint: setup ## ruff, and pyright's checks on core
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m basedpyright --pythonpath $(PY) core

wheel: setup ## build the package co2_training, which is core alone: a wheel and an sdist in dist/
	rm -rf build dist
	$(PY) -m build --no-isolation

##@ Documentation
docs: setup ## build the site into site/; a warning is an error
	$(PY) -m mkdocs build --strict

##@ Measure
gpu-report: ## costs on a GPU: rows of results/gpu.json (GPU="--checks copy")
	$(if $(wildcard $(PY)),$(PY),$(PYTHON)) -m bench.gpu $(GPU)

chaos: setup ## kill workers, cut links, fill disks: results/chaos.json (hours; CHAOS="--kills 10 ..." scales it)
	OMP_NUM_THREADS=1 $(PY) -m bench.chaos $(CHAOS)
