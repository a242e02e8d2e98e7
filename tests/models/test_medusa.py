"""Medusa heads against their formula, head by head."""

import pytest
import torch
from accelerate import cpu_offload
from torch.nn import functional as F

from draftsmith.models.medusa import MedusaConfig, MedusaHeads

HIDDEN = 32


def random_heads(target, projection, heads=3, layers=2):
    made = MedusaHeads.for_target(target, heads, layers, projection)
    torch.manual_seed(4)
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return made.requires_grad_(False)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("projection", ["own", "shared"])
def test_untrained_head_equals_the_lm_head(make_target, projection, layers):
    target = make_target("llama")
    heads = MedusaHeads.for_target(target, 4, layers, projection)
    hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(0))
    logits = heads.logits(hidden, target.lm_head)
    assert logits.shape == (4, 5, 61)
    torch.testing.assert_close(logits, target.lm_head(hidden).expand(4, -1, -1), rtol=1e-4, atol=1e-4)
    names = {name for name, _ in heads.named_parameters()}
    assert names == {"weight", "bias", "projection"} if projection == "own" else {"weight", "bias"}
    assert all(p.requires_grad for p in heads.parameters()) and not target.lm_head.weight.requires_grad


@pytest.mark.parametrize("projection", ["own", "shared"])
def test_heads_are_their_formula(make_target, projection):
    """K heads of L layers, every one with weights of its own."""
    target = make_target("llama")
    heads = random_heads(target, projection)
    hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(0))
    expected = []
    for head in range(3):
        x = hidden
        for layer in range(2):
            x = x + F.silu(x @ heads.weight[layer, head] + heads.bias[layer, head])
        matrix = target.lm_head.weight if projection == "shared" else heads.projection[head]
        expected.append(x @ matrix.T)
        torch.testing.assert_close(heads.features(hidden)[head], x, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(heads.head_logits(head, x, target.lm_head), expected[-1], rtol=1e-4, atol=1e-4)
    for count in (0, 1, 3, None):
        logits = heads.logits(hidden, target.lm_head, count)
        assert logits.shape == (3 if count is None else count, 5, 61)
        for head, own in enumerate(logits):
            torch.testing.assert_close(own, expected[head], rtol=1e-4, atol=1e-4)


def test_layers_are_independent(make_target):
    """Public code repeats one module L times: there, a gradient step moves all layers alike."""
    target = make_target("llama")
    heads = MedusaHeads.for_target(target, 2, 3, "shared")
    torch.nn.init.normal_(heads.weight, std=0.2)
    assert heads.weight.shape == (3, 2, HIDDEN, HIDDEN) and heads.bias.shape == (3, 2, 1, HIDDEN)
    heads.logits(torch.randn(4, HIDDEN), target.lm_head).square().sum().backward()
    gradients = heads.weight.grad.flatten(2).flatten(0, 1)
    assert (torch.cdist(gradients, gradients) + torch.eye(6) > 1e-3).all() and (gradients.norm(dim=1) > 1e-3).all()


def test_own_projection_needs_an_lm_head_without_bias(make_target):
    target = make_target("phi")
    assert target.lm_head.bias is not None
    with pytest.raises(ValueError, match="its LM head has a bias; use drafter.projection=shared"):
        MedusaHeads.for_target(target, 1, 1, "own")
    hidden = torch.randn(2, HIDDEN)
    logits = MedusaHeads.for_target(target, 1, 1, "shared").logits(hidden, target.lm_head)[0]
    torch.testing.assert_close(logits, target.lm_head(hidden))


IDS = torch.tensor([0, 2, 3, 17, 18, 40, 59, 60])


@pytest.mark.parametrize(("family", "projection"), [("llama", "own"), ("llama", "shared"), ("phi", "shared")])
def test_draft_vocabulary_is_the_lm_heads_rows(make_target, family, projection):
    """Outputs and training matrices of heads with a draft vocabulary are those of heads without, at its ids."""
    target = make_target(family)
    whole = MedusaHeads.for_target(target, 3, 1, "shared")
    heads = MedusaHeads.for_target(target, 3, 1, projection, len(IDS))
    heads.draft_from(IDS, target)
    torch.manual_seed(4)
    with torch.no_grad():
        heads.weight.copy_(whole.weight.normal_(std=0.2))
    assert heads.state_dict()["draft_vocab"].equal(IDS) and heads.tokens(torch.tensor([[7, 0]])).tolist() == [[60, 0]]
    hidden = torch.randn(5, HIDDEN)
    expected = whole.logits(hidden, target.lm_head)[..., IDS]
    draft_head = heads.draft_head(target.lm_head)
    torch.testing.assert_close(heads.logits(hidden, draft_head), expected, rtol=1e-4, atol=1e-4)
    for head, (weight, bias) in enumerate(heads.projections(target.lm_head)):
        feature = heads.features(hidden)[head]
        torch.testing.assert_close(F.linear(feature, weight, bias), expected[head], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(heads.head_logits(head, feature, draft_head), expected[head], rtol=1e-4, atol=1e-4)


def test_draft_vocabulary_of_an_offloaded_lm_head(make_target):
    """Its weight is on no device until it is used."""
    target = make_target("llama", tie_word_embeddings=False)
    rows = target.lm_head.weight[IDS].clone()
    cpu_offload(target.model, torch.device("cpu"))
    assert target.lm_head.weight.is_meta
    heads = MedusaHeads(MedusaConfig(2, 1, "shared", HIDDEN, 61, len(IDS)))
    heads.draft_vocab.copy_(IDS)
    assert heads.draft_head(target.lm_head).weight.equal(rows) and target.lm_head.weight.is_meta


GOOD = {"num_draft_heads": 2, "num_layers": 1, "projection": "own", "hidden_size": 4, "vocab_size": 6}


@pytest.mark.parametrize(
    ("change", "ids", "said"),
    [
        ({"num_layers": None}, None, "config.json: field 'num_layers' is None"),
        ({"num_draft_heads": "2"}, None, "config.json: field 'num_draft_heads' is '2'"),
        ({"hidden_size": 0}, None, "config.json: field 'hidden_size' is 0"),
        ({"vocab_size": True}, None, "config.json: field 'vocab_size' is True"),
        ({"projection": "both"}, None, "config.json: field 'projection' is 'both'"),
        ({"num_draft_heads": 3}, None, "model.safetensors: its tensors are"),
        ({"projection": "shared"}, None, "model.safetensors: its tensors are"),
        ({}, [1, 5, 2], "model.safetensors: 'draft_vocab' does not ascend"),
        ({}, [1, 2, 6], "model.safetensors: 'draft_vocab' holds ids from 1 to 6"),
        ({}, [1, 2], "model.safetensors: its tensors are"),
        ({"draft_vocab_size": None}, [1, 2, 5], "model.safetensors: its tensors are"),
        ({"draft_vocab_size": 7}, [1, 2, 5], "config.json: field 'draft_vocab_size' is 7"),
        ({"draft_vocab_size": True}, [1, 2, 5], "config.json: field 'draft_vocab_size' is True"),
    ],
)
def test_from_artifact_refuses(change, ids, said):
    """Of heads of all tokens, and of those with a draft vocabulary."""
    config = GOOD if ids is None else GOOD | {"projection": "shared", "draft_vocab_size": 3}
    weights = MedusaHeads(MedusaConfig(**config)).state_dict()
    weights |= {} if ids is None else {"draft_vocab": torch.tensor([1, 2, 5]).int()}
    heads = MedusaHeads.from_artifact(config, weights, "x")
    assert heads.config == MedusaConfig(**config)
    if ids is not None:
        assert heads.draft_vocab.tolist() == [1, 2, 5] and heads.draft_vocab.dtype == torch.int64
        weights["draft_vocab"] = torch.tensor(ids)
    with pytest.raises(ValueError) as error:
        MedusaHeads.from_artifact(config | change, weights, "runs/x")
    assert str(error.value).startswith(f"runs/x/{said}")


@pytest.mark.parametrize("field", GOOD)
def test_from_artifact_names_the_missing_field(field):
    config = {name: value for name, value in GOOD.items() if name != field}
    with pytest.raises(ValueError, match=f"runs/x/config.json: field '{field}' is missing"):
        MedusaHeads.from_artifact(config, {}, "runs/x")
