# One verb per intent. `make bench` (the main job) and `make test` run `make setup` themselves.
PYTHON ?= python3
VENV ?= .venv
# Any other build: make bench TORCH=torch==2.11.0
TORCH ?= torch==2.13.0
JOBS ?= $(shell nproc 2>/dev/null || echo 2)

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(subst =,-,$(TORCH))
# Minutes of `make bench`, and of them at most for cases; faults get what these leave.  What does not
# fit is printed and recorded as left out.
BENCH_BUDGET ?= 4.7
RUN_BUDGET ?= 3.8
# Minutes and blocks of `make peers` on an idle machine; fewer blocks than the default, so that all pairs fit.
PEERS_BUDGET ?= 16
PEERS_BLOCKS ?= 18

export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup compiled bench peers test launches slow clusters conformance coverage mutants mutants-changed ecosystem gpu gpu-short cluster image lock compare report docs generated lint format clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP) ## create .venv with pinned dependencies (once)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH) into $(VENV) (2 GB with all packages, a few minutes, once) ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt "$(TORCH)"
	@echo "installing the pinned dependencies ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,dev,cluster,docs]"
	@echo "installing the extra deepspeed (built from source, without compiled operators) ..."
	@DS_BUILD_OPS=0 $(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e ".[deepspeed]" >/dev/null 2>&1 \
	&& echo "deepspeed is installed" \
	|| echo "deepspeed could not be installed: its cases are skipped (docs/install-extras.md)"
	@echo "installing the extra mpi (mpi4py and Open MPI) ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[mpi]" >/dev/null 2>&1 \
	&& echo "mpi is installed" \
	|| echo "mpi could not be installed: its cases are skipped (docs/install-extras.md)"
	@rm -f $(VENV)/.installed-* && touch $@

# Where PYTHONDONTWRITEBYTECODE is set, as in many images, every new process would compile the suite again.
compiled: setup
	@$(BIN)/python -m compileall -q suite impls tools

bench: compiled ## the main job: quick conformance on every backend, then the planted faults (under 5 minutes)
	@run=results/$$(date -u +%Y%m%d-%H%M%S)-bench; worst=0; began=$$(date +%s); \
	$(BIN)/shardproof run --tier quick --budget $(RUN_BUDGET) -j $(JOBS) --results $$run || worst=$$?; \
	test $$worst -ge 2 -a $$worst -ne 3 && exit $$worst; \
	left=$$($(PYTHON) -c "import time; print(f\"{max(0.5, $(BENCH_BUDGET) - (time.time() - $$began) / 60):.2f}\")"); \
	$(BIN)/shardproof mutants --tier quick --budget $$left -j $(JOBS) --results $$run || { code=$$?; test $$worst -eq 1 || worst=$$code; }; \
	exit $$worst

test: compiled ## tests of the judge itself, with one planted fault per file and check
	@$(BIN)/pytest tests -n $(JOBS) --dist worksteal -m "not slow and not launches"

SOME = $(if $(PART),--part $(PART))

launches: compiled ## tests that start many processes: watch, parts of a system in prove, init
	@$(BIN)/pytest tests -n $(JOBS) --dist worksteal -m "launches and not slow" $(SOME)

slow: compiled ## slow tests; PART=1/3: the first third of them, also of launches and clusters
	@$(BIN)/pytest tests -n $(JOBS) --dist worksteal -m slow --ignore tests/cluster $(SOME)

clusters: compiled ## slow tests that need a container engine or a Slurm
	@$(BIN)/pytest tests/cluster -m slow $(SOME)

peers: setup ## reference strategies beside their upstream peers, into results/README.md (15 minutes on an idle machine)
	@run=results/$$(date -u +%Y%m%d-%H%M%S)-peers; \
	$(BIN)/shardproof bench peers --blocks $(PEERS_BLOCKS) --budget $(PEERS_BUDGET) --results $$run; code=$$?; \
	test $$code -eq 0 -o $$code -eq 3 || exit $$code; \
	$(BIN)/python -m tools.peers $$run results/README.md

conformance: compiled ## all of conformance and of checkpoints, all tiers
	@$(BIN)/shardproof run --tier full -j $(JOBS)

coverage: setup ## pairs of a trigger and a feature that no case has
	@$(BIN)/shardproof list coverage

mutants: compiled ## every planted fault against the checks that must catch it; then commit results/faults.json
	@$(BIN)/python -m tools.faults --all -j $(JOBS)

mutants-changed: compiled ## planted faults that changes since then can affect; all of them after a week
	@$(BIN)/python -m tools.faults -j $(JOBS)

ecosystem: compiled ## systems that people use, each beside its known verdict (PICOTRON=checkout adds picotron)
	@$(BIN)/python deploy/ecosystem.py $(if $(PICOTRON),--picotron "$(PICOTRON)") -j $(JOBS)

# Uses the installed torch, not the pinned one of `make setup`.
gpu: ## all measurements on GPUs, into results/baselines (40 minutes; docs/gpu.md)
	@$(PYTHON) deploy/gpu.py

gpu-short: ## the same in at most 8 minutes without downloads; RUN=results/RUN resumes
	@$(PYTHON) deploy/gpu.py --short $(if $(RUN),--results "$(RUN)")

# Needs a container engine.  Runs every lane of equal bits.
cluster: setup ## DDP on 2 containers x 2 ranks, then the same cases in local processes: equal digests
	@run=results/$$(date -u +%Y%m%d-%H%M%S); chosen='quick or ((bitwise or dyadic) and sgd)'; \
	$(BIN)/shardproof cluster run ddp-gpt ddp-dyadic --backend gloo --world 4 --tier full -k "$$chosen" --results $$run-cluster && \
	$(BIN)/shardproof reproduce $$run-cluster --results $$run-local

image: setup ## build the container images if missing or outdated
	@$(BIN)/shardproof cluster build

compare: setup ## regenerate the table across hardware from the committed baselines
	@$(BIN)/shardproof compare results/baselines/*.json --by hardware --into results/README.md

lock: setup ## lock the packages of the images with hashes, in deploy/locks
	@$(BIN)/python deploy/lock.py

report: setup ## regenerate the tables of results/README.md from the newest run
	@$(BIN)/shardproof report --into results/README.md

docs: setup ## build the documentation site into build/docs; a warning is an error
	@$(BIN)/python -m sphinx -q -W --keep-going -b html -c docs . build/docs
	@echo "open build/docs/index.html"

generated: setup ## regenerate docs/bug-zoo.md, docs/strategies/ and scenarios/conformance/quick.md
	@$(BIN)/python docs/make_bug_zoo.py
	@$(BIN)/python docs/make_strategies.py
	@$(BIN)/python -m tools.shrink --page

lint: setup ## style and types
	@$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy

format: setup ## rewrite to style
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

clean: ## remove the virtual environment and caches (results stay)
	@rm -rf $(VENV) .venv-gpu .venv-ecosystem .ruff_cache .mypy_cache .pytest_cache .hypothesis build *.egg-info
