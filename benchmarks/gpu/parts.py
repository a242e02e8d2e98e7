"""The parts of `make gpu` and their bundles, as data.

A part is one row of the table: the project's own commands, what they need and make, and a judge of what they wrote. A
bundle is a list of parts for a machine that is rented by the minute: with the parts that they need it runs on a bare
machine, and the limits of all of them add up to nine minutes at most, of the Coder's to ten.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from draftsmith.benchmarks.gpu import judges, kernel_judges
from draftsmith.benchmarks.gpu.judges import Judge

BUNDLE_SECONDS = 540
CODER_SECONDS = 590  # of those that train for a model that people use


@dataclass(frozen=True)
class Part:
    """One row of the table.

    limit: seconds after which it is killed.
    commands: run one after the other, until one fails; NAME=VALUE before one sets an environment variable. ``{out}`` is
        the folder of all results, ``{here}`` the part's own in it, ``{target}``, ``{drafter}``, ``{ssms}``, ``{eagle}``
        and ``{dynaspec}`` are models, ``{parallel}`` is the option for tests in parallel processes.
    rehearsal: the same at toy size on a CPU.
    judge: of what the commands wrote: ``judge(folder of all results, rehearsal)``. Raises ValueError if it is wrong
        whatever the speed.
    uses: packages by import name that the commands import in functions or behind ``except ImportError``, or fixtures,
        and that this part cannot do without; those that their modules import are known
        (:mod:`draftsmith.benchmarks.gpu.closure`).
    after: parts that have to pass first.
    makes: files that parts after this one need; without them its result does not count there.
    brings: files that are copied to the table's folder, whatever the result: weights, which the archive leaves out.
    interpreted: the rehearsal runs under Triton's interpreter.
    files: of the checkout, that git does not keep.
    timed: what it measures is seconds, so that nothing else may run beside it.
    """

    name: str
    goal: str
    limit: int
    commands: tuple[str, ...]
    rehearsal: tuple[str, ...]
    judge: Judge
    uses: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    brings: tuple[str, ...] = ()
    interpreted: bool = False
    files: tuple[str, ...] = ()
    timed: bool = True


# Packages that parts may need, by import name, and what they are used for.
PACKAGES = {
    "torch": "everything",
    "transformers": "every model",
    "accelerate": "training, drafters' checkpoints",
    "triton": "the kernels",
    "pydantic": "recipes, prompts, tests that train a tokenizer",
    "yaml": "recipes",
    "jinja2": "chat templates",
    "numpy": "arrays",
    "rich": "tables",
    "safetensors": "weights",
    "tokenizers": "tokenizers",
    "psutil": "free memory",
    "filelock": "locks",
    "scipy": "intervals of reports, χ² tests",
    "sklearn": "clusters of LM heads",
    "pytest": "tests",
    "hypothesis": "tests",
    "matplotlib": "plots of reports",
    "peft": "LoRA (Medusa-2)",
    "gguf": "SmolLM2 as the package index has it",
}
# Imported in functions that no part reaches.
UNUSED = ("bitsandbytes", "datasets", "deepspeed", "flashinfer", "huggingface_hub", "pyarrow", "wandb")

REPORT = ("scipy", "matplotlib", "tokenizers")  # of decode.py and serving.py
FIXTURES = ("pydantic", "jinja2", "tokenizers")  # of tests that train a tokenizer


# ---- commands; {here} is the part's own folder


def decode(drafter: str, place: str, *options: str) -> str:
    """``place``: the report's folder in the part's own."""
    checked = f"--prompts {{out}}/models/prompts.jsonl --check-lossless --report {{here}}{place}"
    return " ".join(["python inference/decode.py", drafter, checked, *options])


def train(family: str, recipe: str, name: str, *fields: str) -> str:
    run = f"--restart run.name={name} run.output_dir={{out}}/models"
    return " ".join([f"python train/{family}.py recipes/{recipe}.yaml", run, *fields])


def calibrate(drafter: str, seconds: int) -> str:
    return f"python inference/calibrate.py {drafter} --seconds {seconds}"


def kernel_times(file: str, *options: str) -> str:
    return " ".join(["python benchmarks/kernel_times.py", *options, f"--out {{here}}/{file}.json"])


def step_times(file: str, *options: str) -> str:
    options = ("--dtype bfloat16 --batches 1", *options, f"--out {{here}}/{file}.json")
    return " ".join(["python benchmarks/step_times.py", *options])


def toy_step(file: str, *options: str) -> str:
    toy = "--shape tiny-lm --device cpu --threads 1 --contexts 32 --heads 3 --repeat 2 --nodes 1 4"
    return " ".join(["python benchmarks/step_times.py", toy, *options, f"--out {{here}}/{file}.json"])


def tests(*words: str) -> str:
    return " ".join(["python -m pytest -v -p no:cacheprovider --continue-on-collection-errors", *words])


def two_ssms(tree: str, place: str, *options: str) -> str:
    """The two SSMs of the ensemble, as draft models that are merged."""
    drafter = "+".join(f"draft_model:{{ssms}}/ssm-{number}@{tree}" for number in (0, 1))
    return decode(drafter, place, "--baseline engine", *options)


PROMPTS = "python data/prompts.py stdlib --split test --tokenizer models/tiny-lm --out {out}/models/prompts.jsonl"
CHATS = "runs/chats.jsonl"  # python data/prompts.py human-eval writing questions chat --count 12, after make models
SERVING = "python benchmarks/serving.py {eagle} --prompts {out}/models/prompts.jsonl --out {here}/serving.json"
BUDGET = "python benchmarks/budget.py {eagle} --prompts {out}/models/prompts.jsonl --out {here}/budget.json"
COMPRESSED = "python benchmarks/compressed.py speed {target} --out {here}/compressed.json"
EAGLE_STEP = "python benchmarks/train_step.py --shape llama3-8b --dtype bfloat16 --stages eagle-3"
UNROLL = "python benchmarks/unroll.py --out {here}/unroll.json --steps 1 4 7"
LONG, SHORT = "--max-new-tokens 128 --seconds", "--max-new-tokens 8 --seconds 0.1 --threads 1"
TOY_SSMS = "--target {ssms}/tiny-target --max-new-tokens 4 --seconds 0.1 --device cpu --threads 1"
TOY_KERNELS = "--heads 4 --kv-heads 2 --width 16 --dtype float32"
ONE_STREAM = "DRAFTSMITH_ONE_STREAM=1 "
# Calibration may have written a dynamic tree, too; both kinds are decoded with.
TREES = (
    'python -c "import json, sys; tree, fixed, dynamic, shape = sys.argv[1:]; '
    "json.dump({'paths': json.load(open(tree))['paths']}, open(fixed, 'w')); "
    "json.dump({'dynamic': json.loads(shape)}, open(dynamic, 'w'))\" "
    "{eagle}/tree.json {here}/fixed.json {here}/dynamic.json "
    '\'{"top_k": 4, "depth": 6, "nodes": 32}\''
)
HEADS_TREES = TREES.replace("{eagle}", "{drafter}").replace('"depth": 6', '"depth": 4')
# About 190 M parameters and 8 M tokens: beyond toys. Not compiled: Inductor would take longer than the training.
MIDDLE = (
    "precision.compile=false tokenizer=models/tiny-lm model.hidden_size=1024 model.num_layers=16 model.num_heads=16 "
    "model.num_kv_heads=8 model.head_dim=64 model.intermediate_size=2816 checkpoint.every=240 "
    "'data.train=[{source: stdlib}, {source: \"package:torch\"}]' "
    "'stages=[{name: all, max_length: 512, steps: 240, optim: {lr: 6e-4, schedule: linear, warmup_steps: 30}, "
    "batch: {sequences: 64}}]'"
)
SMALL = "'stages=[{name: all, max_length: 64, steps: 2, optim: {lr: 6e-4}, batch: {sequences: 2}}]'"
# Half of the recipe's prompts and steps.
HALF = "data.train.0.answers.prompts=1024 stages.0.steps=400 checkpoint.every=400 evaluate.every=200"
SAME_BITS = "DRAFTSMITH_SAME_BITS=1 "
SWITCHES = {
    "default": "", "pdl": "DRAFTSMITH_PDL=1 ", "logits": "DRAFTSMITH_WRITE_LOGITS=1 ", "same-bits": SAME_BITS
}  # fmt: skip


def coder(size: str, goal: str, toy: str = "--toy") -> Part:
    """Answers, training, calibration and decoding for Qwen2.5-Coder; what it trained comes back in pieces."""
    command = f"python benchmarks/gpu/coder.py {size} --out {{here}}"
    real = f"{command} --prompts runs/prompts --minutes 8.3"
    files = [f"models/qwen2.5-coder-{size}", "runs/prompts"]
    if size == "0.5b":  # data/coder-train.parquet as JSON lines, which need no pyarrow
        real, files = f"{real} --answers runs/coder-train.jsonl", [*files, "runs/coder-train.jsonl"]
    # With the table and the archive eight files, as many as come back from some machines.
    packed = ("drafters.tar.xz.pieces.json", *(f"drafters.tar.xz.{number:03d}" for number in range(5)))
    return Part(
        f"coder-{size}", goal, CODER_SECONDS, (real,), (f"{command} {toy}",),
        judges.judge_coder(f"coder-{size}"), (*REPORT, "triton", "gguf"),
        brings=tuple(f"{{here}}/pack/{name}" for name in packed),
        files=tuple(files),
    )  # fmt: skip


PARTS = (
    coder("1.5b", "drafters for Qwen2.5-Coder-1.5B: EAGLE-3 τ ≥ 2.8 and ≥ 2.0 × on HumanEval, Medusa ≥ 1.7 ×, no text "
          "differs", "--toy --families eagle3 --stages convert answers train calibrate decode pack"),
    coder("0.5b", "drafters for Qwen2.5-Coder-0.5B: EAGLE-3 ≥ 1.9 × on HumanEval, no text differs; τ by tokens",
          "--toy --share 0.0001"),
    Part(
        "products", "products of few rows with the matrices of two models: share of the bandwidth, gain over "
        "PyTorch's: no goal; the forms found are used from then on", 120,
        (kernel_times("kernels", "few_rows --rows 1 8 16 64"),),
        (kernel_times("kernels", "few_rows --rows 1 5 --hidden 32 --vocabulary 200 --dtype float32"),),
        kernel_judges.judge_products, ("triton",), interpreted=True,
    ),
    Part(
        "profile", "every step a graph replay of at most 15 kernels a layer and 40 around; their time: no goal", 80,
        (step_times("step", "--graphs --shape llama3-8b --contexts 1024 --nodes 1 64 --repeat 20 --profile "
                    "{here}/kernels.txt"),),
        (toy_step("step", "--profile {here}/kernels.txt"),),
        kernel_judges.judge_profile, ("triton",),
    ),
    Part(
        "step", "every step within its bytes at 87 % of the bandwidth, products at 60 % of the matrix rate where those "
        "take longer, and 1.3 µs a kernel", 240,
        (step_times("step", "--graphs --shape llama2-7b llama3-8b --contexts 1024 16384 --nodes 1 16 64 --projection "
                    "shared own"),),
        (toy_step("step", "--projection shared own"),),
        kernel_judges.judge_step, ("triton",), makes=("{here}/step.json",),
    ),
    Part(
        "lean", "the lean decoder's step takes less time than transformers' modules", 100,
        (step_times("step", "--shape llama2-7b llama3-8b --contexts 1024 --nodes 1 16 --repeat 20 --decoder "
                    "transformers"),),
        (toy_step("step", "--decoder transformers"),),
        kernel_judges.judge_lean, ("triton",), ("step",),
    ),
    Part(
        "kernels", "tests of the kernels pass on the device, bfloat16 and CUDA graphs too", 120,
        (tests("{parallel} tests/kernels/device"),),
        (tests("tests/kernels/device/test_commit_kernel.py tests/kernels/device/test_engine_on_kernels.py -k "
               "'every_layer or (greedy and llama)'"),),
        judges.tests_of("kernels"), interpreted=True, timed=False,
    ),
    Part(
        "engine", "χ², exact distributions, families and batching pass on the device", 200,
        (tests("{parallel} --device cuda tests/inference/engine/test_engine.py "
               "tests/inference/engine/test_tree_logits.py tests/inference/engine/test_batching.py "
               "tests/inference/engine/test_engine_sampling.py tests/inference/verify/test_sampling.py"),),
        (tests("--device cpu tests/inference/engine/test_engine.py -k 'llama-1 or mates'"),),
        judges.tests_of("engine"), ("triton", *FIXTURES), timed=False,
    ),
    Part(
        "drafters", "drafters with caches, draws and merges pass on the kernels, on streams and in CUDA graphs", 220,
        (tests("{parallel} --device cuda tests/inference/engine/test_protocol.py "
               "tests/inference/drafters/test_draft_model.py tests/inference/trees/test_merged.py "
               "tests/inference/trees/test_merged_lossless.py tests/inference/drafters/test_ngram.py "
               "tests/inference/drafters/test_lossless.py::test_texts_have_the_targets_distribution"),),
        (tests("--device cpu tests/inference/drafters/test_ngram.py -k 'static and not reference'"),),
        judges.tests_of("drafters"), ("triton", *FIXTURES), timed=False,
    ),
    Part(
        "target", "a causal LM of about 190 M parameters trains and exports (speed: unmeasured, no goal)", 200,
        (train("lm", "tiny-lm", "target", "lookahead=null", MIDDLE), PROMPTS + " --count 40 --prompt-tokens 96"),
        (train("lm", "tiny-lm", "target", "lookahead=null --tiny", SMALL), PROMPTS + " --count 2 --prompt-tokens 24"),
        judges.judge_target, makes=("{target}/model.safetensors", "{out}/models/prompts.jsonl"),
    ),
    Part(
        "medusa", "Medusa-1 on that target trains and calibrates (τ: unmeasured, no goal)", 130,
        (train("medusa", "tiny-medusa", "drafter", "target.name={target} stages.0.optim.lr=1e-3", HALF),
         calibrate("{drafter}", 30)),
        (train("medusa", "tiny-medusa", "drafter", "--tiny"), calibrate("{drafter}", 1)),
        judges.judge_drafter("drafter", "simulated_tau", "head1_held_out_top1"), ("triton",), ("target",),
        ("{drafter}/config.json",),
    ),
    Part(
        "decode", "output identical to plain greedy decoding, CUDA graphs (speed-up: unmeasured, no goal)", 120,
        (decode("{drafter}", "", "--baseline all", LONG, "30"),), (decode("{drafter}", "", "--baseline all", SHORT),),
        judges.judge_decode("decode", 1), (*REPORT, "triton"), ("medusa",),
    ),
    Part(
        "same-bits", "with DRAFTSMITH_SAME_BITS output identical without near-ties, CUDA graphs (speed-up: unmeasured, "
        "no goal)", 120,
        (SAME_BITS + decode("{drafter}", "", "--baseline engine", LONG, "20"),),
        (SAME_BITS + decode("{drafter}", "", "--baseline engine", SHORT),),
        judges.judge_decode("same-bits", 1, exact=True), (*REPORT, "triton"), ("medusa",),
    ),
    Part(
        "medusa-dynamic", "heads in dynamic trees: output identical, CUDA graphs (speed-up: unmeasured, no goal)", 90,
        (HEADS_TREES, decode("{drafter}", "", "--tree {here}/dynamic.json --baseline engine", LONG, "20")),
        (HEADS_TREES, decode("{drafter}", "", "--tree {here}/dynamic.json --baseline engine", SHORT)),
        judges.judge_decode("medusa-dynamic", 1), (*REPORT, "triton"), ("medusa",),
    ),
    Part(
        "draft-model", "output identical, CUDA graphs, alone and merged with n-grams", 90,
        (decode("draft_model:models/tiny-lm@1,1,1,1 draft_model:models/tiny-lm@1,1,1,1+ngram", "",
                "--target {target} --max-new-tokens 96 --baseline engine --seconds 15"),),
        (decode("draft_model:{target}@1,1 draft_model:{target}@1,1+ngram", "",
                "--target {target} --max-new-tokens 4 --seconds 0.1 --threads 1"),),
        judges.judge_decode("draft-model", 2), (*REPORT, "triton"), ("target",),
    ),
    Part(
        "smollm2", "SmolLM2-135M with the shipped drafters: output identical, CUDA graphs (speed-up: no goal)", 240,
        ("python -c \"import shutil, sys; shutil.copytree(*sys.argv[1:], dirs_exist_ok=True)\" models/smollm2-eagle3 "
         "{here}/eagle3",
         "python data/prompts.py stdlib --count 16 --prompt-tokens 96 --tokenizer models/smollm2 --out "
         "{here}/windows.jsonl",
         calibrate("{here}/eagle3 --prompts {here}/windows.jsonl", 20),  # the shipped tree is a CPU's
         f"python inference/decode.py models/smollm2-medusa ngram models/smollm2-medusa+ngram {{here}}/eagle3 "
         f"{{here}}/eagle3+ngram --prompts {CHATS} --check-lossless --baseline engine --max-new-tokens 128 --seconds 6 "
         "--report {here}/report"),
        (PROMPTS + " --count 2 --prompt-tokens 24",
         decode("ngram ngram:3-5 " + " ".join(f"draft_model:models/tiny-lm@{tree}" for tree in ("1", "2", "1,1")),
                "/report", "--target models/tiny-lm --baseline engine", SHORT)),
        judges.judge_decode("smollm2", 5), (*REPORT, "triton", "gguf"), files=("models/smollm2", CHATS),
    ),
    Part(
        "kernel-bench", "tree attention ≥ 85 % of the bandwidth or ≥ 60 % of the matrix rate, whichever limits it, "
        "where that takes more than 30 µs; never slower than SDPA, flex_attention and FlashInfer", 200,
        (kernel_times("kernels", "attention commit --batches 1 8 --contexts 1024 16384 --nodes 16 64"),),
        (kernel_times("kernels", "attention commit --batches 1 2 --contexts 33 --nodes 8 --layers 2", TOY_KERNELS),),
        kernel_judges.judge_kernels, ("triton",), interpreted=True,
    ),
    Part(
        "around", "sampling verification of 64 nodes over its floor, the kernels around the products beside PyTorch's "
        "operations: no goal", 120,
        (kernel_times("kernels", "verify head_topk fused --batches 1 --nodes 16 64 --vocabulary 32000 128256"),),
        (kernel_times("kernels", "verify head_topk fused --batches 2 --nodes 8 --hidden 32 --vocabulary 200",
                      TOY_KERNELS),),
        kernel_judges.judge_around, ("triton",), interpreted=True,
    ),
    Part(
        "shortlist", "logits of a fifth of an LM head's rows at ≥ 80 % of the bandwidth where that takes more than "
        "30 µs", 110,
        (kernel_times("4096", "shortlist --batches 1 --hidden 4096 --vocabulary 128256 262144 --level 1 8"),
         kernel_times("576", "shortlist --batches 1 --hidden 576 --vocabulary 49152 --level 1 8")),
        (kernel_times("4096", "shortlist --batches 1 --hidden 32 --vocabulary 90 --level 3 --dtype float32"),
         kernel_times("576", "shortlist --batches 1 --hidden 16 --vocabulary 60 --level 1 --dtype float32")),
        kernel_judges.judge_shortlist, ("triton",), interpreted=True,
    ),
    Part(
        "eagle-unroll", "7 unrolled steps of training-time test take no longer than with dense attention (to within "
        "2 %), and less memory", 110,
        (UNROLL + " --shape llama3-8b --dtype bfloat16 --sequences 1 --tokens 2048",),
        (UNROLL + " --shape tiny-lm --device cpu --threads 1 --tokens 24 --repeat 2",),
        kernel_judges.judge_unroll, ("scipy",),
    ),
    Part(
        "train-step", "Medusa-1 ≥ 50 % of the matrix rate, Medusa-2 ≥ 45 %", 180,
        ("python benchmarks/train_step.py --shape llama2-7b --dtype bfloat16 --sequences 4 --tokens 2048 "
         "--stages medusa-1 medusa-2 --gradient-checkpointing --out {here}/train.json",),
        ("python benchmarks/train_step.py --shape tiny-lm --device cpu --sequences 1 --tokens 24 --heads 2 --repeat 1 "
         "--projection shared --gradient-checkpointing --out {here}/train.json",),
        kernel_judges.judge_training, ("peft",),
    ),
    Part(
        "eagle-step", "EAGLE-3 at the 8B shape: ≥ 45 % of the matrix rate at rows of 2,048, ≥ 35 % at 8,192", 150,
        (EAGLE_STEP + " --sequences 2 --tokens 2048 --samples 3 --out {here}/short.json",
         EAGLE_STEP + " --sequences 1 --tokens 8192 --samples 3 --out {here}/long.json"),
        ("python benchmarks/train_step.py --shape tiny-lm --device cpu --sequences 1 --tokens 24 --stages eagle-3 "
         "--samples 2 --repeat 1 --out {here}/short.json",
         "python benchmarks/train_step.py --shape tiny-lm --device cpu --sequences 1 --tokens 24 --stages eagle-3 "
         "--samples 2 --repeat 1 --loss lk --gradient-checkpointing --out {here}/long.json"),
        kernel_judges.judge_eagle_training, ("peft",),
    ),
    Part(
        "switches", "what is off by default (programmatic dependent launch, written logits, bits that drafting never "
        "changes, attention merged by its last program) is not faster (by more than 2 %): else it has to be the "
        "default", 400,
        (*(switch + step_times(name, "--graphs --shape llama3-8b --contexts 1024 --nodes 1 16 64")
           for name, switch in SWITCHES.items()),
         kernel_times("attention", "attention --batches 1 8 --contexts 1024 16384 --nodes 8 16 --kv-heads 32")),
        (*(switch + toy_step(name) for name, switch in SWITCHES.items()),
         "TRITON_INTERPRET=1 " + kernel_times("attention", "attention --batches 1 --contexts 33 --nodes 8 --heads 2 "
                                              "--kv-heads 2 --width 16 --layers 2 --dtype float32")),
        kernel_judges.judge_switches, ("triton",),
    ),
    Part(
        "eagle", "EAGLE-3 on that target trains and calibrates (τ: unmeasured, no goal)", 170,
        (train("eagle", "tiny-eagle3", "eagle", "target.name={target} cache_hidden=none", HALF),
         calibrate("{eagle}", 30)),
        (train("eagle", "tiny-eagle3", "eagle", "--tiny"), calibrate("{eagle}", 1)),
        judges.judge_drafter("eagle", "simulated_tau"), ("triton",), ("target",), ("{eagle}/config.json",),
    ),
    Part(
        "eagle-decode", "EAGLE-3's output identical, CUDA graphs, with a fixed and a dynamic tree", 150,
        (TREES, *(decode("{eagle}", f"/{tree}", f"--tree {{here}}/{tree}.json --baseline engine", LONG, "20")
                  for tree in ("fixed", "dynamic"))),
        (TREES, *(decode("{eagle}", f"/{tree}", f"--tree {{here}}/{tree}.json --baseline engine", SHORT)
                  for tree in ("fixed", "dynamic"))),
        judges.judge_eagle_decode, (*REPORT, "triton"), ("eagle",),
    ),
    Part(
        "serving", "requests arriving over time, 1, 8 and 32 rows: texts identical, CUDA graphs; where speculation "
        "stops paying: no goal", 170,
        (SERVING + " --batches 1 8 32 --max-new-tokens 128 --seconds 3 --rounds 2",),
        (SERVING + " --batches 1 2 --loads 0.5 --requests 4 --max-new-tokens 8 --seconds 1 --rounds 1 --threads 1",),
        judges.judge_serving, (*REPORT, "triton"), ("eagle",),
    ),
    Part(
        "budget", "trees of the sizes that steps choose, 1, 8 and 32 rows, greedy and sampled at 0.7: texts identical, "
        "CUDA graphs; never slower than plain decoding (lower end of the interval at least 0.97)", 170,
        (BUDGET + " --temperatures 0 0.7 --max-new-tokens 96 --rounds 3",),
        (BUDGET + " --temperatures 0 --batch-sizes 1 2 --max-new-tokens 8 --rounds 1 --threads 1",),
        judges.judge_budget, (*REPORT, "triton"), ("eagle",),
    ),
    Part(
        "magicdec", "the target as its own drafter over a compressed cache, 1, 8 and 64 rows of 1,024 and 3,584 "
        "tokens: CUDA graphs; speed-up beside the planner's prediction: no goal", 170,
        (COMPRESSED + " --contexts 1024 3584 --batch-sizes 1 8 64 --entries 256 --drafts 1 3 --kinds books --count 1",),
        (COMPRESSED + " --contexts 48 --batch-sizes 1 2 --entries 40 --drafts 1 --kinds books --count 1 --rounds 1 "
         "--new-tokens 8 --threads 1 --device cpu",),
        judges.judge_magicdec, (*REPORT, "triton"), ("target",),
    ),
    Part(
        "dynaspec", "shortlists for the drafter of eagle train, calibrate and decode: output identical, CUDA graphs; "
        "not slower (to within 3 %) with the router on a stream of its own", 170,
        (train("dynaspec", "tiny-dynaspec", "dynaspec", "target.name={target} drafter.base={eagle}"),
         calibrate("{dynaspec}", 15),
         decode("{dynaspec} {eagle}", "/two", "--baseline engine", LONG, "15"),
         ONE_STREAM + decode("{dynaspec}", "/one", "--baseline engine", LONG, "15")),
        (train("dynaspec", "tiny-dynaspec", "dynaspec", "--tiny"), calibrate("{dynaspec}", 1),
         # Its base is a new one, which has no tree of its own.
         decode("{dynaspec} {dynaspec}/drafter", "/two", "--baseline engine --tree {dynaspec}/tree.json", SHORT),
         ONE_STREAM + decode("{dynaspec}", "/one", "--baseline engine", SHORT)),
        judges.judge_dynaspec, (*REPORT, "triton"), ("eagle",),
    ),
    Part(
        "ssm", "a boosted ensemble on that target trains and calibrates (τ: unmeasured, no goal)", 200,
        (train("ssm", "tiny-ssm", "ssms", "target.name={target} 'drafter.layers=[0, 15]'",
               "data.train.0.answers.prompts=1536"), calibrate("{ssms}", 30)),
        (train("ssm", "tiny-ssm", "ssms", "--tiny boost.min_prompts=1"), calibrate("{ssms}", 1)),
        judges.judge_drafter("ssms"), ("triton",), ("target",), ("{ssms}/config.json",),
    ),
    Part(
        "ssm-decode", "the ensemble's output identical, CUDA graphs, alone and merged with n-grams", 140,
        (decode("{ssms} {ssms}+ngram", "", "--baseline engine", LONG, "30"),),
        (decode("{ssms} {ssms}+ngram", "", "--baseline engine", SHORT),),
        judges.judge_decode("ssm-decode", 2), (*REPORT, "triton"), ("ssm",),
    ),
    Part(
        "ssm-streams", "two merged SSMs decode faster on two CUDA streams than one after the other", 140,
        (two_ssms("2,2,1,1", "/two", "--target {target}", LONG, "20"),
         ONE_STREAM + two_ssms("2,2,1,1", "/one", "--target {target}", LONG, "20")),
        (two_ssms("2,1", "/two", TOY_SSMS), ONE_STREAM + two_ssms("2,1", "/one", TOY_SSMS)),
        judges.judge_streams, (*REPORT, "triton"), ("ssm",),
    ),
    Part(
        "ssm-claim", "SSMs on the device for a target in CPU memory: output identical (SpecInfer's paper has 2.6–3.5 × "
        "plain decoding for its own models: no goal here)", 140,
        (two_ssms("3,2,2,1,1", "", "--target {target} --device-map cpu --max-new-tokens 64 --seconds 40"),),
        (two_ssms("2,1", "", TOY_SSMS, "--device-map disk"),),
        judges.judge_decode("ssm-claim", 1, graphs=False), (*REPORT, "triton", "accelerate"), ("ssm",),
    ),
)  # fmt: skip

# In the order of their value. What a bundle's parts need runs before them, where it has not run on this machine.
BUNDLES = {
    "coder-1.5b": ("coder-1.5b",),
    "coder-0.5b": ("coder-0.5b",),
    "steps": ("products", "profile", "step", "lean"),
    "tests": ("kernels", "engine", "drafters"),
    "medusa": ("medusa", "decode", "draft-model"),
    "kernels": ("kernel-bench", "around", "shortlist", "eagle-unroll"),
    "eagle": ("eagle", "eagle-decode"),
    "serving": ("serving",),
    "training": ("train-step", "eagle-step"),
    "switches": ("switches",),
    "same-bits": ("same-bits",),
    "dynaspec": ("dynaspec",),
    "ssm": ("ssm", "ssm-decode"),
    "streams": ("ssm-streams",),
    "offloaded": ("ssm-claim",),
    "budget": ("budget",),
    "magicdec": ("magicdec",),
    "smollm2": ("smollm2",),
    "medusa-dynamic": ("medusa-dynamic",),
}


def seconds_of(parts: Iterable[Part]) -> int:
    """What a bundle of these parts takes at most: nine minutes, or the Coder's ten."""
    return max(BUNDLE_SECONDS, *(part.limit for part in parts))


def with_needed(names: Iterable[str]) -> list[Part]:
    """These parts and those that they come after, in the order of the table."""
    wanted = set(names)
    for part in reversed(PARTS):
        if part.name in wanted:
            wanted |= set(part.after)
    return [part for part in PARTS if part.name in wanted]
