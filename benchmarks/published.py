"""The papers' claims as data, for benchmarks/claims.py: what is published, our commands, and how their result is read.

Figures are published ones as they stand in a paper's abstract or table; † marks those noted from it earlier and not
read again. ``tested`` is the scope of our experiment, and a verdict says no more.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.benchmarks import claim_figures as read
from draftsmith.benchmarks.claim_figures import Figure

MEDUSA, SPECINFER = "Medusa, arXiv 2401.10774", "SpecInfer, arXiv 2305.09781"
EAGLE2, DYNASPEC = "EAGLE-2, arXiv 2406.16858", "DynaSpec, arXiv 2510.13847"
MAGICDEC = "MagicDec, arXiv 2408.11049"
SMOLLM2, TINY = "SmolLM2-135M-Instruct", "the bundled target of 4 M parameters"


@dataclass(frozen=True)
class Claim:
    """One claim of a paper.

    published: the paper's statement and figure.
    tested: what our commands compare, and on what.
    commands: with ``{out}``, the claim's folder, ``{shared}``, that of what several claims use, ``{seed}``, of prompts,
        training and samples, and the fields of ``full`` or ``small``. One whose first word is a path and ``:`` makes
        that path, and is left out where it is.
    first: commands before them, of the small version.
    files: writes what the commands read into a folder, given the fields.
    read: our figures, from the folder ``at``.
    speed: the figures are times, which other work on the machine changes.
    minutes: about what the full version takes on one core; an estimate where benchmarks/claims.json has no result.
    why_not: why nothing here can decide it.
    """

    name: str
    paper: str
    published: str
    tested: str = ""
    commands: tuple[str, ...] = ()
    full: dict[str, Any] = field(default_factory=dict)
    small: dict[str, Any] = field(default_factory=dict)
    first: tuple[str, ...] = ()
    files: Callable[[Path, dict[str, Any]], None] | None = None
    read: Callable[[Path], list[Figure]] | None = None
    at: str = "out"
    speed: bool = False
    minutes: int = 0
    why_not: str = ""

    @property
    def awaits(self) -> bool:
        """Whether its commands are for a GPU."""
        return self.read is None and bool(self.commands)


# ---- commands that several claims share

PROMPTS_OF_SSMS = "{shared}/modules.jsonl: python data/prompts.py {sets} --seed {seed} --out {shared}/modules.jsonl"
PROMPTS = "{out}/prompts.jsonl: python data/prompts.py {sets} --seed {seed} --out {out}/prompts.jsonl"
CHATS = "human-eval writing questions chat --count 8 --tokenizer models/smollm2 --prompt-tokens 200"
RARE = "human-eval writing questions rare --count 8 --tokenizer models/smollm2 --prompt-tokens 400"
MODULES = "stdlib --split test --tokenizer models/tiny-lm --prompt-tokens 96 --count"
FEW = "data.train.0.answers.prompts=48 data.train.0.answers.new_tokens=48 data.validation.0.answers.prompts=8"
BRIEF = FEW + " data.validation.0.answers.new_tokens=48 evaluate.sequences=8"


def decoding(tree: str, report: str) -> str:
    """All nodes of a tree, greedy."""
    return (
        "python inference/decode.py {drafter} --prompts {out}/prompts.jsonl --max-new-tokens {tokens} --all-nodes "
        f"--baseline none --threads 1 --tree {{out}}/{tree}.json --report {{out}}/{report}"
    )


def training(family: str, recipe: str, name: str, more: str) -> str:
    """A run in ``{shared}``, made once."""
    command = f"python train/{family}.py recipes/{recipe}.yaml run.name={name} run.output_dir={{shared}}"
    return f"{{shared}}/{name}/config.json: {command} run.seed={{seed}} --resume {more}"


def ssms(count: int, steps: str) -> str:
    """The recipe's stages with another number of SSMs and steps."""
    rest = "batch: {{sequences: 16}}, optim: {{lr: 2e-3, schedule: cosine, warmup_steps: 20}}"
    return "'stages=[" + ", ".join(f"{{{{name: ssm-{n}, steps: {steps}, {rest}}}}}" for n in range(count)) + "]'"


def calibrated(name: str) -> str:
    return f"{{shared}}/{name}/tree.json: python inference/calibrate.py {{shared}}/{name} --nodes 16 --seconds 4"


