"""Every measuring command at toy size by the real command, and the options that it refuses. What it computes is tested
beside this file, by its name."""

import importlib
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.benchmarks import compressed, medusa_stages

pytestmark = pytest.mark.measurement

# A command's name → its words, the list of its report and the length of that, files beside the report. TARGET, HEADS
# and PROMPTS are made here; --out is added.
COMMANDS = {
    "budget": ("ngram:1-3 --target TARGET --prompts PROMPTS --device cpu --batch-sizes 1 3 --fixed 1 4 --temperatures "
               "0 0.7 --max-new-tokens 8 --rounds 2", "rows", 12, ()),
    "coupled": ("draft_model:NEAR --target TARGET --prompts PROMPTS --device cpu --temperatures 0 0.7 --expansion 2 1 "
                "--max-new-tokens 8", "rows", 2, ()),
    "compressed acceptance": ("acceptance TARGET --device cpu --contexts 40 64 --count 2 --entries 36 40 --new-tokens "
                              "8 --selectors snapkv topk", "rows", 4 * 2 * 2 * 2, ()),
    "compressed speed": ("speed TARGET --device cpu --contexts 64 --batch-sizes 1 2 --drafts 1 2 --kinds books --count "
                         "1 --entries 36 40 --new-tokens 8 --drafters ngram", "rows", 2 * (2 * 2 * 2 + 1), ()),
    "compressed selection": ("selection TARGET --device cpu --contexts 64 --batch-sizes 1 3 --entries 36 40 "
                             "--new-tokens 8", "rows", 2 * 2 * 2, ()),
    "clusters": ("--target TARGET --clusters 8 --sample 40 --device cpu", "methods", 4, ()),
    "data_wait": ("--shape tiny-lm --tokens 32 --steps 3 --milliseconds 1 --workers 0 1 --device cpu", "results", 4,
                  ()),
    "kernel_times": ("shortlist --batches 2 --level 3 --hidden 32 --vocabulary 500 60", "rows", 2 * 5, ()),
    "medusa_step": ("--vocab 300 --width 64 --layers 1 --rows 1 --length 128 --repeat 1", "results", 2, ()),
    "plan_grid": ("TARGET --device cpu --settings 1x64 2x64 --drafters draft_model:NEAR --entries 36 --selectors "
                  "snapkv --drafts 1 2 --texts 1 --new-tokens 6 --rounds 1", "rows", 2, ()),
    "quality": ("HEADS --sets arithmetic reasoning --count 5 --max-new-tokens 12 --temperature 0.9", "methods", 3, ()),
    "roofline": ("--depth 3 --nodes 15", "shapes", 3, ("out.png", "out-itself.png")),
    "serving": ("HEADS ngram --prompts PROMPTS --device cpu --batches 1 3 --loads 0.5 --requests 5 --rounds 1 "
                "--seconds 9 --max-new-tokens 8", "batches", 2, ("out.png",)),
    "sequences": ("--target TARGET --device cpu --expansion 1 2 2 --contexts 9 20 --batches 2 --repeat 5", "rows", 2,
                  ()),
    "step_times": ("--target TARGET --device cpu --contexts 9 --nodes 3 6 --heads 3 --repeat 3", "rows", 3,
                   ("out.png",)),
    "train_step": ("--shape tiny-lm --sequences 1 --tokens 24 --heads 2 --repeat 1 --projection shared --device cpu",
                   "results", 2, ()),
    "unroll": ("--shape tiny-lm --sequences 2 --tokens 12 --device cpu --steps 1 3 --repeat 5 --dtype bfloat16",
               "results", 2, ()),
}  # fmt: skip


@pytest.fixture(scope="module")
def near(tiny_lm, tmp_path_factory):
    """The tiny model with disturbed weights."""
    folder = tmp_path_factory.mktemp("near") / "near"
    shutil.copytree(tiny_lm, folder)
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    moved = {name: weight + 0.02 * weight.std() * torch.randn_like(weight) for name, weight in weights.items()}
    save_file(moved, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def run(run_main, tiny_lm, drafter, near, write_prompts, monkeypatch):
    """``run(name, words)`` → exit code, stdout and stderr of ``benchmarks/NAME.py``."""
    places = {"TARGET": tiny_lm, "HEADS": drafter, "NEAR": near}
    places["PROMPTS"] = write_prompts([f"licence {n} of the work" for n in range(6)], "code", "chat")

    def run(name, words):
        monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # of this process
        for place, path in places.items():
            words = words.replace(place, str(path))
        main = importlib.import_module(f"draftsmith.benchmarks.{name}").main
        return run_main(main, *words.split(), script=f"benchmarks/{name}.py")

    return run


SLOW = {"medusa_step": pytest.mark.slow}  # two processes import torch


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in COMMANDS])
def test_the_command(run, tmp_path, name):
    words, field, length, files = COMMANDS[name]
    script, out = name.split()[0], tmp_path / "out.json"
    threads = "" if script in ("kernel_times", "roofline") else " --threads 1"
    code, printed, err = run(script, f"{words}{threads} --out {out}")
    assert code == 0 and printed.strip(), err
    report = json.loads(out.read_text())
    assert len(report[field]) == length
    if script not in ("kernel_times", "roofline"):
        assert report["command"].startswith(f"python benchmarks/{script}.py ") and report["versions"]["torch"]
    for file in files:
        assert (tmp_path / file).read_bytes().startswith(b"\x89PNG"), file
    CHECKS.get(name, lambda report: None)(report)


