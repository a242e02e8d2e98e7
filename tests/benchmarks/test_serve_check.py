"""Exported drafters beside a server: what is counted, and that wrong folders differ. (The server itself needs its own
environment: `make serve-check`.)"""

import json
import sys

import pytest
import torch
from blocks import untrained_block
from exported_logits import difference
from torch import nn

from draftsmith.benchmarks import serve_check
from draftsmith.benchmarks.serve_check import compare, cut, damage, in_server, sentence
from draftsmith.benchmarks.servers import said
from draftsmith.inference.drafters.eagle import EagleDrafter
from draftsmith.inference.engine.engine import Generation, SpeculativeDecoder
from draftsmith.inference.verify.tree import Topology
from draftsmith.models.artifact import write_drafter
from draftsmith.models.eagle import Eagle
from draftsmith.models.serving import to_servers
from draftsmith.models.serving.source import open_source
from draftsmith.models.target import load_target

pytestmark = pytest.mark.measurement
NEW, TOKENS, PROMPTS = 12, 2, [[5, 9, 2, 7], [40, 41, 42], [300, 7, 300, 7, 300]]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """An exported drafter whose tokens are sometimes accepted, and both engines' texts: the server's are ours, token by
    token as a chain is verified."""
    target = load_target("models/tiny-lm")
    torch.manual_seed(0)
    eagle = Eagle.for_target(target, 3, "own", 4000)
    for name, weight in eagle.named_parameters():
        if weight.dim() == 2 and name != "lm_head.weight":
            nn.init.normal_(weight, std=0.03)
    folder = tmp_path_factory.mktemp("drafter")
    write_drafter(folder / "mine", "eagle", eagle.config.to_dict(), eagle.state_dict(), target, {})
    source = open_source(str(folder / "mine"), "vllm")
    to_servers.export(source, "vllm", folder / "out")
    plain = SpeculativeDecoder(target).generate(PROMPTS, NEW, stop_ids=frozenset())
    drafter = EagleDrafter(eagle, target, Topology(((0,), (0, 0))))
    longer = SpeculativeDecoder(target, drafter).generate(PROMPTS, NEW + TOKENS, stop_ids=frozenset())
    ours = [cut(text, NEW, frozenset()) for text in longer]
    return target, source, folder / "out", plain, ours


def answer_of(ours):
    """What a server would say."""
    texts = []
    for text in ours:
        accepted = [sum(count > place for count in text.accepted) for place in (1, 2)]
        texts.append({"tokens": text.tokens, "drafts": len(text.accepted), "accepted": accepted})
    return {"texts": texts, "server": "x 1"}


def test_a_text_is_cut_where_it_ends():
    """At the limit or behind the first stop id; the step that writes the end counts as each server counts it."""
    target = load_target("models/tiny-lm")
    (text,) = SpeculativeDecoder(target).generate([PROMPTS[0]], 8, stop_ids=frozenset())
    text.accepted[:] = [3, 1, 2, 1]
    for limit, stops, tokens, steps in ((4, [], 4, 1), (5, [], 5, 2), (6, [], 6, 3), (1, [], 1, 0), (8, [4], 5, 2)):
        done = cut(text, limit, frozenset(text.tokens[place] for place in stops))
        assert (done.tokens, done.accepted) == (text.tokens[:tokens], text.accepted[:steps])
    for limit, steps in ((8, [3, 1, 2]), (7, [3, 1, 2]), (6, [3, 1]), (4, [3]), (3, [2]), (2, [])):
        done = cut(text, limit, frozenset(), "llamacpp", 3)
        assert (done.tokens, done.accepted) == (text.tokens[:limit], steps), "no more is drafted than there is room for"
    text = Generation(list(range(8)), [4, 3])
    for place, vllm, openvino, llamacpp in (
        (1, [4], [1], [1]),
        (2, [4], [2], [2]),
        (3, [4], [3], [4]),  # the draft's last token: llama.cpp takes it, and one more
        (4, [4], [4], [4]),
        (5, [4, 3], [4, 1], [4, 1]),
        (6, [4, 3], [4, 2], [4, 3]),  # with room for a draft of two
    ):
        for server, steps in (("vllm", vllm), ("openvino", openvino), ("llamacpp", llamacpp)):
            done = cut(text, 8, frozenset([place]), server, 3)
            assert (len(done.tokens), done.accepted) == (place + 1, steps), (place, server)


