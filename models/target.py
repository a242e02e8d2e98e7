"""The target: any ``transformers`` causal LM, unmodified. Loading, hidden states, logits, fingerprint.

Shape letters: B batch, T tokens, d hidden width, F features per token, V vocabulary.
"""

import atexit
import importlib.util
import inspect
import itertools
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer
from transformers.utils import logging

from draftsmith.common.command import out_of_memory
from draftsmith.kernels.linear import apply_linear, prefill_products
from draftsmith.models.files.copies import with_safetensors
from draftsmith.models.files.identity import fingerprint, in_background, older_fingerprint, same_target
from draftsmith.models.files.locate import ModelFolder, locate
from draftsmith.models.files.weights import check_safetensors, stored_dtype, stray_weights
from draftsmith.models.options import DEVICE_MAPS, QUANTIZE, choose_device
from draftsmith.models.precision import DTYPES, choose_dtype, describe
from draftsmith.models.precision import say as print_line
from draftsmith.models.pretrained import (
    check_quantization,
    check_shapes,
    check_tokenizer,
    from_pretrained,
    layers_elsewhere,
    read_config,
    reason_of,
)
from draftsmith.models.tokenizer import load_tokenizer, tokens_after_answer

NO_CONTEXT = 1 << 30  # positions, of a model that does not say how many it is made for
_SMALL = 1 << 30  # bytes of weights that load in a moment, without a progress bar
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_UNSUPPORTED = "this family is not supported yet"
_WINDOW_IN_MASK = ("phimoe",)  # families whose config names no kinds of layers, and whose window is in their mask alone


def context_of(config: Any) -> int:
    """The number of positions a model is made for, by its text config. Where rotary frequencies change with the length
    of the input (longrope, dynamic), the number up to which they are constant: beyond it, a tree or a batch would
    change the text."""
    positions = int(getattr(config, "max_position_embeddings", 0) or NO_CONTEXT)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]  # some have one per kind of layer
    for kind in kinds:
        if kind.get("rope_type", kind.get("type")) in ("longrope", "dynamic"):
            original = kind.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            positions = min(positions, int(original or positions))
    return positions


