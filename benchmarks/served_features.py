"""Hidden states that a running vLLM writes, compared with those of the target here; then a short training on both.

    python benchmarks/served_features.py models/smollm2 --prompts P.jsonl --environment .venv-serve-vllm --out served

`make serve-check` runs this for SmolLM2. vLLM serves the target on this machine's CPU in float32, by the command that
training names (train/served.py), but for its copies by CUDA streams (cpu_hidden_states.py). For each prompt the
features of EAGLE-3 are asked for as training asks: the last hidden state after the final norm, and the inputs of layers
2, n/2 and n − 3. Equal means: by token, each differs from ours by at most a thousandth of its norm, and the inputs of
the layers beside differ by far more, so that a wrong numbering would be found. Then recipes/tiny-eagle3.yaml trains a
few steps on the bundled chats, once with the server's features and once with our own: losses and weights are compared.

Exit codes: 0 equal, 1 not equal, 2 wrong usage or bad input.
"""

import argparse
import os
from pathlib import Path

from draftsmith.benchmarks.options import prompts_option
from draftsmith.common.command import CommandLine, before_imports, run_command
from draftsmith.inference.commands.prompts import check_prompts, encode_prompts, read_prompts

SAME = 1e-3  # of a token's features: relative difference by the order of float32 sums at most
STEPS = 6  # of the training


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    parser.add_argument("target", help="a folder or a Hub id")
    prompts_option(parser)
    parser.add_argument("--environment", type=Path, required=True, metavar="DIR", help="vLLM's virtual environment")
    parser.add_argument(
        "--record",
        type=Path,
        metavar="DIR",
        help="also keep an answer and its file there, for tests/train/test_served.py",
    )
    parser.add_argument("--out", type=Path, default=Path("served"), metavar="DIR", help="of the runs (%(default)s)")
    return parser


def check(args: argparse.Namespace) -> None:
    check_prompts(args.prompts)
    if not os.access(args.environment / "bin/vllm", os.X_OK):
        raise FileNotFoundError(
            f"--environment {args.environment}: bin/vllm is missing; `make serve-check SERVERS=vllm` makes it"
        )


if __name__ == "__main__":
    before_imports(parser(), check)

import contextlib
import fcntl
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

import torch
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.benchmarks.servers import free_port, request, wait_for
from draftsmith.common.files import write_json
from draftsmith.common.sections import Features, TargetSection
from draftsmith.models.eagle import layers_to_capture
from draftsmith.models.files.copies import with_safetensors
from draftsmith.models.files.locate import locate
from draftsmith.models.target import Target, load_target
from draftsmith.train.served import CHECKED, load_served, server_command
from draftsmith.train.tiny import SAMPLES

HERE = Path(__file__).resolve().parent
ROOM = "4"  # GiB of K/V that the server may take


@contextlib.contextmanager
def serving(folder: Path, layers: Sequence[int], environment: Path, context: int) -> Iterator[str]:
    """Inside, vLLM serves a folder at the URL that is yielded. Raises ValueError: it has ended; with its last words."""
    port = free_port()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as shared:
        command = server_command(str(folder), layers)
        connector = {"kv_connector": "CpuHiddenStatesConnector", "kv_connector_module_path": "cpu_hidden_states"}
        connector |= {"kv_role": "kv_producer", "kv_connector_extra_config": {"shared_storage_path": shared}}
        words = shlex.split(command)
        words[words.index("--kv-transfer-config") + 1] = json.dumps(connector)
        words[0] = str(environment.absolute() / "bin/vllm")
        words += ["--port", str(port), "--dtype", "float32", "--max-model-len", str(context), "--enforce-eager"]
        words += ["--max-num-seqs", "8", "--host", "127.0.0.1"]
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        variables |= {"PYTHONPATH": str(HERE), "VLLM_CPU_KVCACHE_SPACE": ROOM, "VLLM_NO_USAGE_STATS": "1"}
        variables |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        log = Path(shared) / "log"
        with log.open("w") as file:
            server = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=variables, cwd=shared)

        def failure() -> ValueError:
            said = [line for line in log.read_text().splitlines() if "Error" in line]
            return ValueError(f"vLLM has ended: {(said or ['it said nothing'])[-1].strip()}")

        try:
            wait_for(port, server, failure, seconds=900)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()
            server.wait(60)


def differences(ours: Tensor, theirs: Tensor, width: int) -> list[float]:
    """The largest relative difference of a token's features ``[T, F]``, of the last state and of each layer."""
    mine, other = (features.float().unflatten(-1, (-1, width)) for features in (ours, theirs))
    return ((mine - other).norm(dim=-1) / mine.norm(dim=-1).clamp(min=1e-6)).amax(0).tolist()


