"""Servers that serve_check.py compares with our engine, each run in its own environment, which has no draftsmith.

    PYTHON benchmarks/servers.py JOB.json FOUND.json    # vLLM, llama.cpp or OpenVINO GenAI: what the job says

Each decodes the job's prompts greedily in float32, one at a time, with or without drafts, and counts its drafts.
Before, llama.cpp and OpenVINO convert target and drafter by their own converters; converted targets are kept.
"""

import atexit
import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# A server: its name; prompt → "tokens", perhaps "steps", the tokens that each step committed; without steps, counters:
# drafts so far, and of these those that accepted at least 1, 2, … tokens.
Server = tuple[str, Callable[[list[int]], dict[str, Any]], Callable[[], list[int]] | None]


def vllm(job: dict[str, Any]) -> Server:
    """vLLM's CPU build."""
    import importlib

    module: Any = importlib.import_module("vllm")
    speculative: dict[str, Any] = {"method": job["method"], "num_speculative_tokens": job["tokens"]}
    if job["method"] == "ngram":
        speculative |= {"prompt_lookup_min": job["match"][0], "prompt_lookup_max": job["match"][1]}
    else:
        speculative |= {"model": job["drafter"]} | ({"parallel_drafting": True} if job.get("parallel") else {})
    llm = module.LLM(
        model=job["target"],
        dtype="float32",
        max_model_len=job["context"],
        max_num_seqs=1,
        enforce_eager=True,
        speculative_config=speculative if job["method"] else None,
        disable_log_stats=False,
        enable_prefix_caching=False,
    )
    sampling = module.SamplingParams(
        temperature=0.0, max_tokens=job["max_new_tokens"], stop_token_ids=job["stop_ids"], detokenize=False
    )

    def decode(prompt: list[int]) -> dict[str, Any]:
        (result,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        return {"tokens": list(result.outputs[0].token_ids)}

    def counts() -> list[int]:
        found = {metric.name: metric for metric in llm.get_metrics()}
        drafts = found.get("vllm:spec_decode_num_drafts")
        places = found.get("vllm:spec_decode_num_accepted_tokens_per_pos")
        return [int(drafts.value), *map(int, places.values)] if drafts and places else [0]

    return f"vllm {module.__version__}", decode, counts


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def request(port: int, path: str, body: dict[str, Any] | None = None) -> str:
    """The text that a server on this machine answers; ``body`` is sent as JSON."""
    data, kind = (None if body is None else json.dumps(body).encode()), {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, kind)
    with urllib.request.urlopen(asked, timeout=600) as answer:
        return answer.read().decode()


def wait_for(
    port: int, server: "subprocess.Popen[Any]", failure: Callable[[], Exception], seconds: float = float("inf")
) -> None:
    """Wait until a server is ready. Raises what ``failure`` returns: it has ended, or takes longer."""
    ends = time.monotonic() + seconds
    while True:
        try:
            request(port, "/health")
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > ends:
                raise failure() from None
            time.sleep(0.2)


# llama.cpp's converter, also for tokenizers that it does not know: the prompts are ids.
GGUF = """
import runpy, sys
sys.path.insert(0, folder := sys.argv.pop(1))
from conversion.base import TextModel
known = TextModel.get_vocab_base_pre
def named(*tokenizer):
    try:
        return known(*tokenizer)
    except NotImplementedError:
        return "default"
TextModel.get_vocab_base_pre = named
runpy.run_path(f"{folder}/convert_hf_to_gguf.py", run_name="__main__")
"""


def llamacpp(job: dict[str, Any]) -> Server:
    """llama-server, compiled in ``build/`` beside its source."""
    source = Path(job["environment"])
    version = (source / "PKG-INFO").read_text().partition("\nVersion: ")[2].partition(".")[0]

    def gguf(model: str, name: str, *options: str) -> str:
        script = [sys.executable, "-c", GGUF, str(source / "llama.cpp"), model, "--outtype", "f32", *options]
        return converted(job, f"{name}.gguf", lambda out: [*script, "--outfile", out])

    target = gguf(job["target"], job["target_name"])
    port = free_port()
    words = [str(source / "build/bin/llama-server"), "-m", target, "--host", "127.0.0.1", "--port", str(port)]
    words += ["-c", str(job["context"]), "-np", "1", "-fa", "off", "-ctk", "f32", "-ctv", "f32", "-fit", "off"]
    words += ["--metrics"]
    if job["method"] == "ngram":
        words += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", str(job["match"][0])]
        words += ["--spec-ngram-simple-size-m", str(job["tokens"])]
    elif job["method"]:
        alone, same = job["method"] == "draft_model", job["drafter"] == job["target"]
        options = [] if alone else ["--target-model-dir", job["target"]]
        kind = "simple" if alone else "dflash" if job["method"] == "dflash" else "eagle3"
        words += ["--spec-type", f"draft-{kind}"]
        words += ["-md", target if same else gguf(job["drafter"], Path(job["drafter"]).name, *options)]
        words += ["--spec-draft-n-max", str(job["tokens"]), "--spec-draft-n-min", "0", "--spec-draft-p-min", "0"]
        words += ["-ctkd", "f32", "-ctvd", "f32"]
    log = Path(job["scratch"]) / "llama-server.log"
    server = subprocess.Popen(words, stdout=log.open("w"), stderr=subprocess.STDOUT)
    atexit.register(server.kill)

    ask = partial(request, port)
    wait_for(port, server, lambda: RuntimeError(said(log.read_text())))

    def decode(prompt: list[int]) -> dict[str, Any]:
        body = {"prompt": prompt, "n_predict": job["max_new_tokens"], "temperature": 0, "cache_prompt": False}
        return {"tokens": json.loads(ask("/completion", {**body, "return_tokens": True}))["tokens"]}

    def counts() -> list[int]:
        name, found = r"\nllamacpp:spec_decode_num_", ask("/metrics")
        drafts = re.findall(rf"{name}drafts_total (\d+)", found)
        places = re.findall(rf"{name}accepted_tokens_per_pos_total\S+ (\d+)", found) or ["0"] * job["tokens"]
        return [int(count) for count in drafts + places[: job["tokens"]]]

    return f"llama.cpp b{version}", decode, counts


def openvino(job: dict[str, Any]) -> Server:
    """OpenVINO GenAI. It has no counters; each answer has the tokens of each step."""
    import importlib

    numpy, runtime, genai = (importlib.import_module(name) for name in ("numpy", "openvino", "openvino_genai"))

    def model(folder: str, name: str) -> str:  # by the commands of the card, where it has some
        card, convert = Path(folder) / "README.md", "optimum-cli export openvino"
        lines = [line for line in card.read_text().splitlines() if " drafter-ov" in line] if card.exists() else []
        script = "\n".join(lines) or f"{convert} --task text-generation-with-past --model DRAFTER drafter-ov"
        script = script.replace(convert, f"{sys.prefix}/bin/{convert} --weight-format fp32")
        script = script.replace("DRAFTER", '"$0"').replace("drafter-ov", '"$1"')
        return converted(job, name, lambda out: ["bash", "-euc", script, folder, out])

    scheduler, single = genai.SchedulerConfig(), {"INFERENCE_PRECISION_HINT": "f32"}
    scheduler.cache_size, scheduler.enable_prefix_caching = 1, False
    target, options = model(job["target"], job["target_name"]), dict[str, Any]()
    if job["method"] == "ngram":
        options["prompt_lookup"] = True
    elif job["method"]:
        drafter = target if job["drafter"] == job["target"] else model(job["drafter"], Path(job["drafter"]).name)
        options["draft_model"] = genai.draft_model(drafter, "CPU", **single)
    pipeline = genai.LLMPipeline(target, "CPU", scheduler_config=scheduler, **single, **options)
    config = genai.GenerationConfig()
    config.max_new_tokens, config.do_sample = job["max_new_tokens"] + job["tokens"], False  # it is cut by its steps
    config.stop_token_ids = set(job["stop_ids"])
    if job["method"]:
        config.num_assistant_tokens = job["tokens"]
    if job["method"] == "ngram":
        config.max_ngram_size = job["match"][1]

    def decode(prompt: list[int]) -> dict[str, Any]:
        ids, ones = (runtime.Tensor(numpy.array([row], dtype="int64")) for row in (prompt, [1] * len(prompt)))
        result = pipeline.generate(genai.TokenizedInputs(ids, ones), config)
        metrics = result.extended_perf_metrics
        steps = metrics.main_model_metrics.raw_metrics.m_batch_sizes[1:] if metrics else []  # the first: the prompt's
        return {"tokens": list(result.tokens[0]), "steps": list(steps), "drafts": 0}

    return f"OpenVINO GenAI {genai.__version__.split('-')[0]}", decode, None


def converted(job: dict[str, Any], name: str, command: Callable[[str], list[str]]) -> str:
    """The path of a model that a converter writes, whole or not at all; a target that is there is not made again.
    Raises RuntimeError: what the converter said."""
    path = Path(job["scratch"]) / name
    if name.startswith(job["target_name"]) and path.exists():
        return str(path)
    half = path.with_name(f"half-{name}")
    done = subprocess.run(command(str(half)), capture_output=True, text=True, check=False)
    if done.returncode or not half.exists():
        raise RuntimeError(said(done.stdout + done.stderr))
    subprocess.run(["rm", "-rf", str(path)], check=True)
    half.rename(path)
    return str(path)


def said(output: str) -> str:
    """The error in a program's output."""
    lines = output.splitlines()
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
    logged = [line for line in lines if re.search(r"\berror\b|^ERROR|not supported|Unrecognized", line)]
    return (raised[-1:] or logged[:1] or lines[-1:] or ["it said nothing"])[0].strip()


SERVERS: dict[str, Any] = {"vllm": vllm, "llamacpp": llamacpp, "openvino": openvino}


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Decode each prompt of a job.

    Returns:
        By prompt: tokens, and either the tokens that each step committed, or the number of drafts and of those that
        accepted at least 1, 2, … tokens; the server's version.
    """
    server, decode, counts = SERVERS[job["server"]](job)
    texts, before = [], counts() if counts else []
    for prompt in job["prompts"]:
        text = decode(prompt)
        if counts:
            after = counts()
            drafts, *accepted = [now - then for now, then in zip(after, before, strict=True)]
            text |= {"drafts": drafts, "accepted": accepted}
            before = after
        texts.append(text)
    return {"texts": texts, "server": server}


if __name__ == "__main__":
    given, written = map(Path, sys.argv[1:3])
    written.write_text(json.dumps(serve(json.loads(given.read_text()))))
