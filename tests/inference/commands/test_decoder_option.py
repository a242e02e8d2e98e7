"""``--decoder``: the chosen decoder runs, reports name it, and an impossible choice is a one-line error."""

import json

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from draftsmith.benchmarks import step_times as bench
from draftsmith.benchmarks import typical
from draftsmith.inference import calibrate, decode
from draftsmith.inference.engine.engine import SpeculativeDecoder
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
def test_decode(run_main, drafter, prompts, tmp_path, asked, decoder):
    code, _, err = run_main(
        decode.main,
        drafter,
        "--prompts",
        prompts,
        "--max-new-tokens",
        6,
        "--threads",
        1,
        "--report",
        tmp_path,
        "--check-lossless",
        "--decoder",
        decoder,
    )
    assert code == 0, err
    assert json.loads((tmp_path / "report.json").read_text())["execution"] == RAN[decoder]
    assert len(asked) >= 2 and set(asked) == {DECODERS[decoder]}, "plain decoding and the drafter's"
    code, _, err = run_main(
        decode.main, drafter, "--prompt", "import", "--max-new-tokens", 3, "--threads", 1, "--decoder", decoder
    )
    assert code == 0 and set(asked) == {DECODERS[decoder]}, err


def test_the_other_commands(run_main, drafter, prompts, tmp_path, asked, monkeypatch):
    monkeypatch.setattr(typical, "available_cores", lambda: 1)
    monkeypatch.setattr(calibrate, "SIZES", (2, 4))
    monkeypatch.setattr(calibrate, "TIMED_TOKENS", 8)
    common = ["--decoder", "transformers", "--device", "cpu"]
    code, _, err = run_main(
        typical.main,
        drafter,
        "--prompts",
        prompts,
        "--epsilons",
        0.1,
        "--max-new-tokens",
        6,
        "--out",
        tmp_path,
        *common,
    )
    assert code == 0, err
    assert json.loads((tmp_path / "typical.json").read_text())["execution"] == RAN["transformers"]
    tree = (drafter / "tree.json").read_text()
    try:
        code, _, err = run_main(calibrate.main, drafter, "--prompts", prompts, "--max-new-tokens", 16, *common)
        assert code == 0, err
        assert json.loads((drafter / "tree.json").read_text())["calibration"]["decoder"] == "transformers"
    finally:
        (drafter / "tree.json").write_text(tree)
    assert len(asked) == 8 and set(asked) == {False}
    monkeypatch.setattr(bench, "release", lambda: None)
    code, _, err = run_main(
        bench.main, "--shape", "tiny-lm", "--nodes", 1, "--contexts", 9, "--repeat", 1, "--threads", 1, *common
    )
    assert code == 0 and f"steps: {RAN['transformers']}\n" in err


def test_families_without_a_lean_decoder(run_main, drafter, prompts, target, tmp_path):
    """``lean`` is an error; by default the model's own modules run, and the report has the reason."""
    folder = tmp_path / "gpt2"
    config = GPT2Config(vocab_size=target.vocab_size, n_embd=32, n_layer=1, n_head=4)
    GPT2LMHeadModel(config).save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    options = ["--max-new-tokens", 3, "--threads", 1, "--report", tmp_path / "report", "--baseline", "none"]
    given = ["none", "--target", folder, "--prompts", prompts, *options]
    reason = "a GPT2Model has no embed_tokens"
    line = f"error: target '{folder}' has no lean decoder: {reason}; use --decoder auto (lean=None)\n"
    line = f"precision: float32 weights (as requested)\n{line}"
    given += ["--dtype", "float32"]
    assert run_main(decode.main, *given, "--decoder", "lean") == (2, "", line)
    code, _, err = run_main(decode.main, *given)
    assert code == 0, err
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["execution"] == f"eager, transformers decoder ({reason})"
    bad = ["--target", folder, "--device", "cpu", "--nodes", 1, "--contexts", 9, "--repeat", 1, "--decoder", "lean"]
    assert run_main(bench.main, *bad, "--dtype", "float32") == (2, "", line)


@pytest.mark.parametrize(("option", "value"), [("--quantize", "8bit"), ("--device-map", "disk")])
def test_conflicting_options_fail_before_loading(run_main, option, value):
    message = f"error: --decoder lean cannot run with {option} {value}; leave out one of the two\n"
    given = ["none", "--target", "nobody/nothing", "--prompt", "x", "--decoder", "lean", option, value]
    assert run_main(decode.main, *given) == (2, "", message)
