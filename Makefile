# `make sweep`: set up and run the main job. `make test`: set up and pass the tests. PYTHON= picks the interpreter.

# Candidates, newest first: what is on PATH, then pyenv's versions where pyenv is installed.
PYENV_PYTHONS = $(shell pyenv root >/dev/null 2>&1 && ls -d "$$(pyenv root)"/versions/3.1[123].*/bin/python 2>/dev/null | sort -rV)
PYTHON ?= $(shell for python in python3.13 python3.12 python3.11 $(PYENV_PYTHONS) python3 python; do \
	$$python -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null \
	&& $$python -c 'import sys; print("%d.%02d" % sys.version_info[:2], sys.executable)'; done | sort -r | head -n 1 | cut -d' ' -f2-)
VENV ?= .venv
BIN = $(VENV)/bin
# One worker a core on small machines; files stay whole, so that their fixtures are made once.
PYTEST = $(BIN)/python -m pytest -n 2 --dist loadfile

ifeq ($(strip $(PYTHON)),)
$(error No Python 3.11, 3.12 or 3.13 found: install one, or say PYTHON=/path/to/python)
endif

VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
TEST_EXTRAS = test,aot,slurm,harness$(if $(filter 3.11,$(VERSION)),$(comma)parity)
comma = ,

.PHONY: help sweep test test-fast test-all lint format setup setup-test clean
help:
	@echo 'make sweep      set up, then train a grid of models, fit its law and predict a larger run (minutes)'
	@echo 'make test       set up, then run the tests (under 20 minutes)'
	@echo 'make test-fast  the fast subset (under 3 minutes);  make test-all  everything'
	@echo 'make lint       ruff, mypy and the import contract'
	@echo 'using PYTHON=$(PYTHON)'

sweep: setup
	$(BIN)/lm sweep configs/ladders/quick.py --workdir runs

test: setup-test
	$(PYTEST) -m 'not full'

test-fast: setup-test
	$(PYTEST) -m 'not slow and not full'

test-all: setup-test
	$(PYTEST)

lint: setup-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A stamp names what the environment holds; another Python makes a new environment.
setup: $(VENV)/base-$(VERSION).stamp
setup-test: $(VENV)/test-$(VERSION).stamp

$(VENV)/base-$(VERSION).stamp: pyproject.toml constraints.txt
	@test -e $(VENV)/bin/python$(VERSION) || { rm -rf $(VENV); $(PYTHON) -m venv $(VENV); }
	$(BIN)/python -m pip install --quiet -e . -c constraints.txt
	@touch $@

$(VENV)/test-$(VERSION).stamp: $(VENV)/base-$(VERSION).stamp
	$(BIN)/python -m pip install --quiet -e '.[$(TEST_EXTRAS)]' -c constraints.txt
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache
