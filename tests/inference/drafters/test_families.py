"""A family is one entry in a table: its drafters are loaded, calibrated and decoded with by the real commands."""

import json
import subprocess
import sys

import pytest
import torch
import toy_family
from faults import error_of

from draftsmith.inference import calibrate, decode
from draftsmith.inference.commands.prompts import encode_prompts, read_prompts
from draftsmith.inference.drafters.family import FAMILIES
from draftsmith.inference.engine.answers import answer
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.load import load_drafter
from draftsmith.inference.measure import step_costs as costs
from draftsmith.inference.measure import tree_search
from draftsmith.inference.measure.calibrations import CALIBRATIONS
from draftsmith.inference.measure.tree_statistics import simulate
from draftsmith.inference.verify.tree import read_tree
from draftsmith.models.artifact import read_drafter, write_drafter


@pytest.fixture(scope="module")
def written(tmp_path_factory, target, four_prompts):
    """A folder with a table of the target's own bigrams, and prompts like those it was counted on."""
    folder = tmp_path_factory.mktemp("drafters") / "bigrams"
    folder.mkdir()
    data = answer(target, encode_prompts(read_prompts(four_prompts), target), 64, 4)
    counts = torch.zeros(target.vocab_size, target.vocab_size)
    for row, marks in zip(data["tokens"].long(), data["supervised"], strict=True):
        text = row[marks]
        counts.index_put_((text[:-1], text[1:]), torch.ones(len(text) - 1), accumulate=True)
    weights = {"embed.weight": counts, "out.weight": torch.eye(target.vocab_size)}  # logits: the counts
    write_drafter(folder, "toy", {"width": target.vocab_size}, weights, target, {})
    return folder, four_prompts


@pytest.fixture
def family(monkeypatch):
    monkeypatch.setitem(FAMILIES, "toy", "toy_family")
    monkeypatch.setitem(CALIBRATIONS, "toy", toy_family.calibration)


def test_a_family_of_one_entry(run_main, run_decode, report_of, written, family, target, monkeypatch):
    """Calibrated and decoded with, alone and merged; the simulated τ is the engine's. Nothing else knows of it."""
    folder, prompts = written
    monkeypatch.setattr(tree_search, "SIZES", (2, 4, 8))
    early = run_decode(f"{folder} --prompts {prompts}")
    assert early == (2, "", f"error: {folder}: has no tree.json yet; run: python inference/calibrate.py {folder}\n")
    options = f"--prompts {prompts} --max-new-tokens 32 --device cpu"
    code, out, err = run_main(calibrate.main, folder, *options.split(), "--seconds", 1)
    assert code == 0 and f"{folder / 'tree.json'}: " in out, err
    known = json.loads((folder / "tree.json").read_text())["calibration"]
    assert known["expected_mean_accepted_length"] > 1.3, "else nothing is accepted, and this tests nothing"
    assert len(known["accuracy_by_head_and_rank"]) == toy_family.DEPTH

    _, drafter = load_drafter(str(folder), target, all_nodes=True)
    texts = encode_prompts(read_prompts(prompts), target)
    lengths = [n for result in SpeculativeDecoder(target, drafter).generate(texts, 32) for n in result.accepted]
    data = answer(target, texts, 32, 4)
    assert isinstance(drafter, toy_family.ToyDrafter)
    calibration = toy_family.calibration(*read_drafter(str(folder)))
    ranks = calibration.ranks(target, data["tokens"], data["supervised"])
    assert simulate(read_tree(folder / "tree.json"), ranks) == sum(lengths) / len(lengths)

    for name in (folder, f"{folder}+ngram"):
        found, _ = report_of(f"{name} {options} --baseline none --check-lossless --all-nodes")
        assert found["lossless"]["mismatches"] == 0 and found["mean_accepted_length"] > 1.3


def test_a_family_without_a_tree(run_main, run_decode, written, family, monkeypatch):
    """Only its target's steps are timed, and a tree that nobody would read is refused."""
    folder, prompts = written
    monkeypatch.delattr(toy_family, "HAS_TREE")
    monkeypatch.delitem(CALIBRATIONS, "toy")
    monkeypatch.setattr(costs, "REMEASURE_SECONDS", 0.3)
    before = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    code, out, err = run_main(calibrate.main, folder, "--device", "cpu")
    assert code == 0 and out.startswith("a plain step: "), err
    assert before == {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    code, out, err = run_decode(f"{folder} --prompts {prompts} --max-new-tokens 9 --check-lossless")
    assert code == 0, err
    for name in (folder, "ngram", "none", f"{folder}+ngram"):
        result = run_decode(f"{name} --prompt a --target nobody/nothing --tree my.json")
        message = f"error: --tree my.json: '{name}' has no tree of its own that another could replace; leave it out\n"
        assert result == (2, "", message)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("ngrams", "'ngrams': there is no such folder, and a Hub id would be USER/NAME; did you mean ngram?"),
        ("ngarm:2-4", "a Hub id would be USER/NAME; did you mean ngram?"),
        ("non", "a Hub id would be USER/NAME; did you mean none?"),
        ("draft-model:runs/x", "a Hub id would be USER/NAME; did you mean draft_model:PATH?"),
        ("xyz", "'xyz': there is no such folder, and a Hub id would be USER/NAME"),
        ("runs/ngram", "'runs/ngram': no such folder here; "),  # a Hub id, if there is no such folder
    ],
)
def test_misspelt_names(run_decode, given, said):
    error = error_of(run_decode(f"{given} --prompt a --target nobody/nothing"))
    assert said in error
    assert ("did you mean" in error) == ("did you mean" in said)


def test_unknown_types(run_main, written, family):
    """The known ones are named, and the nearest."""
    folder, _ = written
    config = json.loads((folder / "config.json").read_text())
    try:
        for kind, hint in (("toys", "; nearest: toy"), ("hydra", "")):
            (folder / "config.json").write_text(json.dumps({**config, "drafter_type": kind}))
            known = "dflash, dynaspec, eagle, medusa, ssm, toy"
            message = f"{folder}: drafter_type '{kind}' is not known to this version; known: {known}{hint}"
            for main, options in ((decode.main, ["--prompt", "a"]), (calibrate.main, [])):
                assert run_main(main, folder, *options, "--target", "nobody/nothing") == (2, "", f"error: {message}\n")
    finally:
        (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.whole_runs
def test_a_family_is_imported_when_it_is_needed():
    ask = """
import sys
from draftsmith.inference import calibrate
from draftsmith.inference.drafters.family import FAMILIES
assert not set(FAMILIES.values()) & set(sys.modules), "before any drafter is loaded"
"""
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
