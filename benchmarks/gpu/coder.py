"""Drafters for Qwen2.5-Coder on a GPU that is rented by the minute: answers, training, calibration, decoding.

    python benchmarks/gpu/coder.py 1.5b --out runs/gpu/coder-1.5b --prompts PROMPTS [--minutes 11] [--stages train …]

The target is models/qwen2.5-coder-SIZE, or --model. PROMPTS is a folder with humaneval.jsonl, mbpp.jsonl, gsm8k.jsonl
and mt-bench.jsonl, rows of {"turns": […]}: for measuring alone; conversations that share a passage of eight words with
one of them are left out of training. Stages, one after the other, each with a limit in seconds, after which it is
interrupted and the next one uses what is there:

    convert    the target's GGUF file to safetensors
    answers    conversations that the target writes, greedily, with those of --answers: train.jsonl and held.jsonl;
               --questions: what it answers in place of the recipe's seeds
    train      EAGLE-3 and Medusa-1, or --families, side by side: folders eagle3 and medusa. DFlash and P-EAGLE are for
               the 0.5B; P-EAGLE begins with the drafter that is in eagle3
    calibrate  a tree for each
    decode     plain decoding, the drafters that have a tree, n-grams and merges, on all four sets: report/
    same-bits  the same for a few prompts with DRAFTSMITH_SAME_BITS=1: every token compared with plain decoding
    curve      training on shares of the answers, --share (0.5b: four; 1.5b: none): folders eagle3-0.33M, …
    pack       drafters and answers, in five pieces of 16 MB at most: pack/; drafters of the curve as far as they fit

Whatever has been done is not done again. stages.json has what each took and how it ended, DIR/STAGE.log its output.
--toy: on a CPU, for the tiny target. Exit codes: 0 each stage made something; 1 one did not; 2 bad input.
"""

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # .types/ holds draftsmith/ with a link for each folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".types"))

from draftsmith.common.command import CommandLine, run_command
from draftsmith.common.files import json_object, read_text, write_json, write_text
from draftsmith.data.passages import passages

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("convert", "answers", "train", "calibrate", "decode", "same-bits", "curve", "pack")
SETS = ("humaneval", "mbpp", "gsm8k", "mt-bench")
PER_SET = 8  # prompts of each set that are decoded
GRACE = 20  # seconds between an interrupt and a kill
AROUND = 35  # seconds of a training run for loading, the last evaluation and writing, and for what those take longer
HELD_OUT = 256  # conversations, or a tenth
PIECE, PIECES = 16_000_000, 5  # bytes, and how many of them
CHECKED = ("--check-lossless", "--seconds")
FAMILIES = {"medusa": "medusa", "eagle3": "eagle", "dflash": "dflash", "peagle": "eagle"}  # with what trains them
USUAL = ("eagle3", "medusa")
PASSES: dict[str, float] = {"eagle3": 3, "medusa": 2, "dflash": 5, "peagle": 2}  # over the answers


@dataclass(frozen=True)
class Size:
    """What is made for a target. Seconds are limits within ``minutes`` = 11; written: conversations that the target
    begins itself; mlp: width of EAGLE's; shares: millions of answer tokens of the curve."""

    written: int
    mlp: int
    seconds: dict[str, float]
    epochs: dict[str, float] = field(default_factory=lambda: PASSES)  # if the time is enough
    seeds: bool = True
    shares: tuple[float, ...] = ()


SIZES = {
    "0.5b": Size(24_000, 896, {"convert": 40, "answers": 90, "train": 130, "calibrate": 110, "decode": 130,
                               "same-bits": 40, "curve": 110, "pack": 20},
                 seeds=False, shares=(0.16, 0.33, 0.65, 1.3)),
    "1.5b": Size(18_000, 3584, {"convert": 45, "answers": 90, "train": 210, "calibrate": 115, "decode": 150,
                                "same-bits": 45, "curve": 1, "pack": 30}, epochs=PASSES | {"medusa": 1}),
}  # fmt: skip


@dataclass
class Job:
    """A command that a stage runs. ``makes``: what is there afterwards; environment: further variables."""

    name: str
    words: list[str]
    makes: Path
    environment: dict[str, str] = field(default_factory=dict)


def python(module: str, *words: object) -> list[str]:
    """A command by its module's full name, by which make gpu finds the files behind its part."""
    return [sys.executable, "-m", module, *map(str, words)]


def limit_of(given: str) -> tuple[str, float]:
    """The stage and the seconds of a word STAGE=SECONDS. Raises ValueError: it is none."""
    stage, _, seconds = given.partition("=")
    with suppress(ValueError):
        if stage in STAGES and float(seconds) > 0:
            return stage, float(seconds)
    raise ValueError(f"--limit {given}: give STAGE=SECONDS, of a stage that is one of {', '.join(STAGES)}")