ONE_SSM = training("ssm", "tiny-ssm", "one", "boost.mark=train {brief} " + ssms(1, "{steps}"))
SMALL_STEPS = "stages.0.steps=20 " + BRIEF
SMALL_HEADS = training("medusa", "tiny-medusa", "heads", SMALL_STEPS)
SMALL_EAGLE = training("eagle", "tiny-eagle1", "eagle", SMALL_STEPS)
ENSEMBLES = (
    "python benchmarks/ensembles.py {folders} --target models/tiny-lm --prompts {shared}/modules.jsonl {match} "
    "--max-new-tokens {tokens} --seed {seed} --nodes 16 --threads 1"
)
WIDTHS = ENSEMBLES + " --sampling 1 --pattern 1 1 w 1 1 1 1 1 --widths {widths} --out {shared}/widths.json"
SSM_FULL = {"sets": f"{MODULES} 64", "tokens": 64, "steps": 900, "long": 2700, "brief": "", "match": ""}
SSM_SMALL = {"sets": f"{MODULES} 6", "tokens": 12, "steps": 20, "long": 30, "brief": BRIEF, "match": ""}
ONE_FULL, ONE_SMALL = ({"folders": "{shared}/one", "widths": w} for w in ("1 2 3 4 5", "1 5"))
BOOSTED = {"folders": "{shared}/boosted {shared}/one {shared}/long", "match": "--match 2"}
ACCEPTANCE = (
    "python benchmarks/compressed.py acceptance {target} --contexts {context} --entries {entries} --kinds books "
    "manuals passages --selectors streamingllm snapkv topk --drafts 4 --count {count} --new-tokens {tokens} --seed "
    "{seed} --threads 1 --out {shared}/acceptance.json"
)
LONG_SMOLLM2 = {"target": "models/smollm2", "context": 2048, "entries": "128 512", "count": 8, "tokens": 48}
LONG_TINY = {"target": "models/tiny-lm", "context": 96, "entries": "36 48", "count": 2, "tokens": 8}


RARE_ROWS = ", ".join(
    f"{{source: data/smollm2-{name}.parquet, weight: {weight}}}"
    for name, weight in (("train", 0.25), ("train-2", 0.25), ("made-up", 0.5))
)
# An EAGLE-3 drafter of all tokens from the shipped one, on the same conversations and on rare tokens.
ALL_TOKENS = (
    "init_from=models/smollm2-eagle3 drafter.draft_vocab_size=null stages.0.steps=250 stages.0.batch.sequences=4 "
    "stages.0.optim.lr=2e-3 stages.0.optim.warmup_steps=10 evaluate.every=250 evaluate.sequences=48 "
    f"'data.train=[{RARE_ROWS}]'"
)


def static_list(kind: str, name: str, more: str = "") -> str:
    how = f"drafter.base={{base}} drafter.shortlist={kind} drafter.size={{size}}{more} {{brief}}"
    return training("dynaspec", "{recipe}", name, how)


