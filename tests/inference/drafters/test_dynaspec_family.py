"""Folders of drafters with shortlists: loaded, calibrated, decoded with; what does not fit is refused in one line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from faults import config, error_of, tensors, tree, truncate, without
from safetensors.torch import load_file, save_file

from draftsmith.common.files import write_json
from draftsmith.inference import calibrate
from draftsmith.inference.drafters import dynaspec
from draftsmith.inference.drafters.eagle import EagleDrafter
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.load import load_drafter
from draftsmith.inference.measure import calibrations, tree_calibration
from draftsmith.inference.measure.tree_statistics import MAX_RANK, draft_labels
from draftsmith.inference.trees.merged import MergedDrafter
from draftsmith.models.artifact import read_drafter, write_drafter
from draftsmith.models.eagle import Eagle
from draftsmith.models.shortlist import ShortlistConfig, ShortlistHead, budget

OPTIONS = "--device cpu --dtype float32"
PATHS = {"paths": [[0], [0, 0], [1]]}
DYNAMIC = {"dynamic": {"top_k": 3, "depth": 2, "nodes": 8}}
LISTS = {"dynaspec": {"clusters": budget(8, "position_aware"), "num_clusters": 12, "router_width": 16}, "fr_spec": {}}


@pytest.fixture(scope="module")
def stored(tmp_path_factory, target) -> dict[str, Path]:
    """By kind, a folder of untrained shortlists on an untrained drafter of half of the vocabulary."""
    torch.manual_seed(0)
    base = Eagle.for_target(target, 3, "own", target.vocab_size // 2)
    base.draft_from(torch.arange(1, target.vocab_size, 2), target)
    folders = {}
    for kind, fields in LISTS.items():
        folder = folders[kind] = tmp_path_factory.mktemp("drafters") / kind
        if kind == "dynaspec":
            sizes = {"embedding_size": target.hidden_size, "feature_size": base.config.hidden_size}
            fields = fields | sizes
        outputs = base.config.outputs
        head = ShortlistHead(ShortlistConfig(kind, outputs, budget(outputs // 2, "position_aware"), **fields))
        head.order.copy_(torch.randperm(outputs))
        if kind == "dynaspec":
            head.starts.copy_(torch.tensor([*range(0, 12 * 7, 7), outputs]))
        write_drafter(folder / "drafter", "eagle", base.config.to_dict(), base.state_dict(), target, {})
        shape = head.config.to_dict()
        write_drafter(folder, "dynaspec", shape, head.state_dict(), target, {}, parts=["drafter"])
        write_json(folder / "tree.json", PATHS)
    return folders


@pytest.fixture
def folder(tmp_path, stored):
    return shutil.copytree(stored["dynaspec"], tmp_path / "short")


@pytest.mark.parametrize("kind", LISTS)
def test_loaded(stored, target, kind):
    """The drafter of the part, with the lists of the folder; its own tree, not the part's."""
    folder = stored[kind]
    _, drafter = load_drafter(str(folder), target)
    assert isinstance(drafter, EagleDrafter) and drafter.shortlists is not None and drafter.num_nodes == 4
    weights, base = load_file(folder / "model.safetensors"), load_file(folder / "drafter" / "model.safetensors")
    assert drafter.shortlists.config.shortlist == kind
    assert torch.equal(drafter.shortlists.ids, base["draft_vocab"][weights["order"]])
    for name, weight in drafter.shortlists.shortlist.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    assert torch.equal(drafter.eagle.state_dict()["fc.weight"], base["fc.weight"])
    prompt = [5, 6, 7, 8]
    plain = SpeculativeDecoder(target).generate([prompt], 12)[0].tokens
    assert SpeculativeDecoder(target, drafter).generate([prompt], 12)[0].tokens == plain
    _, merged = load_drafter(f"{folder}+ngram", target)
    assert isinstance(merged, MergedDrafter)
    assert SpeculativeDecoder(target, merged).generate([prompt], 12)[0].tokens == plain


