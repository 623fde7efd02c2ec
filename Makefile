# make demo: image to video across five node processes. make test: every check. Both set up all they need.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
SECONDS ?= 120
SEED ?= 1000
SEEDS ?= 5000
JOBS ?= 2

# On few cores a second OpenMP thread spins against the first: ten times slower, not faster.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

# Tests in which somebody is judged by heartbeats or leases: they come first on the processors.
SERVING := tests/acceptance tests/client tests/node tests/runtime tests/stages tests/core/test_etcd.py tests/transports/test_processes.py

.PHONY: demo test test-full test-rdma test-rdma-quick test-serving test-parts test-proofs setup setup-test lint explore explore-full chaos leaders simulate validate shift offered-load bench clean

demo: setup
	$(BIN)/python -m stages.demo

test: setup-test lint
	$(MAKE) --jobs 3 --output-sync=target test-serving test-parts test-proofs

test-serving: setup-test
	$(BIN)/python -m pytest --durations 25 $(SERVING)

# These two beside the others, with what they leave of the processors: they wait more than they compute.
test-parts: setup-test
	nice -n 19 $(BIN)/python -m pytest --durations 25 $(SERVING:%=--ignore=%) --ignore=tests/tidy

# What looks at all sources keeps them in memory: in a process of its own, it slows down no other test.
test-proofs: setup-test
	nice -n 19 $(BIN)/python -m pytest tests/tidy
	nice -n 19 $(BIN)/python -m simulations explore --quick --mutants --published
	nice -n 19 $(BIN)/python -m simulations cluster --seed 0 --seeds 200

# At the scale at which faults were reported elsewhere (docs/explanation/faults.md): minutes. ROUNDS of the conformance
# checks more than the default ones take hours.
test-full: setup-test
	$(BIN)/python -m pytest -m full --durations 0 $(FULL_ARGUMENTS)

# In a virtual machine with two Soft-RoCE devices, under emulation: docs/how-to/test-rdma.md. What is compiled
# out here, and plugins that are not loaded, would take long in there.
RDMA_PYTEST = $(BIN)/python -m pytest -p pytest_asyncio.plugin -p pytest_timeout --timeout 300 \
	-p no:cacheprovider --assert=plain -q --durations 5 tests/rdma $(RDMA_ARGUMENTS)

RDMA_VM = $(BIN)/python -m tests.rdma.vm

test-rdma: RDMA_SECONDS := 2400
test-rdma: RDMA_BENCH = $(RDMA_VM) run --counted --memory 4096 --timeout 1200 -- $(BIN)/python -m onepiece.cli.bench_wires verbs --quick
test-rdma-quick: RDMA_SECONDS := 300
test-rdma-quick: RDMA_ARGUMENTS := -m "not slow"
test-rdma test-rdma-quick: setup-test
	$(BIN)/python -m compileall -q onepiece transports stages tests/rdma tests/transports tests/acceptance
	$(RDMA_VM) setup
	PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(RDMA_VM) run --memory 4096 --timeout $(RDMA_SECONDS) -- $(RDMA_PYTEST)
	$(RDMA_BENCH)

lint: setup-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/vulture

explore: setup-test
	$(BIN)/python -m simulations explore --quick --mutants --published

explore-full: setup-test
	$(BIN)/python -m simulations explore --full

chaos: setup-test
	$(BIN)/python -m simulations chaos --seconds $(SECONDS)

# Needs an etcd; Debian has it as etcd-server.
leaders: setup-test
	$(BIN)/python -m simulations leaders --seconds $(SECONDS)

simulate: setup-test
	$(BIN)/python -m simulations cluster --seed $(SEED) --seeds $(SEEDS) --jobs $(JOBS)

# On real node processes, seven and a half minutes and three; they want a machine that has little else to do.
validate: setup-test
	$(BIN)/python -m simulations validate

shift: setup-test
	$(BIN)/python -m simulations shift

# Real processes under half to five times the load that they bear, beside simulated ones; seven minutes, on a machine
# with little else to do.
offered-load: LOADS := 5 3 2 1.5 1 0.8 0.5
offered-load: setup-test
	mkdir -p build
	$(BIN)/onepiece bench admission --decisions 1000 --http-seconds 0 --load-seconds 40 --loads $(LOADS) --json \
		> build/offered-load.json
	$(BIN)/python -m simulations admission --workers 8 --spread 0.01 --wait-factor 0.15 --loads $(LOADS) \
		--measured build/offered-load.json --plot build/offered-load.png

bench: setup-test
	$(BIN)/onepiece bench transport
	$(BIN)/onepiece bench hop

setup: $(VENV)/.set-up
setup-test: $(VENV)/.set-up-test

# torch first and by itself: a CPU build that is already on the machine is then left alone.
$(VENV)/.set-up: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable ".[diffusion]"
	touch $@

$(VENV)/.set-up-test: $(VENV)/.set-up
	$(BIN)/pip install --quiet --editable ".[diffusion,bench,test,ucx]"
	touch $@

clean:
	rm -rf $(VENV) out build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
