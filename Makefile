# Works on a machine that has Python 3.11 or newer and nothing else:
#   make demo    train a small model on real text, evaluate it and generate with it
#   make chat    pretrain, fine-tune and align a small model, compare the three, and chat with it
#   make inspect    write a page that explains how this model answers PROMPT
#   make serve   serve this model with OpenAI's API, and a page to chat in
#   make test    lint and the default tests
#   make test-all   every test: the slow ones, each C++ compiler, the campaigns (hours)
#   make docs    build the documentation as a site that works without a network
# Variables:
#   PYTHON=python3.12        the interpreter that makes .venv
#   TORCH_INDEX=ADDRESS      an index of PyTorch builds, asked beside the default one. PyTorch's own
#                            index of CPU builds (pytorch.org/get-started) saves gigabytes where
#                            there is no GPU.
#   STEPS=50                 steps of each training of make demo and make chat; by default all of
#                            the recipe's, or as many as fit into five minutes. make chat then
#                            asks fewer questions, too
#   WORKERS=3                test processes; one more than two cores, since some tests wait for
#                            processes that they start

PYTHON ?= $(firstword $(foreach name,python3 python3.11 python3.12 python3.13 python3.14,\
    $(shell $(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(name))))
WORKERS ?= 3
VENV := .venv/.made
TORCH := .venv/.torch
INSTALLED := .venv/.installed
FOR_TESTS := .venv/.installed-for-tests
FOR_SERVING := .venv/.installed-for-serving
FOR_DOCS := .venv/.installed-for-docs
PIP := .venv/bin/python -m pip install --disable-pip-version-check --no-compile \
    --constraint constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
WORKHORSE := .venv/bin/workhorse
export COMPILE := from workhorse.native.operators import LOADERS, resolve; resolve(*LOADERS, wait=True)
# A module is compiled when it is first imported, and kept: not by pip, which would compile those
# that nothing imports too, nor again in each of the processes that tests start.
export PYTHONDONTWRITEBYTECODE :=
# One thread a test process: the models of the tests are too small to share out.
PYTEST := OMP_NUM_THREADS=1 .venv/bin/python -m pytest

COMPILERS := $(foreach name,g++ clang++ clang++-19 clang++-16,$(shell command -v $(name) > /dev/null && echo $(name)))

CAMPAIGNS := $(addprefix campaign-,faults exact meshes mutations flex fast cpus hostile inputs gguf harness requests accounting serve page inspect site templates clients traces lens circuits)

# One pip at a time.
.NOTPARALLEL:
.PHONY: help install demo chat inspect serve docs test test-all test-compilers lint format bench reference families clean campaigns $(CAMPAIGNS)
help:
	@sed -n 's/^#  *make/make/p' Makefile
	@echo "make lint, format, bench, campaigns, clean: see CONTRIBUTING.md"

install: $(FOR_TESTS)

# A pip as old as its Python can take twice as long to choose the packages.
$(VENV): constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name one: make PYTHON=..." >&2; exit 2; }
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv || { \
	    rm -rf .venv; echo "$(PYTHON) cannot make an environment; install its venv module" >&2; exit 2; }
	@echo "Updating pip in .venv"
	-$(PIP) --quiet --upgrade pip
	@touch $@

$(TORCH): $(VENV)
	@echo "Installing PyTorch and the rest into .venv (minutes, the first time)"
	$(PIP) torch jaxtyping
	@# The operators need no more: they are compiled while the rest is installed.
	@PYTHONPATH=src nice .venv/bin/python -c "$$COMPILE" > /dev/null 2>&1 &
	@touch $@

$(INSTALLED): $(TORCH) pyproject.toml
	@echo "Installing Workhorse and its dependencies into .venv"
	$(PIP) --quiet --editable .
	@touch $@

$(FOR_TESTS): $(TORCH) pyproject.toml
	@echo "Installing Workhorse and what its tests need into .venv (minutes, the first time)"
	$(PIP) --quiet --editable '.[dev]'
	@touch $@ $(INSTALLED)

DEMO := runs/stdlib-small
RECIPE := recipes/stdlib-small.yaml
# train.steps and train.minutes of a recipe. A slow machine trains for five minutes, and a run that
# has begun keeps its number of steps.
length_of = $(shell sed -nE 's/^  (steps|minutes): /train.\1=/p' $(1))
demo: $(INSTALLED)
	$(WORKHORSE) train $(RECIPE) --out $(DEMO) $(if $(wildcard $(DEMO)/recipe.yaml),\
	    --resume $(call length_of,$(DEMO)/recipe.yaml),\
	    $(if $(STEPS),train.steps=$(STEPS),$(call length_of,$(RECIPE)) train.minutes=5))
	$(WORKHORSE) evaluate $(DEMO) --compare-gzip
	$(WORKHORSE) generate $(DEMO) --prompt "def " --prompt "class " --prompt "import " --seed 1
	@echo "The whole run in one page: $(DEMO)/report.html"
	@$(if $(STEPS),echo "shortened by STEPS; for all steps: rm -r $(DEMO) && make demo")
	@echo "next: make chat"

# A finished stage is not repeated, and an interrupted one is resumed.
chat: $(INSTALLED)
	@.venv/bin/python recipes/chat.py $(if $(STEPS),train.steps=$(STEPS))

CHAT := runs/stdlib-preferences
PROMPT ?= What is threading.Thread?
$(CHAT):
	@echo "there is no $(CHAT); run make chat first" >&2; exit 2

inspect: $(INSTALLED) $(CHAT)
	$(WORKHORSE) inspect $(CHAT) --chat --prompt "$(PROMPT)" --out runs/inspect.html
	@echo "next: make serve"

$(FOR_SERVING): $(INSTALLED)
	@echo "Installing what the server needs into .venv"
	$(PIP) --quiet --editable '.[serve]'
	@touch $@

serve: $(FOR_SERVING) $(CHAT)
	$(WORKHORSE) serve $(CHAT)

# Reads the source without importing it, so PyTorch is not installed.
$(FOR_DOCS): $(VENV) pyproject.toml
	@echo "Installing what the site needs into .venv"
	$(PIP) --quiet --group docs
	@touch $@

docs: $(FOR_DOCS)
	.venv/bin/python -m website.build
	@echo "Open build/site/index.html in a browser"

test: $(FOR_TESTS)
	@# While the checks take one core: the test processes would each compile all they import.
	@$(PYTEST) --collect-only --quiet > /dev/null 2>&1 &
	@$(MAKE) --no-print-directory lint
	$(PYTEST) --numprocesses $(WORKERS) --dist worksteal

test-all: lint
	$(PYTEST) --numprocesses $(WORKERS) --dist worksteal -m "not campaign"
	$(MAKE) test-compilers
	$(MAKE) campaigns

# The operators' bits must depend on no compiler.
test-compilers: $(FOR_TESTS)
	@for compiler in $(COMPILERS); do \
	    echo "CXX=$$compiler"; \
	    CXX=$$compiler $(PYTEST) -m "not campaign" tests/native tests/execute/native_training \
	        tests/execute/native_decoding tests/transforms/quantization || exit 1; \
	done

lint: $(FOR_TESTS)
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/basedpyright
	.venv/bin/lint-imports --no-logo

format: $(FOR_TESTS)
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

bench: $(FOR_TESTS)
ifdef QUICK
	.venv/bin/python -m benchmarks.this_machine
else
	.venv/bin/python -m benchmarks --quick $(if $(NANOGPT),--nanogpt $(NANOGPT)) $(if $(DATA),--data $(DATA))
endif

reference: $(INSTALLED)
	$(WORKHORSE) recipe --markdown > docs/recipe.md
	.venv/bin/python -m tests.models.systems_page
	@echo "A new or changed option also needs a line in CHANGELOG.md"

families: $(FOR_TESTS)
	OMP_NUM_THREADS=1 .venv/bin/python -m tests.parity.table --out docs/families.md

# The slow ones: kills and damaged checkpoints, errors put into the code, compiled kernels, lesser
# CPUs, hostile model directories, wrong inputs, what llama.cpp, lm-eval and TransformerLens make of
# our models, what `plan` predicts, circuits with known edges.
campaigns: $(CAMPAIGNS)
campaign-site: $(FOR_DOCS)
$(CAMPAIGNS): campaign-%: $(FOR_TESTS)
	$(PYTEST) -m campaign -s tests/campaigns/test_$**.py

clean:
	rm -rf .venv build dist .hypothesis .import_linter_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
