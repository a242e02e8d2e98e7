"""Tree sizes chosen from step to step: which, and the texts are the same. With --device cuda: a graph each."""

import itertools
import json
import random

import pytest
import torch

from draftsmith.inference.drafters.load import load_drafter
from draftsmith.inference.drafters.medusa import MedusaDrafter, open_drafter
from draftsmith.inference.engine.engine import Request, SpeculativeDecoder
from draftsmith.inference.engine.sizes import TIMINGS, TRIAL, TreeSizes
from draftsmith.inference.engine.step import why_no_graph
from draftsmith.inference.verify.sampling import Sampling
from draftsmith.inference.verify.tree import Topology
from draftsmith.models.medusa import MedusaHeads

PATHS = ((0,), (0, 0), (0, 0, 0), (0, 0, 1), (0, 1), (0, 1, 0), (1,), (1, 0), (1, 1), (2,), (2, 0))
RATES = (0.6, 0.3, 0.2, 0.05, 0.1, 0.04, 0.2, 0.1, 0.03, 0.1, 0.02)
PROMPTS = [[7, 3, 19, 44, 5, 3, 28, 11, 50, 2, 33], [9], [58, 1, 30, 12], [21, 6, 17, 40, 8]]


def drafter_of(target, acceptances=RATES):
    """Heads near the LM head, which the random target's own text agrees with now and then."""
    torch.manual_seed(2)
    heads = MedusaHeads.for_target(target, 3, 1, "shared")
    with torch.no_grad():
        heads.weight.copy_((torch.randn(heads.weight.shape) * 0.1).to(heads.weight))
    return MedusaDrafter(heads, Topology(PATHS), target, acceptances)


@pytest.mark.parametrize("mode", ["greedy", "sample"])
def test_texts_do_not_depend_on_the_sizes(make_target, greedy_texts, monkeypatch, mode):
    target = make_target("llama")
    requests = [
        Request(prompt, 14, Sampling(temperature=0.5, seed=seed), frozenset()) for seed, prompt in enumerate(PROMPTS)
    ]
    if mode == "greedy":
        truth = greedy_texts(target, PROMPTS, 14)
    else:
        truth = [SpeculativeDecoder(target).serve([request], 1, mode=mode)[0].tokens for request in requests]
    order = itertools.cycle((1, 8, 12, 8, 12, 1))
    chosen, shapes = [], []

    def choose(sizes):
        chosen.append(next(order))
        return chosen[-1]

    monkeypatch.setattr(TreeSizes, "choose", choose)
    drafter = drafter_of(target)
    propose = drafter.propose

    def proposed(state):
        tree = propose(state)
        shapes.append(tree.tokens.shape[1])
        return tree

    drafter.propose = proposed
    decoder = SpeculativeDecoder(target, drafter, static=True)
    counted = []
    for batch in (1, 3):
        drafted = {}

        def on_step(number, result, drafted=drafted):
            drafted.setdefault(number, []).append(result.drafted)

        results = decoder.serve(requests, batch, mode=mode, on_step=on_step)
        counted += [[b - a for a, b in itertools.pairwise(each)] for each in drafted.values()]
        assert [result.tokens for result in results] == truth
        assert any(count > 1 for result in results for count in result.accepted)
    step = decoder._step
    assert set(chosen) == {1, 8, 12}
    if target.device.type == "cuda":
        assert {nodes for _, nodes in step._graphs} == {1, 8, 12} and "cuda graph" in decoder.execution
    else:
        assert shapes == chosen
    assert all(0 < seconds < 60 for seconds in step.sizes.seconds.values()) and len(step.sizes.seconds) == 3
    assert step.sizes.factor != 1.0, "what steps committed is recorded"
    assert {nodes for one in counted for nodes in one} == {0, 7, 11}, "proposed nodes are counted"


def test_trees_of_each_size(make_target):
    """The likeliest paths, and the sums of their acceptance probabilities by depth."""
    drafter = drafter_of(make_target("llama"))
    SpeculativeDecoder(drafter.target, drafter, static=True).generate([[5]], 2)
    by_size = drafter.tree_sizes()
    assert by_size.keys() == {1, 8, 12} and by_size[1] == [1.0]
    assert by_size[8] == pytest.approx([1.0, 0.9, 0.5, 0.2])
    assert by_size[12] == pytest.approx([1.0, 0.9, 0.55, 0.29])
    SpeculativeDecoder(drafter.target, drafter, static=False).generate([[5]], 2)
    assert not drafter.tree_sizes(), "steps that are not static choose by costs"
    SpeculativeDecoder(drafter.target, unknown := drafter_of(drafter.target, None), static=True).generate([[5]], 2)
    assert not unknown.tree_sizes()


@pytest.mark.parametrize("mode", ["mss", "typical"])
def test_other_modes_have_one_size(make_target, mode):
    """A seed's text must not depend on what steps cost."""
    decoder = SpeculativeDecoder(target := make_target("llama"), drafter_of(target), static=True)
    decoder.generate([[5, 6]], 4, mode=mode, sampling=Sampling(seed=1))
    assert decoder._step.sizes is None and decoder._step.state.nodes == 0


