"""The target: any ``transformers`` causal LM, unmodified. Loading, hidden states, logits, fingerprint.

Shape letters: B batch, T tokens, d hidden width, V vocabulary.
"""

import atexit
import hashlib
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from draftsmith.models.options import choose_device
from draftsmith.models.options import target_arguments as target_arguments
from draftsmith.models.options import target_options as target_options

_ROOT = Path(__file__).resolve().parent.parent
_SMALL = 1 << 30  # bytes of weights that load at once
_SLICE = 1024  # bytes of each stored tensor that enter the fingerprint
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_UNSUPPORTED = "this family is not supported yet"


def local_folder(name: str) -> Path | None:
    """A model's or drafter's folder on this machine: a path, or a path inside this project."""
    return next((folder for folder in (Path(name), _ROOT / name) if folder.is_dir()), None)


def resolve_folder(name: str, revision: str | None = None) -> Path:
    """:func:`local_folder`, or a Hub id (downloaded).

    Raises:
        FileNotFoundError: none of these.
    """
    folder = local_folder(name)
    if folder is not None:
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise FileNotFoundError(f"'{name}': there is no such folder, and a Hub id would be USER/NAME")
    from huggingface_hub import snapshot_download  # only where a download may be needed

    try:
        return Path(snapshot_download(name, revision=revision, ignore_patterns=["*.pt", "*.bin", "*.pth", "*.msgpack"]))
    except Exception as error:  # the Hub's client raises a dozen unrelated types
        reason = str(error).strip().splitlines()[0][:200]
        raise FileNotFoundError(f"'{name}': no such folder here, and not to be had from the Hub ({reason})") from None


def fingerprint(folder: Path) -> str:
    """SHA-256 over a stored model: its config, its tokenizer file and the first bytes of every stored tensor.

    Stored, not loaded: loaded weights change with dtype, quantisation and sharding. The order and number of files do
    not matter.

    Raises:
        ValueError: a safetensors file is damaged.
    """
    digest = hashlib.sha256()
    config = json.loads((folder / "config.json").read_text())
    for volatile in ("transformers_version", "_name_or_path"):
        config.pop(volatile, None)
    digest.update(json.dumps(config, sort_keys=True).encode())
    for name in _TOKENIZER_FILES:
        if (folder / name).exists():
            digest.update((folder / name).read_bytes())
            break
    tensors: dict[str, bytes] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            try:
                header_size = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(header_size))
            except (ValueError, MemoryError, OverflowError):
                raise ValueError(f"{file}: damaged or truncated safetensors file; fetch or write it again") from None
            header.pop("__metadata__", None)
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                stream.seek(8 + header_size + begin)
                tensors[name] = f"{name}{entry['dtype']}{entry['shape']}".encode() + stream.read(
                    min(_SLICE, end - begin)
                )
    for name in sorted(tensors):
        digest.update(tensors[name])
    return digest.hexdigest()


def check_safetensors(folder: Path) -> None:
    """Compare each safetensors file's size with what its header promises, before a library trips over it.

    Raises:
        ValueError: a file is truncated or damaged.
    """
    for file in folder.glob("*.safetensors"):
        size = file.stat().st_size
        with file.open("rb") as stream:
            header_size = int.from_bytes(stream.read(8), "little")
            try:
                if header_size > size:
                    raise ValueError
                header = json.loads(stream.read(header_size))
                header.pop("__metadata__", None)
                ends = [entry["data_offsets"][1] for entry in header.values()]
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ValueError(f"{file}: not a safetensors file, or truncated; fetch or write it again") from None
        promised = 8 + header_size + max(ends, default=0)
        if size < promised:
            raise ValueError(f"{file}: truncated ({size:,} of {promised:,} bytes); fetch or write it again")


