"""Shortlists of Medusa heads and of an SSM: what is drafted is the best of each level's shortlist, which is computed
here from the text alone, and what is written stays the target's own."""

from dataclasses import dataclass, replace
from pathlib import Path

import lossless_suite as suite
import pytest
import tiny_models as tiny
import torch
from draws import occurs
from lossless_suite import NONE, STARTS
from tiny_models import SPARSE, listed_tokens, noisy_heads, perturbed, random_shortlists, some_ids

from draftsmith.common.files import write_json
from draftsmith.inference.drafters import draft_model, dynaspec, medusa, ssm
from draftsmith.inference.drafters.draft_model import DraftModelDrafter
from draftsmith.inference.drafters.load import load_drafter, report_fields
from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.drafters.merged import MergedDrafter
from draftsmith.inference.drafters.ranks import chained_ranks, head_ranks, next_token_ranks
from draftsmith.inference.drafters.rollouts import Drafts, kept, record
from draftsmith.inference.engine.answers import answer
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.verify.tree import Topology
from draftsmith.models.artifact import read_drafter, write_drafter
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.shortlist import DEPTHS, ShortlistConfig, ShortlistHead, budget
from draftsmith.models.target import Target

KINDS = ("fr_spec", "vocab_trim", "in_context", "dynaspec")
PROMPTS = [start * 3 for start in (STARTS[1], STARTS[0], STARTS[3])]  # the first has no token 0, and is padded with it
TEXTS = 4000