# ---- what a report says


def check_budget(report):
    settings = [(row["temperature"], row["batch"], row["kind"]) for row in report["rows"]]
    assert settings == [(t, b, kind) for t in (0, 0.7) for b in (1, 3) for kind in ("chat", "code", "all")]
    assert report["planned"] == 4
    for row in report["rows"]:
        assert list(row["speeds"]) == ["budget", "1 nodes", "4 nodes"] and row["tau"] >= 1 and row["nodes"] >= 0
        assert all(speed["speedup"] > 0 for speed in row["speeds"].values())


def check_clusters(report):
    balanced = report["methods"]["draftsmith, balanced"]["seeds"]
    assert all(row["largest_over_mean"] <= 2 for row in balanced)
    for method in report["methods"].values():
        assert -1 <= method["adjusted_rand_index"] <= 1
        assert all(0 < row["mean_cosine"] <= 1 and -1 <= row["silhouette"] <= 1 for row in method["seeds"])


def check_coupled(report):
    for row, methods in zip(report["rows"], (1, 4), strict=True):
        assert len(row["methods"]) == methods and row["nodes"] == 5, "at T = 0 they are one"
        for found in row["methods"].values():
            assert 1 < found["tau"] <= 3 and found["tau_by_kind"].keys() == {"code", "chat"}
            over = row["methods"]["coupled"]["tau"] / found["tau"]
            assert found["coupled_over"] == pytest.approx(over, abs=2e-4)


def check_acceptance(report):
    for row in report["rows"]:
        assert row["kind"] in compressed.KINDS and 0 <= row["alpha"] <= 1 and len(row["by_depth"]) == 4
        whole = row["entries"] == row["context"]
        assert (row["memory_1"] == 1) == whole and row["memory_1"] <= 1
        assert not whole or row["alpha"] == 1 or row["selector"] == "topk"  # which selects from new tokens, too
        accepted, drafted = (sum(each) for each in zip(*row["accepted_by_text"], strict=True))
        assert len(row["accepted_by_text"]) == 2 and row["alpha"] == pytest.approx(accepted / drafted, abs=1e-4)


def check_speed(report):
    for row in report["rows"]:
        assert row["speedup"] > 0 and row["execution"].startswith("eager")
        if row["selector"] == "ngram":
            assert "predicted" not in row
            continue
        assert 1 <= row["tokens"] <= row["drafts"] + 1
        time = row["verify"] + row["draft"] + row["select"]
        assert row["predicted"] == pytest.approx(row["tokens"] / time, rel=0.02)


def check_plan_grid(report):
    for row in report["rows"]:
        methods = row["methods"]
        assert methods["none"]["speedup"] == 1 and {row["planned"], row["best"]} <= methods.keys()
        counted = [each["speedup"] for each in methods.values() if each["rounds"]]
        assert row["best_measured"] == max(counted) >= row["measured"] == methods[row["planned"]]["speedup"]
        assert row["share"] == pytest.approx(row["measured"] / row["best_measured"], abs=1e-4)
        assert {"@" in name for name in methods} == {False, True} and len(methods) >= 1 + 3 * 2


def check_step(report):
    plain, chain, tree = report["rows"]
    for row in report["rows"]:
        assert row["ratio"] == row["median"] / plain["median"] and 0 < row["low"] <= row["median"] <= row["high"]
        assert row["of_bound"] == pytest.approx(row["bound"] / row["median"]) and row["execution"].startswith("eager")
    assert chain["moving_commit"]["seconds"] is None and tree["moving_commit"]["nodes"] > 0