@dataclass
class Target:
    """A loaded causal LM with what the rest of the project asks of it.

    ``fingerprint`` is empty for a model that was never stored (tests). With a trained adapter it covers both;
    ``adapter`` is then its folder inside the drafter's, ``merged_fingerprint`` that of the two stored as one model.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    fingerprint: str
    revision: str | None = None
    adapter: str | None = None
    merged_fingerprint: str | None = None

    def __post_init__(self) -> None:
        self.model.eval().requires_grad_(False)
        self.decoder: nn.Module = self.model.get_decoder()
        self.lm_head: nn.Module = self.model.get_output_embeddings()
        self._check()

    @property
    def config(self) -> Any:
        return self.model.config.get_text_config()

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.lm_head.weight.shape[0])

    @property
    def context(self) -> int:
        """The number of positions the model was made for. Where rotary frequencies change with the length of what is
        run (longrope, dynamic), as far as they stay the same: beyond, a tree or a batch would change the text."""
        positions = int(getattr(self.config, "max_position_embeddings", 0) or 1 << 30)
        rope = getattr(self.config, "rope_parameters", None) or getattr(self.config, "rope_scaling", None) or {}
        for one in (
            rope,
            *(part for part in rope.values() if isinstance(part, dict)),
        ):  # some have one per kind of layer
            if one.get("rope_type", one.get("type")) in ("longrope", "dynamic"):
                own = one.get("original_max_position_embeddings")
                own = own or getattr(self.config, "original_max_position_embeddings", None)
                positions = min(positions, int(own or positions))
        return positions

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def spread(self) -> bool:
        """Whether its layers are on several devices, or wait in other memory until they are used."""
        return len(set(map(str, getattr(self.model, "hf_device_map", {}).values()))) > 1

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end a text, from the generation config."""
        generation = getattr(self.model, "generation_config", None)
        ids = getattr(generation, "eos_token_id", None)
        ids = self.config.eos_token_id if ids is None else ids
        return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)

    def hidden(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Last hidden states after the final norm, without a cache: ``[B, T]`` ids → ``[B, T, d]``.

        Args:
            positions: ``[B, T]``; where they begin at 0 again, another sample begins, which does not see what precedes.
        """
        hidden = self.decoder(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state
        return hidden.to(tokens.device)  # it may come from another of a spread target's devices

    def logits(self, hidden: Tensor) -> Tensor:
        """The LM head with what some families do after it: ``[..., d] → [..., V]``."""
        logits = self.lm_head(hidden).to(hidden.device)
        cap = getattr(self.config, "final_logit_softcapping", None)
        if cap:
            logits = torch.tanh(logits / cap) * cap
        scale = getattr(self.config, "logit_scale", None)  # Cohere
        if scale:
            logits = logits * scale
        divisor = getattr(self.config, "logits_scaling", None)  # Granite
        return logits / divisor if divisor else logits

    @torch.no_grad()
    def check_packing(self) -> None:
        """Several samples in a row do not see each other.

        Raises:
            ValueError: in this family they do.
        """
        tokens = torch.arange(1, 7, device=self.device)[None]
        positions = torch.tensor([[0, 1, 2, 0, 1, 2]], device=self.device)
        packed, alone = self.hidden(tokens, positions)[:, 3:].float(), self.hidden(tokens[:, 3:]).float()
        if (packed - alone).norm() > 0.05 * alone.norm():  # far above rounding, far below what others' tokens change
            raise ValueError(
                f"{self._named()}: samples in one row see each other in this family; set data.packing=false"
            )

    @contextmanager
    def attention(self, implementation: str) -> Iterator[None]:
        """Run the model under another attention implementation (a name registered with ``transformers``)."""
        before = self.config._attn_implementation
        self.model.set_attn_implementation(implementation)
        try:
            if self.config._attn_implementation != implementation:  # transformers only warns
                raise ValueError(f"{self._named()}: its attention cannot be replaced; {_UNSUPPORTED}")
            yield
        finally:
            self.model.set_attn_implementation(before)

    def describe(self) -> dict[str, str | None]:
        """What a drafter's config says of its target (FORMATS: ``target``)."""
        said: dict[str, str | None] = {
            "name_or_path": self.name,
            "revision": self.revision,
            "model_type": str(self.config.model_type),
            "fingerprint": self.fingerprint,
        }
        if self.adapter:
            said |= {"adapter": self.adapter, "merged_fingerprint": self.merged_fingerprint}
        return said

    def _named(self) -> str:
        return f"target '{self.name}' ({self.config.model_type})"

    @torch.no_grad()
    def _check(self) -> None:
        """Our hidden states and logits are the model's own, whatever its family does around its LM head, and each of
        its layers keeps keys and values of one shape.

        Raises:
            ValueError: they are not, or do not.
        """
        kinds = set(getattr(self.config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
        if kinds:
            raise ValueError(f"{self._named()}: it has layers of the kind {', '.join(sorted(kinds))}; {_UNSUPPORTED}")
        tokens = torch.tensor([[1, 2]], device=self.device)
        own = self.logits(self.hidden(tokens))
        cache = DynamicCache()  # made without the config, so that sliding layers keep every key
        theirs = self.model(input_ids=tokens, past_key_values=cache, use_cache=True).logits
        if len(cache.layers) != self.config.num_hidden_layers or any(
            layer.keys.shape != layer.values.shape for layer in cache.layers
        ):
            raise ValueError(
                f"{self._named()}: its layers do not each keep keys and values of one shape; {_UNSUPPORTED}"
            )
        # (key/value heads, head width) of every layer: families name these in a dozen ways, some vary them by layer.
        self.kv_shapes = [(layer.keys.shape[1], layer.keys.shape[3]) for layer in cache.layers]
        self.kv_devices = [layer.keys.device for layer in cache.layers]
        if own.shape != theirs.shape or not torch.allclose(own.float(), theirs.float(), rtol=1e-2, atol=1e-3):
            raise ValueError(
                f"{self._named()}: its logits are not its LM head's output on its last hidden state; {_UNSUPPORTED}"
            )


def _layers_elsewhere(folder: Path, where: str, device: str, trust_remote_code: bool) -> dict[str, str]:
    """Accelerate's device map: every decoder layer waits ``where``, all else is on the device."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    prefix, layers = max(lists, key=lambda item: len(item[1]))
    places = {f"{prefix}.{number}": where for number in range(len(layers))}
    for name, module in model.named_modules():
        above = name.rpartition(".")[0]
        beside = not above or prefix.startswith(above + ".")  # a sibling of the layers, or of what holds them
        if name and beside and module is not layers and not prefix.startswith(name + "."):
            places[name] = device
    return places


def load_target(
    name: str,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    quantize: str = "none",
    device_map: str = "none",
    trust_remote_code: bool = False,
    place: Callable[[PreTrainedModel], None] | None = None,
) -> Target:
    """Load a target and its tokenizer.

    Args:
        name: a folder or a Hub id.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        quantize: ``none``, ``8bit`` or ``4bit`` (NF4): the linear layers but for the LM head, by bitsandbytes.
        device_map: ``none``: all of it on the device; ``cpu`` or ``disk``: its layers wait there and are fetched one
            after the other at each forward pass; ``auto``: spread over GPUs, CPU memory and disk, in this order, as
            far as each has room (accelerate does it).
        place: puts the model where it is to run, instead of ``device``, before anything is asked of it (training puts
            parts of it on each of several processes).

    Raises:
        FileNotFoundError: there is no such model.
        ValueError: its files are damaged, its family is not supported, bitsandbytes is missing, or a quantised model is
            to wait elsewhere.
    """
    folder = resolve_folder(name, revision)
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"{folder}: no config.json here, so this is no model folder")
    check_safetensors(folder)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: not valid JSON ({error}); fetch it again") from None
    if not isinstance(config, dict):
        raise ValueError(f"{folder / 'config.json'}: a JSON object is needed, this is none; fetch it again")
    if "drafter_type" in config:
        raise ValueError(f"{folder}: this is a drafter, not a target; pass it as DRAFTER")
    if sum(file.stat().st_size for file in folder.glob("*.safetensors")) < _SMALL:
        logging.disable_progress_bar()  # a bar that flashes by is noise
    choose_device(device)
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "trust_remote_code": trust_remote_code}
    if device_map == "cpu" and torch.device(device).type == "cpu":
        raise ValueError("device map 'cpu': the device is the CPU itself; layers can wait on 'disk' there")
    if device_map in ("cpu", "disk"):
        if quantize != "none":
            raise ValueError(
                f"device map '{device_map}': a quantised target cannot wait elsewhere; take one of the two"
            )
        options["device_map"] = _layers_elsewhere(folder, device_map, device, trust_remote_code)
    elif device_map == "auto":
        options["device_map"] = "auto"
    if device_map != "none":
        options["offload_folder"] = tempfile.mkdtemp(prefix="draftsmith-")  # for layers stored in another dtype
        atexit.register(shutil.rmtree, options["offload_folder"], ignore_errors=True)
    if quantize == "none":
        if device_map == "none" and not place and torch.device(device).type == "cuda":
            options["device_map"] = {"": device}  # straight there, not by way of the CPU's memory
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, **options)
        if place:
            place(model)
        elif device_map == "none":
            model.to(device)  # type: ignore[arg-type]
    else:
        if importlib.util.find_spec("bitsandbytes") is None:
            raise ValueError(f"target.quantize={quantize} needs bitsandbytes: pip install bitsandbytes")
        bits = BitsAndBytesConfig(
            load_in_8bit=quantize == "8bit", load_in_4bit=quantize == "4bit", bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=options["dtype"],
        )  # fmt: skip
        options.setdefault("device_map", {"": device})
        model = AutoModelForCausalLM.from_pretrained(folder, **options, quantization_config=bits)
        widths: set[int] = {getattr(m, "in_features", 0) for m in model.modules() if type(m).__name__ == "Linear4bit"}
        if torch.device(device).type == "cpu" and any(width % 64 for width in widths):
            raise ValueError(
                f"target '{name}': on a CPU 4-bit layers have to be a multiple of 64 wide, these are "
                f"{', '.join(map(str, sorted(widths)))}; use target.quantize=8bit"
            )
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    return Target(model, tokenizer, name, fingerprint(folder), revision)