def test_equal_and_not(served):
    target, _, _, plain, ours = served
    found = compare(target, PROMPTS, plain, ours, answer_of(ours), TOKENS)
    assert found["equal"] and found["identical_texts"] == 3 and found["tokens"] == 3 * NEW
    assert found["drafts"][0] == found["drafts"][1] == sum(len(text.accepted) for text in ours)
    assert found["mean_accepted_length"] == pytest.approx((3 * NEW - 3) / found["drafts"][0], abs=1e-4)
    words = sentence({**found, "server": "x 1", "draft_tokens": TOKENS, "damage": None})
    assert "as in draftsmith's engine" in words and "**" not in words and "0 mismatches" in words
    for change in ({"drafts": 1}, {"accepted": [0, 1]}):
        other = answer_of(ours)
        for key in change:
            value = other["texts"][0][key]
            other["texts"][0][key] = [value[0] - 1, value[1]] if key == "accepted" else value + 1
        differs = compare(target, PROMPTS, plain, ours, other, TOKENS)
        assert not differs["equal"]
        fewer = differs["mean_accepted_length"] < found["mean_accepted_length"]
        assert fewer == ("drafts" in change), "of the server's drafts, not of ours"
    other = answer_of(ours)
    other["texts"][1]["tokens"] = [*ours[1].tokens[:-1], 4095 - ours[1].tokens[-1]]
    found = compare(target, PROMPTS, plain, ours, other, TOKENS)
    assert not found["equal"] and found["mismatches"] == 1 and found["identical_texts"] == 2
    assert not compare(target, PROMPTS, plain, ours, other, TOKENS, counted=False)["equal"]
    other = answer_of(ours)
    other["texts"][0]["drafts"] += 1
    found = compare(target, PROMPTS, plain, ours, other, TOKENS, counted=False)
    assert found["equal"] and found["mean_accepted_length"] is None, "of n-grams the texts alone count"


@pytest.mark.parametrize("what", ["equal", "drafts", "texts"])
def test_a_control_must_differ(served, run_main, tmp_path, monkeypatch, what):
    """In its drafts alone."""
    target, _, _, plain, ours = served
    other = answer_of(ours)
    other["texts"][0]["drafts"] += what == "drafts"
    if what == "texts":
        other["texts"][0]["tokens"] = [*ours[0].tokens[:-1], 4095 - ours[0].tokens[-1]]
    found = compare(target, PROMPTS, plain, ours, other, TOKENS) | {"server": "x 1"}
    monkeypatch.setattr(serve_check, "check_one", lambda *_: found)
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").touch(0o755)
    words = ["ngram", "--target", "models/tiny-lm", "--prompts", tmp_path / "p.jsonl", "--environment", tmp_path]
    assert run_main(serve_check.main, *words)[0] == (0 if what == "equal" else 1)
    assert run_main(serve_check.main, *words, "--must-differ")[0] == (0 if what == "drafts" else 1)