def test_calibrated_and_decoded(run_main, run_decode, report_of, folder, prompts):
    """By the commands; the part needs no tree of its own."""
    (folder / "tree.json").unlink()
    early = run_decode(f"{folder} --prompts {prompts}")
    assert early == (2, "", f"error: {folder}: has no tree.json yet; run: python inference/calibrate.py {folder}\n")
    options = f"{folder} --prompts {prompts} --max-new-tokens 16 {OPTIONS}"
    code, out, err = run_main(calibrate.main, *options.split(), "--nodes", 5, "--seconds", 2)
    assert code == 0 and "calibrated on" in out, err
    assert json.loads((folder / "tree.json").read_text())["calibration"]["positions"] > 0
    sampled = "--mode sample --temperature 0.8 --seed 1"
    for file, extra in ((None, ""), (None, f"{sampled} --verify mss"), (DYNAMIC, sampled)):
        if file is not None:
            write_json(folder / "tree.json", file)
        report, _ = report_of(f"{options} --baseline none --check-lossless {extra}")
        assert report["lossless"]["passed"]


@pytest.mark.parametrize("fewest", [3, 10])
def test_no_dynamic_tree_is_tried_that_the_shortest_list_cannot_fill(run_main, folder, prompts, monkeypatch, fewest):
    tried: list[list[int]] = []
    monkeypatch.setattr(ShortlistConfig, "fewest", fewest)
    monkeypatch.setattr(tree_calibration, "compare_dynamic", lambda target, drafters, *_: tried.append(drafters) or [])
    code, _, err = run_main(calibrate.main, *f"{folder} --prompts {prompts} --seconds 2 {OPTIONS}".split())
    assert code == 0, err
    assert [drafter.tree.top_k for drafter in tried[0][1:]] == [1, 2, 4, 10][: 2 if fewest == 3 else 4]


@pytest.mark.parametrize("kind", LISTS)
def test_calibration_counts_ranks_within_the_lists(stored, target, kind):
    tokens = torch.randint(1, target.vocab_size, (3, 60), generator=torch.Generator().manual_seed(1))
    supervised = torch.arange(60).expand(3, -1) >= 5
    made = calibrations.dynaspec(*read_drafter(str(stored[kind])))
    ranks = made.ranks(target, tokens, supervised)
    shortlist, base = dynaspec.read_parts(*read_drafter(str(stored[kind])))
    whole = calibrations.eagle(*base).ranks(target, tokens, supervised)[..., : made.max_depth]
    assert ranks.shape == whole.shape and torch.equal(ranks < 0, whole < 0)
    assert (ranks <= whole).logical_or(ranks == MAX_RANK).all() and (ranks < whole).any()
    assert (ranks[ranks != MAX_RANK] < shortlist.config.fewest).all(), "no more children than the shortest list holds"
    if kind == "fr_spec":
        labels = draft_labels(tokens, supervised, made.max_depth)
        for depth in range(made.max_depth):
            listed = base[2]["draft_vocab"][shortlist.order[: shortlist.config.tokens(depth)]]
            outside = (labels[:, :, depth] >= 0) & ~torch.isin(labels[:, :, depth], listed)
            assert outside.any() and (ranks[:, :, depth][outside] == MAX_RANK).all()


# ---- what is refused


def of_another_type(folder):
    """A part of a family that takes no shortlists: itself."""
    config("drafter", drafter_type="dynaspec")(folder)


def of_another_target(folder):
    found = json.loads((folder / "drafter" / "config.json").read_text())["target"]
    config("drafter", target=found | {"fingerprint": "0" * 64})(folder)


