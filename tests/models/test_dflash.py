"""DFlash's blocks against their definition, one block at a time; its anchors, ranks, config and weights."""

import dataclasses
import json
import re
import shutil

import pytest
import torch
from blocks import untrained_block
from exported_logits import difference
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from draftsmith.inference.measure.tree_statistics import MAX_RANK, block_ranks, draft_labels, label_ranks
from draftsmith.models.artifact import read_drafter, write_drafter
from draftsmith.models.dflash import DFlash, DFlashConfig, block_anchors
from draftsmith.models.eagle import SIZES
from draftsmith.models.serving import to_servers
from draftsmith.models.serving.from_published import convert_if_published
from draftsmith.models.serving.layouts import unsupported
from draftsmith.models.serving.source import open_source
from draftsmith.models.target import load_target

SLOTS, LENGTH = 4, 12
KINDS = {"tied": {}, "untied": {"tie_k_norm": False}, "one layer": {"num_layers": 1, "captured_layers": (1,)}}
every_kind = pytest.mark.parametrize("kind", KINDS)


def make_dflash(target, kind="tied", **more):
    """Random weights, of norms too."""
    shape = {"block_size": SLOTS, "num_layers": 2, "mask_token_id": 60, "captured_layers": (0, 2, 3)}
    dflash = DFlash.for_target(target, **shape | KINDS[kind] | more)
    torch.manual_seed(3)
    for name, weight in dflash.named_parameters():
        torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.3)
    return dflash


@pytest.fixture
def target(make_target):
    return make_target("llama", num_hidden_layers=4)