@dataclass
class Target:
    """A loaded causal LM with its tokenizer, its name and its fingerprint.

    ``fingerprint`` is empty for a model that was never stored (tests). With a trained adapter it covers both; then
    ``adapter`` is the adapter's folder inside the drafter's, ``merged_fingerprint`` that of both stored as one model.
    ``older_fingerprint`` is what earlier versions would have taken for ``fingerprint``.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    fingerprint: str
    revision: str | None = None
    adapter: str | None = None
    merged_fingerprint: str | None = None
    older_fingerprint: str = ""

    def __post_init__(self) -> None:
        self.model.eval().requires_grad_(False)
        self.decoder: nn.Module = self.model.get_decoder()
        lm_head = self.model.get_output_embeddings()
        if lm_head is None:
            raise self._error(f"it has no LM head; {_UNSUPPORTED}")
        self.lm_head: nn.Module = lm_head
        self._template_ends: dict[str, frozenset[int]] = {}  # by chat template: a drafter may bring another
        self._check()

    @cached_property  # the engine asks for every request, and transformers looks for parts of the config each time
    def config(self) -> Any:
        return self.model.config.get_text_config()

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def embeddings(self) -> nn.Module:
        """The token embeddings: ids to vectors ``[..., d]``."""
        return cast(nn.Module, self.model.get_input_embeddings())

    @property
    def vocab_size(self) -> int:
        return int(self.lm_head.weight.shape[0])

    @cached_property
    def context(self) -> int:
        return context_of(self.config)

    @property
    def longest(self) -> int:
        """The tokens that a sample may have whose features are wanted."""
        return self.context

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def spread(self) -> bool:
        """Whether its layers are on several devices, or in other memory until they are used."""
        return len(set(map(str, getattr(self.model, "hf_device_map", {}).values()))) > 1

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end a text: those of the generation config, and :attr:`template_end`."""
        return self._config_ends | self.template_end

    @property
    def _config_ends(self) -> frozenset[int]:
        generation = getattr(self.model, "generation_config", None)
        ids = getattr(generation, "eos_token_id", None)
        ids = self.config.eos_token_id if ids is None else ids
        return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)

    @property
    def template_end(self) -> frozenset[int]:
        """The token that the chat template puts after an answer, where the generation config names none of those there:
        without it, an answer would go on with an invented question. Else empty."""
        template = str(getattr(self.tokenizer, "chat_template", None) or "")
        if template not in self._template_ends:
            after = tokens_after_answer(self.tokenizer) if template and self.tokenizer is not None else []
            known = not self._config_ends.isdisjoint(after)
            self._template_ends[template] = frozenset(() if known else after[:1])
        return self._template_ends[template]

    @property
    def end_warning(self) -> str:
        """A line about :attr:`template_end`; empty if there is none."""
        if not self.template_end or self.tokenizer is None:
            return ""
        token = self.tokenizer.convert_ids_to_tokens([*self.template_end])[0]
        return (
            f"warning: the chat template ends an answer with {token}, which is no eos_token_id of '{self.name}' (those "
            f"are {sorted(self._config_ends)}); texts end there as well"
        )

    def hidden(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Last hidden states after the final norm, without a cache: ``[B, T]`` ids → ``[B, T, d]``.
        ``positions``: ``[B, T]``; a 0 begins another sample, which does not attend to the ones before."""
        hidden = self.decoder(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state
        return hidden.to(tokens.device)  # a spread target may end on another device

    def spread_ids(self) -> list[int]:
        """32 tokens from all of the vocabulary."""
        return [number * (self.vocab_size // 32) for number in range(32)]

    @torch.no_grad()
    def hidden_scale(self) -> float:
        """The root mean square of the last hidden states' entries, after the final norm, which sets it."""
        tokens = torch.tensor([self.spread_ids()], device=self.device)
        plain = cast(Any, self.decoder).config._attn_implementation in ("eager", "sdpa")  # not the engine's
        with nullcontext() if plain else self.attention("sdpa"):
            hidden = self.decoder(input_ids=tokens, use_cache=False).last_hidden_state
        return float(hidden.float().square().mean().sqrt())

    def features(self, tokens: Tensor, captures: Sequence[int] = (), positions: Tensor | None = None) -> Tensor:
        """Last hidden states as :meth:`hidden` gives them, then the inputs of the captured layers, in their order.

        Only what is captured is kept, not every layer's output.
        ``tokens``, ``positions``: as :meth:`hidden` takes them.
        ``captures``: numbers of layers.
        Returns ``[B, T, F]``, F = d · (1 + number of layers)."""
        inputs: dict[int, Tensor] = {}

        def keep(number: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs[number] = args[0] if args else kwargs["hidden_states"]

        handles = [self.layers[i].register_forward_pre_hook(partial(keep, i), with_kwargs=True) for i in captures]
        try:
            hidden = self.hidden(tokens, positions)
        finally:
            for handle in handles:
                handle.remove()
        return torch.cat([hidden, *(inputs[number].to(hidden.device) for number in captures)], -1)

    @cached_property
    def layers(self) -> nn.ModuleList:
        """The decoder's layers. Raises ValueError: they are not one list."""
        lists = [m for m in self.decoder.modules() if isinstance(m, nn.ModuleList)]
        found = [m for m in lists if len(m) == self.config.num_hidden_layers]
        if not found:
            raise self._error(f"its layers are not in one list; {_UNSUPPORTED}")
        return found[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """The LM head and the scaling or capping of some families: ``[..., d] → [..., V]``."""
        return self.after_head(apply_linear(self.lm_head, hidden).to(hidden.device))

    def after_head(self, logits: Tensor) -> Tensor:
        """The scaling or capping of some families, of the LM head's output or of some of its columns."""
        cap, scale, divisor = self._after_head
        if cap:
            logits = torch.tanh(logits / cap) * cap
        if scale:
            logits = logits * scale
        return logits / divisor if divisor else logits

    @property
    def changes_logits(self) -> bool:
        """Whether its logits are not the LM head's output as it is."""
        return any(self._after_head)

    @cached_property
    def _after_head(self) -> list[float | None]:
        """Soft cap (Gemma), factor (Cohere) and divisor (Granite) of the logits, cached: config access is slow."""
        names = ("final_logit_softcapping", "logit_scale", "logits_scaling")
        cap, factor, divisor = (getattr(self.config, name, None) for name in names)
        return [cap, factor, 1 / divisor if divisor and self.config.model_type == "hyperclovax" else divisor]

    def prepare_packing(self, attention: str = "auto") -> str:
        """Choose how rows of several samples attend from now on, and check that samples do not see each other.

        Args:
            attention: ``sdpa``: a mask of every two tokens of a row; ``flex_attention``: masks of blocks, of which
                those that no query sees are left out; ``auto``: blocks on a GPU, if they run there.

        Returns a line that says why there are no blocks, where ``auto`` wanted them; else an empty one.
        Raises ValueError: samples attend to each other, or ``flex_attention`` does not run.
        """
        before, reason = self.config._attn_implementation, ""
        if attention == "flex_attention" or (attention == "auto" and _blocks_suit(self.device)):
            try:
                self.model.set_attn_implementation("flex_attention")
                if self.config._attn_implementation != "flex_attention":  # transformers only warns
                    raise ValueError("its attention cannot be replaced")
                self.check_packing(256)  # several blocks
                return ""
            except (ImportError, RuntimeError, ValueError) as error:  # of transformers, or of the compiler
                self.model.set_attn_implementation(before)
                reason = f"flex_attention does not run for this target here ({reason_of(error)})"
                if attention != "auto":
                    raise self._error(f"{reason}; set target.attention=sdpa") from None
        self.check_packing()
        return reason and f"{reason}: rows of several samples attend with whole masks, which takes longer"

    @torch.no_grad()
    def check_packing(self, length: int = 6) -> None:
        """Check that packed samples do not attend to each other, in two rows of ``length`` tokens at once: transformers
        finds samples for some kinds of attention in a single row only. Raises ValueError: in this family they do."""
        tokens = 1 + torch.arange(2 * length, device=self.device).view(2, length) % min(60, self.vocab_size - 1)
        ends = length // 2, length // 3  # of the first sample of each row
        positions = torch.stack([torch.cat((torch.arange(end), torch.arange(length - end))) for end in ends])
        packed = self.hidden(tokens, positions.to(self.device)).float()
        for row, end in enumerate(ends):
            alone = self.hidden(tokens[row : row + 1, end:])[0].float()
            if (packed[row, end:] - alone).norm() > 0.05 * alone.norm():  # far above rounding, far below other samples'
                raise self._error("packed samples attend to each other in this family; set data.packing=false")

    @contextmanager
    def attention(self, implementation: str) -> Iterator[None]:
        """Run the model under another attention implementation (a name registered with ``transformers``)."""
        before = self.config._attn_implementation
        self.model.set_attn_implementation(implementation)
        try:
            if self.config._attn_implementation != implementation:  # transformers only warns
                raise self._error(f"its attention cannot be replaced; {_UNSUPPORTED}")
            yield
        finally:
            self.model.set_attn_implementation(before)

    @cached_property
    def quantized(self) -> bool:
        """Whether some of its weights, as loaded, are in fewer bits than a floating-point dtype's."""
        tensors = itertools.chain(self.model.parameters(), self.model.buffers())
        return any(tensor.dtype not in (*_FLOATS, torch.int64, torch.bool) for tensor in tensors)

    def is_known_as(self, *fingerprints: str | None) -> bool:
        """Whether one of these fingerprints, which a drafter or a run has kept, is this target's."""
        own = (self.fingerprint, self.older_fingerprint or self.fingerprint)
        return any(same_target(each or "", known) for each in fingerprints for known in own)

    def describe(self) -> dict[str, str | None]:
        """The field ``target`` of a drafter's config."""
        described: dict[str, str | None] = {
            "name_or_path": self.name,
            "revision": self.revision,
            "model_type": str(self.config.model_type),
            "fingerprint": self.fingerprint,
        }
        if self.adapter:
            described |= {"adapter": self.adapter, "merged_fingerprint": self.merged_fingerprint}
        return described

    def _error(self, what: str) -> ValueError:
        return ValueError(f"target '{self.name}' ({self.config.model_type}): {what}")

    @torch.no_grad()
    def _check(self) -> None:
        """Check that our hidden states and logits equal the model's own and depend on no later token, that each layer
        keeps keys and values of one shape, and that weights and logits are finite."""
        kinds = set(getattr(self.config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
        if kinds:
            raise self._error(f"it has layers of the kind {', '.join(sorted(kinds))}; {_UNSUPPORTED}")
        if "position_ids" not in inspect.signature(type(self.decoder).forward).parameters:
            raise self._error(f"it takes no positions of tokens (position_ids), which a tree needs; {_UNSUPPORTED}")
        # Checked separately: attention kernels may skip NaN scores, and then the logits are finite.
        for name, weight in self.model.named_parameters():
            exempt = weight.dtype not in _FLOATS or weight.is_meta or not weight.numel()
            if not exempt and not all(bound.isfinite() for bound in weight.aminmax()):
                raise self._error(
                    f"'{name}' holds NaN or infinity in {weight.dtype}; its weights are damaged, or "
                    "it needs bfloat16 or float32"
                )
        tokens = torch.tensor([[1, 2], [1, 3]], device=self.device)
        cache = DynamicCache()  # made without the config, so that sliding layers keep every key
        try:
            with prefill_products():
                logits = self.logits(self.hidden(tokens))
            expected = self.model(input_ids=tokens, use_cache=True, **{cache_argument(self.model): cache}).logits
        except (RuntimeError, IndexError, AttributeError, TypeError) as error:
            if out_of_memory(error):
                raise
            raise self._error(f"it cannot run ({reason_of(error)}); check the shapes in its config.json") from None
        layers, count = cast(list[DynamicLayer], cache.layers), self.config.num_hidden_layers
        if len(layers) != count or any(layer.keys.shape != layer.values.shape for layer in layers):
            raise self._error(f"its layers do not each keep keys and values of one shape; {_UNSUPPORTED}")
        # (key/value heads, head width) of every layer: families name these in a dozen ways, some vary them by layer.
        self.kv_shapes = [(layer.keys.shape[1], layer.keys.shape[3]) for layer in layers]
        self.kv_devices = [layer.keys.device for layer in layers]
        if not expected.isfinite().all():
            raise self._error(
                f"its logits are not finite in {self.dtype}; its weights are damaged, or it needs bfloat16 or float32"
            )
        if logits.shape != expected.shape or not torch.allclose(logits.float(), expected.float(), rtol=1e-2, atol=1e-3):
            raise self._error(f"its logits are not its LM head's output on its last hidden state; {_UNSUPPORTED}")
        first, again = logits[:, 0].float()  # of the same token, before different ones
        allowed = 0.05 if self.dtype in (torch.bfloat16, torch.float16) else 1e-3  # far above rounding
        if (first - again).norm() > allowed * first.norm():
            raise self._error(f"its logits depend on later tokens: it is no decoder; {_UNSUPPORTED}")


def _blocks_suit(device: torch.device) -> bool:
    """Whether FlexAttention's kernels are made for a device; on a CPU they have no gradients."""
    return device.type == "cuda"


def cache_argument(module: nn.Module) -> str:
    """The name of a model's or decoder's argument for the K/V cache: transformers 5.24 renamed it, and warns."""
    return "cache" if "cache" in inspect.signature(type(module).forward).parameters else "past_key_values"


def attention_window(module: nn.Module, given: Mapping[str, Any]) -> int:
    """The window of a layer's attention, 0 for full attention. ``given``: the arguments that the module calls attention
    with. Qwen2-MoE and PhiMoE do not pass it: it is in the mask that transformers makes, which we replace."""
    if "sliding_window" in given:
        return given["sliding_window"] or 0
    config = getattr(module, "config", None)
    kinds, number = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    slides = getattr(config, "model_type", None) in _WINDOW_IN_MASK
    if kinds and number is not None:
        slides = kinds[number] == "sliding_attention"
    return (getattr(config, "sliding_window", None) or 0) if slides else 0


@dataclass(frozen=True)
class Loader:
    """Another way to load a target's weights, such as in parts, by several processes together.

    load: from a folder, by options of ``from_pretrained``, to where the model runs.
    first: returns what the first process makes by a function, on all of them.
    """

    load: Callable[[Path, dict[str, Any]], PreTrainedModel]
    first: Callable[[Callable[[], Any]], Any]


def load_target(
    name: str | ModelFolder,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    quantize: str = "none",
    device_map: str = "none",
    trust_remote_code: bool = False,
    loader: Loader | None = None,
    say: Callable[[str], None] | None = None,
) -> Target:
    """Load a target and its tokenizer.

    Args:
        name: a folder, a .gguf file or a folder that holds one, or a Hub id; or what :func:`locate` found of it.
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``auto``: on a GPU the one it is stored in; on a CPU float32,
            or bfloat16 where that is faster (:mod:`draftsmith.models.precision`).
        quantize: ``none``, ``8bit`` or ``4bit`` (NF4): the linear layers without the LM head, by bitsandbytes.
        device_map: ``none``: all of it on the device; ``cpu`` or ``disk``: its layers are kept there and fetched one by
            one in each forward pass; ``auto``: accelerate spreads it over GPUs, CPU memory and disk, in this order, as
            far as each has room.
        loader: loads the weights, not ``from_pretrained``, and puts them where they run, not on ``device``.
        say: called with a line about the chosen dtype and the reason, and with a second one if it is slow here.

    Raises:
        FileNotFoundError: there is no such model, or it has no config, weights or tokenizer.
        ValueError: its files are damaged or do not belong together, its family is not supported, an argument is
            unknown, bitsandbytes is missing, or quantised layers are to be offloaded.
    """
    known = {"dtype": ("auto", *DTYPES), "quantize": QUANTIZE, "device_map": DEVICE_MAPS}
    for what, value in {"dtype": dtype, "quantize": quantize, "device_map": device_map}.items():
        if value not in known[what]:
            raise ValueError(f"{what} '{value}': unknown; use {', '.join(known[what])}")
    choose_device(device)
    if device_map == "cpu" and torch.device(device).type == "cpu":
        raise ValueError("device map 'cpu': the device is the CPU itself; use 'disk' there")
    if device_map in ("cpu", "disk") and quantize != "none":
        raise ValueError(f"device map '{device_map}': quantised layers cannot be offloaded; leave out one of the two")
    if quantize != "none" and importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(f"target.quantize={quantize} needs bitsandbytes: pip install bitsandbytes")
    located = locate(name, revision)
    config = read_config(located, trust_remote_code)
    tokenizer = load_tokenizer(located, trust_remote_code=trust_remote_code)
    if stray := stray_weights(located.path):
        print_line(stray)
    folder = with_safetensors(located.path)
    check_shapes(folder, config, check_safetensors(folder))
    check_quantization(folder, quantize)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if weights < _SMALL or sys.stderr is None or not sys.stderr.isatty():
        logging.disable_progress_bar()  # it would only flash, or fill a file

    def identify() -> tuple[str, str]:
        return fingerprint(folder), older_fingerprint(folder)

    # In the background: it reads what is loaded meanwhile.
    identity = partial(loader.first, identify) if loader else in_background(identify)
    chosen = choose_dtype(dtype, device, lambda: stored_dtype(folder), quantized=quantize != "none", weights=weights)
    options: dict[str, Any] = {"dtype": getattr(torch, chosen.value), "trust_remote_code": trust_remote_code}
    if device_map != "none":
        apart = device_map != "auto"
        options["device_map"] = layers_elsewhere(config, device_map, device, trust_remote_code) if apart else "auto"
        options["offload_folder"] = tempfile.mkdtemp(prefix="draftsmith-")  # for layers stored in another dtype
        atexit.register(shutil.rmtree, options["offload_folder"], ignore_errors=True)
    if loader:
        model = loader.load(folder, options)
    elif quantize == "none":
        if device_map == "none" and torch.device(device).type == "cuda":
            options["device_map"] = {"": device}  # straight to the GPU, not through the CPU's memory
        model = from_pretrained(folder, options)
        if device_map == "none":
            model.to(device)  # type: ignore[arg-type]
    else:
        bits = BitsAndBytesConfig(
            load_in_8bit=quantize == "8bit",
            load_in_4bit=quantize == "4bit",
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=options["dtype"],
        )
        options.setdefault("device_map", {"": device})
        model = from_pretrained(folder, options | {"quantization_config": bits})
        widths: set[int] = {getattr(m, "in_features", 0) for m in model.modules() if type(m).__name__ == "Linear4bit"}
        if torch.device(device).type == "cpu" and any(width % 64 for width in widths):
            raise ValueError(
                f"target '{located.name}': on a CPU 4-bit layers have to be a multiple of 64 wide, these are "
                f"{', '.join(map(str, sorted(widths)))}; use target.quantize=8bit"
            )
    found, older = identity()
    target = Target(model, tokenizer, located.name, found, located.revision, older_fingerprint=older)
    check_tokenizer(folder, tokenizer, target.vocab_size)
    if say:
        for line in describe(device, chosen):
            say(line)
    return target
