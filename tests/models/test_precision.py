"""What ``auto`` becomes on which device; that commands say it, keep it when they resume, and measure briefly."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from draftsmith.inference import decode
from draftsmith.models import precision
from draftsmith.models.files.locate import locate
from draftsmith.models.files.weights import stored_dtype
from draftsmith.models.precision import Choice, choose_autocast, choose_dtype, describe, lacking, matmul_rate
from draftsmith.models.target import load_target
from draftsmith.train import distill, medusa

ROOT = Path(__file__).parents[2]
HIDING = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}


@pytest.fixture
def cpu(monkeypatch):
    """``cpu(*instruction sets, **environment)``: this machine's CPU, as far as the probe sees it."""

    def set_to(*instructions, **environment):
        monkeypatch.setattr(precision, "_cpu_instructions", lambda: set(instructions))
        for name in HIDING:
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    return set_to


@pytest.mark.parametrize(
    ("instructions", "environment", "has"),
    [
        ({"avx2"}, {}, False),
        ({"avx2", "avx512f", "avx512_vnni"}, {}, False),
        ({"avx512f", "avx512_bf16"}, {}, True),
        ({"amx_tile", "amx_bf16"}, {}, True),
        ({"asimd", "bf16"}, {}, True),
        ({"asimd", "i8mm"}, {}, False),
        ({"avx512_bf16"}, {"ATEN_CPU_CAPABILITY": "avx2"}, False),
        ({"avx512_bf16"}, {"ATEN_CPU_CAPABILITY": "avx512"}, True),
        ({"avx512_bf16"}, {"ONEDNN_MAX_CPU_ISA": "avx512_core_vnni"}, False),
        ({"avx512_bf16"}, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, True),
        ({"avx512_bf16"}, {"MKL_ENABLE_INSTRUCTIONS": "AVX512"}, False),
        ({"avx512_bf16"}, {"MKL_ENABLE_INSTRUCTIONS": "AVX512_E4"}, True),
    ],
)
def test_a_cpu(cpu, instructions, environment, has):
    cpu(*instructions, **environment)
    assert (not lacking("bfloat16", "cpu")) == has
    assert choose_autocast("auto", "cpu").value == ("bfloat16" if has else "none")
    for stored, size in (("bfloat16", 200), ("bfloat16", 8), ("float32", 200), ("float16", 1 << 20)):  # MiB
        half = has and stored == "bfloat16" and size > 100
        found = choose_dtype("auto", "cpu", lambda: stored, weights=size << 20)  # noqa: B023
        assert found.value == ("bfloat16" if half else "float32")
        if has and not environment and not half:
            assert "100 MB and more stored in bfloat16" in found.why
    of_training = choose_dtype("auto", "cpu", lambda: "bfloat16")
    assert of_training.value == "float32" and (
        not has or environment or of_training.why.endswith("of training on a CPU")
    )
    for name, value in environment.items():
        assert has or f"{name}={value} hides" in choose_autocast("auto", "cpu").why


def test_this_cpu_by_linux_and_by_torch():
    """Two sources of its instruction sets: where both are there they agree."""
    known = getattr(torch.cpu, "get_capabilities", dict)()
    if "avx512_bf16" not in known or not Path("/proc/cpuinfo").exists():
        pytest.skip("one of the two is not here")
    listed = Path("/proc/cpuinfo").read_text().split()
    for name in ("avx2", "avx512_bf16", "amx_bf16"):
        assert (name in listed) == known[name] == (name in precision._cpu_instructions())


@pytest.mark.parametrize(
    ("capability", "stored", "quantized", "dtype", "autocast"),
    [
        ((9, 0), "bfloat16", False, "bfloat16", "bfloat16"),
        ((8, 0), "float16", False, "float16", "bfloat16"),
        ((8, 6), "float32", False, "float32", "bfloat16"),
        ((8, 6), "float32", True, "bfloat16", "bfloat16"),
        ((9, 0), "float8_e4m3fn", False, "bfloat16", "bfloat16"),
        ((7, 5), "bfloat16", False, "float32", "none"),
        ((7, 5), "float16", False, "float16", "none"),
        ((7, 5), "bfloat16", True, "float16", "none"),
        ((7, 0), "float64", False, "float32", "none"),
    ],
)
def test_a_gpu(monkeypatch, capability, stored, quantized, dtype, autocast):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose_dtype("auto", "cuda", lambda: stored, quantized=quantized).value == dtype
    assert choose_autocast("auto", "cuda").value == autocast
    (line,) = describe("cuda", choose_dtype("auto", "cuda", lambda: stored), choose_autocast("auto", "cuda"))
    assert line.startswith("precision: "), "nothing that auto chooses is slow"


def test_what_was_asked_for_and_what_a_run_began_with(cpu):
    cpu("avx2")
    assert choose_autocast("bfloat16", "cpu", "none") == Choice("bfloat16", "as requested")
    assert choose_autocast("auto", "cpu", "bfloat16") == Choice("bfloat16", "as this run began")
    assert choose_dtype("float16", "cpu", str, began="float32").value == "float16"
    assert choose_dtype("auto", "cpu", str, began="bfloat16").value == "bfloat16"
    why = "this CPU has no bfloat16 instructions"
    dtype, cast = choose_dtype("auto", "cpu", str), choose_autocast("auto", "cpu")
    assert describe("cpu", dtype, cast) == [f"precision: float32 weights, no autocast ({why})"]
    half = Choice("bfloat16", "as requested")
    assert describe("cpu", half, half) == [
        "precision: bfloat16 weights, bfloat16 autocast (as requested)",
        f"warning: bfloat16 weights and bfloat16 autocast can be many times slower than float32 here: {why}",
    ]
    assert len(describe("cpu", Choice("float16", "as requested"))) == 2
    cpu("avx512_bf16", "avx512_fp16")
    assert len(describe("cpu", half, half)) == len(describe("cpu", Choice("float16", "as requested"))) == 1


def test_the_dtype_a_model_is_stored_in(tiny_lm, tmp_path):
    (tmp_path / "model.safetensors").write_bytes((tiny_lm / "model.safetensors").read_bytes())
    for config, dtype in [
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, "bfloat16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"dtype": None}, "float32"),  # by the weights
    ]:
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert stored_dtype(tmp_path) == dtype
    assert stored_dtype(ROOT / "models/tiny-lm") == "bfloat16"


@pytest.mark.parametrize("kind", [torch.float32, torch.int64])
def test_the_rate_of_products_is_measured_briefly(kind):
    """Integers as a dtype without fast products: one of 2048 would take many seconds."""
    device = torch.device("cpu")
    before = time.process_time()
    rate = matmul_rate(device, kind)
    assert time.process_time() - before < 1.0 * torch.get_num_threads()
    assert 1e6 < rate < 1e14


# ---- the commands


@pytest.fixture
def recipe(tiny_lm, tmp_path):
    ask = {"prompts": 8, "prompt_tokens": 12, "new_tokens": 12, "batch_size": 8}
    content = {
        "run": {"name": "run", "output_dir": str(tmp_path)},
        "target": {"name": str(tiny_lm)},
        "drafter": {"num_draft_heads": 2},
        "data": {
            "train": [{"source": "stdlib", "split": "validation", "answers": ask}],
            "validation": [{"source": "stdlib", "split": "test", "answers": ask}],
        },
        "stages": [{"name": "medusa-1", "batch": {"sequences": 4}, "steps": 2, "optim": {"lr": 1e-2}}],
        "precision": {"threads": 1},
        "checkpoint": {"every": 1, "keep": 1},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def trained_in(folder):
    """(dtype, autocast) of a run by its checkpoint; the recipe and the provenance in its folder say the same."""
    (newest,) = folder.glob("checkpoints/step-*")
    state = json.loads((newest / "state.json").read_text())
    found = (state["dtype"], state["autocast"])
    resolved = yaml.safe_load((folder / "recipe.yaml").read_text())
    assert (resolved["target"]["dtype"], resolved["precision"]["autocast"]) == found
    facts = json.loads((folder / "provenance.json").read_text())
    assert (facts["dtype"], facts["autocast"]) == found
    return found


@pytest.mark.whole_runs
def test_a_command_where_bfloat16_is_hidden(recipe, tmp_path):
    """The real command; what it hides from the probe it hides from PyTorch and its libraries."""
    words, environment = [sys.executable, "train/medusa.py", recipe], {**os.environ, **HIDING}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(("precision", "warning"))]
    assert line.startswith("precision: float32 weights, no autocast (")
    assert line.endswith("instructions)" if lacking("bfloat16", "cpu") else "hides this CPU's bfloat16 instructions)")
    assert trained_in(tmp_path / "run") == ("float32", "none")


