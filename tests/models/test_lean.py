"""The lean decoder computes what the model's own modules do, to within rounding, or says why it is not used."""

import copy
import platform
import random
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.engine.cache import KVCache
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.engine.runner import ATTENTION, Runner
from draftsmith.inference.verify.tree import Topology, bitsets
from draftsmith.kernels import cpu
from draftsmith.kernels.tree_attention import TreeKeys, ancestor_mask, causal_bias, tree_bias
from draftsmith.models.lean import NO_KERNELS, LayerNorm, LeanDecoder
from draftsmith.models.lean_from import lean_decoder
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import Target, cache_argument, load_target

ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}
# name → family of tests/conftest.py, its fields
LEAN = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, linear scaling": ("llama", {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 4.0}}),
    "llama, llama3 scaling": ("llama", {"rope_parameters": {**ROPE, **LLAMA3}}),
    "llama, yarn": ("llama", {"rope_parameters": {**ROPE, "rope_type": "yarn", "factor": 4.0}}),
    "qwen2": ("qwen2", {}),
    "qwen2, windows": ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "mistral, window": ("mistral", {}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", {"rope_parameters": GEMMA3_ROPE}),
    "granite": ("granite", {"residual_multiplier": 0.3, "attention_multiplier": 0.2}),
    "phi3": ("phi3", {"pad_token_id": 0}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox, sequential": ("gpt_neox", {"use_parallel_residual": False, "rotary_pct": 0.5}),
    "gpt_neox, whole heads rotated": ("gpt_neox", {"rotary_pct": 1.0, "hidden_act": "gelu_fast"}),
    "gpt_neox, biases in the MLP alone": ("gpt_neox", {"attention_bias": False, "intermediate_size": 35}),
}
PROMPTS = [[7, 3, 19, 44, 5, 3, 28, 11, 50, 2, 33], [9], [58, 1, 30, 12]]


class Exact(TorchFunctionMode):
    """Float64 stays float64 where a model's code asks for float32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        double = args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64
        if double and (func is torch.Tensor.float or (func is torch.Tensor.to and args[1:] == (torch.float32,))):
            return args[0]
        if double and kwargs.get("dtype") is torch.float32:  # softmax
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def texts(target: Target, count: int, **options) -> list[list[int]]:
    results = SpeculativeDecoder(target, **options).generate(PROMPTS, count, stop_ids=frozenset())
    return [result.tokens for result in results]


def in_dtype(target: Target, dtype: torch.dtype) -> Target:
    return Target(copy.deepcopy(target.model).to(dtype), None, target.name, "")


def run(target: Target, lean: bool, parents: list[list[int]], path: str) -> torch.Tensor:
    """Hidden states of ragged prompts and then of a tree behind each, ``[B, T + N, d]``; the prompts' padding is 0."""
    rows, nodes = len(parents), len(parents[0])
    longest = max(map(len, PROMPTS[:rows]))
    cache = KVCache(target, rows, longest + nodes)
    with torch.inference_mode(), target.attention(ATTENTION):
        runner = Runner(target, cache, lean=lean)
        assert (runner.lean is not None) == lean
        tokens = torch.tensor([[*p, *[0] * (longest - len(p))] for p in PROMPTS[:rows]])
        places = torch.arange(longest)[None]
        biases = {w: causal_bias(0, longest, w, target.dtype, target.device) for w in runner.windows}
        prompt, _ = runner.forward(tokens, places.expand(rows, -1), places, longest, biases=biases)
        lengths = torch.tensor([len(p) for p in PROMPTS[:rows]])
        prompt = torch.where((places < lengths[:, None])[..., None], prompt, 0)
        depth = torch.tensor([depths(parent) for parent in parents], dtype=torch.int32)
        ancestors = torch.stack([bitsets(parent) for parent in parents])
        mask = ancestor_mask(ancestors, nodes)
        seen = cache.capacity
        given = {"tree_keys": TreeKeys(lengths, ancestors, depth, depth)}
        if path == "biases":
            given = {"biases": {w: tree_bias(lengths, mask, depth, seen, w, target.dtype) for w in runner.windows}}
        tokens = torch.arange(rows * nodes).view(rows, nodes) * 7 % 61
        slots = lengths[:, None] + torch.arange(nodes)
        tree, _ = runner.forward(tokens, lengths[:, None] + depth, slots, seen, **given)
    return torch.cat([prompt, tree], 1).double()


def depths(parents: list[int]) -> list[int]:
    found = [0]
    for parent in parents[1:]:
        found.append(found[parent] + 1)
    return found


@pytest.fixture(scope="module")
def make(make_target):
    def make(name: str) -> Target:
        family, fields = LEAN[name]
        torch.manual_seed(1)
        target = make_target(family, **fields)
        with torch.no_grad():
            for weight in target.model.parameters():
                if weight.dim() == 1:  # norms and biases that are all 1 or 0 would hide themselves
                    weight += 0.3 * torch.randn_like(weight)
        return target

    return make


@pytest.mark.parametrize(("dtype", "units"), [(torch.float32, 32), (torch.bfloat16, 12)])
@pytest.mark.parametrize("name", LEAN)
def test_hidden_states_are_those_in_float64(make, name, dtype, units):
    """Within so many units in the last place, after two layers; the lean decoder and the model's own modules."""
    target = in_dtype(make(name), dtype)
    exact = in_dtype(target, torch.float64)
    found = lean_decoder(target)
    assert isinstance(found, LeanDecoder) and (cpu.library() is None or found.not_fused == found.rows_differ == "")
    rng = random.Random(0)
    for rows, nodes in ((1, 1), (3, 1), (1, 33), (3, 65)):
        parents = [[-1] + [rng.randrange(node) for node in range(1, nodes)] for _ in range(rows)]
        with Exact():
            want = run(exact, False, parents, "biases")
        for lean, path in ((False, "biases"), (True, "biases"), (True, "tree_keys")):
            error = float((run(target, lean, parents, path) - want).norm() / want.norm())
            assert 0 < error <= units * torch.finfo(dtype).eps < 0.1, f"{rows} rows of {nodes} nodes, lean: {lean}"


@pytest.mark.parametrize(
    ("fields", "parallel", "rotated"),
    [({}, True, 2), ({"use_parallel_residual": False, "rotary_pct": 0.5}, False, 4), ({"rotary_pct": 1.0}, True, 0)],
)
def test_parts_of_gpt_neox(make_target, fields, parallel, rotated):
    """Of heads of 8 dimensions."""
    lean = lean_decoder(make_target("gpt_neox", **fields))
    if cpu.library():
        assert lean.native is not None and lean.not_fused == lean.rows_differ == ""
    for layer in lean.layers:
        assert (layer.parallel, layer.rotated, layer.interleaved, layer.gated) == (parallel, rotated, True, False)
        assert isinstance(layer.before_mlp, LayerNorm) and layer.gate_up.shape == (32, 48)


def test_captured_layers(make):
    target = make("qwen3")
    lean = lean_decoder(target)
    tokens, places = torch.tensor([PROMPTS[0]]), torch.arange(len(PROMPTS[0]))[None]
    cache = KVCache(target, 1, 11)
    cache.seen = 11
    with torch.no_grad():
        bias = {0: causal_bias(0, 11, 0, torch.float32, target.device)}
        where = places, places, cache.views(), lean.tables(11)
        hidden, layers = lean.forward(tokens, *where, biases=bias, captures=(1, 0))
        want = target.decoder(tokens, output_hidden_states=True)
    assert lean_decoder(target) is lean, "transformers' own hooks, which it leaves behind, change nothing"
    for found, its in ((layers[0], want.hidden_states[1]), (layers[1], want.hidden_states[0]), (hidden, want[0])):
        assert torch.allclose(found, its, atol=1e-4 * float(its.abs().max()))


@pytest.mark.parametrize("name", ["llama with biases", "gpt_neox"])
def test_weights_are_held_once_and_the_model_still_works(make, tmp_path, name):
    target = make(name)
    before = {name: weight.clone() for name, weight in target.model.state_dict().items()}
    hidden = target.hidden(torch.tensor([PROMPTS[0]]))
    lean = lean_decoder(target)
    inside = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in target.model.parameters()}
    assert sum(inside.values()) == sum(weight.nbytes for weight in before.values())
    used = {w.untyped_storage().data_ptr() for one in lean.layers for w in (one.qkv, one.gate_up, one.out)}
    assert used <= set(inside)
    after = target.model.state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    # The same numbers in another order in memory: some machines' products add them in another order then.
    again, atol = target.hidden(torch.tensor([PROMPTS[0]])), 1e-4 * float(hidden.abs().max())
    torch.testing.assert_close(again, hidden, rtol=0, atol=atol)
    target.model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in before.items())


