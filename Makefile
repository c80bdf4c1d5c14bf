# One door for developers: `make check` before a commit. CI runs the same, `make test-rest` and `make oldest`.
# The interpreter of a version, or nothing where none works: a shim of pyenv may fail until a version is named.
find_python = $(shell { $(call print_python,$(1)) || PYENV_VERSION=$(1) $(call print_python,$(1)); } 2>/dev/null)
print_python = python$(1) -c 'import sys; print(sys.executable)'
# References and figures are made with Python 3.12.
PYTHON ?= $(or $(call find_python,3.12),python3)
BIN := .venv/bin
OLDEST := .venv-oldest/bin
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
# Code that touches torch has to work on the oldest supported torch; other rooms do not depend on its version.
OLDEST_TESTS := $(foreach room,gpu rank record world,tests/unit/$(room)) tests/unit/test_importing.py \
	tests/unit/test_patch.py \
	$(foreach name,compiled_programs examples measured_path profiler,tests/integration/test_$(name).py)
# What `make torch` adds: the value contract, replay exactness, compiled graphs, and that recording changes nothing.
TORCH_TESTS := $(OLDEST_TESTS) $(foreach name,compiled recording_changes_nothing replay_exact values values_agree values_in_training, \
	tests/integration/test_$(name).py)
# PyPI's releases from the oldest supported to the newest; 2.13.0 has no CUDA build on some indexes.
TORCHES := 2.10.0 2.11.0 2.12.1 2.14.1 2.15.0
TORCH_ENV := .venv-torch-$(TORCH)
# What is supported besides 3.12: the oldest Python and the newest.
PYTHONS := 3.11 3.13
PYTHON_ENV := .venv-python-$(VERSION)
C_SOURCES = git ls-files -z '*.c' '*.h' '*.cpp' '*.cu'
# The pages' JavaScript has a linter and tests of its own. Users need neither, so they run where node is installed.
NPM := $(shell command -v npm)
DEMO := fakedist-demo-rank0of1024
# What `make help` lists first, in this order.
EVERYDAY := setup demo test check lint types format budgets
# A GPU machine may have its own torch and no network: make gpu takes the Python that it finds.
GPU_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
OUT ?= gpu-results
# Tests of a file stay in one process, since they share runs. Files begin in their order: whole runs first, unit tests last.
WORKERS ?= 2
PARALLEL = --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# Without bytecode, every process would compile the package and its tests again.
unexport PYTHONDONTWRITEBYTECODE

# Says that an environment has another Python. It stays: it may be wanted, and a new one takes minutes.
note_python = @grep -qs '^version.* = 3\.12\.' $(1)/pyvenv.cfg || \
	echo "note: $(1) does not have Python 3.12, with which references and figures are made: rm -rf $(1) for a new one"

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-rest test-all mutants nightly lint types budgets check format bench bench-pace accuracy accuracy-times accuracy-kinds truth measured gallery site gpu calibrate oldest torch python matrix dist exports clean
.PHONY: frameworks recipes clients clients-new clients-recipes clients-longer clients-findings clients-fast test-page plotly

help: ## list the targets
	@awk -F ':.*## ' -v everyday='$(EVERYDAY)' ' \
		function line(name) { printf "  %-17s%s\n", name, text[name]; delete text[name] } \
		/^[a-z-]+:.*## / { text[$$1] = $$2; names[++n] = $$1 } \
		END { split(everyday, first, " "); print "Every day:"; for (i = 1; i in first; i++) line(first[i]); \
			print "\nMore:"; for (i = 1; i <= n; i++) if (names[i] in text) line(names[i]) }' $(MAKEFILE_LIST)

setup: .venv/.installed ## .venv with the exact versions of constraints.txt, and the virtual GPU
	$(call note_python,.venv)

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fakedist needs Python 3.11 or newer: make PYTHON=python3.12")'
	@echo "installing into .venv: PyTorch's CUDA build is 5.6 GB, this takes minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python $(PIP_INSTALL) --constraint constraints.txt setuptools
	$(BIN)/python $(PIP_INSTALL) --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	-$(BIN)/fakedist doctor
	touch $@

