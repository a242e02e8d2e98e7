"""DFlash drafters: what the engine computes for a block is the training forward's, after commits of every length;
folders are calibrated and decoded with by the real commands."""

import copy
import json
import shutil

import lossless_suite as suite
import pytest
import torch
from blocks import fitted_block, untrained_block
from conversing import converse
from draws import occurs
from eagles import fitted
from kept_texts import KeepsTexts
from lossless_suite import NONE, STARTS
from safetensors.torch import save_file

from draftsmith.inference import calibrate
from draftsmith.inference.drafters import dflash as module
from draftsmith.inference.drafters.dflash import DFlashDrafter
from draftsmith.inference.drafters.eagle import EagleDrafter
from draftsmith.inference.engine import prompts as prompts_module
from draftsmith.inference.engine.engine import Request, SpeculativeDecoder
from draftsmith.inference.measure import tree_search
from draftsmith.inference.trees.merged import MergedDrafter
from draftsmith.inference.verify.sampling import Sampling
from draftsmith.inference.verify.tree import Topology
from draftsmith.inference.verify.verify import Mode
from draftsmith.models.artifact import write_drafter
from draftsmith.models.dflash import DFlash

TREE = Topology(((0,), (0, 0), (0, 0, 0), (0, 1), (1,), (1, 0)))
RATES = (0.6, 0.4, 0.25, 0.1, 0.2, 0.1)  # of the paths, in order


class Checked(KeepsTexts, DFlashDrafter):
    """Compares each block with that of the training forward over the whole text."""

    def __init__(self, dflash: DFlash, *args, **options) -> None:
        self.fresh = copy.deepcopy(dflash)
        super().__init__(dflash, *args, **options)

    def prefill(self, features, chunk):
        super().prefill(features, chunk)
        self.seen.update("later chunk" if part.start else "first chunk" for part in chunk.parts)

    def propose(self, state):
        tree = super().propose(state)
        for row, text in self.texts.items():
            tokens = torch.tensor([text], device=self.device)  # with the root
            with self.target.attention("sdpa"):
                features = self.target.features(tokens, self.fresh.config.captured_layers)
            anchor = torch.tensor([[len(text) - 1]], device=self.device)
            wanted = self.fresh.draft(features, self.target.embeddings, tokens, anchor)[0, 0]
            found = self.drafts.hidden[:, row]
            torch.testing.assert_close(found, wanted, atol=1e-4 * float(wanted.std()), rtol=1e-4)
        return tree

    def absorb(self, state, verdict, tree, features):
        super().absorb(state, verdict, tree, features)
        self.seen.update(int(verdict.length[row]) for row in self.texts)


def serve(target, drafter, *, static=False, rows=3, mode: Mode = "greedy", count=30, **sampling):
    """Decode texts of several lengths in a few rows; greedy ones equal plain decoding."""
    prompts = [start * (1 + number % 3) for number, start in enumerate(STARTS)]
    requests = [
        Request(prompt, max(1, count - 3 * number), Sampling(seed=number, **sampling), NONE)
        for number, prompt in enumerate(prompts)
    ]
    results = SpeculativeDecoder(target, drafter, static=static).serve(requests, rows, mode=mode)
    if mode == "greedy":
        assert [r.tokens for r in results] == suite.plain_texts(target, requests)


@pytest.fixture
def target(make_target):
    return suite.phrases(make_target)


@pytest.mark.parametrize("path", ["native", "kernels", "plain"])
@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
def test_the_engines_blocks_are_the_training_forwards(make_target, target, monkeypatch, path, static):
    """By all three ways to run the layers, in rows of different lengths that are refilled."""
    if path == "kernels":  # those of a GPU, here by their definitions
        monkeypatch.setattr(module, "why_not_triton", lambda *_: None)
    if path == "plain":
        monkeypatch.setattr(module, "runs_kernel", lambda *_: False)
    drafter = Checked(fitted_block(target, make_target, draft_vocab=static), TREE, target)
    serve(target, drafter, static=static)
    occurs(all(drafter.seen[length] for length in range(4)), str(drafter.seen))
    for mode in ("sample", "mss"):
        serve(target, drafter, static=static, mode=mode, rows=1, count=6, temperature=0.9)


@pytest.mark.parametrize("chunk", [1, 3])
def test_prompts_in_chunks(make_target, target, monkeypatch, chunk):
    monkeypatch.setattr(prompts_module, "PREFILL_CHUNK", chunk)
    drafter = Checked(fitted_block(target, make_target), TREE, target)
    serve(target, drafter, count=6)
    assert drafter.seen["later chunk"]


