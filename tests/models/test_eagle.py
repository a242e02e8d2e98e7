"""EAGLE's unrolled steps against drafting token by token, values and gradients; its config, weights and features."""

import dataclasses
import itertools
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from made import llama3
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from draftsmith.inference.engine.cache import KVCache
from draftsmith.inference.engine.prompts import Chunk
from draftsmith.inference.engine.runner import Runner, engine_attention, joined_features
from draftsmith.inference.measure.tree_statistics import MAX_RANK, draft_labels, eagle_ranks, label_ranks
from draftsmith.models import unrolled
from draftsmith.models.dflash import DFlash
from draftsmith.models.eagle import Eagle, EagleConfig, layers_to_capture, sizes_for
from draftsmith.models.unrolled import block_mask, dense_mask, marked_places, unrolled_attention

KINDS = {
    "eagle-1": (1, "shared", {}),
    "eagle-3": (3, "own", {}),
    "eagle-3.1": (3, "own", {"norm_before_fc": True, "norm_output": True}),
    "fc norms": (3, "shared", {"fc_norm": True}),
    "imported": (3, "own", {"norm_before_residual": True, "attention_bias": True, "own_embeddings": True}),
    "p-eagle": (3, "own", {"parallel": 4, "fc_norm": True}),
    "three layers": (3, "own", {"num_layers": 3, "norm_before_residual": True, "attention_bias": True}),
    "p-eagle, two layers": (3, "own", {"parallel": 4, "num_layers": 2}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
STEPS = 4
FAMILIES = "llama qwen3 mistral gemma2 gemma3 gemma qwen2 phi3 gpt_neox gpt2 opt cohere granite phi".split()


def make_eagle(target, kind="eagle-3", **fields):
    version, projection, norms = KINDS[kind]
    eagle = Eagle.for_target(target, version, projection, **norms, **fields)
    torch.manual_seed(3)
    for weight in eagle.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return eagle


class OneByOne:
    """A drafter's layers on a cache, one pair at a time, by their formula in the docstring of models/eagle.py."""

    def __init__(self, eagle):
        self.eagle, self.keys, self.values = eagle, defaultdict(list), defaultdict(list)

    def norm(self, x, module):
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eagle.config.rms_norm_eps).sqrt() * module.weight

    def fuse(self, feature):
        eagle, d = self.eagle, self.eagle.config.hidden_size
        if eagle.config.version == 1:
            return feature[:d]
        read = feature[d:]
        if eagle.input_norm is not None:
            read = self.norm(read, eagle.input_norm)
        if eagle.fc_norm is not None:
            read = torch.cat([self.norm(p, n) for p, n in zip(read.split(d), eagle.fc_norm, strict=True)])
        return eagle.fc.weight @ read

    def run(self, e, g, position):
        """What the LM head reads, and what a draft continues with."""
        c, layer = self.eagle.config, self.eagle.midlayer
        if c.version == 1:
            x = residual = self.eagle.fc.weight @ torch.cat((e, g)) + self.eagle.fc.bias
        else:
            x = torch.cat((self.norm(e, layer.input_layernorm), self.norm(g, layer.hidden_norm)))
            residual = self.norm(g, layer.hidden_norm) if c.norm_before_residual else g
        out = self.layer(layer, x, residual, position)
        for number in range(1, c.num_layers):
            layer = self.eagle.layers[str(number)]
            out = self.layer(layer, self.norm(out, layer.input_layernorm), out, position)
        if c.version == 1:
            return out, out
        normed = self.norm(out, self.eagle.norm)
        return normed, normed if c.norm_output else out

    def layer(self, layer, x, residual, position):
        """The output of a layer, from the input of q, k and v."""
        c = self.eagle.config
        parts = [getattr(layer.self_attn, name) for name in ("q_proj", "k_proj", "v_proj")]
        biases = [part.bias if c.attention_bias else 0 for part in parts]
        q, k, v = ((part.weight @ x + bias).view(-1, c.head_dim) for part, bias in zip(parts, biases, strict=True))
        angles = self.eagle.rotary.inv_freq.float().repeat(2) * position  # transformers rotates by float32 angles
        cos, sin = angles.cos()[None].to(x.dtype), angles.sin()[None].to(x.dtype)
        q, k = (part[0] for part in apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=0))
        self.keys[layer].append(k)
        self.values[layer].append(v)
        shared, mine = len(q) // len(k), (self.keys[layer], self.values[layer])
        heads = []
        for head, query in enumerate(q):
            keys, values = (torch.stack([part[head // shared] for part in kept]) for kept in mine)
            heads.append(torch.softmax(keys @ query / c.head_dim**0.5, 0) @ values)
        out = residual + layer.self_attn.o_proj.weight @ torch.cat(heads)
        x, mlp = self.norm(out, layer.post_attention_layernorm), layer.mlp
        return out + mlp.down_proj.weight @ (F.silu(mlp.gate_proj.weight @ x) * (mlp.up_proj.weight @ x))


def same(found, wanted):
    """In float64, but for the rotary cosines and sines: float32, and a unit in the last place off where PyTorch takes
    several elements at once on one side and one on the other."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=16 * 2**-24 * float(wanted.detach().abs().max()))


def drafted(eagle, features, embed, tokens, start, steps):
    """K steps of drafting the true tokens behind position ``start`` of one text, ``[K, d]``; of P-EAGLE the mask pair
    stands for the tokens behind the first one."""
    cache, found = OneByOne(eagle), []
    for t in range(start + 1):
        out = cache.run(embed[tokens[t + 1]], cache.fuse(features[t]), t)
    for step in range(1, steps):
        found.append(out[0])
        pair = embed[tokens[start + 1 + step]], out[1]
        if eagle.config.parallel:
            masked = torch.cat((features[0][: eagle.config.hidden_size], eagle.mask_hidden))
            pair = embed[eagle.config.mask_token_id], cache.fuse(masked)
        out = cache.run(*pair, start + step)
    return torch.stack([*found, out[0]])


def case(target, kind, **fields):
    """A drafter in float64, and the features, embeddings and tokens of two rows of twelve."""
    eagle = make_eagle(target, kind, **fields).double()
    torch.manual_seed(5)
    tokens = torch.randint(target.vocab_size, (2, 12))
    width = target.hidden_size * (1 + len(eagle.config.captured_layers))
    embed = eagle.embeddings(target.embeddings).weight.double()
    return eagle, torch.randn(2, 12, width, dtype=torch.float64), embed, tokens


class Lookup(torch.nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, ids):
        return self.table[ids]


@every_kind
@pytest.mark.parametrize("scores", [1 << 20, 100])
def test_unrolled_steps_are_drafting_token_by_token(make_target, kind, scores, monkeypatch):
    """Values and gradients of K steps from every position at once, in one chunk of queries or in several."""
    monkeypatch.setattr("draftsmith.models.unrolled.SCORES", {"cpu": scores, "cuda": scores})
    eagle, features, embed, tokens = case(make_target("llama", num_hidden_layers=4), kind)
    features.requires_grad_()
    torch.manual_seed(6)
    slopes = torch.randn(2, STEPS, 12 - STEPS, eagle.config.hidden_size, dtype=torch.float64)
    steps = list(eagle.unroll(features, Lookup(embed), tokens, STEPS))
    found = torch.stack(steps, 1)[:, :, : 12 - STEPS]
    wanted = torch.stack(
        [
            torch.stack([drafted(eagle, features[row], embed, tokens[row], t, STEPS) for t in range(12 - STEPS)], 1)
            for row in range(2)
        ]
    )
    same(found, wanted)
    trained = [features, *(p for n, p in eagle.named_parameters() if n != "lm_head.weight")]
    of_found, of_wanted = (torch.autograd.grad((out * slopes).sum(), trained) for out in (found, wanted))
    for one, other in zip(of_found, of_wanted, strict=True):
        assert other.abs().max() > 1e-3
        same(one, other)


@every_kind
def test_samples_of_a_row_and_chosen_places(make_target, kind):
    """Two samples in a row are as they are alone, and what is chosen does not depend on what else is, nor on how many
    others end earlier."""
    eagle, features, embed, tokens = case(make_target("llama", num_hidden_layers=4), kind)
    segment = torch.tensor([[1] * 5 + [2] * 7, [1] * 9 + [2] * 2 + [0]])
    positions = torch.tensor([[*range(5), *range(7)], [*range(9), 0, 1, 0]])
    marks = torch.zeros(2, 12, dtype=torch.bool)
    marks[0, [1, 5, 8]] = marks[1, [0, 2, 4, 5, 6]] = True
    places = marked_places(marks)
    assert places[:, :3].tolist() == [[1, 5, 8], [0, 2, 4]] and places.shape == (2, 5)
    assert marked_places(torch.zeros(2, 3, dtype=torch.bool)).shape == (2, 1)
    with torch.no_grad():
        packed = torch.stack([*eagle.unroll(features, Lookup(embed), tokens, 3, positions, segment)])
        some = torch.stack([*eagle.unroll(features, Lookup(embed), tokens, 3, positions, segment, places)])
        fewer = eagle.unroll(features, Lookup(embed), tokens, 3, positions, segment, places, (5, 3, 1))
        for count, found, wanted in zip((5, 3, 1), fewer, some, strict=True):
            same(found, wanted[:, :count])
        for row, begin, end in ((0, 0, 5), (0, 5, 12), (1, 0, 9)):
            part = row, slice(begin, end)
            alone = torch.stack([*eagle.unroll(features[part][None], Lookup(embed), tokens[part][None], 3)])
            steps = (packed[:, row, begin : end - 3], alone[:, 0, : end - begin - 3])
            same(*steps)
            assert begin == 0 or not torch.allclose(packed[:, row, begin], packed[:, row, 0])
    for row in range(2):
        same(some[:, row], packed[:, row, places[row]])


def test_no_weights_are_kept_for_the_backward_pass(make_target):
    """What the K steps keep grows with the length, not with its square."""
    eagle = make_eagle(make_target("llama", num_hidden_layers=4))
    embed, sizes = Lookup(torch.randn(61, 32)), {}

    def largest(length):
        kept = []

        def note(tensor):
            if tensor.is_floating_point():
                kept.append(tensor.numel())
            return tensor

        tokens = torch.randint(61, (1, length))
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            out = torch.stack([*eagle.unroll(torch.randn(1, length, 128), embed, tokens, 5)])
        assert out.requires_grad
        return max(kept)

    sizes = {length: largest(length) for length in (64, 256)}
    assert sizes[256] == 4 * sizes[64] and sizes[256] < 256 * 256


def test_autocast(make_target):
    """In bfloat16 the error is that of rounding; gradients keep the weights' dtype."""
    eagle, tokens = make_eagle(make_target("llama", num_hidden_layers=4)), torch.randint(61, (2, 12))
    features, embed = torch.randn(2, 12, 128), Lookup(torch.randn(61, 32))
    wanted = torch.stack([*eagle.unroll(features, embed, tokens, 3)])
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.stack([*eagle.unroll(features, embed, tokens, 3)])
        found.float().square().sum().backward()
    assert (found - wanted).norm() < 0.03 * wanted.norm()
    assert all(p.grad.dtype == torch.float32 and p.grad.abs().sum() > 0 for p in eagle.midlayer.parameters())


def test_unrolled_attention_is_one_softmax():
    """Against scores written into one matrix; queries of all groups of heads, in chunks of three."""
    torch.manual_seed(0)
    q = torch.randn(2, 6, 7, 4, dtype=torch.float64)

    def pair(length):
        return torch.randn(2, 3, length, 4, dtype=torch.float64), torch.randn(2, 3, length, 4, dtype=torch.float64)

    first, later = pair(9), [pair(7), pair(7)]
    mask = torch.rand(2, 7, 9) < 0.5
    mask[..., 0] = True
    found = unrolled_attention(q, first, later, mask, chunk=3)
    for row, head, t in itertools.product(range(2), range(6), range(7)):
        of = lambda part, row=row, head=head: part[row, head // 2]  # noqa: E731
        keys, values = (
            torch.cat([of(first[n])[mask[row, t]], *(of(pair[n])[t : t + 1] for pair in later)]) for n in (0, 1)
        )
        wanted = torch.softmax(keys @ q[row, head, t] / 2, 0) @ values
        torch.testing.assert_close(found[row, head, t], wanted, rtol=1e-10, atol=1e-10)


@pytest.fixture
def on_a_cpu(monkeypatch):
    """FlexAttention's operators as PyTorch defines them, with gradients, which it only offers on other devices."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.mark.parametrize("segmented", [False, True])
def test_attention_by_blocks_is_that_of_a_dense_mask(on_a_cpu, segmented):
    """Values and gradients of the first step and of a later one; samples of a row, padding, grouped queries."""
    torch.manual_seed(0)
    segment = torch.tensor([[1] * 140 + [2] * 150 + [0] * 10, [1] * 30 + [2] * 250 + [3] * 20]) if segmented else None
    marks = torch.rand(2, 300) < 0.95
    chosen = marked_places(marks)
    q = torch.randn(2, 6, chosen.shape[1], 16, dtype=torch.float64, requires_grad=True)

    def pair(length):
        return tuple(torch.randn(2, 3, length, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))

    first, later = pair(300), [pair(chosen.shape[1]), pair(chosen.shape[1])]
    blocks, dense = (make(chosen, segment, 300) for make in (block_mask, dense_mask))
    left_out = 2 * 3 * 3 - int(blocks.kv_num_blocks.sum() + blocks.full_kv_num_blocks.sum())
    assert dense.any(-1).all() and left_out >= (3 if segmented else 2)
    for count in (0, 2):
        given = [q, *first, *(part for keys in later[:count] for part in keys)]
        slopes = torch.randn_like(q)
        found, wanted = (unrolled_attention(q, first, later[:count], mask) for mask in (blocks, dense))
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
        pairs = (torch.autograd.grad((out * slopes).sum(), given) for out in (found, wanted))
        for one, other in zip(*pairs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@every_kind
@pytest.mark.parametrize("recompute", [False, True])
def test_unrolled_steps_by_blocks(on_a_cpu, make_target, kind, recompute, monkeypatch):
    """A drafter's steps and gradients, also with activations that the backward pass computes again."""
    eagle, features, embed, tokens = case(make_target("llama", num_hidden_layers=4), kind)
    eagle.recompute = recompute
    segment, places = torch.tensor([[1] * 5 + [2] * 7] * 2), torch.tensor([[0, 1, 6, 7, 8], [2, 3, 7, 5, 6]])
    positions, found = torch.tensor([[*range(5), *range(7)]] * 2), {}
    trained = [p for n, p in eagle.named_parameters() if n != "lm_head.weight"]
    monkeypatch.setattr("draftsmith.models.eagle.takes_blocks", lambda q: True)
    attended = []
    monkeypatch.setattr("draftsmith.models.unrolled._on", lambda kind, function: attended.append(0) or function)
    for blocks in (False, True):
        assert not attended
        eagle.blocks = blocks
        outs = eagle.unroll(features, Lookup(embed), tokens, 3, positions, segment, places, (5, 5, 2))
        outs = torch.cat([*outs], 1)
        found[blocks] = outs.detach(), *torch.autograd.grad(outs.square().sum(), trained)
    assert attended, "by blocks"
    for one, other in zip(found[True], found[False], strict=True):
        assert (one - other).norm() < 1e-9 * other.norm()


# ---- features


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_features_are_the_engines(make_target, family):
    target = make_target(family)
    tokens = torch.randint(61, (2, 10), generator=torch.Generator().manual_seed(1))
    captures = (1, 0)
    found = target.features(tokens, captures)
    assert torch.equal(found[..., :32], target.hidden(tokens)) and found.shape == (2, 10, 96)
    assert torch.equal(target.features(tokens), target.hidden(tokens))
    for lean in (False, None):
        runner = Runner(target, KVCache(target, 2, 16), lean=lean)
        with engine_attention([target]):
            chunk = Chunk.of([(row, 0, text) for row, text in enumerate(tokens.tolist())], target.device)
            engines = joined_features(*runner.forward_prompts(chunk, captures))
        torch.testing.assert_close(found, engines.view_as(found), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "cohere", "gemma2"])
def test_the_last_norm_begins_as_large_as_the_targets(make_target, family):
    target = make_target(family)
    with torch.no_grad():
        target.decoder.norm.weight.add_(6)  # Gemma adds 1 to its weights
    mask = {"block_size": 4, "num_layers": 1, "mask_token_id": 3, "captured_layers": (0, 1)}
    tokens, x = torch.randint(1, 60, (1, 40)), torch.randn(40, target.hidden_size)
    wanted = target.hidden(tokens).detach().square().mean().sqrt()
    for drafter in (Eagle.for_target(target, 3, "shared", captured_layers=(0, 1)), DFlash.for_target(target, **mask)):
        assert float(drafter.norm(x).detach().square().mean().sqrt()) == pytest.approx(float(wanted), rel=0.1)


def test_layers_to_capture():
    assert [layers_to_capture(n) for n in (32, 7, 6, 2, 1)] == [(2, 16, 29), (2, 3, 4), (1, 3, 5), (1,), (0,)]


# ---- ranks


@every_kind
@pytest.mark.parametrize("size", [None, 40])
def test_ranks_are_those_of_drafting_token_by_token(make_target, kind, size):
    target = make_target("llama")
    eagle = make_eagle(target, kind, draft_vocab_size=size)
    if size:
        eagle.draft_from(torch.arange(10, 50), target)
    torch.manual_seed(8)
    tokens = torch.randint(61, (3, 12), dtype=torch.int32)
    supervised = torch.zeros(3, 12, dtype=torch.bool)
    supervised[0, 4:12] = supervised[1, 3:9] = supervised[2, 1:5] = True
    found = eagle_ranks(target, eagle, tokens, supervised, STEPS)
    labels, wanted = draft_labels(tokens, supervised, STEPS), torch.full((3, 12, STEPS), -1)
    head, embed = eagle.draft_head(target.lm_head), eagle.embeddings(target.embeddings).weight
    with torch.no_grad():
        for row, t in (labels >= 0).any(-1).nonzero().tolist():
            features = target.features(tokens[row : row + 1].long(), eagle.config.captured_layers)[0]
            reach = int((labels[row, t] >= 0).sum())
            best = head(drafted(eagle, features, embed, tokens[row].long(), t, reach)).topk(MAX_RANK, -1).indices
            wanted[row, t, :reach] = label_ranks(eagle.tokens(best), labels[row, t, :reach])
    assert torch.equal(found, wanted)
    assert len(found[found >= 0].unique()) > 1, "some are right, some are wrong"


# ---- config and weights


def test_what_is_stored_loads_and_what_is_damaged_is_refused(make_target):
    target = make_target("llama")
    eagle = make_eagle(target, "eagle-3.1", draft_vocab_size=40)
    config, weights = eagle.config.to_dict(), eagle.state_dict()
    again = Eagle.from_artifact(config, weights, "here")
    assert again.config == eagle.config and not any(p.requires_grad for p in again.parameters())
    assert all(torch.equal(again.state_dict()[name], weight) for name, weight in weights.items())
    later = ("norm_before_residual", "attention_bias", "own_embeddings", "target_hidden_size")
    older = {name: value for name, value in config.items() if name not in later}
    assert Eagle.from_artifact(older, weights, "here").config == eagle.config
    for broken, message in (
        (config | {"version": 2}, "field 'version' is 2"),
        (config | {"captured_layers": []}, "EAGLE-3 reads some layers"),
        (config | {"num_attention_heads": 5}, "field 'num_attention_heads' is 5"),
        ({k: v for k, v in config.items() if k != "rope_parameters"}, "field 'rope_parameters' is missing"),
        (config | {"intermediate_size": 50}, "'midlayer.mlp.down_proj.weight' is"),
    ):
        with pytest.raises(ValueError, match=f"^here/.*{message}"):
            Eagle.from_artifact(broken, weights, "here")
    with pytest.raises(ValueError, match="does not ascend"):
        Eagle.from_artifact(config, weights | {"draft_vocab": weights["draft_vocab"].flip(0)}, "here")


def test_the_config_is_the_targets():
    """Rotary positions, their scaling and their number come from the target."""
    from transformers import AutoConfig

    rope = llama3(8192)
    config = AutoConfig.for_model("llama", num_hidden_layers=32, rope_parameters=rope, num_key_value_heads=8)
    found = EagleConfig.for_target(config, 128256, 131072, 3, "own", 32000)
    assert (found.captured_layers, found.max_position_embeddings) == ((2, 16, 29), 131072)
    assert found.rope_parameters == rope and found.outputs == 32000
    assert EagleConfig(**found.to_dict()) == found
    with pytest.raises(ValueError, match=r"drafter.captured_layers=\[32\]: the target has layers 0 to 31"):
        EagleConfig.for_target(config, 128256, 131072, 3, "own", None, [32])
    with pytest.raises(ValueError, match="EAGLE-1 has the target's LM head"):
        dataclasses.replace(found, version=1, captured_layers=())


def test_targets_that_no_llama_layer_is_like(make_target):
    """More heads than divide the width, and a factor for each frequency of a part of each head."""
    target = make_target("qwen3", hidden_size=32, num_attention_heads=6, num_key_value_heads=2, head_dim=8)
    dflash = DFlash.for_target(target, block_size=4, num_layers=1, mask_token_id=60, tie_k_norm=True)
    for config in (Eagle.for_target(target, 3, "shared").config, dflash.config):
        assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 8)
    rope = {"rope_type": "longrope", "rope_theta": 5.0, "partial_rotary_factor": 0.75, "short_factor": [1.0] * 3}
    phi = SimpleNamespace(hidden_size=32, num_attention_heads=4, rope_parameters=rope)
    assert sizes_for(phi, 61, 64, None)["rope_parameters"] == {"rope_type": "default", "rope_theta": 5.0}
    rope["short_factor"].append(1.0)
    assert sizes_for(phi, 61, 64, None)["rope_parameters"]["rope_type"] == "longrope"


def test_unrolled_steps_without_blocks_where_they_do_not_run(on_a_cpu, monkeypatch, capsys):
    """A compiler that fails is one line, once, and the dense form."""
    assert unrolled._runs.__wrapped__(torch.device("cpu")) and not capsys.readouterr().err

    def fails(kind, function):
        raise RuntimeError("no kernel\nfor this GPU")

    monkeypatch.setattr(unrolled, "_on", fails)
    assert not unrolled._runs.__wrapped__(torch.device("cpu"))
    line = "flex_attention does not run here (no kernel): unrolled steps take whole masks, and longer\n"
    assert capsys.readouterr().err == line
