"""Ensembles of SSMs are loaded, calibrated, decoded with and reported on by the real commands."""

import json
import shutil

import pytest
import torch
from draws import occurs
from faults import config, error_of, tensors
from tiny_models import write_ensemble
from transformers import AutoModelForCausalLM, BertConfig, BertModel

from draftsmith.common.files import write_json
from draftsmith.inference import calibrate, decode
from draftsmith.inference.commands.prompts import encode_prompts, read_prompts
from draftsmith.inference.drafters import load
from draftsmith.inference.drafters.draft_model import DraftModelDrafter
from draftsmith.inference.engine.answers import answer
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.load import load_drafter
from draftsmith.inference.measure import calibrations, tree_search
from draftsmith.inference.measure.step_costs import StepCosts
from draftsmith.inference.measure.tree_search import nodes_of, trees_by_size
from draftsmith.inference.measure.tree_statistics import MAX_RANK, best_trees, simulate_ensemble
from draftsmith.inference.trees.merged import MergedDrafter
from draftsmith.inference.verify.tree import Topology, read_trees
from draftsmith.models.artifact import read_drafter
from draftsmith.models.target import Target
from draftsmith.models.vocabulary import most_frequent

MARK = 4
OPTIONS = "--device cpu --dtype float32"


@pytest.fixture(scope="module")
def prompts(four_prompts):
    return four_prompts


@pytest.fixture(scope="module")
def text(target, prompts):
    """What the target writes after the prompts."""
    return answer(target, encode_prompts(read_prompts(prompts), target), 32, 4)


@pytest.fixture(scope="module")
def ids(target, text):
    """A draft vocabulary that lacks some of the tokens of the text."""
    counts = torch.bincount(text["tokens"][text["supervised"]].long(), minlength=target.vocab_size)
    size = int((counts > 0).sum()) * 3 // 4
    return most_frequent(counts, size)


@pytest.fixture(scope="module")
def stored(tmp_path_factory, target, ids):
    return write_ensemble(tmp_path_factory.mktemp("drafters") / "two", target, [0.02, 0.01], ids)


@pytest.fixture
def ensemble(tmp_path, stored):
    """A copy with a tree for each SSM."""
    folder = shutil.copytree(stored, tmp_path / "two")
    write_json(folder / "tree.json", {"parts": [[[0], [0, 0], [0, 0, 0], [1]], [[0], [0, 0], [1], [1, 0]]]})
    return folder