demo: setup ## profile rank 0 of 1,024 of a 70B Llama, on this machine's GPU or without one
	$(BIN)/fakedist profile --world-size 1024 --rank 0 --force --output $(DEMO) \
		examples/llama_fsdp2.py --model 70b --tp 8 --checkpoint full
	@echo
	@echo "The run is in $(DEMO); the same tables again: $(BIN)/fakedist report $(DEMO)"

test: setup test-page ## every unit test, and a whole run of most kinds: 6 minutes; TESTS= chooses
	$(BIN)/python -m pytest $(PARALLEL) --short $(TESTS)

test-rest: setup ## the other whole runs, damaged files, pages in a browser; TESTS= chooses
	$(BIN)/python -m pytest $(PARALLEL) --rest $(TESTS)

test-all: test test-rest oldest clients-fast ## all tests, also on the oldest torch and of frameworks

test-page: ## the pages' JavaScript, by node's own test runner
	$(if $(NPM),npm run --silent test,@echo "node is not installed: the pages' JavaScript is not tested")

mutants: setup ## change one thing at a time: do the unit tests notice? ARGS=--sample 500
	$(BIN)/python -m tests.mutants $(ARGS)

nightly: frameworks ## what takes too long for CI: other torches, Pythons, poisoned memory, fuzzers; ONLY= chooses
	$(BIN)/python -m tests.nightly --torches '$(TORCHES)' --pythons '$(PYTHONS)' --only '$(ONLY)'

lint: setup $(if $(NPM),node_modules/.installed) ## Python, C, C++ and JavaScript: mistakes, format, statements
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/statements.py
	$(C_SOURCES) | xargs -0 $(BIN)/clang-format --dry-run --Werror
	$(if $(NPM),npm run --silent lint,@echo "npm is not installed: the pages' JavaScript is not linted")

# Not npm ci: it refuses where a registry lacks the packages of other platforms. package.json has the exact version.
node_modules/.installed: package.json package-lock.json
	npm install --no-save --no-audit --no-fund --silent
	touch $@

types: setup ## mypy, strict
	$(BIN)/mypy

budgets: setup ## our own examples against reports/baselines
	$(BIN)/fakedist check

check: lint types test budgets ## before a commit: lint, types, test, budgets

frameworks: .venv/.frameworks ## DeepSpeed, Accelerate, torchtitan and the rest of docs/clients.md into .venv

.venv/.frameworks: .venv/.installed constraints-clients.txt
	$(BIN)/python $(PIP_INSTALL) --constraint constraints.txt --constraint constraints-clients.txt \
		--no-build-isolation --editable '.[dev,clients]'
	touch $@

recipes: .venv/.recipes ## the packages of public projects' recipes too, which need 400 MB and no part of CI

# Their own requirements are left aside: LitGPT's exclude the huggingface_hub of Transformers, OpenCV's needs a display.
.venv/.recipes: .venv/.frameworks requirements-recipes.txt
	$(BIN)/python $(PIP_INSTALL) --no-deps --requirement requirements-recipes.txt
	touch $@

# A project that pins other versions than ours: what it has of its own, and .venv's packages behind it.
.venv-%: tests/clients/environments/%.txt .venv/.frameworks ## an environment of a project of docs/clients.md, by its name
	$(BIN)/python -m venv --without-pip $@
	realpath .venv/lib/python*/site-packages . > $$(echo $@/lib/python*/site-packages)/behind.pth
	ln -sfn $$(realpath .venv/lib/python*/site-packages/nvidia) $$(echo $@/lib/python*/site-packages)/nvidia
	$@/bin/python $(PIP_INSTALL) --no-deps --requirement $<
	rm -rf $@/lib/python*/site-packages/tests  # of wheels that bring a package of ours' name