class Bundle:
    """The stages of one target."""

    def __init__(self, size: Size, name: str, args: Any) -> None:
        self.size, self.name, self.out, self.toy = size, name, args.out.resolve(), args.toy
        self.model = str(args.model or f"models/qwen2.5-coder-{name}")
        self.prompts = (args.prompts or self.toy_prompts()).resolve()
        self.given = [path.resolve() for path in args.answers]
        self.questions = args.questions and args.questions.resolve()
        self.shares = size.shares if args.share is None else tuple(args.share)
        self.batch = args.batch_size
        self.speed, self.families = args.minutes / 11, args.families
        self.limits = dict(map(limit_of, args.limit))

    def toy_prompts(self) -> Path:
        (self.out / "prompts").mkdir(parents=True, exist_ok=True)
        for name in SETS:
            write_text(self.out / "prompts" / f"{name}.jsonl", json.dumps({"turns": [f"def {name[:2]}(a, b):"]}) + "\n")
        return self.out / "prompts"

    def limit(self, stage: str) -> float:
        return self.limits[stage] if stage in self.limits else self.size.seconds[stage] * self.speed

    # ---- the commands

    def convert(self) -> list[Job]:
        code = "import sys\nfrom draftsmith.models.files.locate import locate\nprint(locate(sys.argv[1]).path)"
        model = "models/tiny-lm" if self.toy else self.model
        return [Job("convert", [sys.executable, "-c", code, model], self.out)]

    def answers(self) -> list[Job]:
        fields = [f"engine.batch_size={self.batch}", f"data.written={self.size.written}"]
        if self.questions:
            fields = [fields[0], f"data.seeds=[{{source: {self.questions}}}]", "data.written=0"]
        elif not self.size.seeds:  # --answers has those to the seeds
            fields += ["data.seeds=[]", "run.seed=1"]
        if self.toy:
            fields = ["data.seeds=[{source: data/coder-seeds.jsonl, limit: 12}]", "data.written=0", *TOY_TARGET,
                      "data.template=recipes/templates/vicuna.jinja", "decoding.max_new_tokens=16",
                      "engine.batch_size=16", "engine.max_length=256"]  # fmt: skip
        recipe = f"recipes/qwen2.5-coder-{self.name}-distill.yaml"
        words = python(
            "draftsmith.train.distill", recipe, f"run.output_dir={self.out}", "run.name=answers", *self.target, *fields
        )
        return [Job("answers", words, self.out / "answers/shard-00000.jsonl")]

    @property
    def target(self) -> list[str]:
        return [] if self.toy else [f"target.name={self.model}"]

    def training(self, family: str, folder: str, data: str, stage: str, share: float = 0.0) -> Job:
        """Its time is the stage's limit less what a run takes around its steps. A ``share`` of the answers, in millions
        of tokens, has a batch of which its passes are a hundred steps or so."""
        module = f"draftsmith.train.{FAMILIES[family]}"
        fields = [f"run.output_dir={self.out}", f"run.name={folder}", *self.target]
        fields += [
            f"data.train=[{{source: {self.out / data}}}]",
            f"data.validation=[{{source: {self.out / 'held.jsonl'}}}]",
        ]
        fields += ["checkpoint.every=100000", "evaluate.every=100000", "stages.0.steps=null"]
        epochs = self.size.epochs[family]
        fields += [f"stages.0.epochs={epochs:g}"]
        fields += [f"stages.0.seconds={max(1.0, self.limit(stage) - AROUND):g}"]
        if family == "eagle3":
            fields += [f"drafter.intermediate_size={self.size.mlp}"]
        if family == "peagle":
            fields += [f"init_from={self.out / 'eagle3'}"]
        if share:
            rows = share * 1e6 * epochs / (0.75 * 1024)  # three quarters of the tokens are answers
            fields += [f"stages.0.batch.sequences={min((4, 8, 16, 32), key=lambda size: abs(rows / size - 100))}"]
        if self.toy:
            fields += [*TOY_TARGET, "data.template=recipes/templates/vicuna.jinja", "drafter.draft_vocab_size=512",
                       "stages.0.batch.sequences=4", "data.max_length=128", "stages.0.optim.warmup_steps=1",
                       "evaluate.sequences=4", "precision.autocast=none"]  # fmt: skip
            fields += ["drafter.intermediate_size=48", "drafter.unroll=2"] if family == "eagle3" else []
        recipe = f"recipes/qwen2.5-coder-{self.name}-{family}.yaml"
        return Job(folder, python(module, recipe, "--restart", *fields), self.out / folder / "config.json")

    def train(self) -> list[Job]:
        return [self.training(family, family, "train.jsonl", "train") for family in self.families]

    def curve(self) -> list[Job]:
        wanted = [(share, family) for share in self.shares for family in self.families]
        return [
            self.training(each, f"{each}-{share:g}M", f"train-{share:g}M.jsonl", "curve", share)
            for share, each in wanted
        ]

    def pack(self) -> list[Job]:
        """Drafters without checkpoints, and the answers, as pieces of one archive."""
        files = [
            name
            for name in ("train.jsonl", "held.jsonl", "data.json", "stages.json", "report")
            if (self.out / name).exists()
        ]
        left = PIECES * PIECE - sum((self.out / name).stat().st_size for name in files) / 3  # text, compressed
        names, others = list[str](), [path.parent.name for path in sorted(self.out.glob("*/config.json"))]
        for name in sorted(others, key=lambda name: name not in FAMILIES):
            left -= sum(path.stat().st_size for path in (self.out / name).glob("*.safetensors"))
            if left > 0:
                names.append(name)
        archive, left_out = self.out / "drafters.tar.xz", "--exclude=checkpoints"
        packed = shlex.join(["tar", "-C", str(self.out), left_out, "-c", *files, *names])
        cut = shlex.join(
            python("draftsmith.tools.pieces", "cut", archive, "--out", self.out / "pack", "--mb", PIECE / 1e6)
        )
        words = ["bash", "-c", f"{packed} | xz -T0 -1 > {shlex.quote(str(archive))} && {cut}"]
        return [Job("pack", words, self.out / "pack/drafters.tar.xz.000")]

    def calibrate(self) -> list[Job]:
        seconds = 1 if self.toy else min(12, self.limit("calibrate") / 8)
        return [
            Job(f"calibrate-{name}", python("draftsmith.inference.calibrate", self.out / name, "--seconds", seconds),
                self.out / name / "tree.json")
            for name in self.trained
        ]  # fmt: skip

    @property
    def trained(self) -> list[str]:
        return [name for name in FAMILIES if (self.out / name / "config.json").exists()]

    def decoding(self, name: str, prompts: int, environment: dict[str, str], *options: str) -> Job:
        alone = [str(self.out / family) for family in self.trained if (self.out / family / "tree.json").exists()]
        drafters = [*alone, "ngram", *(f"{drafter}+ngram" for drafter in alone)]
        files = [word for each in SETS for word in ("--prompts", str(self.prompts / f"{each}.jsonl"))]
        files += ["--first", str(prompts), "--target", "models/tiny-lm" if self.toy else self.model]
        tokens = 8 if self.toy else 128
        options = ("--max-new-tokens", str(tokens), "--baseline", "engine", "--report", str(self.out / name), *options)
        words = python("draftsmith.inference.decode", *drafters, *files, *options)
        return Job(name, words, self.out / name / "report.json", environment)

    def decode(self) -> list[Job]:
        timed = 1 if self.toy else 0.4 * self.limit("decode")  # besides it loads, captures graphs and decodes the rest
        return [self.decoding("report", 1 if self.toy else PER_SET, {}, *CHECKED, f"{timed:g}")]

    def same_bits(self) -> list[Job]:
        options = (*CHECKED, "1")
        return [self.decoding("report-same-bits", 1 if self.toy else 2, {"DRAFTSMITH_SAME_BITS": "1"}, *options)]

    # ---- between the commands

    def split(self) -> str:
        """Write train.jsonl, held.jsonl and the shares of the curve from the answers; returns what to say of them."""
        rows: list[dict[str, Any]] = []
        for path in [*sorted((self.out / "answers").glob("shard-*.jsonl")), *self.given]:
            for line in read_text(path).splitlines():
                with suppress(ValueError, LookupError):  # a line that was being written
                    row: dict[str, Any] = json.loads(line)
                    rows.append({"messages": row["messages"], "finish_reason": row["finish_reason"]})
        asked = {passage for name in SETS for row in read_text(self.prompts / f"{name}.jsonl").splitlines()
                 for turn in json.loads(row)["turns"] for passage in passages(turn).tolist()}  # fmt: skip
        clean = [row for row in rows if not any(
            asked.intersection(passages(message["content"]).tolist())
            for message in row["messages"] if message["role"] != "assistant"
        )]  # fmt: skip
        random.Random(0).shuffle(clean)
        held = max(1, min(HELD_OUT, len(clean) // 10))
        self.write("held.jsonl", clean[:held])
        train = clean[held:]
        self.write("train.jsonl", train)
        tokens = [self.tokens(row) for row in train]
        for share in self.shares:
            count, total = 0, 0
            while count < len(train) and total < share * 1e6:
                total, count = total + tokens[count], count + 1
            self.write(f"train-{share:g}M.jsonl", train[:count])
        facts = {"conversations": len(train), "answer_tokens": sum(tokens), "held_out": held,
                 "left_out": len(rows) - len(clean)}  # fmt: skip
        write_json(self.out / "data.json", facts)
        return ", ".join(f"{name} {value:,}" for name, value in facts.items())

    def tokens(self, row: dict[str, Any]) -> int:
        """Answer tokens of a conversation, the ends of the answers included."""
        if not hasattr(self, "tokenizer"):
            from draftsmith.models.tokenizer import load_tokenizer

            self.tokenizer = load_tokenizer("models/tiny-lm" if self.toy else self.model)
        answers = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        return sum(map(len, self.tokenizer(answers)["input_ids"])) + len(answers)

    def write(self, name: str, rows: list[dict[str, Any]]) -> None:
        write_text(self.out / name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


TOY_TARGET = ["target.name=models/tiny-lm", "target.model_type=llama"]


def run_jobs(jobs: list[Job], limit: float, logs: Path) -> dict[str, str]:
    """Run commands side by side for ``limit`` seconds at most; returns how each ended."""
    links, ended = str(ROOT / ".types"), dict[str, str]()
    running: dict[str, subprocess.Popen[bytes]] = {}
    began = time.monotonic()
    for job in jobs:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [links, os.environ.get("PYTHONPATH")])),
                       "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", **job.environment}  # fmt: skip
        with (logs / f"{job.name}.log").open("ab") as log:
            log.write(f"$ {shlex.join(job.words)}\n".encode())
            log.flush()
            running[job.name] = subprocess.Popen(
                job.words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True, env=environment,
            )  # fmt: skip
    for name, process in running.items():
        try:
            code = process.wait(max(0.0, began + limit - time.monotonic()))
            ended[name] = "done" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
    for name, process in running.items():
        if name not in ended:
            ended[name] = "interrupted at its limit"
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return ended