@torch.no_grad()
def compare(target: Target, served: Target, prompts: Sequence[Sequence[int]]) -> bool:
    """Print how far the server's features are from ours, and ours of the layers beside; whether they are the same."""
    last = target.config.num_hidden_layers
    layers, width = layers_to_capture(last), target.hidden_size
    found, beside = list[list[float]](), list[list[float]]()
    for prompt in prompts:
        tokens = torch.tensor([list(prompt)])
        ours = target.features(tokens, layers)[0]
        found.append(differences(ours, served.features(tokens, layers)[0], width))
        beside += [differences(ours, target.features(tokens, [n + by for n in layers])[0], width)[1:] for by in (-1, 1)]
    worst = [max(column) for column in zip(*found, strict=True)]
    nearest = min(min(row) for row in beside)
    named = zip(("last hidden state", *(f"input of layer {layer}" for layer in layers)), worst, strict=True)
    for name, value in named:
        print(f"{name}: relative difference {value:.1e} at most, over {len(prompts)} prompts")
    print(f"inputs of the layers beside: {nearest:.1e} at least")
    return max(worst) <= SAME and nearest > 10 * SAME


def train(name: str, url: str | None, target: str, out: Path) -> Path:
    """The run's folder."""
    words = [
        str(HERE.parent / "recipes/tiny-eagle3.yaml"),
        f"run.name={name}",
        f"run.output_dir={out}",
        "--restart",
        "cache_hidden=none",
    ]
    words += [f"target={{name: {target}, dtype: float32}}", "data.max_length=160", f"stages.0.steps={STEPS}"]
    words += [f"data.{part}=[{{source: {SAMPLES}}}]" for part in ("train", "validation")]
    words += ["stages.0.batch={sequences: 4, accumulate: 2}", f"evaluate={{every: {STEPS}, sequences: 4}}"]
    words += ["data.packing=true", "precision.autocast=none", "drafter.unroll=3"]
    words += [f"target.features={{url: '{url}'}}"] if url else []
    subprocess.run([sys.executable, "-m", "draftsmith.train.eagle", *words], check=True)
    return out / name


def compare_runs(ours: Path, theirs: Path) -> bool:
    """Print losses of both runs and the largest difference of a weight; whether they are the same."""
    losses = []
    for folder in (ours, theirs):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses.append(next(line["loss"] for line in reversed(lines) if "loss" in line))
    weights = [load_file(folder / "model.safetensors") for folder in (ours, theirs)]
    apart = max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0])
    print(f"EAGLE-3, {STEPS} steps: loss {losses[0]:.5f} here, {losses[1]:.5f} on the server's features; ", end="")
    print(f"weights differ by {apart:.1e} at most")
    return abs(losses[0] - losses[1]) <= SAME * abs(losses[0]) and apart <= SAME


def record(url: str, target: Target, folder: Path) -> None:
    """Keep the answer to the request that checks a server, and the file that it names."""
    assert target.tokenizer is not None
    fields = {"prompt": target.tokenizer(CHECKED)["input_ids"], "max_tokens": 1, "temperature": 0.0}
    port = int(url.split(":")[2].split("/")[0])
    model = json.loads(request(port, "/v1/models"))["data"][0]["id"]
    answer = json.loads(request(port, "/v1/completions", {"model": model, **fields, "return_token_ids": True}))
    file = Path(answer["kv_transfer_params"]["hidden_states_path"])
    with Path(f"{file}.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.move(file, folder / "hidden_states.safetensors")
    answer["kv_transfer_params"]["hidden_states_path"], answer["model"] = file.name, Path(model).name
    write_json(folder / "answer.json", answer)


def main() -> None:
    args = parser().parse_args()
    check(args)
    folder = with_safetensors(locate(args.target).path).resolve()
    target = load_target(args.target, dtype="float32")
    prompts = encode_prompts(read_prompts(args.prompts), target)
    last = target.config.num_hidden_layers
    with serving(folder, [*layers_to_capture(last), last], args.environment, 512) as url:
        section = TargetSection(name=args.target, dtype="float32", features=Features(url=url))
        same = compare(target, load_served(section, "cpu"), prompts)
        if args.record:
            record(url, target, args.record)
        del target
        runs = [train(f"features-{n}", there, args.target, args.out) for n, there in (("here", None), ("served", url))]
    same &= compare_runs(*runs)
    for run in runs:
        shutil.rmtree(run)
    print("equal" if same else "NOT equal")
    if not same:
        sys.exit(1)


if __name__ == "__main__":
    run_command(main)