def check_train_step(report):
    first, second = report["results"]
    assert second["trained_parameters"] > first["trained_parameters"] and second["operations"] > first["operations"]
    for row in report["results"]:
        assert row["tokens_per_second"] == pytest.approx(24 / row["seconds"], rel=0.01, abs=0.06)  # rounded
        share = row["operations"] / row["seconds"] / row["matmul_rate"]
        assert row["of_matmul_rate"] == pytest.approx(share, rel=0.02, abs=1e-4)


def check_unroll(report):
    for row in report["results"]:
        ours, dense = (row["all_seconds"][form] for form in ("draftsmith", "dense"))
        assert len(ours) == len(dense) == 5 and row["ratio"] == pytest.approx(sum(ours) / sum(dense), abs=1e-3)
        assert row["ratio_interval"][0] <= row["ratio"] <= row["ratio_interval"][1]
        assert max(row["errors"].values()) < 0.05


def check_sequences(report):
    for row in report["rows"]:
        low, high = row["interval"]
        assert (row["nodes"], row["rows_apart"], row["tokens_apart"]) == (8, 2 * 4, 4 * 4) and low <= row[
            "ratio"
        ] <= high
        copies = 3 * row["context"] + 4 * 3  # of the prefix, and the nodes of each row, in slots beside the tree's
        assert row["apart_memory"] / row["tree_memory"] == pytest.approx(copies / 7)


def check_medusa_step(report):
    theirs, ours = report["results"].values()
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=2e-2) and ours["step"] > ours["heads"] > 0


CHECKS = {
    "budget": check_budget,
    "compressed acceptance": check_acceptance,
    "compressed speed": check_speed,
    "clusters": check_clusters,
    "coupled": check_coupled,
    "medusa_step": check_medusa_step,
    "plan_grid": check_plan_grid,
    "sequences": check_sequences,
    "step_times": check_step,
    "train_step": check_train_step,
    "unroll": check_unroll,
}


def test_a_grid_goes_on_where_it_ended(run, tmp_path):
    """Settings that a file holds are not measured again; figures of other options stay apart."""
    out, rows = tmp_path / "grid.json", []
    words = (
        "TARGET --device cpu --threads 1 --entries 36 --selectors snapkv --drafts 1 --texts 1 --new-tokens 4 --rounds 1"
    )
    for settings in ("1x48", "1x48 2x48"):
        code, printed, err = run("plan_grid", f"{words} --settings {settings} --out {out}")
        assert code == 0 and f"of {len(settings.split())}" in printed, err
        assert ("1x48: planned" in err) == (settings == "1x48")
        rows.append(json.loads(out.read_text())["rows"])
    assert rows[1][:1] == rows[0] and len(rows[1]) == 2
    code, _, err = run("plan_grid", f"{words} --settings 1x48 --seed 1 --out {out}")
    assert code == 2 and "has settings of another target or of other options" in err


# ---- what is refused