def parser() -> CommandLine:
    parser = CommandLine(__doc__)
    parser.add_argument("size", choices=SIZES, help="of the target")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs, logs and stages.json")
    parser.add_argument("--prompts", type=Path, help="folder of the four evaluation sets")
    parser.add_argument("--model", help="the target's folder or Hub id; models/qwen2.5-coder-SIZE if left out")
    parser.add_argument("--answers", type=Path, nargs="*", default=[], help="further conversations, as JSON lines")
    parser.add_argument(
        "--questions", type=Path, help="JSON lines of {messages}, answered in place of the recipe's seeds"
    )
    parser.add_argument("--share", type=float, nargs="*", help="millions of answer tokens of each point of the curve")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(USUAL), help="what is trained")
    parser.add_argument("--limit", nargs="*", default=[], metavar="STAGE=SECONDS", help="in place of the stage's own")
    parser.add_argument("--minutes", type=float, default=11, help="of all stages, at most (default 11)")
    parser.add_argument("--batch-size", type=int, default=1024, help="conversations at once (default 1024)")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), help="some of the stages")
    parser.add_argument("--at-once", type=int, default=4, help="runs of the curve side by side (default 4)")
    parser.add_argument("--toy", action="store_true", help="the same at toy size, on a CPU")
    return parser


