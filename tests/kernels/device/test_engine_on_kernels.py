"""The whole engine on the kernels: tree attention behind the prefix, commit, verification, the heads' best tokens. On a
GPU its steps run in CUDA graphs."""

import pytest
import torch
from draws import occurs

from draftsmith.inference.drafters.eagle import EagleDrafter
from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.engine.engine import Request, SpeculativeDecoder
from draftsmith.inference.trees.dynamic import DynamicShape
from draftsmith.inference.verify.sampling import Sampling
from draftsmith.inference.verify.tree import Topology
from draftsmith.kernels.linear import kernel_weight
from draftsmith.models.eagle import Eagle
from draftsmith.models.medusa import MedusaHeads

pytestmark = pytest.mark.usefixtures("as_users_run_it")
PROMPTS = [[24, 23, 34, 52], [9], [12, 52], [58, 1, 30]]
LIMITS = [5, 1, 3]  # one text for each of the first prompts; the third takes the place of the second
TREE = Topology(((0,), (0, 0), (0, 0, 0), (1,), (1, 0)))


def drafter_of(target, kind, ids=None, tree=TREE):
    """Heads near the LM head, which the random target's own text agrees with now and then. ``ids``: their draft
    vocabulary."""
    torch.manual_seed(2)
    heads = MedusaHeads.for_target(target, 3, 1, kind, None if ids is None else len(ids))
    if ids is not None:
        heads.draft_from(ids, target)
    with torch.no_grad():
        heads.weight.copy_((torch.randn(heads.weight.shape) * 0.1).to(heads.weight))
    return MedusaDrafter(heads, tree, target)


@pytest.mark.parametrize(
    ("family", "ids", "tree"),
    [
        ("llama", None, TREE),
        ("mistral", torch.arange(0, 61, 2), TREE),
        ("gemma2", None, TREE),
        ("llama", torch.arange(0, 61, 2), DynamicShape(3, 3, 6)),
    ],
)
def test_greedy(make_target, greedy_texts, device, on, family, ids, tree):
    target = make_target(family)
    prompts = PROMPTS[: len(LIMITS)]
    truth = greedy_texts(target, prompts, max(LIMITS))
    mine = on(target)
    drafter = drafter_of(mine, "shared", ids, tree)
    assert drafter.shared and kernel_weight(drafter.draft_head, torch.empty(1, 32, device=device)) is not None
    decoder = SpeculativeDecoder(mine, drafter, static=True)
    requests = [Request(prompt, limit, stop_ids=frozenset()) for prompt, limit in zip(prompts, LIMITS, strict=True)]
    cuda = device.type == "cuda"
    for _ in range(1 + cuda):  # the second time by the graph of the first
        step = decoder._step
        results = decoder.serve(requests, 2)
        assert step in (None, decoder._step) and decoder._step is not None and len(decoder._step._graphs) == cuda
        assert [r.tokens for r in results] == [row[:limit] for row, limit in zip(truth, LIMITS, strict=True)]
        occurs(any(count > 1 for result in results for count in result.accepted))
    assert decoder.execution == f"{'cuda graph' if cuda else 'eager'}, lean decoder"


@pytest.mark.parametrize("mode", ["sample", "mss"])
def test_sampled_texts_are_those_of_plain_pytorch(make_target, on, monkeypatch, mode):
    """The same seeds, the same texts; a random number within rounding of a border would be one text of many."""
    target = on(make_target("llama"))
    drafter = drafter_of(target, "own")
    samplings = [Sampling(temperature=0.7, seed=1), Sampling(top_p=0.8, seed=2), Sampling(temperature=0)]
    samplings.insert(2, Sampling(repetition_penalty=1.3, frequency_penalty=0.4, logit_bias={5: 2.0}, seed=3))
    each = zip(PROMPTS, (5, 3, 3, 3), samplings, strict=True)
    requests = [Request(prompt, limit, sampling, frozenset()) for prompt, limit, sampling in each]
    ours = SpeculativeDecoder(target, drafter, static=True).serve(requests, 2, mode=mode)
    with monkeypatch.context() as patch:
        patch.setattr("draftsmith.kernels.backend.triton", None)
        plain = SpeculativeDecoder(target, drafter_of(target, "own")).serve(requests, 2, mode=mode)
    assert [r.tokens for r in ours] == [r.tokens for r in plain]
    occurs(any(count > 1 for result in ours for count in result.accepted))  # paths are committed


@pytest.mark.parametrize(("mode", "tree"), [("sample", (2, 1)), ("mss", (2, 1)), ("greedy", DynamicShape(2, 2, 5))])
def test_eagle_drafts_as_with_plain_pytorch(make_target, device, on, monkeypatch, mode, tree):
    """The same texts in the same steps; on a GPU by a graph, the second time by the first one's."""
    target = on(make_target("llama"))
    torch.manual_seed(18)
    eagle = Eagle.for_target(target, 3, "own")
    with torch.no_grad():
        for name, weight in eagle.named_parameters():
            if "norm" not in name and "lm_head" not in name:
                weight.copy_(torch.randn(weight.shape) * 0.1)
    limits = zip(PROMPTS[1:], (2, 4, 3), strict=True)
    requests = [Request(prompt, limit, Sampling(seed=limit), frozenset()) for prompt, limit in limits]
    drafter = EagleDrafter(eagle, target, tree)
    decoder = SpeculativeDecoder(target, drafter, static=True)
    cuda = device.type == "cuda"
    ours = [decoder.serve(requests, 2, mode=mode) for _ in range(1 + cuda)]
    assert drafter.layer.kernel, "the kernel is in use"
    assert decoder._step is not None and len(decoder._step._graphs) == cuda
    with monkeypatch.context() as patch:
        patch.setattr("draftsmith.kernels.backend.triton", None)
        plain = SpeculativeDecoder(target, EagleDrafter(eagle, target, tree), static=False)
        expected = plain.serve(requests, 2, mode=mode)
    for results in ours:
        assert [(r.tokens, r.accepted) for r in results] == [(r.tokens, r.accepted) for r in expected]
    occurs(any(count > 1 for result in expected for count in result.accepted))  # tokens are drafted