def test_calibrated(run_main, run_decode, stored, prompts, target, text, ids, monkeypatch):
    """The trees, and the facts in tree.json; the simulated τ is that of the engine with these trees."""
    monkeypatch.setattr(tree_search, "SIZES", (2, 4, 8))
    early = run_decode(f"{stored} --prompts {prompts}")
    assert early == (2, "", f"error: {stored}: has no tree.json yet; run: python inference/calibrate.py {stored}\n")
    refused = run_main(calibrate.main, stored, "--prompts", prompts, "--at-load", "--target", "nobody/nothing")
    message = f"--at-load is for draft heads; the nodes of '{stored}' follow from its trees: leave it out"
    assert refused == (2, "", f"error: {message}\n")
    options = f"--prompts {prompts} --max-new-tokens 32 {OPTIONS}"
    monkeypatch.setattr(calibrations, "pass_time", lambda *_: 0.01)  # the SSMs are as large as the target
    code, out, err = run_main(calibrate.main, stored, *options.split(), "--nodes", 12, "--seconds", 2)
    assert code == 0 and f"{stored / 'tree.json'}: 12 nodes (" in out, err
    tree = json.loads((stored / "tree.json").read_text())
    trees = read_trees(stored / "tree.json", 2)
    assert sum(map(len, tree["parts"])) == 11 and len(trees) == 2
    calibration = calibrations.ssm(*read_drafter(str(stored)))
    ranks = calibration.ranks(target, text["tokens"], text["supervised"])
    assert ranks.shape == (*text["tokens"].shape, 2, 8)
    outside = ~torch.isin(text["tokens"].long(), ids)
    assert (ranks[:, :-2, :, 0][(outside & text["supervised"])[:, 2:] & (ranks[:, :-2, 0, 0] >= 0)] == MAX_RANK).all()
    known = tree["calibration"]
    tau = simulate_ensemble(trees, ranks)
    assert known["expected_mean_accepted_length"] == round(tau, 4) > 1.3, "else nothing is accepted"
    assert known["mean_accepted_length_by_nodes"]["8"] == round(simulate_ensemble(best_trees(ranks, 8), ranks), 4)
    assert torch.tensor(known["accuracy_by_ssm_depth_and_rank"]).shape == (2, 8, MAX_RANK)
    first = torch.tensor(known["accuracy_by_ssm_depth_and_rank"])[:, 0, 0]
    labels = ranks[..., 0] >= 0
    share = (ranks[..., 0] == 0).sum((0, 1)) / labels.sum((0, 1))
    assert torch.allclose(first, share, atol=1e-4) and share[0] != share[1]
    # The greedy continuations of each SSM, restricted to the draft vocabulary.
    assert known["answers"] == 4 and known["mark_tokens"] == MARK
    first, second = _matched(stored, ids, text)
    assert known["coverage"] == [len(first) / 4, len(first | second) / 4]
    occurs(0 < len(first) < len(first | second) < 4, "the SSMs' answers are alike")
    one = len(first & second) / len(first | second)
    assert known["overlap"] == [[1.0, one], [one, 1.0]]
    occurs(0 < one < 1)

    two = (Topology(((0,), (0, 0), (0, 0, 0), (1,))), Topology(((0,), (0, 0), (0, 1), (1,), (1, 0))))
    assert calibration.step_time is not None
    step_time = calibration.step_time(target, StepCosts({1: 1.0, 2: 1.5}))
    assert step_time(two) == pytest.approx(5.5 + 0.01 * (1 + 1 + 1) + 0.01 * (1 + 1.5)), "leaves are not run"
    texts = encode_prompts(read_prompts(prompts), target)
    for each in (trees, two):
        file = prompts.parent / "trees.json"
        write_json(file, {"parts": [[list(path) for path in tree.paths] for tree in each]})
        _, drafter = load_drafter(str(stored), target, tree=str(file), all_nodes=True)
        results = SpeculativeDecoder(target, drafter).generate(texts, 32)
        lengths = [length for result in results for length in result.accepted]
        assert len(set(lengths)) > 2 and simulate_ensemble(each, ranks) == sum(lengths) / len(lengths)


@torch.no_grad()
def _matched(folder, ids, text):
    """By SSM, the numbers of the answers that begin as its own greedy continuation, written token by token."""
    found = []
    for part in sorted(folder.glob("ssm-*")):
        model = AutoModelForCausalLM.from_pretrained(part)
        found.append(set())
        for number, (row, marks) in enumerate(zip(text["tokens"].tolist(), text["supervised"], strict=True)):
            own = row[: int(marks.nonzero()[0])]
            for _ in range(min(MARK, int(marks.sum()))):
                logits = model(torch.tensor([own]), use_cache=False).logits[0, -1]
                own.append(int(logits.argmax() if ids is None else ids[logits[ids].argmax()]))
            if own == row[: len(own)]:
                found[-1].add(number)
    return found


def test_coverage_of_the_target_itself(target, text, tmp_path):
    """An SSM of all of the target's weights reproduces every answer; with little noise, some of them."""
    folder = write_ensemble(tmp_path / "same", target, [0.01, 0.01, 0.0], None)
    calibration = calibrations.ssm(*read_drafter(str(folder)))
    assert calibration.facts is not None
    ranks = calibration.ranks(target, text["tokens"], text["supervised"])
    assert (ranks[:, :, 2] <= 0).all() and (ranks[:, :, :2] > 0).any()
    facts, matched = calibration.facts(ranks), _matched(folder, None, text)
    assert facts["answers"] == len(matched[2]) == 4
    occurs(4 > len(matched[0]) > len(matched[1]) > 0)
    assert facts["coverage"] == [len(set().union(*matched[: s + 1])) / 4 for s in range(3)]
    share = lambda one, other: round(len(one & other) / len(one | other), 4) if one | other else 1.0  # noqa: E731
    assert facts["overlap"] == [[share(one, other) for other in matched] for one in matched]