def exchanged(target):
    """With a decoder that was made before, and is not used for other weights."""
    target.model.model.layers[0].mlp.down_proj.weight = torch.nn.Parameter(torch.ones(32, 48), requires_grad=False)


def written_in_place(target):
    """A norm's copy of its weights would be the old one."""
    target.model.model.norm.weight.copy_(3 * torch.randn(32))


@pytest.mark.parametrize(("family", "change"), [("llama", exchanged), ("gemma", written_in_place)])
def test_other_weights_are_noticed(make, family, change):
    target = make(family)
    decoder = SpeculativeDecoder(target, lean=True)
    first = decoder.generate(PROMPTS, 8, stop_ids=frozenset())
    lean = lean_decoder(target)
    assert lean_decoder(target) is lean
    torch.manual_seed(5)
    change(target)
    second = decoder.generate(PROMPTS, 8, stop_ids=frozenset())
    assert change is written_in_place or lean_decoder(target) is not lean
    assert [r.tokens for r in second] == texts(target, 8, lean=False) != [r.tokens for r in first]


def test_a_short_context(make_target):
    """The model is tried on no more tokens than it was made for."""
    target = make_target("llama", max_position_embeddings=7)
    decoders = (SpeculativeDecoder(target, lean=lean) for lean in (True, False))
    ours, plain = (decoder.generate([[5, 6]], 9, stop_ids=frozenset()) for decoder in decoders)
    assert ours == plain and ours[0].finish_reason == "context"


