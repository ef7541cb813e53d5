# Every target makes its own .venv from pinned versions; torch comes first, so that nothing pulls in another build of it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# the oldest transformers that amor/hf is for; the newest it was tried with is in constraints.txt
HF := .venv-hf
HF_OLDEST := 5.19.0

.PHONY: setup demo test test-hf check clean
.DEFAULT_GOAL := setup

setup: $(VENV)/ready
demo: $(VENV)/ready-demo
	$(BIN)/amor demo
test: $(VENV)/ready-test
	$(BIN)/python -m pytest -n 2 --dist worksteal
test-hf: $(HF)/ready
	$(HF)/bin/python -m pytest tests/test_hf.py
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

$(HF)/ready: pyproject.toml constraints.txt
	test -d $(HF) || $(PYTHON) -m venv $(HF)
	@echo "installing into $(HF), with transformers $(HF_OLDEST)"
	sed "s/^transformers==.*/transformers==$(HF_OLDEST)/" constraints.txt > $(HF)/constraints.txt
	$(HF)/bin/python -m pip install --quiet --disable-pip-version-check -c $(HF)/constraints.txt torch==2.13.0
	$(HF)/bin/python -m pip install --quiet --disable-pip-version-check -c $(HF)/constraints.txt -e ".[test]"
	touch $@

clean:
	rm -rf $(VENV) $(HF) .pytest_cache .ruff_cache .mypy_cache
