"""EAGLE drafter folders are loaded, decoded with and reported on by the real commands; what does not fit is refused."""

import json
import shutil

import pytest
import torch
from draws import fixed_seed
from faults import config, error_of, tensors, tree

from draftsmith.common.files import write_json
from draftsmith.inference import calibrate, load
from draftsmith.inference.drafters.eagle import EagleDrafter
from draftsmith.inference.load import load_drafter
from draftsmith.inference.measure.tree_statistics import MAX_RANK
from draftsmith.inference.verify.tree import read_tree
from draftsmith.models.artifact import write_drafter
from draftsmith.models.eagle import Eagle

OPTIONS = "--device cpu --dtype float32"
PATHS = {"paths": [[0], [0, 0], [1]]}
DYNAMIC = {"dynamic": {"top_k": 3, "depth": 2, "nodes": 8}}


@pytest.fixture(scope="module")
def stored(tmp_path_factory, target):
    """An untrained drafter of half of the vocabulary."""
    with fixed_seed("of an untrained drafter hardly any token is accepted, and calibration may choose no tree"):
        torch.manual_seed(0)
    eagle = Eagle.for_target(target, 3, "own", target.vocab_size // 2)
    eagle.draft_from(torch.arange(1, target.vocab_size, 2), target)
    folder = tmp_path_factory.mktemp("drafters") / "eagle"
    write_drafter(folder, "eagle", eagle.config.to_dict(), eagle.state_dict(), target, {})
    return folder


@pytest.fixture
def folder(tmp_path, stored):
    return shutil.copytree(stored, tmp_path / "eagle")


def test_calibrated_and_decoded(run_main, run_decode, report_of, folder, prompts):
    """By a fixed tree and a dynamic one, greedily and by sampling, alone and with n-grams."""
    early = run_decode(f"{folder} --prompts {prompts}")
    assert early == (2, "", f"error: {folder}: has no tree.json yet; run: python inference/calibrate.py {folder}\n")
    assert run_decode(f"{folder}@1,1 --prompts {prompts}") == early, "the folder's name is what calibrate.py takes"
    options = f"--prompts {prompts} --max-new-tokens 24 {OPTIONS}"
    code, out, err = run_main(calibrate.main, folder, *options.split(), "--nodes", 6, "--seconds", 2)
    assert code == 0 and "6 nodes" in out, err
    tree = read_tree(folder / "tree.json")
    known = json.loads((folder / "tree.json").read_text())["calibration"]
    assert tree.num_nodes == 6 and known["positions"] > 0
    shares = known["accuracy_by_depth_and_rank"]
    assert len(shares) == 8 and all(len(each) == MAX_RANK and sum(each) <= 1.001 for each in shares)
    sampled = "--mode sample --temperature 0.8 --seed 1"
    for file, name, extra in (
        (None, folder, ""),
        (None, folder, sampled),
        (None, folder, f"{sampled} --verify mss"),
        (None, f"{folder}+ngram", ""),
        (PATHS | DYNAMIC, folder, ""),
        (DYNAMIC, f"{folder}+ngram", sampled),
    ):
        if file is not None:
            write_json(folder / "tree.json", file)
        found, _ = report_of(f"{name} --baseline none --check-lossless {options} {extra}")
        assert found["lossless"]["passed"] and found["mean_accepted_length"] >= 1
        if "+" in str(name):
            assert set(found["sources"]) == {str(folder), "ngram"}
    code, _, err = run_decode(f"{folder}@1,1 --prompts {prompts} --tree {folder / 'tree.json'}")
    assert code == 2 and f"'{folder}@1,1' gives its children by depth, too; leave one of them out" in err


def test_a_dynamic_tree_has_precedence(folder, target):
    write_json(folder / "tree.json", PATHS)
    _, drafter = load_drafter(str(folder), target)
    assert isinstance(drafter, EagleDrafter) and drafter.shape is None and drafter.num_nodes == 4
    assert drafter.costs is not None and drafter.clock is not None and drafter.random
    write_json(folder / "tree.json", PATHS | DYNAMIC)
    _, drafter = load_drafter(str(folder), target)
    assert isinstance(drafter, EagleDrafter) and drafter.num_nodes == 8 and not drafter.random


def test_all_nodes(run_decode, folder, prompts, monkeypatch):
    """Trees that end where more does not pay, unless --all-nodes says otherwise."""
    write_json(folder / "tree.json", PATHS)
    loaded = []
    real = load.load_drafter
    monkeypatch.setattr(load, "load_drafter", lambda *a, **k: loaded.append(real(*a, **k)) or loaded[-1])
    for extra, limited in (("", True), ("--all-nodes", False)):
        options = f"--prompts {prompts} --max-new-tokens 6 --baseline none {OPTIONS} {extra}"
        code, _, err = run_decode(f"{folder} {options}")
        assert code == 0, err
        _, drafter = loaded.pop()
        assert (drafter.costs is not None) == limited == (drafter.clock is not None)
        assert limited or drafter.levels.deepest_run == 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (config(max_position_embeddings=128), "{folder}: has 128 positions (max_position_embeddings) and target"),
        (config(version=2), "{folder}/config.json: field 'version' is 2; it has to be 1 or 3"),
        (config(draft_vocab_size=7), "{folder}/model.safetensors: 2 tensors are not those that config.json promises"),
        (tensors(norm__weight=None), "{folder}/model.safetensors: 1 tensors are not those that config.json promises"),
        (tree({"paths": [[0], [200]]}), "{folder}/tree.json: the tree asks for rank 200 of a vocabulary of 150"),
        (tree({"paths": []}), "{folder}/tree.json: the tree holds the root alone"),
        (tree({"dynamic": {"top_k": 200, "depth": 1, "nodes": 9}}), "{folder}/tree.json: dynamic tree: top_k is 200"),
        (tree({"dynamic": {"top_k": 2}}), "{folder}/tree.json: 'dynamic' is {{'top_k': 2}}, not "),
    ],
)
def test_what_does_not_fit_is_refused(run_decode, folder, prompts, damage, message):
    write_json(folder / "tree.json", PATHS)
    damage(folder)
    said = error_of(run_decode(f"{folder} --prompts {prompts} {OPTIONS}"))
    assert said.startswith(message.format(folder=folder))
