# Two commands: `make run` shows what fedld does, `make test` proves that it works.
# Both need only Python 3.11+, make and a C compiler; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: run test lint types clean

run: $(INSTALLED)
	$(BIN)/fedld compare --out runs/default --overwrite
	@echo "The report: runs/default/report.html"

test: lint types
	$(BIN)/pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
