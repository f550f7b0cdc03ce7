# Everything a person or CI does with this repository. `make` alone lists the targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CORE_INSTALLED := $(VENV)/.core-installed
INSTALLED := $(VENV)/.installed

# Tests start hundreds of processes: without bytecode each would compile the sources again, in 0.2 s of CPU time.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv lock audit train test test-torch parity test-fine-tuning test-faults test-all test-cluster test-emulated cluster-up chaos soak fuzz lint format docs site structure \
	bench gpu-session-kit clean

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(INSTALLED) ## Make the virtual environment with all that development needs.

# What is locked first, each file by its hash; then torch, whose builds differ from index to index, and what it needs of a
# GPU, by version; docs/reference/dependencies.md says more.
$(CORE_INSTALLED): pyproject.toml constraints.txt core.lock hatch_build.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --require-hashes -r core.lock
	$(BIN)/python -m pip install --quiet --no-compile --no-build-isolation -c constraints.txt -e .
	@touch $@

$(INSTALLED): $(CORE_INSTALLED) requirements.lock fleet/pyproject.toml
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt -e '.[dev]' -e './fleet[dev]'
	@touch $@

# packages that are not locked: torch, and what only its builds for a GPU need
UNLOCKED := torch triton $(addprefix nvidia-,cublas cuda-cupti cuda-nvrtc cuda-runtime cudnn-cu13 cufft cufile curand \
	cusolver cusparse cusparselt-cu13 nccl-cu13 nvjitlink nvshmem-cu13 nvtx) $(addprefix cuda-,bindings pathfinder toolkit)

COMPILE := --quiet --universal --python-version 3.11 --generate-hashes -c constraints.txt --custom-compile-command "make lock" \
	$(addprefix --no-emit-package ,$(UNLOCKED) phalanx)

lock: ## Choose the newest versions of what development needs, for requirements.lock and core.lock.
	test -x build/uv/bin/uv || { $(PYTHON) -m venv build/uv && build/uv/bin/python -m pip install --quiet uv; }
	build/uv/bin/uv pip compile $(COMPILE) --upgrade --extra dev -o requirements.lock pyproject.toml fleet/pyproject.toml
	build/uv/bin/uv pip compile $(COMPILE) --extra build -c requirements.lock -o core.lock pyproject.toml

audit: ## Look for known vulnerabilities in what is locked; where advisories cannot be reached, say so.
	test -x build/audit/bin/pip-audit || { $(PYTHON) -m venv build/audit && \
		build/audit/bin/python -m pip install --quiet pip-audit; }
	@for asked in "--require-hashes -r requirements.lock" "--no-deps -r constraints.txt"; do \
		build/audit/bin/pip-audit --strict --progress-spinner off --disable-pip $$asked >build/audit/report 2>&1; code=$$?; \
		grep -v '^Traceback\|^  ' build/audit/report; \
		if grep -q 'could not be audited\|ConnectionError\|ServiceError' build/audit/report; then \
			echo "make audit: no advisories can be reached from here: nothing is known of these packages" >&2; exit 2; \
		fi; \
		test $$code = 0 || exit 1; \
	done

# Half of its steps, so that installing and training take three minutes on two cores.
train: $(CORE_INSTALLED) ## Install Phalanx, train the example on real text, report on it, and let it write some text.
	$(BIN)/phalanx train examples/gpt-python.yaml steps=150 --run runs/gpt-python
	$(BIN)/phalanx report runs/gpt-python --html runs/gpt-python/report.html
	$(BIN)/phalanx generate runs/gpt-python

# Short files come last: with a long one at the end (the soak takes a minute), one of both processes would idle.
PYTEST_ON_BOTH_CORES := -m pytest -m "not slow" --durations 20 -n 2 --dist loadfile --no-loadscope-reorder

test: venv ## Run unit tests and training on several processes.
	$(BIN)/python $(PYTEST_ON_BOTH_CORES) tests/world fleet/tests/world tests/unit fleet/tests/unit

test-faults: venv ## Test that runs survive injected faults and damaged files: about as long as `make test`.
	$(BIN)/python $(PYTEST_ON_BOTH_CORES) tests/soak tests/chaos tests/fuzz fleet/tests/fuzz

parity: venv ## Compare every parallelism with one process: pairs of models, precisions, optimizers, dropout and data.
	$(BIN)/python -m pytest -n 2 --dist loadgroup --durations 20 tests/world/test_parity.py tests/world/test_dropout_parity.py

test-torch: build/torch-$(VERSION)/.installed ## Test with another torch, such as VERSION=2.11.0, and PYTHON=python3.14; takes its build for CUDA.
	build/torch-$(VERSION)/bin/python $(PYTEST_ON_BOTH_CORES) tests/world fleet/tests/world tests/unit fleet/tests/unit

build/torch-%/.installed:
	$(PYTHON) -m venv build/torch-$*
	build/torch-$*/bin/python -m pip install --quiet torch==$* -e '.[dev]' -e './fleet[dev]'
	@touch $@

test-fine-tuning: venv ## Test conversations, preferences, teachers, images, whole texts and new tokens in every combination.
	$(BIN)/python -m pytest -n 2 --dist loadfile --durations 20 $(addprefix tests/world/test_,conversations.py \
		image_conversations.py whole_texts.py new_tokens.py)

# A Slurm serves one process of pytest; everything else has ports and directories of its own.
ON_SLURM := $(wildcard tests/cluster/test_slurm_*.py fleet/tests/cluster/test_slurm_*.py)
IGNORE_SLURM := $(addprefix --ignore ,$(ON_SLURM))

test-all: venv ## Run all tests without Slurm, also those that take minutes each.
	$(BIN)/python -m pytest -n 2 --dist loadfile $(IGNORE_SLURM) \
		tests/world tests/cluster tests/chaos tests/unit tests/browser tests/fuzz tests/soak fleet/tests