def test_all_nodes_can_be_asked_for(target, drafter):
    for all_nodes in (True, False):
        _, loaded = load_drafter(str(drafter), target=target, all_nodes=all_nodes)
        assert loaded.one_size == all_nodes
        decoder = SpeculativeDecoder(target, loaded, static=True)
        (result,) = decoder.generate([[5, 6]], 8, stop_ids=frozenset())
        assert not all_nodes or (decoder._step.sizes is None and result.drafted == 5 * len(result.accepted))


def test_instrumented_steps_have_all_nodes(make_target):
    """They are not timed, and must not be left at the first size."""
    decoder = SpeculativeDecoder(target := make_target("llama"), drafter_of(target), static=True)
    (result,) = decoder.generate([[5, 6]], 12, stop_ids=frozenset(), instrument=True)
    assert result.drafted == 11 * len(result.accepted) and not any(decoder._step.sizes.timings.values())


@pytest.mark.parametrize(("share", "best"), [(0.0, 1), (0.5, 8), (1.6, 64)])
def test_the_size_with_the_most_tokens_per_second(share, best):
    """Drafts are accepted ``share`` times as often as in calibration; at 0 hardly any step drafts."""
    by_depth = {1: [1.0], 8: [1.0, 0.5, 0.2], 64: [1.0, 0.6, 0.5, 0.4]}
    sizes, rng = TreeSizes(by_depth), random.Random(0)
    chosen = []
    for _ in range(4000):
        nodes = sizes.choose()
        sizes.timed(nodes, {1: 1.0, 8: 1.1, 64: 1.6}[nodes] * rng.uniform(1, 1.02))
        expected = [accepted * share**depth for depth, accepted in enumerate(by_depth[nodes])]
        draws = [1 + sum(rng.random() < probability for probability in expected[1:]) for _ in range(2)]
        sizes.committed(nodes, [*draws, 0, -1])
        chosen.append(nodes)
    assert chosen[: 3 * TIMINGS] == [64] * TIMINGS + [8] * TIMINGS + [1] * TIMINGS, "each is timed"
    late = chosen[1000:]
    # f moves by half a hundredth of a token a step: some steps choose another size.
    assert late.count(best) > 0.8 * len(late)
    assert sizes.factor == pytest.approx(share, abs=0.25)
    if best == 1:
        assert late.count(8) == pytest.approx(len(late) / (TRIAL + 1), abs=3) and not late.count(64)


def test_times_follow_the_texts():
    """Steps take longer as texts grow: a size that was timed with short ones is tried again."""
    sizes = TreeSizes({1: [1.0], 8: [1.0, 0.6]})
    for nodes, seconds in ((8, 1.2), (8, 1.1), (8, 1.3), (1, 1.0), (1, 1.0), (1, 1.0)):
        assert sizes.choose() == nodes
        sizes.timed(nodes, seconds)
    assert sizes.seconds == {1: 1.0, 8: 1.1} and sizes.choose() == 8
    for _ in range(100):
        sizes.timed(8, 3.0)
    assert sizes.seconds[8] == pytest.approx(3.0, abs=0.02) and sizes.choose() == 1


def test_the_factor_stays_in_its_range():
    sizes = TreeSizes({1: [1.0], 4: [1.0, 0.8]})
    for _ in range(500):
        sizes.committed(4, [3, 3])
    assert sizes.factor == sizes.most == 1.25
    for _ in range(500):
        sizes.committed(4, [1])
    assert sizes.factor == pytest.approx(0, abs=1e-3)
    sizes.committed(1, [1])
    sizes.committed(4, [0, -1])
    assert sizes.factor == pytest.approx(0, abs=1e-3), "no text, or not finite"


def test_rates_of_a_calibrated_tree(make_target, tmp_path):
    target = make_target("llama")
    heads = drafter_of(target).heads
    candidates = [{"path": list(path), "rate": rate} for path, rate in zip(PATHS, RATES, strict=True)]
    for kept, known in ((candidates, True), (candidates[1:], False), (None, False)):
        tree = {"paths": [list(path) for path in PATHS], "calibration": {"candidates": kept}}
        (tmp_path / "tree.json").write_text(json.dumps(tree))
        part = open_drafter(tmp_path, heads.config.to_dict(), heads.state_dict(), tmp_path / "tree.json", False)
        drafter = part.build(target, None, {})
        assert drafter.acceptances == (list(RATES) if known else None)


def test_errors_around_a_capture():
    """What a graph cannot hold is a reason to run steps eagerly; a device's error is not."""
    reasons = (
        "called a synchronizing CUDA operation",
        "CUDA error: operation not permitted when stream is capturing\nCUDA kernel errors might be …",
        "CUDA error: operation failed due to a previous error during capture",
    )
    for reason in reasons:
        assert why_no_graph(RuntimeError(reason)) == reason.splitlines()[0]
    for error in (
        RuntimeError("CUDA error: an illegal memory access was encountered\nduring graph capture"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError(""),
        torch.OutOfMemoryError("CUDA out of memory while capturing"),
    ):
        assert why_no_graph(error) is None