def main() -> None:
    args = parser().parse_args()
    if not args.prompts and not args.toy:
        raise ValueError("--prompts: name the folder of the four evaluation sets")
    if args.prompts and (missing := [name for name in SETS if not (args.prompts / f"{name}.jsonl").is_file()]):
        raise FileNotFoundError(
            f"{args.prompts}: no {missing[0]}.jsonl; docs/data.md says where the four sets are from"
        )
    bundle = Bundle(SIZES[args.size], args.size, args)
    bundle.out.mkdir(parents=True, exist_ok=True)
    record = bundle.out / "stages.json"
    stages: dict[str, Any] = json_object(record) if record.exists() else {}
    failed = False
    for stage in args.stages:
        jobs: list[Job] = getattr(bundle, stage.replace("-", "_"))()
        if stage in ("train", "curve"):  # what is there already is not trained again
            jobs = [job for job in jobs if not job.makes.exists()]
        limit, began, ended = bundle.limit(stage), time.monotonic(), dict[str, str]()
        limit = max(limit * 5, 300) if args.toy else limit + AROUND if stage in ("train", "curve") else limit
        at_once = {"curve": args.at_once, "calibrate": 1}.get(stage, len(jobs) or 1)
        for first in range(0, len(jobs), at_once):
            left = began + limit - time.monotonic()
            if left > 0:
                ended |= run_jobs(jobs[first : first + at_once], left, bundle.out)
        said = ""
        if stage == "answers" and (bundle.out / "answers").is_dir():
            said = bundle.split()
        stages[stage] = {"seconds": round(time.monotonic() - began, 1), "ended": ended, "said": said}
        write_json(record, stages)
        failed |= not all(job.makes.exists() for job in jobs)
        print(f"{stage}: {stages[stage]}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    run_command(main)