test-cluster: venv ## Test on real backends, launchers, servers and a browser, made on this machine; Slurm needs root.
	$(BIN)/python $(PYTEST_ON_BOTH_CORES) $(IGNORE_SLURM) tests/cluster fleet/tests/cluster tests/browser fleet/tests/browser
	$(BIN)/python -m pytest $(ON_SLURM)

# PART=1 leaves out what is marked as slow: .ci/run has ten minutes for it.
test-emulated: build/emulated/venv/.installed ## Test the GPU path on an emulated GPU; takes torch's CUDA build (4.7 GB).
	build/emulated/venv/bin/python -m pytest $(if $(PART),-m "not slow") tests/emulated

build/emulated/venv/.installed:
	@echo "downloading torch 2.11 for CUDA into build/emulated/venv: 4.7 GB"
	$(PYTHON) -m venv build/emulated/venv
	build/emulated/venv/bin/python -m pip install --quiet torch==2.11.0 pytest pytest-timeout -e '.[tokenizers]'
	@touch $@

build/azurite/.installed: ## Install Azurite, an emulator of Azure's storage, for its test (170 MB; needs npm).
	npm install --silent --no-fund --no-audit --prefix build/azurite azurite@3
	@touch $@

# Its own environment: the server needs python-dateutil 2, the client of Kubernetes 3.
build/mlflow/venv/.installed: ## Install an MLflow server for its test (about 1 GB).
	$(PYTHON) -m venv build/mlflow/venv
	build/mlflow/venv/bin/python -m pip install --quiet 'mlflow>=3.1,<4'
	@touch $@

cluster-up: venv ## Open a shell on such a Slurm; `exit` removes it.
	@$(BIN)/python tests/helpers/slurm_cluster.py

chaos: venv ## Inject hundreds of faults of every kind into one recipe, and compare digests.
	rm -rf build/chaos
	$(BIN)/phalanx chaos tests/chaos/hundred.yaml --faults 100 --kinds kill,crash,abort,fork-server,agent --nproc-per-node 2 --run build/chaos/kills
	$(BIN)/phalanx chaos tests/chaos/hundred.yaml steps=1000 --faults 30 --nproc-per-node 2 --run build/chaos/all
	$(BIN)/phalanx chaos tests/chaos/hundred.yaml steps=1000 --faults 10 --kinds kill,agent,node-loss,partition --nodes 2 --run build/chaos/nodes
	$(BIN)/phalanx chaos tests/chaos/hundred.yaml steps=1000 --faults 10 --kinds kill,agent,job-runner,queue-daemon --nproc-per-node 2 --queue --run build/chaos/queue

soak: venv ## Train random recipes under random faults for HOURS (2), and compare their digests; SEED is of the first.
	PYTHONPATH=tests/helpers $(BIN)/python tests/soak/soak.py --hours $(or $(HOURS),2) $(if $(SEED),--seed $(SEED))

fuzz: venv ## Run the fuzz tests for HOURS (2), each time with the next SEED (1), until one fails.
	@echo "$(or $(HOURS),2) $(or $(SEED),1)" | grep -Eqx '[0-9]+(\.[0-9]+)? [0-9]+' || \
		{ echo "error: HOURS=$(HOURS) SEED=$(SEED): expected numbers, such as HOURS=0.5 SEED=7" >&2; exit 64; }
	@seed=$(or $(SEED),1); end=$$(( $$(date +%s) + $$(awk 'BEGIN { print int(3600 * $(or $(HOURS),2)) }') )); \
	while FUZZ_SEED=$$seed $(BIN)/python -m pytest -q -x tests/fuzz fleet/tests/fuzz || \
			{ echo "again: FUZZ_SEED=$$seed $(BIN)/python -m pytest -x tests/fuzz fleet/tests/fuzz"; exit 1; }; do \
		seed=$$(( seed + 1 )); [ $$(date +%s) -lt $$end ] || break; \
	done; echo "no failure in the seeds below $$seed"

structure: venv ## Print the figures of the code's structure beside their goals; ARGS=--list names what misses them.
	$(BIN)/python tools/structure.py $(ARGS)

lint: venv ## Check format, lint, types, layers, words and the budgets of lines.
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/words.py
	$(BIN)/python tools/structure.py --budgets

format: venv ## Format the code and fix what ruff can fix.
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: venv ## Write the reference pages that come from the code, and build the sites into build/site and build/fleet-site.
	$(BIN)/python tools/reference.py
	$(MAKE) VENV=$(VENV) site

site: venv ## Build the sites into build/site and build/fleet-site; a broken link is an error.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict -f fleet/mkdocs.yml

bench: venv ## Run the benchmarks against their peers; tables go to docs/benchmarks.
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[bench]'
	for script in loop_overhead data checkpoint determinism_cost; do \
		$(BIN)/python benchmarks/$$script.py --out docs/benchmarks/$$script.md || exit 1; \
	done

gpu-session-kit: ## Download what benchmarks/gpu_session.py needs on a machine with torch for CUDA but without a package index.
	rm -rf build/gpu-session-kit
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
		--platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 -d build/gpu-session-kit \
		pydantic==2.14.4 pydantic-core==2.50.5 annotated-types typing-inspection xxhash \
		pytest pytest-timeout pluggy iniconfig packaging pygments psutil obstore ruamel.yaml ruamel.yaml.clib nvidia-ml-py \
		prometheus-client starlette uvicorn anyio idna h11 click typing-extensions liger-kernel==0.8.5

clean: ## Remove what was built; the runs in runs/ and the virtual environment stay.
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find src tests benchmarks examples fleet -name __pycache__ -type d -prune -exec rm -rf {} +