@pytest.fixture
def succeed(run_main):
    """``succeed(module.main, *arguments)`` → stdout of a command that ends well and says nothing on stderr."""

    def run(*words):
        code, out, err = run_main(*words)
        assert (code, err) == (0, "")
        return out

    return run


def test_a_resumed_run_keeps_what_it_began_with(recipe, tmp_path, succeed, cpu):
    cpu("avx512_bf16")
    assert ", bfloat16 autocast (in hardware here)\n" in succeed(medusa.main, recipe)
    assert trained_in(tmp_path / "run") == ("float32", "bfloat16")
    cpu("avx2")  # another machine
    out = succeed(medusa.main, recipe, "--resume", "stages.0.steps=3")
    assert "resuming medusa-1 at step 2 of 3" in out
    assert "precision: float32 weights, bfloat16 autocast (as this run began)\n" in out
    assert out.count("warning: ") == 1 and "warning: bfloat16 autocast can be many times slower" in out
    assert trained_in(tmp_path / "run") == ("float32", "bfloat16")
    out = succeed(medusa.main, recipe, "--resume", "stages.0.steps=4", "precision.autocast=none")
    assert "no autocast (as requested)\n" in out and "warning" not in out
    assert trained_in(tmp_path / "run") == ("float32", "none"), "obeyed"
    out = succeed(medusa.main, recipe, "--restart")
    assert "precision: float32 weights, no autocast (this CPU has no bfloat16 instructions)\n" in out


def test_a_distillation_goes_on_in_the_dtype_it_began_with(tiny_lm, tmp_path, succeed, cpu):
    cpu("avx512_bf16")
    (tmp_path / "seeds.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(3)))
    content = {
        "run": {"name": "run", "output_dir": str(tmp_path)},
        "target": {"name": str(tiny_lm)},
        "data": {"seeds": [{"source": str(tmp_path / "seeds.jsonl")}]},
        "engine": {"batch_size": 4, "max_length": 250, "threads": 1},
        "decoding": {"mode": "greedy", "max_new_tokens": 4},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    assert "precision: bfloat16 weights (as requested)\n" in succeed(distill.main, path, "target.dtype=bfloat16")
    assert "precision: bfloat16 weights (as this run began)\n" in succeed(distill.main, path)
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    assert manifest["decides"]["target.dtype"] == "bfloat16"
    assert "precision: float32 weights (" in succeed(distill.main, path, "--restart")


def test_distillation_answers_in_the_dtype_of_decoding(tmp_path, monkeypatch, cpu):
    """A large target stored in bfloat16, on a CPU with its instructions."""
    cpu("avx512_bf16")
    recipe = distill.DistillRecipe.model_validate(
        {"run": {"name": "run"}, "target": {"name": str(ROOT / "models/tiny-lm")}, "data": {"seeds": [], "written": 1}}
    )
    for large, dtype in ((1 << 40, "float32"), (1000, "bfloat16")):
        monkeypatch.setattr(precision, "_LARGE", large)
        assert distill.with_dtype(recipe, locate(recipe.target.name), tmp_path, False).target.dtype == dtype
        assert load_target(str(ROOT / "models/tiny-lm")).dtype == getattr(torch, dtype)


def test_one_line_of_a_decoding_command_and_one_warning(tiny_lm, tmp_path, run_main, cpu):
    cpu("avx512_bf16", **HIDING)
    ask = ["none", "--target", tiny_lm, "--prompt", "def", "--max-new-tokens", 2, "--threads", 1, "--device", "cpu"]
    ask += ["--baseline", "none", "--report", tmp_path]
    for given, dtype, warnings in [([], "float32", 0), (["--dtype", "bfloat16"], "bfloat16", 1)]:
        code, out, err = run_main(decode.main, *ask, *given)
        assert code == 0 and "precision" not in out
        assert (err.count("precision: "), err.count("warning: ")) == (1, warnings)
        assert f"precision: {dtype} weights (" in err
        assert json.loads((tmp_path / "report.json").read_text())["dtype"] == dtype