def wider_norm(target):
    target.model.model.layers[1].post_attention_layernorm.forward = lambda x: x


def adapter(target):
    from peft import LoraConfig, get_peft_model

    get_peft_model(target.model, LoraConfig(target_modules=["q_proj"])).requires_grad_(False)


def other_residual(target):
    """A variant that no attribute tells of."""
    layer = target.model.model.layers[0]
    before = layer.forward
    layer.forward = lambda x, **kwargs: before(x, **kwargs) * 1.1


def training(target):
    target.lm_head.requires_grad_(False)
    target.model.model.layers[0].mlp.up_proj.weight.requires_grad_(True)


def other_arguments(target):
    """A model's own code that hands on only what it knows."""
    before, name = target.decoder.forward, cache_argument(target.decoder)

    def forward(
        input_ids, position_ids=None, cache=None, past_key_values=None, use_cache=None, biases=None, tree_keys=None
    ):
        known = {"use_cache": use_cache, "biases": biases, "tree_keys": tree_keys, name: cache or past_key_values}
        return before(input_ids, position_ids=position_ids, **known)

    target.decoder.forward = forward


def packed(target):
    class Packed(torch.nn.Parameter):
        """As libraries for quantised or divided weights have them."""

    up = target.model.model.layers[0].mlp.up_proj
    up.weight = Packed(up.weight.detach().clone(), requires_grad=False)


def hook(target):
    target.model.model.layers[0].register_forward_hook(lambda module, args, out: out + 1)


def kept_arguments(target):
    """As StableLM's attention does."""
    attention = target.model.model.layers[0].self_attn
    before = attention.forward
    attention.forward = lambda *args, record=None, **kwargs: before(*args, **kwargs)


REFUSED = {
    hook: "its modules have hooks",
    kept_arguments: "its layers do not pass arguments on to attention",
    other_arguments: "it cannot be tried (TypeError: ",
    packed: "its weights are quantised, or sharded among processes",
    wider_norm: "is no RMSNorm",
    adapter: "its q_proj is not a plain nn.Linear in torch.float32 (peft.",
    other_residual: "its layer 0 differs from its own modules' by 9.1e-02",
    training: "its weights are being trained",
}


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_what_is_not_lean_says_why(make_target, change):
    target = make_target("llama")
    truth = texts(target, 4)
    change(target)
    reason = lean_decoder(target)
    assert isinstance(reason, str) and REFUSED[change] in reason
    with pytest.raises(ValueError, match="has no lean decoder"):
        SpeculativeDecoder(target, lean=True).generate(PROMPTS, 4)
    decoder = SpeculativeDecoder(target)
    results = decoder.generate(PROMPTS, 4, stop_ids=frozenset())
    assert decoder.execution == f"eager, transformers decoder ({reason})"
    if change not in (wider_norm, other_residual, hook):  # a new adapter changes nothing
        assert [r.tokens for r in results] == truth


OTHERS = {"gpt2": "has no embed_tokens", "opt": "has no rotary_emb", "phi": "has no norm", "cohere": "is no RMSNorm"}


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_say_why(make_target, family):
    assert OTHERS[family] in str(lean_decoder(make_target(family)))


def in_16_bits(model: torch.nn.Module) -> torch.nn.Module:
    """In bfloat16, with two dimensions of the residual, as trained models have them, beside which all else is small;
    norms make them small again."""
    for name, weight in model.named_parameters():
        if "embed" in name:
            weight.data[:, :2] = 3000
        elif "norm" in name:
            weight.data *= torch.tensor([0.01] * 2 + [100.0] * (len(weight) - 2))
    return model.to(torch.bfloat16)


@pytest.mark.parametrize("change", [lambda model: model, in_16_bits])
def test_a_layer_without_rotary_embedding_is_found_out(change):
    """SmolLM3 has none in every fourth layer, which its modules do not tell in a way we read."""
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = AutoConfig.for_model("smollm3", **sizes, num_attention_heads=4, num_key_value_heads=2, **ids)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data.normal_(std=0.4)
    reason = str(lean_decoder(Target(change(model), None, "nope", "")))
    assert "the query tensor of its layer 3 differs from its own modules'" in reason