clients-projects: $(patsubst tests/clients/environments/%.txt,.venv-%,$(wildcard tests/clients/environments/*.txt)) ## their jobs, each in its environment
	for each in $^; do PATH=$$PWD/$$each/bin:$$PATH $$each/bin/python -m tests.clients.run --projects || exit 1; done

clients: recipes ## run every job of every framework, write docs/clients.md; ONLY=text chooses
	$(BIN)/python -m tests.clients.run --only '$(ONLY)'

clients-new: recipes ## the same, only for jobs that have no result yet
	$(BIN)/python -m tests.clients.run --only '$(ONLY)' --new

clients-recipes: recipes ## only public projects' recipes, one rank of each: 15 minutes
	FAKEDIST_RECIPES=1 $(BIN)/python -m pytest $(PARALLEL) tests/clients/test_recipes.py

clients-longer: recipes ## every job for 12 steps, those in which the host is timed too; ONLY=text chooses
	FAKEDIST_LONGER=1 $(BIN)/python -m tests.clients.run --only '$(ONLY)'

clients-findings: recipes ## the findings of every job, each with its judgement
	FAKEDIST_LONGER=1 $(BIN)/python -m tests.clients.finding_survey

clients-fast: frameworks ## the fast jobs, and launchers
	$(BIN)/python -m pytest $(PARALLEL) tests/clients

format: setup $(if $(NPM),node_modules/.installed) ## format Python, C, C++ and JavaScript
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(C_SOURCES) | xargs -0 $(BIN)/clang-format -i
	$(if $(NPM),npm run --silent format)

plotly: ## build the plotly.js that pages carry (tools/plotly): 300 MB of packages, 1 minute
	cd tools/plotly && npm install --no-save --no-audit --no-fund --silent && node build.js

bench: setup ## every benchmark but bench-pace, results on stdout
	for file in $(filter-out bench/pace.py bench/processes.py,$(wildcard bench/*.py)); do echo "== $$file"; $(BIN)/python $$file || exit 1; done

bench-pace: setup ## fails if fakedist got slower than the lines of bench/pace.csv: 5 to 25 minutes; ARGS=--keep adds one
	$(BIN)/python bench/pace.py $(ARGS)

gpu: ## measure what waits for a GPU on the one of this machine: 30 minutes, into gpu-results; PIECES= chooses
	$(GPU_PYTHON) -m tests.gpu.confirm $(PIECES) --out $(OUT)

accuracy: setup ## real processes against faked ranks, on virtual GPUs: 10 minutes; into docs/accuracy
	$(BIN)/python -m tests.accuracy.many --backend nccl --backend gloo --write

calibrate: ## measure kernels of many shapes on the GPU of this machine, for --times
	$(GPU_PYTHON) -m tests.gpu.calibrate

measured: setup ## published measurements of kernels (bench/measured/README.md): 80 MB, 1 minute
	$(BIN)/python $(PIP_INSTALL) --no-deps --target build/measured aiconfigurator-core==0.12.0
	$(BIN)/python bench/measured/make.py build/measured/aiconfigurator_core/systems/data
	$(BIN)/python bench/measured/collectives.py build/measured/aiconfigurator_core/systems/data
	$(BIN)/python bench/measured/dispatchers.py

accuracy-times: setup ## estimated kernel times against left-out measured ones; into docs/accuracy
	$(BIN)/python bench/accuracy_times.py
	$(BIN)/python bench/accuracy_collectives.py

accuracy-kinds: setup ## what is known of the kernels of 250 operations: 1 minute; into docs/accuracy
	$(BIN)/python -m tests.accuracy.kernel_kinds

# Rows of Megatron-LM need Transformer Engine (tests/clients/build_transformer_engine.sh), and are left out without it.
truth: $(if $(FAST),setup,frameworks) ## rebuild published peaks and steps, into docs/truth.md; ONLY= names rows, FAST=1 runs none
	$(BIN)/python -m tests.truth --only '$(ONLY)' $(if $(FAST),--fast) $(ARGS)

gallery: setup ## make the pages of reports/ and the pictures of the docs again; ARGS= names some
	$(BIN)/python -m reports.make $(ARGS)

site: setup ## the documents and the gallery as a web site, into build/site
	$(BIN)/python -m reports.site build/site

oldest: .venv-oldest/.installed ## the tests that touch torch, on the oldest supported one
	$(call note_python,.venv-oldest)
	$(OLDEST)/python -m pytest $(PARALLEL) --short $(OLDEST_TESTS)

.venv-oldest/.installed: pyproject.toml constraints-oldest.txt
	test -x $(OLDEST)/python || $(PYTHON) -m venv .venv-oldest
	$(OLDEST)/python $(PIP_INSTALL) --constraint constraints-oldest.txt setuptools
	$(OLDEST)/python $(PIP_INSTALL) --constraint constraints-oldest.txt --no-build-isolation --editable '.[test]'
	touch $@

torch: ## tests and our own jobs on another torch, in .venv-torch-... (6 GB): make torch TORCH=2.12.1
	@test -n '$(TORCH)' || { echo 'which torch? make torch TORCH=2.12.1   ($(TORCHES))'; exit 2; }
	$(MAKE) --no-print-directory $(TORCH_ENV)/.installed
	$(call note_python,$(TORCH_ENV))
	$(TORCH_ENV)/bin/fakedist doctor
	$(TORCH_ENV)/bin/python -m pytest $(PARALLEL) $(TORCH_TESTS)
	sed 's#"reports/baselines"#"build/baselines-$(TORCH)"#; s/tool.fakedist.check/check/' pyproject.toml > check-torch-$(TORCH).toml
	$(TORCH_ENV)/bin/fakedist check --config check-torch-$(TORCH).toml --update
	rm check-torch-$(TORCH).toml

.venv-torch-%/.installed: pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) 'setuptools>=77' torch==$* numpy
	$(@D)/bin/python $(PIP_INSTALL) --no-build-isolation --editable '.[test]'
	touch $@

python: ## the tests on another Python, in .venv-python-... (6 GB): make python VERSION=3.13; TESTS= chooses
	@test -n '$(VERSION)' || { echo 'which Python? make python VERSION=3.13   ($(PYTHONS))'; exit 2; }
	$(MAKE) --no-print-directory $(PYTHON_ENV)/.installed
	$(PYTHON_ENV)/bin/python -m pytest $(PARALLEL) $(TESTS)

.venv-python-%/.installed: pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(or $(call find_python,$*),python$*) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) --constraint constraints.txt setuptools
	$(@D)/bin/python $(PIP_INSTALL) --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@

matrix: ## make torch and make python for all that is supported; into docs/versions.md
	failed=; for torch in $(TORCHES); do $(MAKE) --no-print-directory torch TORCH=$$torch || failed="$$failed torch-$$torch"; done; \
		for version in $(PYTHONS); do $(MAKE) --no-print-directory python VERSION=$$version || failed="$$failed python-$$version"; done; \
		test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

dist: ## wheels and sdist into dist/, checked as a user installs them: 8 minutes
	rm -rf dist build/dist && mkdir -p build/dist
	$(PYTHON) -m venv build/dist/tools
	build/dist/tools/bin/python $(PIP_INSTALL) auditwheel==6.8.2 build twine ziglang==0.17.1
	build/dist/tools/bin/python -m build --outdir dist .
	build/dist/tools/bin/python -m tools.platform_wheel dist build/dist/drivers
	build/dist/tools/bin/twine check --strict dist/*
	$(PYTHON) tools/check_dist.py dist build/dist

exports: setup ## functions of the CUDA libraries of torch's releases, for wheels (tools/exports): 8 GB, 10 minutes
	$(BIN)/python -m tools.cuda_exports $(filter-out 2.8.% 2.9.%,$(TORCHES))

clean: ## remove everything that make made
	rm -rf .venv .venv-* node_modules tools/plotly/node_modules gpu-results build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache $(DEMO)
