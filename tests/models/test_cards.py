"""The commands of exported model cards, as benchmarks/cards.py takes them out and runs them in `make serve-check`."""

import json
import sys
from dataclasses import replace

import pytest
from made import write_eagle, write_heads

from draftsmith.benchmarks import cards
from draftsmith.models.serving import to_servers
from draftsmith.models.serving.model_card import model_card
from draftsmith.models.serving.source import open_source
from draftsmith.models.target import load_target

TARGET = "models/tiny-lm"


@pytest.fixture(scope="module")
def drafters(tmp_path_factory):
    """A folder of random drafters; an EAGLE drafter has a calibrated dynamic tree."""
    folder, target = tmp_path_factory.mktemp("drafters"), load_target(TARGET)
    write_eagle(folder / "eagle", target)
    write_heads(folder / "heads", target, "own")
    dynamic = {"top_k": 2, "depth": 3, "nodes": 8}
    (folder / "eagle/tree.json").write_text(json.dumps({"paths": [[0]], "dynamic": dynamic}))
    return folder


@pytest.fixture(scope="module")
def card(drafters):
    """``card(kind, format)`` → the card of an exported drafter."""

    def make(kind, to):
        to_servers.export(open_source(str(drafters / kind), to), to, drafters / to, "org/target")
        return (drafters / to / "README.md").read_text()

    return make


@pytest.mark.parametrize(
    "kind, to, wanted",
    [
        ("eagle", "vllm", ["vllm serve org/target --spec", *["python -m sglang.launch_server --model-path org/"] * 2]),
        ("eagle", "speculators", ["vllm serve DRAFTER"]),
        (
            "eagle",
            "openvino",
            [*["optimum-cli export openvino --task"] * 2, "sed -i.bak", "python -c 'import openvino"],
        ),
        ("heads", "vllm", ["vllm serve org/target --spec"]),
        ("heads", "medusa", ["python -m draftsmith.inference.decode DRAFTER --target org/target --prompt"]),
    ],
)
def test_every_command_is_taken_out_whole(card, kind, to, wanted):
    found = cards.commands_of(card(kind, to))
    assert len(found) == len(wanted) and all(map(str.startswith, found, wanted)), found
    assert not any(line.startswith("#") for command in found for line in command.splitlines())


@pytest.mark.parametrize("served", ["org/target", "org/other"])
def test_commands_name_the_targets_revision(drafters, served):
    """That of the target which the drafter was trained for; another name may have none such."""
    source = replace(open_source(str(drafters / "eagle"), "vllm"), target_name="org/target", revision="v1.5")
    commands = cards.commands_of(model_card(source, "mine", "vllm", served, 3))
    wanted = served == "org/target"
    assert len(commands) == 3 and all((f"{served} --revision v1.5 " in each) == wanted for each in commands)


def test_a_block_that_does_not_end():
    for text in ("```bash\nvllm serve 'x\n```\n", "no block", "```bash\nvllm serve x \\\n```\n"):
        with pytest.raises(ValueError, match="do not end"):
            cards.commands_of(text)


def test_options_of_sglang(card, tmp_path):
    """Those of both commands are found where the source has them; where it has one no longer, that one is named."""
    names = ["speculative_draft_model_path", "speculative_num_steps", "speculative_eagle_topk", "model_path"]
    fields = "".join(f"    {name}: A[\n" for name in (*names, "speculative_num_draft_tokens", "speculative_algorithm"))
    (tmp_path / "spec.py").write_text(f'{fields}"Speculative algorithm. Builtins: EAGLE, EAGLE3, NEXTN. Or others."')
    commands = [command for command in cards.commands_of(card("eagle", "sglang")) if "sglang" in command]
    assert len(commands) == 2
    for command in commands:
        assert cards.check_sglang(command, tmp_path) == "its options are in SGLang's source"
        with pytest.raises(ValueError, match="no option --speculative-eagle-topk2"):
            cards.check_sglang(command.replace("topk", "topk2"), tmp_path)
        with pytest.raises(ValueError, match="no --speculative-algorithm EAGLE4"):
            cards.check_sglang(command.replace("EAGLE3", "EAGLE4"), tmp_path)
    assert "not looked up" in cards.check_sglang(commands[0], tmp_path / "none")


def test_a_command_that_fails_is_named(tmp_path, run_main, monkeypatch):
    """From another folder, with DRAFTER and TARGET filled in; the other commands are run all the same."""
    seen = []
    monkeypatch.setattr(
        cards, "commands_of", lambda card: ["ls DRAFTER TARGET >&2; exit 3", "test -e DRAFTER/README.md"]
    )
    run = cards.run
    monkeypatch.setattr(cards, "run", lambda command, *rest: seen.append((command, *rest)) or run(command, *rest))
    write_heads(tmp_path / "heads", load_target(TARGET), "own")
    code, printed, _ = run_main(cards.main, tmp_path / "heads", "--to", "medusa", "--target", TARGET)
    assert code == 1 and "FAILED: exit code 3: " in printed and printed.rstrip().endswith("  exit code 0")
    assert not any("DRAFTER" in command or "TARGET" in command for command, *_ in seen)
    assert {folder.name for _, folder, _ in seen} == {"elsewhere"} and seen[0][2]["PATH"].startswith(sys.prefix)


def test_a_server_that_ends_is_one_line(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/vllm").write_text("#!/bin/sh\necho 'ValueError: no such model'; exit 1\n")
    (tmp_path / "bin/vllm").chmod(0o755)
    with pytest.raises(ValueError, match="it does not serve: ValueError: no such model"):
        cards.run("vllm serve x", tmp_path, {"PATH": f"{tmp_path}/bin:/bin:/usr/bin"})