REFUSED = [
    ("budget", "none --target TARGET --prompts PROMPTS", "'none' drafts nothing; give a drafter"),
    ("claims", "--list --table", "give the NAMEs of claims, or one of --list, --table and --keep"),
    ("claims", "--list --small", "--small, --show and --seed need the NAME of a claim"),
    ("claims", "eagle-dynamic-tre", "no claim 'eagle-dynamic-tre'; did you mean eagle-dynamic-tree?"),
    ("claims", "magicdec-speed", "magicdec-speed: awaits a GPU; --show prints its commands"),
    ("claims", "specinfer-parallel", "specinfer-parallel: there is no tensor parallelism here"),
    ("compressed", "acceptance models/tiny-lm --contexts 64 --entries 40 --new-tokens 4 --kinds books --count 1 "
     "--drafts 40", "drafts of 40 tokens, 40 deep, have no room here"),
    ("plan_grid", "TARGET --settings 4", "4: write rows x cached tokens, for example 4x2048"),
    ("plan_grid", "TARGET --settings 1x9000 --device cpu", "--settings: 9000 tokens are too many"),
    ("kernel_times", "few_rows --rows 1 65", "have to be from 1 to 64"),
    ("quality", "HEADS --count 0", "--count 0: must be at least 1"),
    ("quality", "HEADS --temperature 0", "--temperature 0.0: must be at least 1e-10; leave it out"),
    ("quality", "HEADS --judge http://x/v1", "--judge, --judge-model and --questions go together"),
    ("quality", "HEADS --judge nonsense --judge-model m --questions q.jsonl", "--judge nonsense: is no address; "),
    ("quality", "HEADS --judge http://x/v1 --judge-model m --questions q.jsonl --sets code", "leave out --sets"),
    ("quality", "HEADS --sets code code", "--sets code code: code is given twice; leave one out"),
    ("quality", "HEADS --epsilon 2 --temperature 1", "epsilon 2.0: must be above 0 and at most 1"),
    ("quality", "some/plain", "a drafter's name is 'plain', as that of plain decoding; give its folder another one"),
    ("roofline", "--ranks 0.9 0.2", "--ranks 0.9 0.2: must be above 0, and 1 at most together"),
    ("serving", "ngram --prompts PROMPTS", "'ngram' has no target of its own"),
    ("serving", "ngram ngram --prompts PROMPTS", "ngram ngram: ngram is given twice"),
    ("serving", "ngram --prompts PROMPTS --batches 8 8", "--batches 8 8: 8 is given twice"),
    ("serving", "ngram --prompts PROMPTS --max-new-tokens 1", "--max-new-tokens 1: must be at least 2"),
    ("serving", "ngram --prompts PROMPTS --seed -1", "--seed -1: must be from 0"),
    ("serving", "ngram --prompts PROMPTS --out x.txt", "name a .json file"),
    ("serving", "none --target TARGET --prompts PROMPTS --url http://127.0.0.1:9/v1", "no server answers at"),
    ("step_times", "--shape llama9 --device cpu", "--shape llama9: unknown; use llama2-7b, "),
    ("step_times", "--shape tiny-lm --device cpu --heads 1 --nodes 99", "--nodes 99: 1 heads give trees of at most 11"),
    ("step_times", "--shape tiny-lm --device gpu", "device 'gpu': unknown; use cpu, cuda or cuda:N"),
    ("step_times", "--shape tiny-lm --device cpu --nodes 5000", "--nodes 5000: must be at most 4096"),
    ("step_times", "--target TARGET --device cpu --nodes 1 --contexts 256", "this exceeds the target's context of 256"),
    ("step_times", "--target TARGET --device cpu --nodes 1 --contexts 9 --repeat 1 --graphs", "--graphs: 0 of 4 steps"),
    ("typical", "x --prompts PROMPTS --temperature 0", "--temperature 0.0: must be at least 1e-10; below, every mode"),
    ("typical", "x --prompts PROMPTS --epsilons 2", "epsilon 2.0: must be above 0 and at most 1"),
    ("typical", "x --prompts PROMPTS --deltas 0", "delta 0.0: must be above 0 and at most 1"),
    ("typical", "x --prompts PROMPTS --epsilons 0.1 0.2 0.1", "--epsilons 0.1 0.2 0.1: 0.1 is given twice"),
    ("typical", "x --prompts PROMPTS --seed -1", "seed -1: "),
    ("unroll", "--shape x", "--shape x: unknown; use llama2-7b, llama3-8b, smollm2-135m, tiny-lm"),
    *((name, f"{words} --out /dev/null/x.json", "cannot write here") for name, words in (
        ("medusa_step", ""), ("train_step", ""), ("medusa_stages", "--prompts PROMPTS"), ("kernel_times", ""),
        ("unroll", ""), ("typical", "x --prompts PROMPTS"))),
]  # fmt: skip


@pytest.mark.parametrize("name, words, said", REFUSED, ids=[f"{name} {said[:24]}" for name, _, said in REFUSED])
def test_refused(run, monkeypatch, name, words, said):
    """In one line, before anything is measured."""
    if name == "kernel_times" and said.startswith("have"):  # as where the kernels are interpreted
        kernel_times = importlib.import_module("draftsmith.benchmarks.kernel_times")
        monkeypatch.setattr(kernel_times, "INTERPRETING", True)
        monkeypatch.setattr(kernel_times, "triton", kernel_times)
    code, _, err = run(name, words)
    last = err.splitlines()[-1]
    assert code == (1 if said.startswith("no server") else 2), err
    assert last.startswith("error: ") and said in last and "Traceback" not in err, err


def test_a_run_of_other_fields_is_not_taken_for_the_one_asked_for(tmp_path):
    """benchmarks/medusa_stages.py measures finished runs that are there, by their recipe and fields. (Its small version
    runs in test_claims.py.)"""
    recipe, folder = "recipes/tiny-medusa2.yaml", tmp_path / "joint-direct-4"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    own = f"{recipe} run.name={folder.name} run.output_dir={tmp_path} run.seed=1"
    (folder / "recipe.yaml").write_text(f"# accelerate launch train/medusa.py {own} --resume\nrun: {{}}\n")
    assert medusa_stages.train(recipe, tmp_path, "joint, direct", 4, ["run.seed=1"]) == folder
    for other, fields in ((recipe, ["run.seed=2"]), ("recipes/other.yaml", ["run.seed=1"])):
        with pytest.raises(ValueError, match="a run of another recipe or with other fields; give another --out"):
            medusa_stages.train(other, tmp_path, "joint, direct", 4, fields)