def shortlist(kind: str, outputs: int, width: int = 32) -> ShortlistHead:
    """In a random order; the router's weights are random. Of the vocabulary of 61, the deepest levels have 6 tokens."""
    schedule = "fixed" if kind == "fr_spec" else "position_aware"
    most = max(outputs * 4 // 5, 3)
    capacity = tuple(max(count, 3) for count in budget(most, schedule, 4))
    own = {"static": max(outputs // 12, 2)} if kind == "in_context" else {}
    if kind == "in_context":
        capacity = (outputs * 2 // 5 + 1,) * 3
    if kind == "dynaspec":
        own = {
            "clusters": budget(max(outputs // 8, 1), schedule, 4),
            "num_clusters": max(outputs // 5, 2),
            "router_width": 16,
            "embedding_size": width,
            "feature_size": width,
        }
        capacity = tuple(max(count, 3) for count in budget(outputs // 2, schedule, 4))
    config = ShortlistConfig(kind, outputs, capacity, **own)
    return random_shortlists(config, tiny.random_starts(config.num_clusters, outputs) if config.num_clusters else ())


@torch.enable_grad()
def fitted_heads(target: Target, draft_vocab: torch.Tensor | None = None) -> MedusaHeads:
    """Three heads that know much of the target's greedy texts by heart."""
    heads = MedusaHeads.for_target(target, 3, 1, "shared", None if draft_vocab is None else len(draft_vocab))
    if draft_vocab is not None:
        heads.draft_from(draft_vocab, target)
    starts = [[token % target.vocab_size for token in start] for start in STARTS]
    texts = [r.tokens for r in SpeculativeDecoder(target).generate(starts, 72, stop_ids=NONE)]
    tokens = torch.tensor([(start + text)[:73] for start, text in zip(starts, texts, strict=True)])
    hidden = target.hidden(tokens)
    optimiser = torch.optim.Adam(heads.parameters(), 0.02)
    for _ in range(60):
        features = heads.features(hidden.flatten(0, 1)).unflatten(1, tokens.shape)  # [K, S, T, d]
        loss = torch.zeros(())
        for k in range(3):
            logits = target.logits(features[k, :, : -k - 2])
            loss = loss + torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, k + 2 :].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return heads.eval().requires_grad_(False)


_HEADS: dict[tuple[int, bool], dict[str, torch.Tensor]] = {}


def medusa_drafter(target: Target, kind: str | None, draft_vocab: bool = False) -> MedusaDrafter:
    """With fitted heads; ``target`` is one of the suite's."""
    key = target.vocab_size, draft_vocab
    ids = some_ids(target) if draft_vocab else None
    if key not in _HEADS:
        _HEADS[key] = fitted_heads(target, ids).state_dict()
    heads = MedusaHeads.for_target(target, 3, 1, "shared", None if ids is None else len(ids)).requires_grad_(False)
    heads.load_state_dict(_HEADS[key])
    outputs = heads.config.outputs
    return MedusaDrafter(heads, SPARSE, target, shortlist=None if kind is None else shortlist(kind, outputs))


def ssm_drafter(target: Target, kind: str | None, draft_vocab: bool = False, vocabulary: int = 0) -> DraftModelDrafter:
    ids = some_ids(target) if draft_vocab else None
    model = perturbed(target, 0.0025 if target.vocab_size == 5 else 0.06, vocabulary)
    outputs = min(target.vocab_size, model.vocab_size) if ids is None else len(ids)
    chosen = None if kind is None else shortlist(kind, outputs)
    return DraftModelDrafter(model, target, SPARSE, draft_vocab=ids, shortlist=chosen)


MAKE = {"medusa": medusa_drafter, "ssm": ssm_drafter}


@dataclass
class Step:
    """What a drafter chose by, and proposed: lengths ``[B]``, tree, and (embeddings, hidden) by depth."""

    lengths: list[int]
    tree: torch.Tensor
    acceptance: torch.Tensor | None
    chosen: list[tuple[torch.Tensor, torch.Tensor]]


def watched(drafter: MedusaDrafter | DraftModelDrafter) -> list[Step]:
    """The steps that the drafter will take."""
    steps: list[Step] = []
    chosen: list[tuple[torch.Tensor, torch.Tensor]] = []
    propose, lists = drafter.propose, drafter.shortlists
    assert lists is not None
    choose = lists.choose

    def recording(embeddings, hidden, depth):
        assert depth == len(chosen)
        chosen.append((embeddings.clone(), hidden.clone()))
        choose(embeddings, hidden, depth)

    def proposing(state):
        chosen.clear()
        tree = propose(replace(state, weighs=True))
        steps.append(Step(state.length.tolist(), tree.tokens.clone(), tree.acceptance, [*chosen]))
        return tree

    lists.choose, drafter.propose = recording, proposing
    return steps


def ids_of(drafter: MedusaDrafter | DraftModelDrafter) -> torch.Tensor:
    if isinstance(drafter, MedusaDrafter):
        ids, outputs = drafter.heads.draft_vocab, drafter.heads.config.outputs
    else:
        ids, outputs = drafter.ids, drafter.vocabulary
    return torch.arange(outputs) if ids is None else ids


@torch.no_grad()
def check_medusa_step(drafter: MedusaDrafter, head: ShortlistHead, text: list[int], tokens: list[int]) -> set[int]:
    """A tree's tokens are the best of each head's shortlist; returns the sizes of these."""
    target, sizes = drafter.target, set()
    features = drafter.heads.features(target.hidden(torch.tensor([text[:-1]]))[0, -1:])[:, 0]  # [K, d]
    for depth, feature in enumerate(features):
        scores = None
        if head.router is not None:
            scores = head.router(target.embeddings(torch.tensor(text[-1])), feature, depth)
        inside = listed_tokens(head, ids_of(drafter), depth, text, scores)
        sizes.add(len(inside))
        best = sorted(inside, key=lambda t: -float(feature @ target.lm_head.weight[t]))
        for node, path in enumerate(SPARSE.paths, 1):
            if len(path) == depth + 1:
                assert tokens[node] == (best[path[-1]] if path[-1] < len(best) else 0), "0 stands for padding"
    return sizes


@torch.no_grad()
def check_ssm_step(
    drafter: DraftModelDrafter, head: ShortlistHead, text: list[int], tokens: list[int], acceptance: list[float]
) -> set[int]:
    """A tree's tokens, and their probabilities, are those of the model restricted to each level's shortlist."""
    model, paths, sizes = drafter.model, drafter.layout.paths, set()
    last = model.embeddings.weight.shape[0] - 1
    for depth in range(drafter.max_depth):
        nodes = [n for n, path in enumerate(paths) if len(path) == depth and any(p[:-1] == path for p in paths if p)]
        hidden, scores = {}, []
        with model.attention("eager" if model.config.model_type == "gemma2" else "sdpa"):
            for node in nodes:
                above = [tokens[paths.index(paths[node][:d])] for d in range(1, depth + 1)]
                read = torch.tensor([text + above]).clamp(max=last)
                hidden[node] = model.hidden(read)[0, -1]
                if head.router is not None:
                    scores.append(head.router(model.embeddings(read[0, -1]), hidden[node], depth))
        inside = listed_tokens(head, ids_of(drafter), depth, text, torch.stack(scores).amax(0) if scores else None)
        sizes.add(len(inside))
        for node in nodes:
            p, best = model.logits(hidden[node])[inside].softmax(-1).sort(descending=True)
            for child, path in enumerate(paths):
                if path and path[:-1] == paths[node]:
                    rank = path[-1]
                    assert tokens[child] == (inside[best[rank]] if rank < len(inside) else 0)
                    right = acceptance[node] * float(p[rank]) if rank < len(inside) else 0.0
                    assert acceptance[child] == pytest.approx(right, abs=1e-4)
    return sizes


def check_drafts(target: Target, drafter: MedusaDrafter | DraftModelDrafter, rows: int, static: bool) -> set[int]:
    """Decode, and check each step's tree against its text; returns the sizes of the shortlists."""
    steps, prompts, sizes = watched(drafter), PROMPTS[:rows], set()
    results = SpeculativeDecoder(target, drafter, static=static).generate(prompts, 20, stop_ids=NONE)
    plain = SpeculativeDecoder(target).generate(prompts, 20, stop_ids=NONE)
    assert [r.tokens for r in results] == [r.tokens for r in plain]
    occurs(any(count > 1 for r in results for count in r.accepted), "hardly anything is accepted")
    assert drafter.shortlists is not None
    head = drafter.shortlists.shortlist
    for row, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        whole = prompt + result.tokens
        for step, _ in zip(steps, result.accepted, strict=False):
            text, tokens = whole[: step.lengths[row] + 1], step.tree[row].tolist()
            assert tokens[0] == text[-1]
            if isinstance(drafter, MedusaDrafter):
                sizes |= check_medusa_step(drafter, head, text, tokens)
            else:
                assert step.acceptance is not None
                sizes |= check_ssm_step(drafter, head, text, tokens, step.acceptance[row].tolist())
    return sizes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", MAKE)
def test_drafts_are_the_best_of_each_levels_shortlist(make_target, family, kind):
    """And the text is plain decoding's; with 1 and 3 rows, eager and static, with and without a draft vocabulary."""
    target = suite.phrases(make_target)
    for rows, static, cut in ((1, False, False), (3, False, True), (3, True, False), (1, True, True)):
        sizes = check_drafts(target, MAKE[family](target, kind, cut), rows, static)
        outputs = 49 if cut else 61
        assert max(sizes) < outputs and (kind == "fr_spec" or len(sizes) > 1), sizes


@pytest.mark.parametrize("vocabulary", [57, 64])
def test_an_ssm_of_another_vocabulary_size(make_target, vocabulary):
    """Its rows beyond the target's are never drafted; tokens beyond its own are read as its last."""
    target = suite.phrases(make_target)
    drafter = ssm_drafter(target, "dynaspec", vocabulary=vocabulary)
    assert drafter.shortlists is not None and len(drafter.shortlists.weight) == min(61, vocabulary)
    check_drafts(target, drafter, 3, False)
    if vocabulary == 57:
        check_drafts(target, ssm_drafter(target, "in_context", vocabulary=57), 3, True)


def test_an_ssms_own_cap(make_target):
    """Gemma-2 caps its logits: the shortlists' are capped, too, by the SSM's and not by the target's."""
    target = make_target("gemma2")
    model = perturbed(target, noise=0.1, final_logit_softcapping=3.0)
    for kind in ("fr_spec", "dynaspec"):
        drafter = DraftModelDrafter(model, target, SPARSE, shortlist=shortlist(kind, 61))
        check_drafts(target, drafter, 3, False)


@pytest.mark.parametrize("family", MAKE)
def test_the_text_is_the_targets_own(make_target, family):
    """The suite: a row's drafts depend on its text alone, whatever stands beside it, also of an in-context shortlist;
    static steps have one shape, do not synchronise, and are undone by restoring the buffers."""

    def make(kind):
        return lambda target: MAKE[family](target, kind)

    for check in (suite.check_greedy, suite.check_coupled, suite.check_seeds, suite.check_static, suite.check_warm_up):
        check(make_target, make("in_context"))
    suite.check_apart(make_target, make("in_context"))
    suite.check_static(make_target, make("dynaspec"))
    suite.check_coupled(make_target, make("dynaspec"))


@pytest.mark.parametrize("kind", ["in_context", "dynaspec"])
def test_sampling_from_an_ssm_is_exact(make_target, kind):
    """With lists of three of five tokens; the check is χ²'s."""
    drafter = ssm_drafter(suite.soft(make_target), kind)
    assert drafter.shortlists is not None and drafter.shortlists.config.capacity[0] == 3
    suite.check_sampling(make_target, lambda t: ssm_drafter(t, kind), "cut", count=TEXTS, rows=TEXTS, static=True)


@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
def test_accepted_nodes_of_other_drafters_are_read(make_target, static):
    """In a merge, in-context lists hold what other drafters proposed, if it was accepted."""
    target = suite.phrases(make_target)
    heads, model = medusa_drafter(target, "in_context"), ssm_drafter(target, "in_context")
    heads.acceptances = [0.5 ** len(path) for path in SPARSE.paths]
    heads._take(SPARSE)
    steps = [watched(heads), watched(model)]
    merged = MergedDrafter({"more": ssm_drafter(target, None), "heads": heads, "ssm": model}, target, 40)
    results = SpeculativeDecoder(target, merged, static=static).generate(PROMPTS, 30, stop_ids=NONE)
    plain = SpeculativeDecoder(target).generate(PROMPTS, 30, stop_ids=NONE)
    assert [r.tokens for r in results] == [r.tokens for r in plain]
    for row, (prompt, result) in enumerate(zip(PROMPTS, results, strict=True)):
        whole = prompt + result.tokens
        for (one, two), _ in zip(zip(*steps, strict=True), result.accepted, strict=False):
            text = whole[: one.lengths[row] + 1]
            assert heads.shortlists is not None and model.shortlists is not None
            check_medusa_step(heads, heads.shortlists.shortlist, text, one.tree[row].tolist())
            assert two.acceptance is not None
            check_ssm_step(
                model, model.shortlists.shortlist, text, two.tree[row].tolist(), two.acceptance[row].tolist()
            )


# ---- rollouts


def drafts_of(drafter: MedusaDrafter | DraftModelDrafter, target: Target) -> Drafts:
    if isinstance(drafter, MedusaDrafter):
        return medusa.drafts(drafter.heads, target)
    return draft_model.drafts(drafter.model, target, drafter.ids)


@pytest.mark.parametrize("cut", [False, True], ids=["all", "draft vocabulary"])
@pytest.mark.parametrize("family", MAKE)
@torch.no_grad()
def test_rollouts_are_what_the_engine_chose_by(make_target, family, cut):
    """At the root, and at the nodes of the true tokens; the rollouts' logits are the LM head's."""
    target = suite.phrases(make_target)
    drafter = MAKE[family](target, "dynaspec", cut)
    steps = watched(drafter)
    results = SpeculativeDecoder(target, drafter).generate(PROMPTS, 60, stop_ids=NONE)
    whole = [prompt + result.tokens for prompt, result in zip(PROMPTS, results, strict=True)]
    tokens, supervised = torch.zeros(3, 90, dtype=torch.int32), torch.zeros(3, 90, dtype=torch.bool)
    for row, (prompt, text) in enumerate(zip(PROMPTS, whole, strict=True)):
        tokens[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
        supervised[row, len(prompt) : len(text)] = True
    drafts = drafts_of(drafter, target)
    rollouts = [*drafts.run(tokens, supervised)]
    begins = supervised[:, 1:].nonzero().tolist()
    assert drafts.head.weight.shape == (49 if cut else 61, drafts.feature_size)
    compared = [0] * len(rollouts)
    for row, text in enumerate(whole):
        for step, _ in zip(steps, results[row].accepted, strict=False):
            length = step.lengths[row]
            at = begins.index([row, length - 1])
            for depth, (embeddings, hidden) in enumerate(step.chosen):
                node = 0
                if isinstance(drafter, DraftModelDrafter):
                    first, paths = drafter.layout.firsts[depth], drafter.layout.paths
                    run = [paths[first + n] for n in range(hidden.shape[1])]
                    drafted = [[int(step.tree[row, paths.index(p[:d])]) for d in range(1, depth + 1)] for p in run]
                    true = text[length + 1 : length + 1 + depth]
                    if len(true) < depth or true not in drafted:
                        continue
                    node = drafted.index(true)
                rollout = rollouts[depth]
                torch.testing.assert_close(hidden[row, node], rollout.hidden[at], atol=1e-4, rtol=1e-3)
                torch.testing.assert_close(embeddings[row, node], drafts.embed(rollout.tokens[at]))
                torch.testing.assert_close(rollout.out[at], rollout.hidden[at])
                compared[depth] += 1
    occurs(compared[0] > 20 and min(compared[:3]) > 5, f"{compared}")
    # What is recorded of the whole head has the ranks by which trees are calibrated.
    recorded = record(drafts, tokens, supervised, 24)
    if isinstance(drafter, MedusaDrafter):
        ranks = head_ranks(target, drafter.heads, tokens, supervised)
    else:
        following = next_token_ranks(drafter.model, tokens, supervised, drafter.ids)
        ranks = chained_ranks(following, tokens, supervised, DEPTHS)
    assert torch.equal(kept(recorded, drafts.embed, None).ranks, ranks) and (ranks == 0).any()


# ---- artifacts


@pytest.fixture(scope="module")
def text(target):
    prompts = [target.tokenizer(prompt)["input_ids"] for prompt in ("import os", "The software is provided")]
    return answer(target, prompts, 24, 2)


def write_shortlists(folder: Path, target: Target, family: str, kind: str, count: int = 1, projection="shared") -> Path:
    """Of heads near the LM head, or SSMs that are the target with noise, with a draft vocabulary."""
    if family == "medusa":
        heads = noisy_heads(target, 0.1, projection)
        write_drafter(folder / "drafter", family, heads.config.to_dict(), heads.state_dict(), target, {})
    else:
        tiny.write_ensemble(folder / "drafter", target, [0.02] * count, torch.arange(50, 300))
    head = shortlist(kind, 300 if family == "medusa" else 250)
    weights = {name: w.int() if name in ("order", "starts") else w for name, w in head.state_dict().items()}
    write_drafter(folder, "dynaspec", head.config.to_dict(), weights, target, {}, parts=["drafter"])
    write_json(folder / "tree.json", {"paths": [list(path) for path in SPARSE.paths]})
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", MAKE)
def test_loaded_by_name(target, text, tmp_path, family, kind):
    """A folder of shortlists with the drafter as its part: decoded with, calibrated, and opened for rollouts."""
    folder = write_shortlists(tmp_path / "lists", target, family, kind)
    loaded, drafter = load_drafter(str(folder), target)
    assert loaded is target and isinstance(drafter, MedusaDrafter | DraftModelDrafter)
    assert drafter.shortlists is not None and drafter.shortlists.config.shortlist == kind
    prompts = [target.tokenizer(prompt)["input_ids"] for prompt in ("import os", "def read(path):", "The")]
    plain = [r.tokens for r in SpeculativeDecoder(target).generate(prompts, 20)]
    assert [r.tokens for r in SpeculativeDecoder(target, drafter).generate(prompts, 20)] == plain
    stored = read_drafter(str(folder))
    calibration = dynaspec.calibration(*stored)
    ranks = calibration.ranks(target, text["tokens"], text["supervised"])
    occurs((ranks == 0).any(), "by the whole LM head")
    one, other = (calibration.build(target, tree) for tree in (SPARSE, Topology(((0,), (1,)))))
    assert isinstance(one, MedusaDrafter | DraftModelDrafter) and isinstance(other, MedusaDrafter | DraftModelDrafter)
    assert one.shortlists is not None and other.shortlists is not None and one.shortlists is not other.shortlists
    assert one.shortlists.weight is other.shortlists.weight, "the LM head's rows are copied once"
    decoders = [SpeculativeDecoder(target, each) for each in (one, other)]
    for decoder in decoders * 2:  # in turn, as calibration times them
        assert [r.tokens for r in decoder.generate(prompts, 20)] == plain
    _, module, base = dynaspec.read_parts(*stored)
    drafts = module.open_drafts(*base, target)
    recorded = record(drafts, text["tokens"], text["supervised"], 10)
    found = kept(recorded, drafts.embed, drafter.shortlists.shortlist)
    assert (found.ranks >= 0).any() and drafts.after_head is None
    fields = report_fields(str(folder))
    assert fields.keys() == ({"training"} if family == "medusa" else {"training", "ssm"})


def test_what_takes_no_shortlists(target, tmp_path):
    own = write_shortlists(tmp_path / "own", target, "medusa", "fr_spec", projection="own")
    said = "Medusa heads with an own projection have no common LM head, whose rows shortlists choose; train heads with"
    for call in (
        lambda: load_drafter(str(own), target),
        lambda: medusa.open_drafts(*read_drafter(str(own / "drafter")), target),
    ):
        with pytest.raises(ValueError, match=f"{own}/drafter: {said}"):
            call()
    two = write_shortlists(tmp_path / "two", target, "ssm", "fr_spec", count=2)
    for call in (
        lambda: load_drafter(str(two), target),
        lambda: dynaspec.calibration(*read_drafter(str(two))),
        lambda: ssm.open_drafts(*read_drafter(str(two / "drafter")), target),
    ):
        with pytest.raises(ValueError, match=f"{two}/drafter: is an ensemble of 2 SSMs; shortlists are made for"):
            call()
    for family in MAKE:
        folder = write_shortlists(tmp_path / family, target, family, "vocab_trim")
        fewest = min(shortlist("vocab_trim", 300 if family == "medusa" else 250).config.capacity)
        write_json(folder / "tree.json", {"paths": [[fewest]]})
        with pytest.raises(ValueError, match=f"the tree asks for rank {fewest} of a vocabulary of {fewest}"):
            load_drafter(str(folder), target)
    one = write_shortlists(tmp_path / "another", target, "ssm", "fr_spec")
    head = shortlist("fr_spec", 251)
    write_drafter(one, "dynaspec", head.config.to_dict(), head.state_dict(), target, {}, parts=["drafter"])
    with pytest.raises(ValueError, match="the shortlists order 251 rows, and the LM head has 250"):
        load_drafter(str(one), target)
    for family in MAKE:
        head = shortlist("dynaspec", 300 if family == "medusa" else 250, 16)
        folder = tmp_path / family
        write_json(folder / "tree.json", {"paths": [[0]]})
        write_drafter(folder, "dynaspec", head.config.to_dict(), head.state_dict(), target, {}, parts=["drafter"])
        with pytest.raises(ValueError, match="router reads embeddings of 16 and hidden states of 16, and the drafter"):
            load_drafter(str(folder), target)