NAN = torch.full((16,), torch.nan)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (config(shortlist="frspec"), "{folder}/config.json: field 'shortlist' is 'frspec'; known: fr_spec, "),
        (config(capacity=[0]), "{folder}/config.json: field 'capacity' is [0]; it has to be a list of whole numbers"),
        (config(capacity=9), "{folder}/config.json: field 'capacity' is 9; it has to be a list of whole numbers"),
        (config(clusters=[13]), "{folder}/config.json: field 'clusters' is [13]; it has to be a list of whole numbers"),
        (config(outputs=7, capacity=[7]), "{folder}/model.safetensors: 'order' is (150,) instead of (7,)"),
        (config(router_width=7), "{folder}/model.safetensors: 'router.clusters.weight' is (12, 16) instead of (12, 7)"),
        (config(shortlist="fr_spec"), "{folder}/model.safetensors: 'router.clusters.bias' is (12,) instead of absent"),
        (config(parts=[]), "{folder}/config.json: field 'parts' is []; it has to be ['drafter']"),
        (config(parts=["drafter", "drafter"]), "{folder}/config.json: field 'parts' is ['drafter', 'drafter']; it has"),
        (tensors(starts=None), "{folder}/model.safetensors: 'starts' is missing instead of (13,), as config.json"),
        (tensors(order=torch.zeros(150).long()), "{folder}/model.safetensors: 'order' does not hold each row"),
        (tensors(starts=torch.arange(13)), "{folder}/model.safetensors: 'starts' does not ascend from 0 to 150"),
        (tensors(router__inputs__weight=None), "{folder}/model.safetensors: 'router.inputs.weight' is missing instead"),
        (tensors(router__clusters__bias=NAN[:12]), "{folder}/model.safetensors: 'router.clusters.bias' holds NaN"),
        (without("model.safetensors"), "{folder}/model.safetensors: 'order' is missing instead of (150,)"),
        (truncate("model.safetensors", -100), "{folder}/model.safetensors: "),
        (without("drafter/config.json"), "{folder}/drafter/config.json: there is no such config of a part"),
        (without("drafter/model.safetensors"), "{folder}/drafter"),
        (of_another_type, "{folder}/drafter: drafters of type 'dynaspec' take no shortlists"),
        (config("drafter", drafter_type="egale"), "{folder}/drafter: drafters of type 'egale' take no shortlists"),
        (of_another_target, "{folder}/drafter: this drafter and its shortlists were made for different targets"),
        (config("drafter", version=2), "{folder}/drafter/config.json: field 'version' is 2; it has to be 1 or 3"),
        (tensors("drafter", norm__weight=None), "{folder}/drafter/model.safetensors: 1 tensors are not those"),
        (tree({"paths": [[0], [40]]}), "{folder}/tree.json: the tree asks for rank 40 of a vocabulary of"),
        (tree({"paths": []}), "{folder}/tree.json: the tree holds the root alone"),
        (tree({"dynamic": {"top_k": 40, "depth": 1, "nodes": 9}}), "{folder}/tree.json: dynamic tree: top_k is 40"),
    ],
)
def test_what_does_not_fit_is_refused(folder, damage, message, target):
    """When it is loaded, with the file's name; trees by the fewest tokens of any depth."""
    damage(folder)
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        load_drafter(str(folder), target)
    text = str(error.value)
    assert text.startswith(message.format(folder=folder)) and "\n" not in text, text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"outputs": 149, "capacity": [75]}, "the shortlists order 149 rows, and the LM head has 150"),
        ({"embedding_size": 40}, "reads embeddings of 40 and hidden states of 32, and the drafter has 32 and 32"),
    ],
)
def test_lists_of_another_drafter_are_refused(folder, fields, message, target):
    """Consistent in themselves, but made for a drafter of another shape."""
    stored = json.loads((folder / "config.json").read_text())
    names = ShortlistConfig.__dataclass_fields__
    head = ShortlistHead(ShortlistConfig(**{name: value for name, value in (stored | fields).items() if name in names}))
    if head.config.num_clusters:
        head.starts.copy_(torch.tensor([*range(0, 12 * 7, 7), head.config.outputs]))
    save_file(head.state_dict(), folder / "model.safetensors")
    config(**fields)(folder)
    with pytest.raises(ValueError, match=message) as error:
        load_drafter(str(folder), target)
    assert "\n" not in str(error.value)


def test_one_line_of_the_command(run_decode, folder, prompts):
    tensors(starts=None)(folder)
    said = error_of(run_decode(f"{folder} --prompts {prompts} {OPTIONS}"))
    assert said.startswith(f"{folder}/model.safetensors: 'starts' is missing")