def test_an_lm_head_with_bias(make_target, greedy_texts):
    """An SSM that is the target, with a draft vocabulary: greedy decoding writes the target's text, and accepts every
    draft up to the first token outside of the vocabulary."""
    target, depth, count = make_target("phi"), 3, 40
    head = target.lm_head
    with torch.no_grad():
        head.bias.mul_(8)
    prompts = [[7, 3, 19, 44], [9, 1]]
    texts = greedy_texts(target, prompts, count)
    ids = torch.tensor(sorted({token for text in texts for token in text[::2]}), device=target.device)
    drafter = DraftModelDrafter(Target(target.model, None, "ssm", ""), target, [1] * depth, draft_vocab=ids)
    results = SpeculativeDecoder(target, drafter).generate(prompts, count, stop_ids=frozenset())
    known, lengths = set(ids.tolist()), []
    for text, result in zip(texts, results, strict=True):
        assert result.tokens == text
        done, steps = 1, []  # the first token is the prefill's
        while done < count:
            drafted = text[done : done + depth]
            right = next((n for n, token in enumerate(drafted) if token not in known), len(drafted))
            steps.append(min(right + 1, count - done))
            done += steps[-1]
        assert result.accepted == steps
        lengths += steps
    assert min(lengths) < max(lengths) == depth + 1
    hidden = target.hidden(torch.tensor([prompts[0] + texts[0]], device=target.device))[0]
    biased = (hidden @ head.weight[ids].T).argmax(-1) != (hidden @ head.weight[ids].T + head.bias[ids]).argmax(-1)
    assert biased.float().mean() > 0.2, "the bias changes hardly any draft"


def test_decoded(report_of, ensemble, prompts):
    """Greedily and by sampling, alone and with n-grams; who proposed what was accepted, and the line on the SSMs."""
    sampled, both = "--mode sample --temperature 0.8 --seed 1", ["ssm-0", "ssm-1"]
    options = f"--prompts {prompts} --max-new-tokens 24 --baseline none --check-lossless --all-nodes {OPTIONS}"
    for drafter, mode, sources in (
        (ensemble, "", both),
        (f"{ensemble}+ngram", "", [*both, "ngram"]),
        (ensemble, sampled, both),
        (ensemble, f"{sampled} --verify mss", both),
    ):
        found, err = report_of(f"{drafter} {options} {mode}")
        assert found["lossless"]["passed"] and list(found["sources"]) == sources
        assert found["mean_accepted_length"] > 1.3
        accepted = [found["sources"][source]["accepted_tokens"] for source in sources[:2]]
        assert min(accepted) > 0 and sum(accepted) >= found["spec_decode"]["num_accepted_tokens"] * 0.9
        assert found["ssm"] == {"coverage": [0.25, 0.375], "overlap": [[1.0, 0.5], [0.5, 1.0]], "mark_tokens": MARK}
        assert "first 4 tokens: coverage@1 0.25, @2 0.38, overlap ssm-0/ssm-1 0.50\n" in err


def test_names_and_empty_trees(ensemble, target, tmp_path):
    """Names are short where they are unique. An SSM without a tree is not loaded; without any, nothing is drafted."""
    one = write_ensemble(tmp_path / "one", target, [0.02], None)
    write_json(one / "tree.json", {"paths": [[0], [0, 0], [1]]})
    _, drafter = load_drafter(str(one), target)
    assert drafter is not None and not drafter.sources and drafter.num_nodes == 4
    _, drafter = load_drafter(f"{ensemble}+{one}", target)
    assert drafter is not None
    assert isinstance(drafter, MergedDrafter)
    assert drafter.sources == (f"{ensemble}:ssm-0", "ssm-1", f"{one}:ssm-0") and len(drafter.models) == 3
    assert all(isinstance(each, DraftModelDrafter) for each in drafter.drafters) and drafter.costs is not None
    assert load.report_fields(f"ngram+{one}+{ensemble}")["ssm"]["coverage"] == [0.25]
    write_json(ensemble / "tree.json", {"parts": [[], [[0]]]})
    _, drafter = load_drafter(str(ensemble), target)
    assert drafter is not None and (drafter.num_nodes, len(drafter.models)) == (2, 1)
    write_json(ensemble / "tree.json", {"parts": [[], []]})
    assert load_drafter(str(ensemble), target)[1] is None


def test_levels_are_weighed():
    """Where a forward pass costs much, one SSM drafts a wide tree; where it costs nothing, both draft deep ones."""
    torch.manual_seed(0)
    ranks = torch.tensor([0.6, 0.2, 0.1, 0.1]).multinomial(4 * 40 * 2 * 8, replacement=True).view(4, 40, 2, 8)
    sizes = (4, 8, 16)

    def shapes(cost):
        def step_time(trees):
            return 1 + 0.02 * nodes_of(trees) + cost * sum(tree.max_depth for tree in trees)

        found = trees_by_size(ranks, sizes, step_time)
        assert [nodes_of(trees) for trees in found] == [*sizes]
        times = [step_time(trees) for trees in found]
        assert times == sorted(times), "as race expects"
        return [[(len(tree.paths), tree.max_depth) for tree in trees] for trees in found]

    by_tokens = trees_by_size(ranks, sizes)
    assert by_tokens == [best_trees(ranks, size) for size in sizes]
    (_, first), (_, second) = shapes(0.0)[-1]
    occurs(min(first, second) >= 4)
    assert shapes(10.0) == [[(3, 1), (0, 0)], [(7, 2), (0, 0)], [(15, 2), (0, 0)]], "there are 4 ranks"
    shapes(0.03)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("num_ssms", "2", "field 'num_ssms' is '2'; it has to be a number of SSMs"),
        ("num_ssms", 3, "field 'parts' is ['ssm-0', 'ssm-1']; it has to be 3 folders, one for each SSM"),
        ("parts", [], "field 'parts' is []; it has to be 2 folders, one for each SSM"),
        ("vocab_size", None, "field 'vocab_size' is None; it has to be the size of the target's vocabulary"),
        ("draft_vocab_size", 7.5, "field 'draft_vocab_size' is 7.5; it has to be a number of tokens, or null"),
        ("draft_vocab_size", None, "holds ['draft_vocab']; draft_vocab_size=None needs []"),
        ("draft_vocab_size", 5, "of int64; draft_vocab_size=5 needs [5] of int64 or int32"),
        ("mark_tokens", 0, "field 'mark_tokens' is 0; it has to be a number of tokens"),
        ("coverage", [0.5], "field 'coverage' is [0.5]; it has to be 2 shares"),
        ("overlap", [[1.0, 0.5]], "field 'overlap' is [[1.0, 0.5]]; it has to be 2 × 2 shares"),
    ],
)
def test_damaged_configs(run_main, ensemble, field, value, said):
    config(**{field: value})(ensemble)
    for main, options in ((decode.main, ["--prompt", "a"]), (calibrate.main, [])):
        error = error_of(run_main(main, ensemble, *options, "--target", "nobody/nothing"))
        assert error.startswith(f"{ensemble}/") and error.endswith(said)


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"parts": [[[0]]]}, "'parts' has 1 trees, and the drafter has 2 SSMs; calibrate it again"),
        ({"parts": {}}, "'parts' is not a list of trees, and the drafter has 2 SSMs; calibrate it again"),
        ({"parts": [[[0]], 7]}, "a tree is a list of rank paths such as [[0], [0, 0], [1]]"),
        ({"paths": [[0, 0]]}, "tree: path [0, 0] has no parent; add [0]"),
        ({"parts": [[[0]], [[299]]]}, "the tree asks for rank 299 of a vocabulary of "),
    ],
)
def test_damaged_trees(run_decode, ensemble, tree, said):
    write_json(ensemble / "tree.json", tree)
    error = error_of(run_decode(f"{ensemble} --prompt a --target nobody/nothing"))
    assert error.startswith(f"{ensemble / 'tree.json'}: {said}")


def test_damaged_parts(run_decode, ensemble, stored):
    """One that is missing; one that is no causal LM; one of another vocabulary; a draft vocabulary out of order."""

    def fails(said):
        assert said in error_of(run_decode(f"{ensemble} --prompt a {OPTIONS}"))

    part = ensemble / "ssm-1"
    tokenizer = json.loads((part / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    one, other = list(vocab)[-2:]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    (part / "tokenizer.json").write_text(json.dumps(tokenizer))
    fails("has another vocabulary than target")
    shutil.rmtree(part)
    fails(f"{ensemble}: part 'ssm-1' is missing; fetch or train the drafter again")
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    shutil.copytree(stored / "ssm-0", part)
    BertModel(BertConfig(**small)).save_pretrained(part)
    config("ssm-1", model_type="clip")(ensemble)
    fails("'clip' is no causal language model")
    shutil.rmtree(part)
    shutil.copytree(stored / "ssm-1", part)
    _, shape, weights = read_drafter(str(ensemble))
    tensors(draft_vocab=weights["draft_vocab"].flip(0).contiguous())(ensemble)
    fails("'draft_vocab' does not ascend, or holds an id twice")
    tensors(draft_vocab=weights["draft_vocab"] + shape["vocab_size"])(ensemble)
    fails(f"the target's are 0 to {shape['vocab_size'] - 1}")
