# Every target makes its own .venv from pinned versions; torch comes first, so that nothing pulls in another build of it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: setup demo test check clean
.DEFAULT_GOAL := setup

setup: $(VENV)/ready
demo: $(VENV)/ready-demo
	$(BIN)/amor demo
test: $(VENV)/ready-test
	$(BIN)/python -m pytest -n 2 --dist worksteal
check: $(VENV)/ready-test $(VENV)/ready-check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

$(VENV)/ready: pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (torch first; a few minutes on a fresh machine)"
	$(PIP) torch==2.13.0
	$(PIP) -e .
	touch $@

$(VENV)/ready-%: $(VENV)/ready
	$(PIP) -e ".[$*]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache
