# Everything runs in .venv, which any target makes when it is missing. `make` alone lists the targets.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := python -m pip install --quiet --disable-pip-version-check
# Real data for tests and benchmarks that use it; without it they say so and are skipped.
ifndef CONSILIENCE_DATA
  ifneq ($(wildcard ../shared/data),)
    export CONSILIENCE_DATA := $(abspath ../shared/data)
  endif
endif

.PHONY: help setup flower demo test check docs bench bench-aggregation bench-trees reproduce soak format lock sbom wheel
help:
	@grep -E '^## ' Makefile | sed 's/^## //'

.venv/.ready: pyproject.toml requirements.hashed.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "consilience needs Python 3.11 or newer; set PYTHON=..."; exit 1; }
	@echo "Setting up .venv (packages are downloaded once; this can take some minutes)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/$(INSTALL) --require-hashes --no-deps --only-binary :all: --requirement requirements.hashed.txt
	@$(BIN)/$(INSTALL) --no-index --no-build-isolation --editable '.[dev]'
	@touch $@

## setup   create .venv with everything the other targets need, every archive checked by its hash
setup: .venv/.ready

.venv-flower/.ready: pyproject.toml constraints-flower.txt
	@echo "Setting up .venv-flower (packages are downloaded once; this can take some minutes)"
	@$(PYTHON) -m venv .venv-flower
	@.venv-flower/bin/$(INSTALL) --constraint constraints-flower.txt --editable '.[flower]'
	@touch $@

## flower  create .venv-flower: Flower pins other versions of some packages, so its processes have an environment of their own
flower: .venv-flower/.ready

## demo    six sites learn one classifier together; a table and a plot beside the honest baselines
demo: setup
	@$(BIN)/consilience demo

## test    everything a change must pass
# Tests start many processes, which read modules that were compiled once.
test: check
	@OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadgroup -m "not soak"

## check   lint, types, import order, the container's file
check: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo >/dev/null || $(BIN)/lint-imports
	@$(BIN)/hadolint deploy/Dockerfile

## bench   speed and accuracy tables of benchmarks/ (peers get environments of their own)
bench: setup
	@$(BIN)/python benchmarks/peers.py
	@$(BIN)/python benchmarks/fit_time.py
	@$(BIN)/python benchmarks/accuracy.py

## bench-aggregation   every way to combine sites: accuracy, cost, thousands of sites, distillation, planning
bench-aggregation: setup
	@$(BIN)/python benchmarks/many_sites.py
	@$(BIN)/python benchmarks/distillation.py
	@$(BIN)/python benchmarks/aggregation.py
	@$(BIN)/python benchmarks/many_members.py
	@$(BIN)/python benchmarks/end_to_end.py
	@$(BIN)/python benchmarks/planning.py
	@$(BIN)/python benchmarks/poisoning.py

## bench-trees   forests and boosting: accuracy, integration across sites, speed
bench-trees: setup
	@$(BIN)/python benchmarks/forests.py
	@$(BIN)/python benchmarks/forest_sites.py
	@$(BIN)/python benchmarks/forest_speed.py

## reproduce   the papers' experiments and a report: FULL=1 as in the papers, FIGURE=xie2016/3a for one, OUT=folder, SEED=1, JOBS=4, BACKEND=dask, FRESH=1, MINUTES=60
reproduce: setup
	@$(BIN)/python -m experiments $(FIGURE) $(if $(filter-out 0 no,$(FULL)),--full) $(if $(OUT),--out '$(OUT)') \
	    $(if $(SEED),--seed $(SEED)) $(if $(JOBS),--jobs $(JOBS)) $(if $(BACKEND),--backend $(BACKEND)) \
	    $(if $(filter-out 0 no,$(FRESH)),--fresh) $(if $(MINUTES),--minutes $(MINUTES))

## docs    the documentation as a site: build/docs/site/index.html
docs: setup
	@$(BIN)/python docs/build.py

## soak    the long form of the proofs: kills, concurrency, full audits
soak: setup
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -m soak

## format  let ruff rewrite the files
format: setup
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

## wheel   build the wheel, install it in a clean environment beside packages of known hash, and play studies through
wheel: setup
	@rm -rf build/wheel && $(BIN)/python -m pip wheel --quiet --no-deps --no-index --no-build-isolation --wheel-dir build/wheel .
	@$(PYTHON) -m venv --clear build/wheel/clean
	@$(BIN)/python .ci/packages.py part build/wheel/requirements.txt
	@build/wheel/clean/bin/$(INSTALL) --require-hashes --no-deps --only-binary :all: --requirement build/wheel/requirements.txt
	@build/wheel/clean/bin/$(INSTALL) --no-index --no-deps build/wheel/*.whl
	@build/wheel/clean/bin/python -m pip check --disable-pip-version-check
	@cd build/wheel && clean/bin/consilience --help >/dev/null && clean/bin/python -I ../../.ci/try_wheel.py
	@$(BIN)/python .ci/newcomer.py build/wheel/clean/bin

## lock    after a change of constraints.txt or pyproject.toml: INDEX=https://…/simple states the hashes of requirements.hashed.txt
lock:
	@$(BIN)/$(INSTALL) --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python .ci/packages.py lock '$(INDEX)'

## sbom    what an installation of sites and hubs consists of, as CycloneDX: build/sbom.json
sbom: setup
	@mkdir -p build && $(BIN)/python .ci/packages.py sbom build/sbom.json