CLAIMS = (
    Claim(
        "medusa-sparse-tree",
        f"{MEDUSA} §2.3.3",
        "an optimised sparse tree of 64 nodes accepts more than dense (Cartesian) trees of 256, drawn at random",
        f"Medusa-1 heads of {SMOLLM2} (models/smollm2-medusa), greedy, 32 prompts × 48 tokens; sparse by the paper's "
        "product of accuracies, against the median, by expected τ, of all dense trees of 200 to 256 nodes, and against "
        "the best of them, which a random draw seldom is",
        (PROMPTS, *(decoding(tree, tree) for tree in ("sparse", "median", "best"))),
        {"drafter": "models/smollm2-medusa", "nodes": 64, "dense": (200, 256), "tokens": 48, "sets": CHATS},
        {"drafter": "{shared}/heads", "nodes": 8, "dense": (12, 16), "tokens": 12, "sets": f"{MODULES} 6"},
        (SMALL_HEADS, calibrated("heads")),
        files=read.medusa_trees,
        read=read.read_medusa_trees,
        minutes=30,
    ),
    Claim(
        "medusa-typical",
        f"{MEDUSA} §2.3.1, figure of the sweep",
        "as ε rises from 0.01 to 0.25 (δ = √ε), fewer tokens are accepted, and quality rises (not judged: no judge)",
        f"acceptance only, whole trees, Medusa-1 heads of {SMOLLM2}, temperature 0.7, 32 prompts × 48 tokens; quality "
        "as nats per token under the target, without a judge; beside it δ apart from ε",
        (
            PROMPTS,
            "python benchmarks/typical.py {drafter} --prompts {out}/prompts.jsonl --max-new-tokens {tokens} --seed "
            "{seed} --epsilons 0.01 0.03 0.09 0.17 0.25 --all-nodes --out {out}/epsilon",
            "python benchmarks/typical.py {drafter} --prompts {out}/prompts.jsonl --max-new-tokens {tokens} --seed "
            "{seed} --epsilons 0.09 --deltas 0.1 0.3 0.9 --all-nodes --out {out}/delta",
        ),
        {"drafter": "models/smollm2-medusa", "tokens": 48, "sets": CHATS},
        {"drafter": "{shared}/heads", "tokens": 12, "sets": f"{MODULES} 6"},
        (SMALL_HEADS, calibrated("heads")),
        read=read.read_typical,
        minutes=15,
    ),
    Claim(
        "medusa-stages",
        f"{MEDUSA} §2.2.2, table of training ways",
        "joint training from the start harms quality; Medusa-2 (2.83 ×) is faster than Medusa-1 (2.18 ×)",
        f"acceptance of Medusa-2 and Medusa-1 heads with equally many head-training steps (400), {TINY}, its own "
        "answers, 64 prompts × 64 tokens; quality as KL from the original target and repeated 4-grams, not judged",
        (
            PROMPTS,
            "python benchmarks/medusa_stages.py --prompts {out}/prompts.jsonl --steps {steps} --max-new-tokens "
            "{tokens} --out {out} run.seed={seed} {brief}",
        ),
        {"sets": f"{MODULES} 64", "steps": 400, "tokens": 64, "brief": ""},
        {"sets": f"{MODULES} 6", "steps": 6, "tokens": 12, "brief": BRIEF},
        read=read.read_stages,
        minutes=35,
    ),
    Claim(
        "specinfer-width",
        f"{SPECINFER}, evaluation, table 2",
        "greedy τ of ⟨1,1,w,1,1,1,1,1⟩ rises with the width: 2.2–2.95 at w = 1, 3.1–3.9 at w = 5 †",
        f"one SSM of two of the target's layers (900 steps), {TINY}, its own modules, 64 prompts × 64 tokens",
        (PROMPTS_OF_SSMS, ONE_SSM, WIDTHS),
        SSM_FULL | ONE_FULL,
        SSM_SMALL | ONE_SMALL,
        read=read.read_widths,
        at="shared",
        minutes=15,
    ),
    Claim(
        "specinfer-sampling",
        f"{SPECINFER}, theorem 4.3 and evaluation",
        "multi-step speculative sampling accepts 1.26–1.28 × as many tokens as naive sampling at width 5 †",
        f"τ at temperature 1 with ⟨1,1,5,1,1,1,1,1⟩, one SSM of two of the target's layers, {TINY}, 64 prompts × 64 "
        "tokens; judged: above naive sampling",
        (PROMPTS_OF_SSMS, ONE_SSM, WIDTHS),
        SSM_FULL | ONE_FULL,
        SSM_SMALL | ONE_SMALL,
        read=read.read_sampling,
        at="shared",
        minutes=15,
    ),
    Claim(
        "specinfer-boosting",
        f"{SPECINFER}, merge-based trees",
        "SSMs, boosted one after the other on the prompts that the earlier ones miss, propose together what one "
        "misses; no figure",
        f"three SSMs of two layers, 900 steps each (boost.mark train, two tokens to match), {TINY}, 64 prompts × 64 "
        "tokens, merged trees of 16 nodes; judged: above its first SSM alone at as many nodes",
        (
            PROMPTS_OF_SSMS,
            ONE_SSM,
            training("ssm", "tiny-ssm", "boosted", "boost.mark=train boost.tokens=2 {brief} " + ssms(3, "{steps}")),
            training("ssm", "tiny-ssm", "long", "boost.mark=train {brief} " + ssms(1, "{long}")),
            ENSEMBLES + " --out {out}/ensembles.json",
        ),
        SSM_FULL | BOOSTED,
        SSM_SMALL | BOOSTED,
        read=read.read_boosting,
        minutes=25,
    ),
    Claim(
        "eagle-dynamic-tree",
        f"{EAGLE2}, abstract",
        "a dynamic tree accepts more than EAGLE's fixed one (20–40 % faster)",
        f"τ at 16 nodes each, none left out, EAGLE-3 drafter of {SMOLLM2} (models/smollm2-eagle3), greedy, 32 prompts "
        "× 48 tokens; the fixed tree by the product of accuracies",
        (PROMPTS, *(decoding(tree, tree) for tree in ("fixed", "dynamic"))),
        {"drafter": "models/smollm2-eagle3", "nodes": 16, "tokens": 48, "sets": CHATS},
        {"drafter": "{shared}/eagle", "nodes": 8, "tokens": 12, "sets": f"{MODULES} 6"},
        (SMALL_EAGLE, calibrated("eagle")),
        files=read.eagle_trees,
        read=read.read_eagle_trees,
        minutes=2,
    ),
    Claim(
        "dynaspec-shortlist",
        f"{DYNASPEC} (v3), abstract",
        "dynamic shortlists keep 98.4 % of the whole LM head's τ, fixed ones 93.6 % (Llama-3-8B); by the table of an "
        "earlier version 97.5 and 93.5 %",
        "τ decoded, one list a level; DynaSpec's lists by its own selection, fixed ones of 2,048 tokens; EAGLE-3 "
        f"drafter of {SMOLLM2}, trained on for 250 steps without a draft vocabulary, dynamic tree of 16 nodes, 32 "
        "prompts × 48 tokens, a quarter with rare tokens; FR-Spec by a general corpus, VocabTrim by the training rows' "
        "answers",
        (
            PROMPTS,
            training("eagle", "{eagle}", "{trained}", "{how}"),
            training("dynaspec", "{recipe}", "dynaspec", "drafter.base={base} {lists}"),
            static_list("fr_spec", "fr-spec", " {corpus}"),
            static_list("vocab_trim", "vocab-trim"),
            "python benchmarks/shortlist_tasks.py {shared}/dynaspec {shared}/fr-spec {shared}/vocab-trim --prompts "
            "{out}/prompts.jsonl --schedules selected --max-new-tokens {tokens} --nodes {nodes} --report {out}",
        ),
        {
            "base": "{shared}/rare",
            "eagle": "smollm2-eagle3",
            "trained": "rare",
            "how": ALL_TOKENS,
            "recipe": "smollm2-dynaspec",
            "lists": "",
            "size": 2048,
            "corpus": "'drafter.corpus=[{source: data/smollm2-train.parquet}, {source: data/smollm2-train-2.parquet}]'",
            "brief": "evaluate.sequences=24",
            "nodes": 16,
            "tokens": 48,
            "sets": RARE,
        },
        {
            "base": "{shared}/eagle",
            "eagle": "tiny-eagle1",
            "trained": "eagle",
            "how": SMALL_STEPS,
            "recipe": "tiny-dynaspec",
            "lists": "drafter.positions=256 stages.0.steps=10 " + BRIEF,
            "size": 512,
            "corpus": "",
            "brief": BRIEF,
            "nodes": 8,
            "tokens": 12,
            "sets": f"{MODULES} 6",
        },
        read=read.read_dynaspec,
        minutes=35,
    ),
    Claim(
        "magicdec-selector",
        f"{MAGICDEC}, evaluation",
        "SnapKV keeps more acceptance than StreamingLLM",
        f"α of chains of four drafts at 2,048 tokens, 128 and 512 entries, {SMOLLM2}, eight texts each of books, "
        "manuals and repeated passages × 48 tokens",
        (ACCEPTANCE,),
        LONG_SMOLLM2,
        LONG_TINY,
        read=read.read_selectors,
        at="shared",
        minutes=15,
    ),
    Claim(
        "magicdec-self-speculation",
        f"{MAGICDEC}, insight 3",
        "the target over its own cache, restricted to the entries of highest attention, has α ≥ 0.9 †",
        f"α of chains of four drafts at 2,048 tokens, top-k attention over 512 entries, {SMOLLM2}, the same 24 "
        "texts × 48 tokens",
        (ACCEPTANCE,),
        LONG_SMOLLM2,
        LONG_TINY,
        read=read.read_topk,
        at="shared",
        minutes=15,
    ),
    Claim(
        "magicdec-batch",
        f"{MAGICDEC}, insights 1 and 2",
        "above S* the speed-up grows with the batch (judged: 3,584 tokens), below it falls (judged: 512)",
        f"speed-up of three drafts over 256 entries (SnapKV) with 16 rows and with 1, at 3,584 and 512 tokens, {TINY}, "
        "float32, two cores",
        (
            "python benchmarks/compressed.py speed models/tiny-lm --dtype float32 --contexts {contexts} --batch-sizes "
            "{batches} --entries {entries} --drafts 3 --selectors snapkv --count 2 --rounds {rounds} --new-tokens "
            "{tokens} --seed {seed} --out {out}/speed.json",
        ),
        {"contexts": "512 3584", "batches": "1 4 16", "entries": 256, "rounds": 3, "tokens": 64},
        {"contexts": "64 96", "batches": "1 2", "entries": 40, "rounds": 1, "tokens": 8},
        read=read.read_batches,
        speed=True,
        minutes=6,
    ),
    Claim(
        "specinfer-sequences",
        f"{SPECINFER}, evaluation",
        "tree-based parallel decoding is up to 1.8 × as fast as decoding the sequences apart, and needs less than 1 % "
        "more memory than plain decoding †",
        f"the target's pass alone, over ⟨1,1,5,1,1,1,1,1⟩ as one tree and as five rows, one text, {SMOLLM2}, 128 and "
        "1,024 cached tokens, two cores; judged: the ratio is above 1",
        (
            "python benchmarks/sequences.py --target {target} --contexts {contexts} --repeat {rounds} "
            "--seed {seed} --out {out}/sequences.json",
        ),
        {"target": "models/smollm2", "contexts": "128 1024", "rounds": 60},
        {"target": "models/tiny-lm", "contexts": "32", "rounds": 6},
        read=read.read_sequences,
        speed=True,
        minutes=2,
    ),
    Claim(
        "specinfer-parallel",
        f"{SPECINFER}, system",
        "the LLM runs tensor- and pipeline-parallel on several GPUs (1.5–2.8 × distributed)",
        why_not="there is no tensor parallelism here",
    ),
    # What only a GPU can tell, by benchmarks/AWAITING.md.
    Claim(
        "medusa-speed",
        f"{MEDUSA}, abstract",
        "2.2–3.6 × plain decoding",
        commands=(
            "accelerate launch train/medusa.py recipes/vicuna7b.yaml",
            "python inference/calibrate.py runs/vicuna7b",
            "python inference/decode.py runs/vicuna7b --prompts P.jsonl --check-lossless --baseline all",
        ),
    ),
    Claim(
        "eagle-speed",
        f"{EAGLE2}, abstract",
        "3.05–4.26 × plain decoding",
        commands=("make gpu BUNDLE=eagle", "make gpu BUNDLE=smollm2"),
    ),
    Claim(
        "specinfer-offloaded",
        f"{SPECINFER}, abstract",
        "1.5–2.8 × distributed, 2.6–3.5 × with the target in CPU memory",
        commands=(
            "python inference/decode.py draft_model:JackFram/llama-68m@1,1,3,1,1,1,1,1 --target huggyllama/llama-7b "
            "--prompts P.jsonl --check-lossless --baseline engine --device-map cpu",
            "accelerate launch train/ssm.py recipes/llama7b-68m-ssm.yaml",
            "python inference/calibrate.py runs/llama7b-68m-ssm",
            "python inference/decode.py runs/llama7b-68m-ssm --prompts P.jsonl --check-lossless --baseline engine "
            "--device-map cpu",
        ),
    ),
    Claim(
        "dynaspec-speed",
        f"{DYNASPEC}, abstract",
        "2.23 × plain decoding, fixed shortlists 1.91 × (rare tokens)",
        commands=("make gpu BUNDLE=dynaspec", "accelerate launch train/dynaspec.py recipes/llama3-8b-dynaspec.yaml"),
    ),
    Claim(
        "magicdec-speed",
        f"{MAGICDEC}, abstract",
        "up to 2.51 × for Llama-3.1-8B, 32 to 256 rows",
        commands=("make gpu BUNDLE=magicdec",),
    ),
)