def test_other_layers_are_found_out_in_16_bits(make_target):
    target = make_target("llama")
    in_16_bits(target.model)
    found = lean_decoder(target)
    assert isinstance(found, LeanDecoder) and found.not_fused == ("" if cpu.library() else NO_KERNELS)
    mlp = target.model.model.layers[1].mlp
    before = mlp.forward
    mlp.forward = lambda x: 5 * before(x)
    assert str(lean_decoder(target)).startswith("the norm after its layer 1 differs from its own modules'")


def test_queries_that_grow_with_the_position_are_found_out():
    """Those of Ministral 3, from ``original_max_position_embeddings`` on; with a factor of 0 they do not."""
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1 << 20}
    yarn = {**ROPE, "rope_type": "yarn", "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0}
    found = []
    for beta in (0.0, 0.1):
        rope = {**yarn, "llama_4_scaling_beta": beta}
        config = AutoConfig.for_model("ministral3", **sizes, pad_token_id=0, rope_parameters=rope)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        found.append(lean_decoder(Target(model, None, "nope", "")))
    assert isinstance(found[0], LeanDecoder)
    assert f"the query tensor of its layer 0 at position {(1 << 20) - 24} differs" in str(found[1])


class Count(TorchDispatchMode):
    """Operations by name, composite ones taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._can_decompose():
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        self.seen["view" if func.is_view else str(func)] += 1
        return func(*args, **kwargs)


def step_operations(target: Target, drafter=None, static=False) -> Counter[str]:
    decoder = SpeculativeDecoder(target, drafter, static=static)
    decoder.generate([[1, 2, 3]], 4)
    assert decoder.execution == "eager, lean decoder" and decoder._step is not None
    with torch.inference_mode(), target.attention(ATTENTION):
        decoder._step.cache.lengths.fill_(5)
        with Count() as count:
            decoder._step.run()
    return count.seen


def medusa(target: Target) -> MedusaDrafter:
    tree = Topology(((0,), (0, 0), (0, 1), (1,)))
    return MedusaDrafter(MedusaHeads.for_target(target, 2, 1, "shared"), tree, target)


# Static steps here mask the whole cache by a bias; on a GPU a kernel reads lengths instead.
@pytest.mark.parametrize(
    ("drafter", "static", "most"), [(None, False, 60), (None, True, 80), (medusa, False, 110), (medusa, True, 135)]
)
def test_operations_per_step_without_kernels(make_target, monkeypatch, drafter, static, most):
    """A greedy step: at most 25 operations a layer, and 60 around the layers in plain decoding; views are counted."""
    monkeypatch.setattr(cpu, "runs", lambda tensor: False)
    targets = [make_target("llama", num_hidden_layers=n) for n in (2, 6)]
    few, many = (step_operations(target, drafter and drafter(target), static) for target in targets)
    per_layer = {name: (many[name] - few[name]) / 4 for name in many}
    around = {name: few[name] - 2 * per_layer[name] for name in many}
    print(f"operations per layer and around: {sum(per_layer.values()):g}, {sum(around.values()):g}", end=", ")
    print(f"of them views: {per_layer['view']:g}, {around['view']:g}")
    assert sum(per_layer.values()) <= 25
    assert sum(around.values()) <= most
    assert per_layer["aten._scaled_dot_product_flash_attention_for_cpu.default"] == 1  # it is being counted


@pytest.mark.parametrize(("drafter", "static", "most"), [(None, False, 45), (medusa, False, 95), (medusa, True, 120)])
def test_operations_per_step(make_target, drafter, static, most):
    """No operation for each layer but views of its cache: all layers are one call."""
    targets = [make_target("llama", num_hidden_layers=n) for n in (2, 6)]
    few, many = (step_operations(target, drafter and drafter(target), static) for target in targets)
    assert {name for name in many if many[name] != few[name]} <= {"view"}
    print(f"operations: {sum(few.values())}, of them views {few['view']}")
    assert sum(few.values()) <= most


def test_tiny_lm_is_lean():
    decoder = SpeculativeDecoder(load_target("models/tiny-lm"))
    assert decoder.execution == "not yet"
    decoder.generate([[1, 2, 3]], 2)
    assert decoder.execution == "eager, lean decoder"


@pytest.mark.skipif(not Path("/proc/self/status").exists() or platform.libc_ver()[0] != "glibc", reason="counts pages")
def test_the_memory_of_joined_matrices_is_returned(make_target):
    """Half of the layers' 88 MB is joined in other memory; what it was in before is not kept."""

    def held() -> float:
        return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024

    target = make_target("llama", hidden_size=512, intermediate_size=1536, num_hidden_layers=7)
    before = held()
    assert isinstance(lean_decoder(target), LeanDecoder)
    assert held() - before < 12
