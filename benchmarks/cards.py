"""The commands of an exported drafter's model card, each run as it is printed there, from another folder.

    python benchmarks/cards.py models/smollm2-eagle3 --to vllm --target models/smollm2 --environment .venv-serve-vllm
    python benchmarks/cards.py models/smollm2-medusa --to medusa --target models/smollm2

The drafter is exported, and DRAFTER and TARGET in its card are replaced by the two folders. A server that a command
starts (vLLM) has to answer a prompt with drafts of the drafter; it is given a free port. Of SGLang, which has no CPU
build, the options are looked up in its source. Every other command has to end with exit code 0. Exit codes: 0 all did.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

from draftsmith.benchmarks.servers import free_port, request, wait_for
from draftsmith.common.command import CommandLine, run_command

ROOT = Path(__file__).resolve().parents[1]
SGLANG = ROOT / ".venv-serve-sources/sglang/srt/arg_groups/fields"
MINUTES = 15  # for one command


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    parser.add_argument("drafter", metavar="DRAFTER", help="a drafter's folder")
    formats = ("vllm", "sglang", "speculators", "openvino", "medusa")
    parser.add_argument("--to", required=True, choices=formats, help="the format, as for models/export.py")
    parser.add_argument("--target", required=True, help="its target")
    parser.add_argument("--environment", type=Path, metavar="DIR", help="the server's virtual environment")
    return parser


def commands_of(card: str) -> list[str]:
    """The commands in a card's first block, comments left out."""
    block = re.search(r"^```bash\n(.*?)^```$", card, re.DOTALL | re.MULTILINE)
    found, begun = list[str](), ""
    for line in block[1].splitlines(keepends=True) if block else ():
        if not begun and line.startswith("#"):
            continue
        begun += line
        try:
            shlex.split(begun)
        except ValueError:  # a quotation that the next lines close
            continue
        if not line.endswith("\\\n"):
            found.append(begun.strip())
            begun = ""
    if begun or not found:
        raise ValueError(f"the card's commands do not end: {begun!r}")
    return found


def check_sglang(command: str, fields: Path = SGLANG) -> str:
    """Look up the options of SGLang's command in its source. Raises ValueError: one is not there.
    Returns what was looked up; nothing if there is no source."""
    known = "".join(path.read_text(encoding="utf-8") for path in sorted(fields.glob("*.py")))
    if not known:
        return "not looked up: make serve-check fetches SGLang's source"
    words = shlex.split(command)
    for option in (word for word in words if word.startswith("--")):
        if not re.search(rf"^    {option[2:].replace('-', '_')}: ", known, re.MULTILINE):
            raise ValueError(f"SGLang has no option {option}")
    algorithm = words[words.index("--speculative-algorithm") + 1]
    if not re.search(rf"Speculative algorithm\. Builtins: [^.]*\b{algorithm}\b", known):
        raise ValueError(f"SGLang has no --speculative-algorithm {algorithm}")
    return "its options are in SGLang's source"


def serve(command: str, folder: Path, environment: dict[str, str]) -> str:
    """Start vLLM, ask it for a text, and return how many drafts it made. Raises ValueError: it failed, or made none."""
    port = free_port()
    log = folder / "server.log"
    words = ["bash", "-c", f"exec {command} --port {port}"]
    with log.open("w") as file:
        server = subprocess.Popen(
            words, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )

    def failure() -> ValueError:
        said = [line for line in log.read_text().splitlines() if "Error" in line]
        return ValueError(f"it does not serve: {(said or ['no answer'])[-1].strip()}")

    ask = partial(request, port)
    try:
        wait_for(port, server, failure, 60 * MINUTES)
        model = json.loads(ask("/v1/models"))["data"][0]["id"]
        ask("/v1/completions", {"model": model, "prompt": "def add(a, b):", "max_tokens": 24, "temperature": 0})
        metrics = ask("/metrics")
        counts = re.findall(r"^vllm:spec_decode_num_(?:drafts|accepted_tokens)_total\{.*\} ([\d.]+)$", metrics, re.M)
        drafts, accepted = (int(float(count)) for count in (*counts, 0, 0)[:2])
        if not drafts:
            raise ValueError("it serves, but makes no drafts")
        return f"{drafts} drafts, {accepted} tokens of them accepted, in 24 tokens"
    finally:
        with suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def run(command: str, folder: Path, environment: dict[str, str]) -> str:
    """Run a command to its end. Raises ValueError: it failed; with its last words."""
    if command.startswith("vllm serve "):
        return serve(command, folder, environment)
    if "sglang.launch_server" in command:
        return check_sglang(command)
    words = ["bash", "-euc", command]
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60 * MINUTES
    )
    if done.returncode:
        raise ValueError(f"exit code {done.returncode}: {((done.stderr or done.stdout).splitlines() or [''])[-1]}")
    return "exit code 0"


def main() -> None:
    args = parser().parse_args()
    from draftsmith.models.files.locate import locate
    from draftsmith.models.serving.model_card import fastest_chain  # torch
    from draftsmith.models.serving.source import open_source
    from draftsmith.models.serving.to_servers import export

    source, target = open_source(args.drafter, args.to, args.target), str(locate(args.target).path.resolve())
    binary = Path(args.environment or sys.prefix).absolute() / "bin"
    environment = os.environ | {"PATH": f"{binary}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        folder, elsewhere = Path(temporary) / "drafter", Path(temporary) / "elsewhere"
        elsewhere.mkdir()
        # By the folder that is here: the card's Hub id may not be fetched, and speculators' config names its target.
        export(source, args.to, folder, served_target=target, speculative_tokens=fastest_chain(source))
        for command in commands_of((folder / "README.md").read_text(encoding="utf-8")):
            print(f"$ {command}", flush=True)
            try:
                filled = re.sub(r"\bTARGET\b", target, command).replace("DRAFTER", str(folder))
                print(f"  {run(filled, elsewhere, environment)}", flush=True)
            except (ValueError, subprocess.TimeoutExpired) as error:
                failed = True
                print(f"  FAILED: {error}", flush=True)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    run_command(main)
