.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
GPU_PYTHON ?= $(BIN)/python
REPORT ?= reports/run
STAMP := .venv/.installed
TORCH := 2.13.0
FRAMEWORKS := accelerate==1.15.0 pytorch-lightning==2.6.6 transformers==5.24.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# Every service is a process: without kept bytecode each start compiles all it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup setup-dev setup-browser pictures docs setup-torch kernels run test thorough nightly experiment vm-test gpu-test audit chaos mutants setup-lab lab lab-test lab-upgrade wheelhouse lint type format bench lock size sim clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

setup: $(STAMP) ## create .venv and install what running needs, pinned

$(STAMP): requirements.lock pyproject.toml deploy/install.py
	@test -x $(BIN)/python || { echo "creating .venv"; $(PYTHON) -m venv .venv; }
	@$(BIN)/python deploy/install.py $(BIN)/python requirements.lock
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

setup-dev: $(STAMP)-dev ## and what tests, lint and types need

$(STAMP)-dev: $(STAMP) requirements-dev.lock
	@$(BIN)/python deploy/install.py $(BIN)/python requirements-dev.lock
	@touch $@

pictures: setup-dev setup-browser ## the pictures of the guides, from a live cluster: docs/images, a minute
	$(BIN)/python -m tests.pictures

docs: setup-dev ## the documentation as a site: build/site/index.html
	$(BIN)/mkdocs build --quiet --strict

setup-browser: ## Chromium for the tests of pages, from the system's packages; needs root
	@deploy/browser_packages.sh

setup-torch: $(STAMP)-torch ## PyTorch (the CPU build) for slackwater.torch, and what its tests need: pinned, 1.1 GB

$(STAMP)-torch: $(STAMP) requirements-torch.lock
	@$(BIN)/python deploy/install.py $(BIN)/python requirements-torch.lock || \
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes \
	  --extra-index-url $(TORCH_INDEX) -r requirements-torch.lock
	@touch $@

kernels: setup ## compile all that is compiled when it is first needed
	@$(BIN)/slackwater compile

run: setup ## what it does, shown in two minutes: a live cluster, six jobs of a real trace, three on GPUs
	@$(BIN)/slackwater compile folds streams
	@$(BIN)/loadgen demo --report $(REPORT)

test: setup-dev setup-torch kernels ## unit, simulation, integration and fault tests
	$(BIN)/python -m pytest -q -n 3 --dist worksteal --cache-clear -m 'not slow and not nightly and not lab' tests \
	|| { [ $$? -eq 1 ] && $(BIN)/python tests/again.py; }

thorough: setup-dev setup-torch kernels ## what `make test` leaves out: more seeds, published tables
	$(BIN)/python -m pytest -q -n 3 --dist worksteal --cache-clear -m 'slow and not nightly and not lab' tests \
	|| { [ $$? -eq 1 ] && $(BIN)/python tests/again.py; }

nightly: setup-dev setup-torch kernels ## what is long and seldom fails, the experiment, all seeds
	$(BIN)/python -m pytest -q -n 3 --dist worksteal -m 'nightly and not lab' --timeout 1800 tests \
	  --ignore tests/integration/fidelity
	$(BIN)/python -m pytest -q -m nightly --timeout 1800 tests/integration/fidelity
	$(MAKE) sim mutants experiment lab-test lab-upgrade

experiment: setup ## the paper's figure 10 with its controls; a quiet machine, some minutes
	@$(BIN)/slackwater compile folds streams
	@$(BIN)/loadgen experiment sharing

vm-test: setup-dev ## verbs (RDMA) and swap in an emulated machine; PARTS="conformance refusals live swap"
	$(BIN)/python tests/vm/guest.py $(PARTS:%=--part %)

setup-lab: setup-dev $(STAMP)-lab ## Ansible, for `make lab` and `make lab-test`; the system's packages, where root runs it

$(STAMP)-lab: requirements-lab.lock deploy/install.py
	@test -x .venv-lab/bin/python || $(PYTHON) -m venv .venv-lab
	@$(BIN)/python deploy/install.py .venv-lab/bin/python requirements-lab.lock
	@deploy/lab_packages.sh
	@touch $@