def norm(x, module, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * module.weight


def one_block(dflash, features, embed, tokens, anchor, change=lambda tokens: tokens):
    """What the LM head reads of the slots of the block at ``anchor`` of one text, ``[S, d]``: slot by slot and head by
    head, by the formula in the docstring of models/dflash.py. ``change``: of the block's input tokens."""
    c = dflash.config
    eps, width = c.rms_norm_eps, c.head_dim
    angles = dflash.rotary.inv_freq.float().repeat(2)  # transformers rotates by float32 angles
    context = norm(features[:anchor, c.hidden_size :] @ dflash.fc.weight.T, dflash.hidden_norm, eps)
    x = embed[change([int(tokens[anchor]), *[c.mask_token_id] * (c.block_size - 1)])]

    def rotated(part, positions):
        turn = positions[:, None].float() * angles
        cos, sin = turn.cos().to(part.dtype), turn.sin().to(part.dtype)
        return apply_rotary_pos_emb(part[None], part[None], cos[None], sin[None], unsqueeze_dim=2)[0][0]

    places = torch.arange(anchor + c.block_size)
    for layer in dflash.layers:
        attention, mlp = layer.self_attn, layer.mlp
        normed = norm(x, layer.input_layernorm, eps)
        read = torch.cat([context, normed])  # what keys and values are made of
        q = norm((normed @ attention.q_proj.weight.T).unflatten(-1, (-1, width)), attention.q_norm, eps)
        k = norm((read @ attention.k_proj.weight.T).unflatten(-1, (-1, width)), attention.k_norm, eps)
        v = (read @ attention.v_proj.weight.T).unflatten(-1, (-1, width))
        q, k = rotated(q, places[anchor:]), rotated(k, places)
        shared = c.num_attention_heads // c.num_key_value_heads
        heads = [
            torch.softmax(q[:, head] @ k[:, head // shared].T / width**0.5, -1) @ v[:, head // shared]
            for head in range(c.num_attention_heads)
        ]
        x = x + torch.cat(heads, -1) @ attention.o_proj.weight.T
        y = norm(x, layer.post_attention_layernorm, eps)
        x = x + (F.silu(y @ mlp.gate_proj.weight.T) * (y @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
    return norm(x, dflash.norm, eps)


def same(found, wanted):
    """In float64, but for the rotary cosines and sines, which are float32."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=16 * 2**-24 * float(wanted.detach().abs().max()))


def case(target, kind, **more):
    """A drafter in float64, and the features, embeddings and tokens of two rows of twelve."""
    dflash = make_dflash(target, kind, **more).double()
    torch.manual_seed(5)
    tokens = torch.randint(target.vocab_size - 1, (2, LENGTH))
    width = target.hidden_size * (1 + len(dflash.config.captured_layers))
    return dflash, torch.randn(2, LENGTH, width, dtype=torch.float64), target.embeddings.weight.double(), tokens


class Lookup(torch.nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, ids):
        return self.table[ids]


@every_kind
@pytest.mark.parametrize("scores", [1 << 20, 100])
def test_many_blocks_at_once_are_blocks_one_by_one(target, kind, scores, monkeypatch):
    """At every anchor and slot; values and gradients, in one chunk of queries or in several, also recomputed."""
    monkeypatch.setattr("draftsmith.models.unrolled.SCORES", {"cpu": scores, "cuda": scores})
    dflash, features, embed, tokens = case(target, kind)
    dflash.recompute = scores == 100
    features.requires_grad_()
    anchors = torch.arange(1, LENGTH).expand(2, -1)
    found = dflash.draft(features, Lookup(embed), tokens, anchors)
    wanted = torch.stack(
        [torch.stack([one_block(dflash, features[row], embed, tokens[row], a)[1:] for a in range(1, LENGTH)])
         for row in range(2)]
    )  # fmt: skip
    same(found, wanted)
    slopes = torch.randn_like(found)
    trained = [features, *dflash.parameters()]
    of_found, of_wanted = (torch.autograd.grad((out * slopes).sum(), trained) for out in (found, wanted))
    for one, other in zip(of_found, of_wanted, strict=True):
        assert other.abs().max() > 1e-3
        same(one, other)


@pytest.mark.parametrize("wrong", ["the anchor is context", "one mask differs", "a feature is missing"])
def test_what_is_wrong_by_little_is_found(target, wrong):
    """The definition with such an error is far from what is computed."""
    dflash, features, embed, tokens = case(target, "tied")
    found = dflash.draft(features, Lookup(embed), tokens, torch.full((2, 1), 6))[0, 0]
    text, change = features[0], lambda ids: ids
    if wrong == "one mask differs":
        change = lambda ids: [*ids[:2], 3, *ids[3:]]  # noqa: E731
    right = one_block(dflash, text, embed, tokens[0], 6, change)[1:]
    if wrong != "one mask differs":
        moved = text.roll(-1 if wrong == "the anchor is context" else 1, 0)
        right = one_block(dflash, moved, embed, tokens[0], 6)[1:]
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        torch.testing.assert_close(found, right, rtol=1e-2, atol=1e-2)


@every_kind
def test_a_block_sees_the_features_before_its_anchor_alone(target, kind):
    """Of its own sample in a packed row, at the sample's own positions; later tokens change nothing either."""
    dflash, features, embed, tokens = case(target, kind)
    segment = torch.tensor([[1] * 5 + [2] * 7, [1] * 9 + [2] * 2 + [0]])
    positions = torch.tensor([[*range(5), *range(7)], [*range(9), 0, 1, 0]])
    anchors = torch.tensor([[1, 4, 6, 9], [3, 8, 10, 10]])
    with torch.no_grad():
        packed = dflash.draft(features, Lookup(embed), tokens, anchors, positions, segment)
        for row, number in ((row, number) for row in range(2) for number in range(4)):
            anchor = int(anchors[row, number])
            begin = int((segment[row] == segment[row, anchor]).int().argmax())
            own = slice(begin, LENGTH)
            wanted = one_block(dflash, features[row, own], embed, tokens[row, own], anchor - begin)
            same(packed[row, number], wanted[1:])
        later, before = (features.clone() for _ in range(2))
        later[0, 9:], before[0, 8] = 7.0, 7.0
        changed = tokens.clone()
        changed[0, 10:] = 3
        again = dflash.draft(later, Lookup(embed), changed, anchors, positions, segment)
        assert torch.equal(again[0], packed[0]), "neither the anchor's feature nor what follows it is read"
        again = dflash.draft(before, Lookup(embed), tokens, anchors, positions, segment)
        assert torch.equal(again[0, :3], packed[0, :3]) and not torch.allclose(again[0, 3], packed[0, 3])


def test_blocks_of_flex_attention(target, monkeypatch):
    """The path of a GPU gives the same, values and gradients; here by PyTorch's definition of FlexAttention."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr("draftsmith.models.dflash.takes_blocks", lambda q: True)
    dflash, features, embed, tokens = case(target, "untied")
    segment = torch.tensor([[1] * 5 + [2] * 7] * 2)
    positions, anchors = torch.tensor([[*range(5), *range(7)]] * 2), torch.tensor([[1, 4, 6, 9], [2, 3, 8, 11]])
    found = {}
    for dflash.flex in (False, True):
        out = dflash.draft(features, Lookup(embed), tokens, anchors, positions, segment)
        found[dflash.flex] = out.detach(), *torch.autograd.grad(out.square().sum(), [*dflash.parameters()])
    for one, other in zip(found[True], found[False], strict=True):
        assert (one - other).norm() < 1e-9 * other.norm()


def test_autocast(target):
    """In bfloat16 the error is that of rounding; gradients keep the weights' dtype."""
    dflash, features, embed, tokens = case(target, "tied")
    dflash, features, anchors = dflash.float(), features.float(), torch.tensor([[2, 7]] * 2)
    wanted = dflash.draft(features, Lookup(embed.float()), tokens, anchors)
    with torch.autocast("cpu", torch.bfloat16):
        found = dflash.draft(features, Lookup(embed.float()), tokens, anchors)
        found.float().square().sum().backward()
    assert (found - wanted).norm() < 0.05 * wanted.norm()
    assert all(p.grad.dtype == torch.float32 and p.grad.abs().sum() > 0 for p in dflash.parameters())


# ---- anchors


def test_anchors_are_drawn_from_each_answer():
    """A token and the next one are an answer's; of each sample so many at most, whatever else is there."""
    segment = torch.tensor([[1] * 6 + [2] * 8 + [3] * 4 + [0] * 2] * 2)
    supervised = torch.zeros(2, 20, dtype=torch.bool)
    supervised[:, [3, 4, 5, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]] = True
    uniforms = torch.rand(2, 20, generator=torch.Generator().manual_seed(0))
    can = [3, 4, 8, 9, 10, 11, 12, 15, 16]  # 14 is its sample's first token, 5, 13 and 17 are their answers' last
    assert [row.nonzero().flatten().tolist() for row in block_anchors(supervised, segment, uniforms, 99)] == [can, can]
    for most in (1, 3):
        for row, marks in enumerate(block_anchors(supervised, segment, uniforms, most)):
            wanted = []
            for own in ([3, 4], [8, 9, 10, 11, 12], [15, 16]):
                wanted += sorted(sorted(own, key=lambda at, row=row: float(uniforms[row, at]))[:most])
            assert marks.nonzero().flatten().tolist() == wanted
    alone = block_anchors(supervised[:, 6:14], None, uniforms[:, 6:14], 3)
    assert torch.equal(alone, block_anchors(supervised, segment, uniforms, 3)[:, 6:14])


# ---- ranks


@pytest.mark.parametrize("size", [None, 40])
def test_ranks_are_those_of_each_block(target, size):
    dflash = make_dflash(target, draft_vocab_size=size)
    if size:
        dflash.draft_from(torch.arange(10, 50), target)
    torch.manual_seed(8)
    tokens = torch.randint(61, (3, LENGTH), dtype=torch.int32)
    supervised = torch.zeros(3, LENGTH, dtype=torch.bool)
    supervised[0, 4:12] = supervised[1, 3:9] = supervised[2, 1:5] = True
    found = block_ranks(target, dflash, tokens, supervised)
    labels, wanted = draft_labels(tokens, supervised, SLOTS - 1), torch.full((3, LENGTH, SLOTS - 1), -1)
    head, embed = dflash.draft_head(target.lm_head), target.embeddings.weight
    with torch.no_grad():
        for row, t in (labels >= 0).any(-1).nonzero().tolist():
            features = target.features(tokens[row : row + 1].long(), dflash.config.captured_layers)[0]
            out = one_block(dflash, features, embed, tokens[row].long(), t + 1)[1:]
            best = dflash.tokens(head(out).topk(MAX_RANK, -1).indices)
            wanted[row, t] = label_ranks(best, labels[row, t])
    assert torch.equal(found, wanted)
    assert len(found[found >= 0].unique()) > 1, "some are right, some are wrong"


# ---- config and weights


def test_what_is_stored_loads_and_what_is_damaged_is_refused(target):
    dflash = make_dflash(target, draft_vocab_size=40)
    config, weights = dflash.config.to_dict(), dflash.stored()
    again = DFlash.from_artifact(config, weights, "here")
    assert again.config == dflash.config and not any(p.requires_grad for p in again.parameters())
    assert all(torch.equal(one, weights[name]) for name, one in again.stored().items())
    names = {"fc.weight", "hidden_norm.weight", "norm.weight", "draft_vocab"}
    names |= {f"layers.{n}.{norm}.weight" for n in (0, 1) for norm in ("input_layernorm", "post_attention_layernorm")}
    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    names |= {f"layers.{n}.self_attn.{part}.weight" for n in (0, 1) for part in parts}
    names |= {f"layers.{n}.mlp.{part}.weight" for n in (0, 1) for part in ("gate_proj", "up_proj", "down_proj")}
    assert weights.keys() == names, "those of published folders, and the draft vocabulary"
    assert torch.equal(weights["layers.0.self_attn.k_norm.weight"], weights["layers.1.self_attn.k_norm.weight"])
    untied = make_dflash(target, "untied")
    assert len([*untied.parameters()]) == len([*dflash.parameters()]) + 1
    with pytest.raises(ValueError, match="here/model.safetensors: 1 tensors are not those .* 'fc.weight' is missing"):
        DFlash.from_artifact(config, {n: w for n, w in weights.items() if n != "fc.weight"}, "here")
    with pytest.raises(ValueError, match="here/config.json: field 'mask_token_id' is missing"):
        DFlash.from_artifact({n: v for n, v in config.items() if n != "mask_token_id"}, weights, "here")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"block_size": 1}, "field 'block_size' is 1; it has to be from 2 to 64"),
        ({"block_size": 65}, "field 'block_size' is 65"),
        ({"mask_token_id": 61}, "field 'mask_token_id' is 61; it has to be an id from 0 to 60"),
        ({"captured_layers": ()}, "field 'captured_layers' is empty"),
        ({"captured_layers": (4,)}, r"drafter.captured_layers=\[4\]: the target has layers 0 to 3"),
        ({"num_layers": 0}, "field 'num_layers' is 0; it has to be a whole number above 0"),
    ],
)
def test_impossible_configs(target, change, message):
    config = make_dflash(target).config
    with pytest.raises(ValueError, match=message):
        DFlashConfig(**dataclasses.asdict(config) | change)


# ---- published folders


def test_a_published_folder_and_back(tiny_lm, tmp_path):
    """As z-lab writes them, whose layer ids are those of the layers left; imported again it is the same drafter."""
    target, served = load_target(str(tiny_lm)), tmp_path / "served"
    dflash = untrained_block(target, draft_vocab=True)
    write_drafter(tmp_path / "own", "dflash", dflash.config.to_dict(), dflash.stored(), target, {})
    assert to_servers.export(open_source(str(tmp_path / "own"), "vllm"), "vllm", served) == 0
    written, weights = (served / "config.json").read_text(), load_file(served / "model.safetensors")
    config = json.loads(written)
    assert config["dflash_config"] == {"mask_token_id": 299, "target_layer_ids": [0], "causal": False}
    assert (config["block_size"], config["num_target_layers"], config["draft_vocab_size"]) == (4, 2, 240)
    assert weights.keys() == {*dflash.stored()} - {"draft_vocab"} | {"lm_head.weight", "d2t", "t2d"}
    assert torch.equal(weights["d2t"] + torch.arange(240), dflash.draft_vocab)
    card = (served / "README.md").read_text()
    assert '"method": "dflash"' in card and "llama-server" not in card, "its converter knows no draft vocabulary"
    assert difference(served, dflash, target) < 1e-4
    assert to_servers.export(open_source(str(tmp_path / "own"), "sglang"), "sglang", tmp_path / "all") == 0
    assert load_file(tmp_path / "all/model.safetensors").keys() == {*dflash.stored()} - {"draft_vocab"}
    assert "draft_vocab_size" not in json.loads((tmp_path / "all/config.json").read_text())
    assert "-md drafter.gguf --spec-type draft-dflash --spec-draft-n-max 3" in (tmp_path / "all/README.md").read_text()
    own = open_source(str(tmp_path / "own"), "sglang")
    to_servers.export(own, "sglang", tmp_path / "fetched", served_target="org/target")
    card = (tmp_path / "fetched/README.md").read_text()  # the converter reads folders
    assert "hf download org/target --local-dir target" in card and "convert_hf_to_gguf.py target" in card
    other = dataclasses.replace(dflash.config, captured_layers=(1, 0))
    said = unsupported(DFlash(other), "vllm")
    assert said == "it captures layers [1, 0] of the target; servers take them in ascending order"
    swapped = {"layers.1.self_attn.q_norm.weight": weights["layers.1.self_attn.k_norm.weight"].clone()}
    save_file(weights | swapped, tmp_path / "model.safetensors")
    shutil.copy(served / "config.json", tmp_path)
    assert difference(tmp_path, dflash, target) > 1e-2, "the independent computation can differ"
    _, found, again = read_drafter(convert_if_published(str(served), str(tiny_lm)))
    assert DFlash.from_artifact(found, again, "here").config == dflash.config
    assert all(torch.equal(weight, again[name]) for name, weight in dflash.stored().items())
    for change, message in (
        ({"is_causal": True}, "its blocks are causal, or have a window"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "its blocks are causal, or have a window"),
        ({"num_target_layers": 3}, "num_target_layers 3 ≠ 2 of the target"),
        ({"dflash_config": {"mask_token_id": 299, "target_layer_ids": [1]}}, "the target has layers 0 to 1"),
    ):
        (served / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=re.escape(message)):
            convert_if_published(str(served), str(tiny_lm))
    (served / "config.json").write_text(written)  # of which there is a converted copy
    (served / "mask_embedding.pt").touch()
    with pytest.raises(ValueError, match=r"mask_embedding\.pt: a mask token's own embedding, which is not read"):
        convert_if_published(str(served), str(tiny_lm))
    with pytest.raises(ValueError, match="it is written for vLLM, SGLang and speculators, not for openvino"):
        open_source(str(tmp_path / "own"), "openvino")


# The fields of z-lab/Qwen3-8B-DFlash-b16's config.json, and where others of theirs have some.
PUBLISHED = {
    "architectures": ["DFlashDraftModel"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 4, "bos_token_id": 1,
    "dflash_config": {"mask_token_id": 299, "target_layer_ids": [0]}, "dtype": "bfloat16", "eos_token_id": 2,
    "hidden_act": "silu", "initializer_range": 0.02, "layer_types": ["full_attention"] * 2,
    "max_position_embeddings": 40960, "max_window_layers": 5, "model_type": "qwen3", "num_hidden_layers": 2,
    "num_target_layers": 2, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": None,
    "tie_word_embeddings": False, "transformers_version": "4.57.1", "use_cache": True, "use_sliding_window": False,
}  # fmt: skip


@pytest.mark.parametrize(
    "moved",
    [
        {},
        {"block_size": None, "dflash_config": {"block_size": 4, "mask_token_id": 299, "target_layer_ids": [0]}},
        {"mask_token_id": 299, "dflash_config": {"target_layer_ids": [0]}},
    ],
)
def test_configs_as_they_are_published(tiny_lm, tmp_path, moved):
    target = load_target(str(tiny_lm))
    dflash = untrained_block(target)
    sizes = {name: getattr(dflash.config, name) for name in SIZES if name != "max_position_embeddings"}
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | sizes | moved))
    save_file(dflash.stored(), tmp_path / "model.safetensors")
    _, found, again = read_drafter(convert_if_published(str(tmp_path), str(tiny_lm)))
    assert DFlash.from_artifact(found, again, "here").config == dflash.config
    assert all(torch.equal(weight, again[name]) for name, weight in dflash.stored().items())


