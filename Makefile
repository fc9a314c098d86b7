# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0

# The interpreter that makes the virtual environment: Python 3.11 or newer.
PYTHON ?= python3
# Another version of JAX than constraints.txt says, in an environment of its own.
JAX ?=
VENV ?= .venv$(addprefix -jax,$(JAX))
# What `make test` installs besides the library. test,bench,rocm also compiles for gfx942.
EXTRAS ?= test,bench
# Handed to jaxfp8 demo and to pytest: make test ARGS="tests/scales -k merge"
ARGS ?=

comma := ,
install = $(VENV)/bin/pip install --disable-pip-version-check -c $(VENV)/constraints.txt -e
installed = $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))

.PHONY: help demo test lint docs clean
.NOTPARALLEL:

help:
	@echo 'make demo    install, then prefill a long text in BF16 and FP8 and compare (about 2 minutes)'
	@echo 'make test    install, then run the tests (pytest, 2 processes; about 10 minutes), but'
	@echo '             those marked slow: ARGS="-m slow" runs these'
	@echo 'make lint    ruff and mypy'
	@echo 'make docs    the documentation with the API reference, into build/docs/index.html'
	@echo 'make clean   remove the environments and everything built'
	@echo
	@echo 'Each installs what it needs into $(VENV). Variables:'
	@echo '  PYTHON=python3.12      the interpreter (3.11 or newer) for a new environment'
	@echo '  JAX=0.12.0             another JAX, in .venv-jax0.12.0'
	@echo '  VENV=DIR               another place for the environment'
	@echo '  EXTRAS=test,bench,rocm also compile for gfx942 (the tests then want llvm-19)'
	@echo '  ARGS="..."             arguments for jaxfp8 demo or pytest'

demo: $(VENV)/.installed
	$(VENV)/bin/jaxfp8 demo $(ARGS)

test: $(installed)
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile -m 'not slow' $(ARGS)

lint: $(VENV)/.installed-lint
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

docs: $(VENV)/.installed-docs
	$(VENV)/bin/sphinx-build -W --keep-going -q -b html docs build/docs

clean:
	rm -rf .venv* build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	rm -f bazel-bin bazel-out bazel-testlogs bazel-$(notdir $(CURDIR))
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'jaxfp8 needs Python 3.11 or newer. Name one: make PYTHON=python3.12 ...' >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/constraints.txt: constraints.txt | $(VENV)/bin/python
	sed -E '$(if $(JAX),s/^(jax|jaxlib|jax-rocm7-[a-z]+)==[^ ;]+/\1==$(JAX)/)' constraints.txt > $@

$(VENV)/.installed: pyproject.toml $(VENV)/constraints.txt
	$(install) .
	@touch $@

$(VENV)/.installed-%: pyproject.toml $(VENV)/constraints.txt
	$(install) '.[$(subst -,$(comma),$*)]'
	@touch $@
