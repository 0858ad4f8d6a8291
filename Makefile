# make demo      install, then run the main job on the built-in source
# make test      install the test extras, then format, lint, types, tests
# make test-all  the same with the slow tests
PYTHON ?= python3
BIN := .venv/bin
# Two processes of one thread each: the models are too small for more.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

.PHONY: demo test test-all check clean

demo: .venv/.installed
	$(BIN)/vit2linear convert demo --op relu --output demo-relu --overwrite

test: check
	$(PYTEST) -m "not slow"

test-all: check
	$(PYTEST)

check: .venv/.installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

.venv/.created:
	$(PYTHON) -c 'import sys; sys.exit("vit2linear needs Python 3.11 or newer; set PYTHON=...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv
	touch $@

.venv/.installed: .venv/.created pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	touch $@

.venv/.installed-test: .venv/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info demo-relu