def test_what_a_folder_of_speculators_holds(tiny_lm, tmp_path, monkeypatch):
    """The first layer's input has a name in it, but not in z-lab's; its LM head has no bias, the target's may."""
    target = load_target(str(tiny_lm))
    dflash = make_dflash(target, captured_layers=(0,))
    write_drafter(tmp_path / "own", "dflash", dflash.config.to_dict(), dflash.stored(), target, {})
    with pytest.raises(ValueError, match="it captures layer 0, which vllm has no name for; use --to speculators"):
        open_source(str(tmp_path / "own"), "vllm")
    source = open_source(str(tmp_path / "own"), "speculators")
    assert to_servers.export(source, "speculators", tmp_path / "served") == 0
    target.lm_head.bias = torch.nn.Parameter(torch.ones(target.vocab_size))
    monkeypatch.setattr("draftsmith.models.serving.source.load_stored", lambda *given: target)
    with pytest.raises(ValueError, match="has a bias, for which speculators has no place"):
        open_source(str(tmp_path / "own"), "speculators")


@pytest.mark.parametrize("draft_vocab", [True, False])
def test_a_folder_of_speculators_and_back(tiny_lm, tmp_path, draft_vocab):
    """As that package writes them: layers by the one entered, a layer's fields apart, an LM head in every folder."""
    target, served = load_target(str(tiny_lm)), tmp_path / "served"
    dflash = untrained_block(target, draft_vocab)
    write_drafter(tmp_path / "own", "dflash", dflash.config.to_dict(), dflash.stored(), target, {})
    source = open_source(str(tmp_path / "own"), "speculators")
    assert to_servers.export(source, "speculators", served, "USER/TARGET") == 0
    config, weights = json.loads((served / "config.json").read_text()), load_file(served / "model.safetensors")
    assert {name: config[name] for name in (
        "speculators_model_type", "block_size", "aux_hidden_state_layer_ids", "mask_token_id",
        "sliding_window_non_causal", "sample_from_anchor", "draft_vocab_size",
    )} == {
        "speculators_model_type": "dflash", "block_size": 4, "aux_hidden_state_layer_ids": [1], "mask_token_id": 299,
        "sliding_window_non_causal": True, "sample_from_anchor": False, "draft_vocab_size": 240 if draft_vocab else 300,
    }  # fmt: skip
    assert config["transformer_layer_config"]["model_type"] == "qwen3"
    (method,) = config["speculators_config"]["proposal_methods"]
    assert (method["proposal_type"], method["speculative_tokens"]) == ("greedy", 3)
    assert config["speculators_config"]["verifier"]["name_or_path"] == "USER/TARGET"
    assert weights.keys() - {"d2t", "t2d"} == {*dflash.stored()} - {"draft_vocab"} | {"lm_head.weight"}
    assert "vllm serve DRAFTER\n" in (served / "README.md").read_text()
    assert difference(served, dflash, target) < 1e-4
    # What the package stores besides: the target's own tensors, of its training.
    hidden = target.hidden_size
    of_target = {"verifier_norm.weight": torch.ones(hidden), "embed_tokens.weight": target.embeddings.weight.clone()}
    save_file(weights | of_target, served / "model.safetensors")
    (served / "config.json").write_text(json.dumps(config | {"max_anchors": 256}))  # of the package's older versions
    _, found, again = read_drafter(convert_if_published(str(served), str(tiny_lm)))
    assert DFlash.from_artifact(found, again, "here").config == dflash.config
    assert all(torch.equal(weight, again[name]) for name, weight in dflash.stored().items())
    layer = config["transformer_layer_config"]
    for change, message in (
        ({"sample_from_anchor": True}, "to draft from the anchor is not known here"),
        ({"transformer_layer_config": None}, "field 'transformer_layer_config' is None; it has to be an object"),
        ({"transformer_layer_config": layer | {"layer_types": ["sliding_attention"] * 2}}, "or have a window"),
        ({"aux_hidden_state_layer_ids": None}, "field 'aux_hidden_state_layer_ids' is None; it has to be a list"),
        ({"aux_hidden_state_layer_ids": [2]}, "the target has layers 0 to 1"),
        ({"target_hidden_size": 8}, "target_hidden_size 8 ≠ 32 of the target"),
        ({"conv_kernel_size": 3}, "field 'conv_kernel_size' is 3; it is not known here what that changes"),
    ):
        (served / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=re.escape(message)):
            convert_if_published(str(served), str(tiny_lm))
