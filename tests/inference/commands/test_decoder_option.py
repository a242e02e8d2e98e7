"""``--decoder``: the chosen decoder runs, reports name it, and an impossible choice is a one-line error."""

import json

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from draftsmith.benchmarks import step_times as bench
from draftsmith.benchmarks import typical
from draftsmith.inference import calibrate
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.measure import tree_search
from draftsmith.models.options import DECODERS

LEAN = "eager, lean decoder"
RAN = {"auto": LEAN, "lean": LEAN, "transformers": "eager, transformers decoder (as requested)"}


@pytest.fixture
def asked(monkeypatch):
    """The argument ``lean`` of each decoder that is created."""
    arguments = []
    init = SpeculativeDecoder.__init__

    def recorded(self, *args, lean=None, **kwargs):
        arguments.append(lean)
        init(self, *args, lean=lean, **kwargs)

    monkeypatch.setattr(SpeculativeDecoder, "__init__", recorded)
    return arguments


@pytest.mark.parametrize("decoder", RAN)
def test_decode(run_decode, report_of, drafter, prompts, asked, decoder):
    report, _ = report_of(f"{drafter} --prompts {prompts} --max-new-tokens 6 --check-lossless --decoder {decoder}")
    assert report["execution"] == RAN[decoder]
    assert len(asked) >= 2 and set(asked) == {DECODERS[decoder]}, "plain decoding and the drafter's"
    code, _, err = run_decode(f"{drafter} --prompt import --max-new-tokens 3 --decoder {decoder}")
    assert code == 0 and set(asked) == {DECODERS[decoder]}, err


def test_the_other_commands(run_main, drafter, prompts, tmp_path, asked, monkeypatch):
    monkeypatch.setattr(typical, "available_cores", lambda: 1)
    monkeypatch.setattr(tree_search, "SIZES", (2, 4))
    common = "--decoder transformers --device cpu"

    def run(main, line):
        code, _, err = run_main(main, *line.split(), *common.split())
        assert code == 0, err
        return err

    run(typical.main, f"{drafter} --prompts {prompts} --epsilons 0.1 --max-new-tokens 6 --out {tmp_path}")
    assert json.loads((tmp_path / "typical.json").read_text())["execution"] == RAN["transformers"]
    tree = (drafter / "tree.json").read_text()
    try:
        run(calibrate.main, f"{drafter} --prompts {prompts} --max-new-tokens 16")
        assert json.loads((drafter / "tree.json").read_text())["calibration"]["decoder"] == "transformers"
    finally:
        (drafter / "tree.json").write_text(tree)
    assert len(asked) == 5 and set(asked) == {False}
    monkeypatch.setattr(bench, "release", lambda: None)
    err = run(bench.main, "--shape tiny-lm --nodes 1 --contexts 9 --repeat 1 --threads 1")
    assert f"steps: {RAN['transformers']}\n" in err


def test_families_without_a_lean_decoder(run_main, run_decode, report_of, prompts, target, tmp_path):
    """``lean`` is an error; by default the model's own modules run, and the report has the reason."""
    folder = tmp_path / "gpt2"
    config = GPT2Config(vocab_size=target.vocab_size, n_embd=32, n_layer=1, n_head=4, eos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    given = f"none --target {folder} --prompts {prompts} --max-new-tokens 3 --baseline none --dtype float32"
    reason = "a GPT2Model has no embed_tokens"
    line = f"error: target '{folder}' has no lean decoder: {reason}; use --decoder auto (lean=None)\n"
    line = f"precision: float32 weights (as requested)\n{line}"
    assert run_decode(f"{given} --decoder lean") == (2, "", line)
    assert report_of(given)[0]["execution"] == f"eager, transformers decoder ({reason})"
    bad = f"--target {folder} --device cpu --nodes 1 --contexts 9 --repeat 1 --decoder lean --dtype float32"
    assert run_main(bench.main, *bad.split()) == (2, "", line)


@pytest.mark.parametrize(("option", "value"), [("--quantize", "8bit"), ("--device-map", "disk")])
def test_conflicting_options_fail_before_loading(run_decode, option, value):
    message = f"error: --decoder lean cannot run with {option} {value}; leave out one of the two\n"
    given = f"none --target nobody/nothing --prompt x --decoder lean {option} {value}"
    assert run_decode(given) == (2, "", message)
