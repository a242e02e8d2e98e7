"""Exported folders in the drafter classes of vLLM itself: every tensor arrives. Skipped where there is no vLLM, which
`make serve-check` installs; what vLLM then drafts, that compares."""
# ruff: noqa: E402

import importlib
import subprocess
import sys
from pathlib import Path

PAIRS = sys.argv[2:]  # as a script, in vLLM's environment, which has no draftsmith: METHOD FOLDER …
if __name__ == "__main__":
    from safetensors.torch import save_file

    names = ("config", "distributed", "engine.arg_utils", "utils.torch_utils", "model_executor.model_loader")
    modules = (importlib.import_module(f"vllm.{name}") for name in (*names, f"{names[-1]}.utils"))
    settings, distributed, engine, dtypes, loading, making = modules
    for method, folder in zip(PAIRS[::2], PAIRS[1::2], strict=True):
        drafts = {"method": method, "model": folder, "num_speculative_tokens": 3}
        options = {"dtype": "float32", "max_model_len": 128, "enforce_eager": True, "speculative_config": drafts}
        config = engine.EngineArgs(model=sys.argv[1], **options).create_engine_config()
        its = config.speculative_config.draft_model_config
        with settings.set_current_vllm_config(config), dtypes.set_default_torch_dtype(its.dtype):
            if folder == PAIRS[1]:
                distributed.init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
                distributed.initialize_model_parallel(1, 1)
            loader = loading.get_model_loader(config.load_config)
            model = making.initialize_model(vllm_config=config, model_config=its)
            loader.load_weights(model, its)
        save_file({n: weight.detach().contiguous() for n, weight in model.named_parameters()}, f"{folder}/in_vllm")
    sys.exit()

import importlib.util

import pytest
import torch
from made import write_eagle, write_heads
from safetensors.torch import load_file

from draftsmith.models.serving import to_servers
from draftsmith.models.serving.source import open_source
from draftsmith.models.target import load_target

ROOT, TARGET = Path(__file__).parents[2], "models/tiny-lm"
PYTHON = Path(sys.executable) if importlib.util.find_spec("vllm") else ROOT / ".venv-serve-vllm/bin/python"
FORMS = {
    "maps": ("eagle3", {}),
    "all-tokens": ("eagle3", {"size": None, "norm_before_residual": True}),
    "norms": ("eagle3", {"fc_norm": True, "norm_output": True, "captured_layers": (2, 5, 8, 10)}),
    "norm-before-fc": ("eagle3", {"norm_before_fc": True}),
    "eagle1": ("eagle", {"version": 1, "projection": "shared", "size": None, "fc_bias": False}),
    "heads": ("medusa", "own"),
}
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@pytest.mark.whole_runs
@pytest.mark.skipif(not PYTHON.exists(), reason="no vLLM here: make serve-check installs it")
def test_every_tensor_arrives(tmp_path):
    target, words = load_target(TARGET), list[str]()
    for name, (method, options) in FORMS.items():
        mine, served = tmp_path / "mine" / name, tmp_path / name
        write_heads(mine, target, options) if isinstance(options, str) else write_eagle(mine, target, **options)
        to_servers.export(open_source(str(mine), "vllm"), "vllm", served)
        words += [method, str(served)]
    command = [str(PYTHON), __file__, str(ROOT / TARGET), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for name in FORMS:
        served, loaded = (load_file(tmp_path / name / file) for file in ("model.safetensors", "in_vllm"))
        served = {n.replace("midlayer.", "layers.0."): tensor for n, tensor in served.items() if n != "t2d"}
        for parameter, value in loaded.items():
            own = parameter.removeprefix("model.").replace("draft_id_to_target_id", "d2t")
            joined = next((part for part in JOINED if part in own), own)
            names = [own.replace(joined, part) for part in JOINED.get(joined, (own,))]
            if not served.keys() >= set(names):  # the target's, which vLLM shares
                assert parameter == "model.embed_tokens.weight" or (name, own) == ("eagle1", "lm_head.weight")
            else:
                wanted = torch.cat([served.pop(each) for each in names])
                assert torch.equal(value[: len(wanted)], wanted.to(value.dtype)), (name, parameter)
        assert not served, f"{name}: not loaded: {sorted(served)}"