$(STAMP)-audit: requirements-audit.lock deploy/install.py
	@test -x .venv-audit/bin/python || $(PYTHON) -m venv .venv-audit
	@$(BIN)/python deploy/install.py .venv-audit/bin/python requirements-audit.lock
	@touch $@

audit: setup $(STAMP)-audit ## known vulnerabilities of the pinned packages, and their list: reports/sbom.json
	@$(BIN)/python deploy/audit.py .venv-audit/bin requirements.lock reports/sbom.json $(AUDIT_ARGS)

chaos: setup-dev ## kills and pauses of each service under load, judged by what clients were told; CHAOS_ARGS="--times 500 ..."
	$(BIN)/python -m tests.chaos $(CHAOS_ARGS)

mutants: setup-dev kernels ## single changes of what matters most: do the unit tests notice? MUTANTS_ARGS="--count 60"
	$(BIN)/python -m tests.mutants $(MUTANTS_ARGS)

wheelhouse: setup ## the wheels of a release, for machines without a network: deploy/ansible/wheelhouse.tar
	$(BIN)/python deploy/wheelhouse.py deploy/ansible/wheelhouse.tar

lab: setup-lab ## three machines with systemd on this one, made a cluster by site.yml; needs root. `python -m tests.lab down` ends them
	$(BIN)/python -m tests.lab up

lab-test: setup-lab ## deploy, lose and restore machines of a lab under load, 17 min; needs root (SLACKWATER_LAB=required: or fail)
	cd deploy/ansible && PATH="$(CURDIR)/.venv-lab/bin:$$PATH" LC_ALL=C.UTF-8 ansible-lint
	$(BIN)/python -m pytest -q --cache-clear -m 'lab and not nightly' --maxfail 4 --durations 8 $(LAB_ARGS) tests/lab \
	|| { [ $$? -eq 1 ] && $(BIN)/python tests/again.py; }

lab-upgrade: setup-lab ## from the version before to this one, on a lab, under load
	$(BIN)/python -m pytest -q -m 'lab and nightly' tests/lab

gpu-test: ## device memory on this machine's GPU, then the figures (docs/guide/operator.md)
	$(GPU_PYTHON) -m pytest -q tests/gpu
	$(GPU_PYTHON) -m pytest -q -m gpu tests/unit/common/transport tests/integration/aggregator
	$(GPU_PYTHON) benchmarks/gpu.py --json benchmarks/results/gpu.json

sim: setup-dev ## 200 seeds of ten virtual minutes of the whole system; a virtual day of the pool
	$(BIN)/python -m tests.sim.test_whole_system --seeds 200
	$(BIN)/python -m pytest -q -m slow tests/sim tests/unit/loadgen/simulator/pool

lint: setup-dev ## style and spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

type: setup-dev ## mypy, strict
	$(BIN)/mypy

format: setup-dev ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup-dev setup-torch ## every benchmark: a figure, its peer in the same run, and their ratio
	for b in benchmarks/[a-z]*.py; do echo "== $$b"; $(BIN)/python $$b || exit 1; done

PIP_COMPILE := $(BIN)/pip-compile --quiet --generate-hashes --allow-unsafe --strip-extras \
  --no-emit-index-url --no-emit-find-links --no-emit-trusted-host

lock: setup-dev ## pin the newest allowed versions of every dependency
	$(PIP_COMPILE) --all-build-deps --extra web --extra top --output-file requirements.lock pyproject.toml
	$(PIP_COMPILE) --extra dev --constraint requirements.lock \
	  --output-file requirements-dev.lock pyproject.toml
	printf '%s\n' pip-audit cyclonedx-bom | $(PIP_COMPILE) --output-file requirements-audit.lock -
	printf '%s\n' torch==$(TORCH) $(FRAMEWORKS) | $(PIP_COMPILE) --constraint requirements-dev.lock \
	  --output-file requirements-torch.lock -

size: ## lines of product code by folder
	@for d in schemas common services loadgen $$(find src/slackwater/* -maxdepth 0 -type d ! -name __pycache__); do \
	  printf '%8d  %s\n' $$(find $$d -name '*.py' | xargs cat | wc -l) $$d; done
	@printf '%8d  all\n' $$(find schemas common services loadgen src -name '*.py' | xargs cat | wc -l)

clean: ## remove what the targets made
	rm -rf .venv build *.egg-info src/*.egg-info .mypy_cache .ruff_cache .pytest_cache reports
