"""The driver of the runs on a GPU: what is trained on, how long commands may take, and what it refuses."""

import json
import shlex
import sys
import time
from itertools import accumulate

import pytest
from draws import occurs

from draftsmith.benchmarks.gpu import coder
from draftsmith.benchmarks.gpu.coder import AROUND, SETS, SIZES, Bundle, Job, run_jobs
from draftsmith.models.tokenizer import load_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"
ASKED = {name: f"{name} has eight words in a row here and {name} more" for name in ("alpha", "beta", "gamma", "delta")}


@pytest.fixture
def prompts(tmp_path):
    """A folder of the four sets, of one prompt each; the last one's is its second turn."""
    folder = tmp_path / "prompts"
    folder.mkdir()
    for name, text in zip(SETS, ASKED.values(), strict=True):
        turns = ["Hello.", text] if name == SETS[-1] else [text]
        (folder / f"{name}.jsonl").write_text(json.dumps({"turns": turns}) + "\n")
    return folder


@pytest.fixture
def bundle(prompts, tmp_path):
    """``bundle(*options)`` → the stages as the command makes them of its options."""

    def make(*options):
        words = ["0.5b", "--out", tmp_path / "out", "--prompts", prompts, *options]
        return Bundle(SIZES["0.5b"], "0.5b", coder.parser().parse_args([*map(str, words)]))

    return make


def word(number):
    return "".join(LETTERS[int(digit)] for digit in str(number))


