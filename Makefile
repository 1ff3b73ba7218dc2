# Every target sets up what it needs in .venv, once. `make` alone lists the targets.

PYTHON ?= python3
DEMO   ?= fedavg fedprox scaffold feddyn feduv univarfl spherefed feddecorr fedalign fedavg+ffc feddyn+spherefed central \
          data=digits partition=dirichlet:0.05 clients=10 model=mlp rounds=12 lr=0.03 seeds=3 target=0.85 out=runs/demo
TESTS  ?= -n 2

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.ready
LOG   := $(VENV)/setup.log
PIP   := $(BIN)/python -m pip install --progress-bar off --constraint constraints.txt

# Two pytest workers share two cores: one thread each.
OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test fuzz test-ray test-deploy test-papers lint format docs clean FORCE

help:
	@echo 'isofed: federated learning on data that differ from client to client'
	@echo
	@echo '  make demo    compare twelve methods on skewed clients; results in runs/demo'
	@echo '  make test    run the tests (TESTS="-n 2 -k name" to choose)'
	@echo '  make test-ray  the tests of executor=ray, which need Ray (225 MB)'
	@echo '  make test-deploy  federations of real processes, with keys, kills and strangers (a quarter of an hour)'
	@echo '  make test-papers  every preset of the papers from end to end at a tiny scale (long on a CPU)'
	@echo '  make fuzz    100,000 generated inputs for each parser; what fails is kept in tests/fuzz/found'
	@echo '  make lint    check style, formatting and types'
	@echo '  make format  put the code into its standard format'
	@echo '  make docs    build the documentation into site/'
	@echo '  make setup   only set up .venv; every target above does so by itself'
	@echo '  make clean   remove .venv, site/, build products and caches; your runs/ stay'

setup: $(STAMP)
	@echo '$(VENV) is ready'

demo: $(STAMP)
	@$(BIN)/isofed compare $(DEMO)

test: $(STAMP)
	@OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python -m pytest $(TESTS)

test-ray: $(STAMP)
	@$(PIP) --quiet --no-build-isolation --editable '.[ray]'
	@OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python -m pytest tests/engine/test_ray.py tests/test_recorder.py

test-deploy: $(STAMP)
	@ISOFED_DEPLOY=1 OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python -m pytest tests/flower/test_deploy.py

test-papers: $(STAMP)
	@ISOFED_TEST_PAPERS=1 OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python -m pytest $(TESTS) tests/papers/test_tiny.py

fuzz: $(STAMP)
	@OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python -m tests.fuzz.run

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy src tests benchmarks examples

format: $(STAMP)
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

docs: $(STAMP)
	@$(BIN)/mkdocs build --strict --clean --site-dir site
	@echo 'documentation: site/index.html'

clean:
	rm -rf $(VENV) build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
	@echo 'runs/ is left as it is'

# The stamp is written last and holds this folder's path, so a set-up that was broken off, copied from elsewhere
# or lost its Python does not count as done, and starts from an empty .venv. A finished one is brought up to date in place.
READY := $(shell [ "$$(cat $(STAMP) 2>/dev/null)" = "$(CURDIR)" ] && $(BIN)/python -c '' 2>/dev/null && echo yes)
ifneq ($(READY),yes)
$(STAMP): FORCE
endif

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo 'isofed needs Python 3.11 or newer, and there is no $(PYTHON) here.'; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "isofed needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.11"; exit 1; }
	@if [ "$(READY)" = yes ]; then echo 'bringing $(VENV) up to date…'; \
	else echo 'setting up $(VENV) (once, about a minute)…'; $(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }; fi
	@rm -f $(STAMP)
	@{ $(PIP) torch setuptools && \
	   $(PIP) --no-build-isolation --editable '.[dev,plot,docs,flower]'; } >$(LOG) 2>&1 || { \
	  tail -n 30 $(LOG); echo 'set-up failed; the lines above are the end of $(LOG). The next make starts it afresh.'; exit 1; }
	@printf '%s\n' '$(CURDIR)' >$(STAMP)
