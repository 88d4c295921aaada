# Two commands: `make run` shows what fedld does, `make test` proves that it works.
# Both need only Python 3.11+, make and a C compiler; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: run test test-fast test-portable test-device fuzz audit bench lint types docs clean

run: $(INSTALLED)
	$(BIN)/fedld compare --lr 0.02 --decompose 5 --set client_losses=false --out runs/default --resume
	@echo "Open runs/default/report.html in a browser."

# One test process per core; the tests of one file stay together, because they share what they started.
PYTEST := $(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder
test: lint types
	$(PYTEST)
	$(MAKE) docs

# For daily work: no Flower, no killed processes, no browser.
FAST := tests/aggregation tests/analysis tests/config tests/data tests/local tests/methods tests/models tests/privacy \
	tests/records tests/tasks tests/transforms tests/test_classes.py tests/test_layout.py tests/test_rooms.py
test-fast: $(INSTALLED)
	$(PYTEST) $(FAST)

# The numeric tests under other instruction sets and thread counts: what holds must not hang on the processor.
NUMERIC := tests/aggregation tests/methods tests/local tests/analysis tests/test_layout.py
test-portable: $(INSTALLED)
	ATEN_CPU_CAPABILITY=default $(PYTEST) $(NUMERIC)
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 $(PYTEST) $(NUMERIC)
	ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE OPENBLAS_CORETYPE=Nehalem $(PYTEST) $(NUMERIC)
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(PYTEST) $(NUMERIC)

# The numeric tests on the accelerator that torch finds; without one what needs it is skipped, and says so.
test-device: $(INSTALLED)
	$(BIN)/python -c "from fedld.engine.hardware import find_device; print('device:', find_device('auto'))"
	$(BIN)/pytest -n 0 -rs tests/device

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

fuzz: $(INSTALLED)
	$(BIN)/python tests/fuzz/fuzz.py configurations 2000
	$(BIN)/python tests/fuzz/fuzz.py files 1000
	$(BIN)/python tests/fuzz/fuzz.py messages 2000
	$(BIN)/python tests/fuzz/fuzz.py secure 500

# Known faults of the pinned versions, asked of a public database; in an environment of its own.
audit:
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/pip install --quiet --disable-pip-version-check pip-audit
	.venv-audit/bin/pip-audit --no-deps --disable-pip --requirement constraints.txt

# The figures of docs/performance.md for this machine, in about a quarter of an hour; let nothing else run.
bench: $(INSTALLED)
	$(BIN)/python benchmarks/all.py

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The constraints pin the CPU build of torch and everything that could replace it.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv .venv-audit .mypy_cache .ruff_cache .pytest_cache .hypothesis site