def test_prompts_that_begin_with_a_text_before(make_target, target):
    """All context features of the tokens that are not read again are kept, or copied from another row."""
    drafter = Checked(fitted_block(target, make_target), TREE, target)
    *_, counts = converse(target, drafter, static=True)
    assert counts.reused_tokens > counts.prefilled_tokens


def test_accepted_nodes_of_other_drafters(make_target, target):
    """In a merge with a deeper drafter that reads other layers, all committed tokens' features are kept."""
    drafter = Checked(fitted_block(target, make_target), Topology(((0,), (1,))), target, (0.6, 0.2))
    deeper = EagleDrafter(fitted(target, make_target, "eagle1"), target, (1,) * 5)
    for static in (False, True):
        serve(target, MergedDrafter({"one": drafter, "deeper": deeper}, target, 12), static=static)
    assert any(drafter.seen[length] for length in (3, 4, 5)), drafter.seen


@pytest.mark.parametrize("family", ["gemma", "granite", "gpt2", "phi3"])
def test_other_families(make_target, family):
    """Scaled embeddings, scaled logits, targets without rotary positions."""
    target = make_target(family)
    serve(target, Checked(untrained_block(target, family == "gpt2"), TREE, target), count=9)


class ShiftedFeatures(Checked):
    """Wrong: committed tokens get the next one's feature."""

    def absorb(self, state, verdict, tree, features):
        super().absorb(state, verdict, tree, torch.roll(features, -1, 1))


class AnchorAsContext(Checked):
    """Wrong: blocks see a context feature in the anchor's place, and begin one position too late."""

    def propose(self, state):
        run = self.layers.run
        self.layers.run = lambda roots, lengths, plans: run(roots, lengths + 1, plans)
        return super().propose(state)


class UnequalMasks(Checked):
    """Wrong: one slot holds another token."""

    def allocate(self, *args):
        super().allocate(*args)
        self.layers.masks[:, 1] = 5


class Causal(Checked):
    """Wrong: a slot does not see those behind it."""

    def allocate(self, *args):
        super().allocate(*args)
        self.layers.ancestors[:] = torch.tensor([1, 3, 7, 15])[:, None]


@pytest.mark.parametrize("wrong", [ShiftedFeatures, AnchorAsContext, UnequalMasks, Causal])
def test_what_is_wrong_by_little_is_found(make_target, target, wrong):
    """The comparison with the training forward fails."""
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        serve(target, wrong(fitted_block(target, make_target), TREE, target))


# ---- folders


@pytest.fixture(scope="module")
def stored(make_target, tiny_lm, tmp_path_factory):
    """A folder of a drafter for the tiny target, which has learned nothing."""
    from draftsmith.models.target import load_target

    of = load_target(str(tiny_lm))
    folder = tmp_path_factory.mktemp("drafters") / "dflash"
    dflash = untrained_block(of, draft_vocab=True)
    write_drafter(folder, "dflash", dflash.config.to_dict(), dflash.stored(), of, {})
    return folder


def test_a_folder_is_calibrated_and_decodes(stored, run_main, run_decode, four_prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(tree_search, "SIZES", (2, 4))
    folder = shutil.copytree(stored, tmp_path / "dflash")
    code, _, err = run_main(calibrate.main, folder, "--prompts", four_prompts, "--seconds", 1, "--max-new-tokens", 24)
    assert code == 0, err
    tree = json.loads((folder / "tree.json").read_text())
    assert len(tree["calibration"]["accuracy_by_depth_and_rank"]) == 3
    (folder / "tree.json").write_text(json.dumps({"paths": [[0], [0, 0], [1]]}))
    for name in (folder, f"{folder}+ngram"):
        code, _, err = run_decode(f"{name} --prompts {four_prompts} --max-new-tokens 12 --check-lossless")
        assert code == 0, err


@pytest.mark.parametrize(
    "change, message",
    [
        ("deep", "the tree is 4 deep, but there are 3 draft heads"),
        ("weights", "tensors are not those that config.json promises"),
        ("positions", "has 32 positions (max_position_embeddings) and target "),
    ],
)
def test_what_does_not_fit_is_refused(stored, run_decode, tmp_path, change, message):
    folder = shutil.copytree(stored, tmp_path / "dflash")
    paths = [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]
    (folder / "tree.json").write_text(json.dumps({"paths": paths[: 4 if change == "deep" else 2]}))
    if change == "positions":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32}))
    if change == "weights":
        save_file({"norm.weight": torch.ones(32)}, folder / "model.safetensors", {"format": "pt"})
    code, _, err = run_decode(f"{folder} --prompt x --max-new-tokens 4")
    *_, line = err.splitlines()
    assert code == 2 and line.startswith("error: ") and message in line, err