@pytest.mark.parametrize("how", ["transposed", "shifted-vocabulary", "shifted-layers"])
def test_damage_is_none_that_the_contract_finds(served, tmp_path, how):
    """A damaged folder has other logits, or reads other layers, and every tensor's shape and dtype."""
    target, source, folder, *_ = served
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    damage(tmp_path, how, 12)
    if how == "shifted-layers":
        assert json.loads((tmp_path / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [1, 5, 8]
    else:
        with pytest.raises(AssertionError):  # also where the maps contradict each other
            assert difference(tmp_path, source.drafter, target) < 1e-2
    with pytest.raises(ValueError, match="no such place"):
        damage(tmp_path, "no-bias", 12)


@pytest.mark.parametrize(
    ("to", "places"),
    [("vllm", ("dflash_config", "target_layer_ids")), ("speculators", ("aux_hidden_state_layer_ids",))],
)
def test_shifted_layers_of_a_block_drafter(served, tmp_path, to, places):
    """In the field that each form has for them, and nothing else."""
    target, *_ = served
    block = untrained_block(target)
    write_drafter(tmp_path / "mine", "dflash", block.config.to_dict(), block.state_dict(), target, {})
    to_servers.export(open_source(str(tmp_path / "mine"), to), to, tmp_path / "out")
    before = json.loads((tmp_path / "out/config.json").read_text())
    damage(tmp_path / "out", "shifted-layers", 12)
    after = json.loads((tmp_path / "out/config.json").read_text())
    *path, name = places
    wanted, own = (config[path[0]] if path else config for config in (before, after))
    assert own[name] == [layer - 1 for layer in wanted[name]] and len(own[name]) > 1
    own[name] = wanted[name]
    assert after == before


def test_shifted_layers_are_those_of_openvinos_card(served, tmp_path):
    _, source, *_ = served
    to_servers.export(source, "openvino", tmp_path)
    before = (tmp_path / "README.md").read_text()
    damage(tmp_path, "shifted-layers", 12)
    assert '_list value="1 5 8" ' in before
    assert (tmp_path / "README.md").read_text() == before.replace('_list value="1 5 8" ', '_list value="2 6 9" ')


def test_a_server_that_fails_is_one_line(tmp_path):
    """This environment has no vLLM. One that is killed is named."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text("#!/bin/sh\nkill -9 $$\n")
    (tmp_path / "bin/python").chmod(0o755)
    with pytest.raises(ValueError, match="it was killed, most likely for memory"):
        in_server({"server": "vllm", "environment": str(tmp_path), "method": None, "prompts": []})
    job = {"server": "vllm", "environment": sys.prefix, "method": None, "prompts": []}
    with pytest.raises(ValueError, match="the server failed: ModuleNotFoundError: No module named 'vllm'"):
        in_server(job)

    trace = "  raise ValueError(\nValueError: Can not map tensor 'fc.weight'\nIt may help to upgrade.\n"
    assert said(f"INFO: loading\n{trace}") == "ValueError: Can not map tensor 'fc.weight'"
    log = "0.1 I loading\n0.2 E llama_model_load: error loading model: no layers\n0.3 E failed to load\n"
    assert said(log) == "0.2 E llama_model_load: error loading model: no layers"


def test_a_drafter_that_is_not_exported(run_main, tmp_path):
    """A row says why; that alone is no success."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n')
    words = ["ngram", "--target", "models/tiny-lm", "--prompts", tmp_path / "p.jsonl", "--environment", tmp_path]
    code, _, err = run_main(serve_check.main, *words)
    assert code == 2 and "bin/python is missing; `make serve-check SERVERS=vllm` makes it" in err
    program = tmp_path / "bin/python"
    program.parent.mkdir()
    program.touch(0o755)
    target = load_target("models/tiny-lm")
    eagle = Eagle.for_target(target, 1, "shared")
    nn.init.ones_(eagle.fc.bias)
    write_drafter(tmp_path / "mine", "eagle", eagle.config.to_dict(), eagle.state_dict(), target, {})
    words = [tmp_path / "mine", "--prompts", tmp_path / "p.jsonl", "--environment", tmp_path, "--out", tmp_path / "out"]
    for server, why in (("vllm", "its fc has a bias"), ("openvino", "openvino holds EAGLE-3 alone")):
        code, printed, err = run_main(serve_check.main, *words, "--server", server)
        for text in (printed, err):
            assert code == 1 and "mine: not exported: " in text and why in text
    third = Eagle.for_target(target, 3, "own", norm_output=True)
    write_drafter(tmp_path / "third", "eagle", third.config.to_dict(), third.state_dict(), target, {})
    (tmp_path / "build/bin").mkdir(parents=True)
    (tmp_path / "build/bin/llama-server").touch(0o755)
    code, printed, _ = run_main(serve_check.main, tmp_path / "third", *words[1:], "--server", "llamacpp")
    assert code == 1 and "third: not exported: it has norm_output without fc_norm, which llama.cpp's conv" in printed


@pytest.mark.parametrize(("server", "layout"), [("openvino", "speculators"), ("vllm", "openvino")])
def test_a_layout_that_the_server_does_not_read(run_main, tmp_path, server, layout):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x"}\n')
    line = ["ngram", "--target", "models/tiny-lm", "--prompts", tmp_path / "prompts.jsonl", "--environment", tmp_path]
    code, _, err = run_main(serve_check.main, *line, "--server", server, "--to", layout)
    assert code == 2 and err.startswith(f"error: --to {layout}: {server} reads "), err