def conversation(number, asked=None):
    """One of the number's own words; every fifth one was cut."""
    text = " ".join(f"{word(number)}{letter}" for letter in LETTERS[: 10 + number % 7])
    messages = [{"role": "user", "content": text if asked is None else f"{text} {asked}"}]
    messages += [{"role": "assistant", "content": f"def {word(number)}():\n    return {number}\n" * (1 + number % 3)}]
    return {"id": str(number), "messages": messages, "finish_reason": ["length" if number % 5 == 0 else "stop"]}


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_split(bundle, tmp_path):
    """What shares a passage with one of the sets is left out, in whatever turn of the user's; a share of the curve is
    the beginning of the next one, up to the answer that completes its tokens."""
    shares = (0.0002, 0.0004, 0.0007, 9)
    made = bundle("--toy", "--answers", tmp_path / "further.jsonl", "--share", *shares)
    own = [conversation(number) for number in range(50)]
    shared = [conversation(60 + number, asked) for number, asked in enumerate(ASKED.values())]
    later = conversation(70)
    later["messages"] += conversation(71, ASKED["beta"])["messages"]
    told = conversation(72)
    told["messages"].insert(0, {"role": "system", "content": ASKED["alpha"]})
    (tmp_path / "out/answers").mkdir(parents=True)
    lines = [json.dumps(row) for row in (*own[:30], *shared, later, told)]
    (tmp_path / "out/answers/shard-00000.jsonl").write_text("\n".join([*lines, lines[0][:40]]))  # being written
    (tmp_path / "further.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own[30:]))
    said = made.split()
    held, train = read(tmp_path / "out/held.jsonl"), read(tmp_path / "out/train.jsonl")
    assert len(held) == 5 and len(train) == 45
    kept = [{name: row[name] for name in ("messages", "finish_reason")} for row in own]
    order = lambda row: row["messages"][0]["content"]  # noqa: E731
    assert sorted(held + train, key=order) == sorted(kept, key=order) and held + train != kept
    tokenizer = load_tokenizer("models/tiny-lm")
    tokens = [len(tokenizer(row["messages"][1]["content"])["input_ids"]) + 1 for row in train]
    totals = [*accumulate(tokens)]
    for share in shares:
        count = len(read(tmp_path / f"out/train-{share:g}M.jsonl"))
        assert read(tmp_path / f"out/train-{share:g}M.jsonl") == train[:count]
        assert count == next((n for n, total in enumerate(totals, 1) if total >= share * 1e6), 45)
    occurs(totals[0] < 200 and totals[-1] > 700, "the shares differ")
    facts = {"conversations": 45, "answer_tokens": totals[-1], "held_out": 5, "left_out": 6}
    assert json.loads((tmp_path / "out/data.json").read_text()) == facts
    assert said == f"conversations 45, answer_tokens {totals[-1]:,}, held_out 5, left_out 6"
    before = (tmp_path / "out/train.jsonl").read_bytes()
    made.split()
    assert (tmp_path / "out/train.jsonl").read_bytes() == before, "the same order each time"


# ---- commands and their limits


SAVES = """
import pathlib, sys, time
place = pathlib.Path(sys.argv[1])
place.write_text("begun")
try:
    time.sleep(60)
except KeyboardInterrupt:
    place.write_text("saved")
"""
IGNORES = """
import pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).write_text("begun")
time.sleep(60)
"""
SHOWS = """
import os, pathlib, sys
names = ("PYTHONPATH", "HF_HUB_OFFLINE", "OF_THE_JOB")
pathlib.Path(sys.argv[1]).write_text(" ".join(os.environ[name] for name in names))
print("shown")
"""


def test_jobs_side_by_side(tmp_path, monkeypatch):
    """One that is not done at the limit is interrupted, and what it saves then stays; if it goes on, it is killed."""
    monkeypatch.setattr(coder, "GRACE", 0.5)
    monkeypatch.setenv("PYTHONPATH", "of-the-user")
    codes = {"saves": SAVES, "ignores": IGNORES, "shows": SHOWS, "fails": "import sys; sys.exit(3)"}
    jobs = [
        Job(name, [sys.executable, "-S", "-c", code, str(tmp_path / name)], tmp_path / name, {"OF_THE_JOB": "x"})
        for name, code in codes.items()
    ]
    began = time.monotonic()
    ended = run_jobs(jobs, 3, tmp_path)
    assert 3 <= time.monotonic() - began < 30
    at_limit = "interrupted at its limit"
    assert ended == {"saves": at_limit, "ignores": at_limit, "shows": "done", "fails": "exit code 3"}
    assert [(tmp_path / name).read_text() for name in ("saves", "ignores")] == ["saved", "begun"]
    assert (tmp_path / "shows").read_text() == f"{coder.ROOT / '.types'}:of-the-user 1 x"
    first, *_, last = (tmp_path / "shows.log").read_text().splitlines()
    assert first.startswith(f"$ {sys.executable} -S -c ") and last == "shown"
    run_jobs(jobs[2:3], 30, tmp_path)
    assert (tmp_path / "shows.log").read_text().splitlines().count("shown") == 2, "logs are added to"


def test_limits_of_stages(bundle):
    """A share of the minutes, or what --limit says; of a training run, its steps have what the rest leaves."""
    seconds = SIZES["0.5b"].seconds
    assert bundle().limit("decode") == seconds["decode"]
    assert bundle("--minutes", 22).limit("decode") == 2 * seconds["decode"]
    limited = bundle("--minutes", 22, "--limit", "train=95", "decode=7.5")
    assert (limited.limit("train"), limited.limit("decode")) == (95, 7.5)
    assert limited.limit("answers") == 2 * seconds["answers"]
    for job in limited.train():
        assert f"stages.0.seconds={95 - AROUND}" in job.words
    assert all("stages.0.seconds=1" in job.words for job in bundle("--limit", "train=3").train())
    (job,) = bundle("--limit", "curve=50", "--families", "medusa", "--share", 0.5).curve()
    assert job.name == "medusa-0.5M" and "stages.0.seconds=15" in job.words


def test_families(bundle, tmp_path):
    """Each by its script; what has no tree is not decoded."""
    for path in (
        "eagle3/config.json",
        "eagle3/tree.json",
        "dflash/config.json",
        "dflash/tree.json",
        "medusa/config.json",
    ):
        (tmp_path / "out" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / path).write_text("{}")
    made = bundle("--families", "dflash", "peagle")
    assert [job.words[2] for job in made.train()] == ["draftsmith.train.dflash", "draftsmith.train.eagle"]
    assert f"init_from={tmp_path / 'out/eagle3'}" in made.train()[1].words
    drafters = made.decode()[0].words[3:8]
    alone = [str(tmp_path / "out" / name) for name in ("eagle3", "dflash")]
    assert drafters == [*alone, "ngram", *(f"{name}+ngram" for name in alone)]


def test_what_is_packed(bundle, tmp_path, monkeypatch):
    """Answers and drafters; of those of the curve what fits into the pieces."""
    monkeypatch.setattr(coder, "PIECE", 100)
    names = ("curve-a", "eagle3", "medusa", "zz-curve")
    for name in names:
        (tmp_path / "out" / name).mkdir(parents=True)
        (tmp_path / "out" / name / "config.json").write_text("{}")
        (tmp_path / "out" / name / "model.safetensors").write_bytes(b"x" * 120)
    (tmp_path / "out/train.jsonl").write_text("x" * 300)
    (job,) = bundle().pack()
    words = shlex.split(job.words[2].partition("|")[0])
    assert words[words.index("-c") + 1 :] == ["train.jsonl", "eagle3", "medusa", "curve-a"]


@pytest.fixture
def run_coder(run_main, prompts, tmp_path, monkeypatch):
    """The command, whose commands are only noted: names and limit of each call. Those in ``makes`` make their file."""
    calls, making = [], set()

    def noted(jobs, limit, logs):
        calls.append(([job.name for job in jobs], round(limit)))
        for job in jobs:
            if job.name in making:
                job.makes.parent.mkdir(exist_ok=True)
                job.makes.write_text("{}")
        return {job.name: "done" for job in jobs}

    monkeypatch.setattr(coder, "run_jobs", noted)

    def run(*options, makes=()):
        calls.clear()
        making.clear()
        making.update(makes)
        return *run_main(coder.main, "0.5b", "--out", tmp_path / "out", "--prompts", prompts, *options), calls[:]

    return run


def test_the_command(run_coder, tmp_path):
    """What is there is not trained again; the exit code says whether each stage made something."""
    limits = ["--limit", "train=60", "curve=50", "calibrate=40"]
    code, out, _, calls = run_coder("--stages", "train", *limits, makes={"eagle3"})
    assert (code, calls) == (1, [(["eagle3", "medusa"], 60 + AROUND)]) and out.startswith("train: {'seconds': ")
    code, _, _, calls = run_coder("--stages", "train", "calibrate", *limits, makes={"medusa", "calibrate-eagle3"})
    assert (code, calls) == (1, [(["medusa"], 95), (["calibrate-medusa"], 40), (["calibrate-eagle3"], 40)])
    record = json.loads((tmp_path / "out/stages.json").read_text())
    assert {name: stage["ended"] for name, stage in record.items()} == {
        "train": {"medusa": "done"},
        "calibrate": {"calibrate-medusa": "done", "calibrate-eagle3": "done"},
    }
    names = [f"{family}-{share}M" for share in (0.1, 0.2, 0.3) for family in ("eagle3", "medusa")]
    options = ["--stages", "curve", *limits, "--share", 0.1, 0.2, 0.3]
    code, _, _, calls = run_coder(*options, makes=set(names))
    assert (code, calls) == (0, [(names[:4], 85), (names[4:], 85)])


def test_what_is_refused(run_coder, prompts, tmp_path):
    """Limits of no stage or time, and sets that are not there: before anything is made."""
    for wrong in ("trian=5", "train", "train=", "train=soon", "train=-1", "train=nan"):
        code, _, err, calls = run_coder("--stages", "train", "--limit", "decode=9", wrong)
        assert code == 2 and not calls and err.startswith(f"error: --limit {wrong}: give STAGE=SECONDS, of a stage ")
    for name in SETS:
        (prompts / f"{name}.jsonl").rename(tmp_path / "away")
        code, _, err, calls = run_coder()
        said = f"error: {prompts}: no {name}.jsonl; docs/data.md says where the four sets are from\n"
        assert (code, err, calls) == (2, said, []) and not (tmp_path / "out").exists()
        (tmp_path / "away").rename(prompts / f"{name}.jsonl")
