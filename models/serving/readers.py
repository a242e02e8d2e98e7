"""The programs that read exported folders, and which of them reads which field of config.json.

The export refuses a drafter with a field that changes its logits and that the program leaves out (layouts.py);
benchmarks/readers.py writes the table of docs/export.md and holds this one against the programs' sources.
"""

from typing import NamedTuple


class Reader(NamedTuple):
    """A program. place: what holds its source once `make serve-check` has installed it. files: those that read a
    drafter's config.json, as patterns; after ``#`` the beginning of the names of the classes that do."""

    name: str
    place: str
    files: tuple[str, ...]


_PACKAGES = "lib/python3*/site-packages"
READERS = {
    "vllm": Reader("vLLM 0.32", f".venv-serve-vllm/{_PACKAGES}/vllm", (
        "model_executor/models/llama*.py", "model_executor/models/medusa.py", "config/speculative.py",
        "transformers_utils/configs/medusa.py", "transformers_utils/configs/speculators/*.py",
        "v1/worker/gpu_model_runner.py",
    )),
    "sglang": Reader("SGLang 0.5.23", ".venv-serve-sources/sglang", (
        "srt/models/llama_eagle*.py", "srt/speculative/eagle_utils.py",
        "srt/model_executor/model_runner_components/spec_aux_hidden_state.py",
    )),
    "speculators": Reader("speculators 0.9", ".venv-serve-sources/speculators", (
        "*.py", "models/eagle3/*.py", "models/peagle/*.py",
    )),
    "llamacpp": Reader("llama.cpp b11434", ".venv-serve-sources/llama.cpp", (
        "conversion/llama.py", "src/models/eagle3.cpp",
    )),
    "openvino": Reader("OpenVINO's optimum-intel 2.2", f".venv-serve-openvino/{_PACKAGES}/optimum", (
        "exporters/openvino/model_patcher.py#LlamaEagle3",
    )),
}  # fmt: skip

EVERY = tuple(READERS)
READ_BY: dict[str, tuple[str, ...]] = {  # field → programs
    "draft_vocab_size": EVERY,
    "target_hidden_size": EVERY,
    "eagle_aux_hidden_state_layer_ids": ("vllm", "sglang", "speculators", "llamacpp"),
    "eagle_config": ("vllm", "sglang"),
    "num_aux_hidden_states": ("vllm", "sglang"),
    "norm_before_fc": ("vllm", "sglang", "speculators", "llamacpp"),
    "fc_norm": ("vllm", "sglang", "speculators"),
    "norm_output": ("vllm", "sglang", "speculators"),
    "norm_before_residual": ("vllm", "speculators", "llamacpp"),
    "attention_bias": ("vllm", "speculators"),
    "speculators_model_type": ("vllm", "speculators"),
    "speculators_config": ("vllm", "speculators"),
    "transformer_layer_config": ("vllm", "speculators", "llamacpp"),
    "num_heads": ("vllm",),
    "medusa_fc_bias": ("vllm",),
    "original_lm_head": ("vllm",),
    "truncated_vocab_size": ("vllm",),
    "mask_token_id": ("vllm", "speculators"),
    "pard_token": ("vllm",),
    "num_lookahead_tokens": ("vllm",),
}
