# Two commands: `make run` shows what fedld does, `make test` proves that it works.
# Both need only Python 3.11+, make and a C compiler; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: run test lint types docs clean

run: $(INSTALLED)
	$(BIN)/fedld compare --decompose 5 --out runs/default --resume
	@echo "Open runs/default/report.html in a browser."

test: lint types
	$(BIN)/pytest
	$(MAKE) docs

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The constraints pin the CPU build of torch and everything that could replace it.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis site
