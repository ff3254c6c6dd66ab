# Two commands: `make report` (the embedded model, measured and shown) and `make test`. Both need Python 3.11 or newer
# and a package index, nothing else. `make PYTHON=python3.12 report` chooses the interpreter.

PYTHON ?= python3
VENV ?= .venv
REPORT ?= reports/first
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help report test clean

help:
	@echo "make report   install into $(VENV), measure the embedded model, write $(REPORT)/index.html"
	@echo "make test     install into $(VENV), check style and types, run the tests"
	@echo "make clean    remove $(VENV)"

report: $(VENV)/.installed
	$(BIN)/pavinterp report --out $(REPORT) --overwrite
	@echo "Open in a browser: $(CURDIR)/$(REPORT)/index.html"

test: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2

clean:
	rm -rf $(VENV)

# editable_mode=compat: a clone in a folder named pavinterp does not hide the package from a Python started beside it.
# torch goes in first and alone: its wheel is chosen (CPU or CUDA) by what the index offers, and nothing later moves it.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "pavinterp needs Python 3.11 or newer, $(PYTHON) is %d.%d: make PYTHON=python3.12 ..." % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(PIP) $$(grep '^torch==' constraints.txt)
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(PIP) --quiet --config-settings editable_mode=compat -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.torch pyproject.toml
	$(PIP) --quiet --config-settings editable_mode=compat -e '.[dev]'
	@touch $@ $(VENV)/.installed
