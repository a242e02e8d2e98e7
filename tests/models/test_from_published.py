"""Published drafters where one of ours is expected: converted once, decoded and calibrated like the original."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from made import edit, write_eagle, write_heads
from safetensors.torch import load_file, save_file

from draftsmith.inference import calibrate, decode
from draftsmith.inference.drafters.load import read_named
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.load import load_drafter
from draftsmith.models import export
from draftsmith.models.artifact import read_drafter
from draftsmith.models.files import drafters
from draftsmith.models.files.locate import ModelFolder
from draftsmith.models.serving import to_servers
from draftsmith.models.serving.source import open_source
from draftsmith.models.target import load_target

TARGET = "models/tiny-lm"


@pytest.fixture(scope="module")
def tiny():
    return load_target(TARGET, dtype="bfloat16")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """One of a test's own, but for the times of steps, which take a second."""
    (tmp_path / "cache").mkdir()
    if (known := Path(os.environ["DRAFTSMITH_CACHE"]) / "steps.json").exists():
        shutil.copy(known, tmp_path / "cache")
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/drafters"


def made(folder, tiny, to="vllm", **options):
    """A drafter's folder of ours with a chain as its tree, and what it is exported to."""
    if "heads" in options:
        write_heads(folder / "mine", tiny, options["heads"])
    else:
        write_eagle(folder / "mine", tiny, dtype="bfloat16", **options)
    depth = 3
    (folder / "mine/tree.json").write_text(json.dumps({"paths": [[0] * n for n in range(1, depth + 1)]}))
    to_servers.export(open_source(str(folder / "mine"), to), to, folder / "served", facts={"target": TARGET})
    return folder / "mine", folder / "served"


@pytest.mark.parametrize(
    "to, options",
    [
        ("vllm", {"norm_before_residual": True, "captured_layers": (1, 4, 7)}),
        ("speculators", {}),
        ("sglang", {"version": 1, "projection": "shared", "size": None}),
        ("medusa", {"heads": "own"}),
    ],
)
def test_each_layout_decodes_like_the_original(tiny, tmp_path, cache, capfd, to, options):
    """Weights bit for bit, and the same tokens in the same steps; converted by the first of three uses alone."""
    mine, served = made(tmp_path, tiny, to, **options)
    before = sorted(served.iterdir())
    prompt = [5, 7, 11, 300, 41]
    results = []
    for folder in (mine, served, served):
        target, drafter = load_drafter(str(folder), dtype="float32", all_nodes=True)
        results += SpeculativeDecoder(target, drafter).generate([prompt], 24)
    assert results[0].tokens == results[1].tokens == results[2].tokens
    assert results[0].accepted == results[1].accepted == results[2].accepted
    said = [line for line in capfd.readouterr().err.splitlines() if "published" in line]
    assert len(said) == 1 and f"{served}: a published drafter (" in said[0]
    assert f"once for '{TARGET}' in {cache}" in said[0]
    (_, config, weights), (_, wanted, own) = read_named(str(served)), read_drafter(str(mine))
    assert config == wanted and all(torch.equal(weights[name], own[name]) for name in own) and len(weights) == len(own)
    assert sorted(served.iterdir()) == before, "the published folder stays as it is"


def test_commands(tiny, tmp_path, cache, run_main):
    """decode.py, calibrate.py, whose tree decode.py then has, and export.py to another layout."""
    mine, served = made(tmp_path, tiny)
    words = ("--prompt", "import os", "--raw", "--max-new-tokens", 8, "--device", "cpu")
    texts = [run_main(decode.main, folder, *words, "--check-lossless") for folder in (mine, served)]
    assert [code for code, *_ in texts] == [0, 0] and "converted once" in texts[1][2]
    (tmp_path / "p.jsonl").write_text('{"prompt": "import os\\nimport sys\\n"}\n')
    words = ("--prompts", tmp_path / "p.jsonl", "--max-new-tokens", 16, "--nodes", 3, "--seconds", 4, "--device", "cpu")
    code, printed, err = run_main(calibrate.main, served, *words)
    assert code == 0 and "converted" not in err, err
    (copy,) = (folder for folder in cache.iterdir() if folder.is_dir())
    assert f"{copy}/tree.json: " in printed
    paths = json.loads((copy / "tree.json").read_text())["paths"]
    _, drafter = load_drafter(str(served), all_nodes=True)
    assert drafter is not None and drafter.max_depth == max(map(len, paths)) and len(paths) <= 2
    code, _, err = run_main(export.main, served, "--to", "speculators", "--out", tmp_path / "again")
    assert code == 0, err
    weights, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("again", "served"))
    assert torch.equal(weights["fc.weight"], wanted["fc.weight"]) and "embed_tokens.weight" in weights


def test_who_does_not_say_the_target(tiny, tmp_path, cache, refused):
    _, served = made(tmp_path, tiny)
    (served / "provenance.json").unlink()
    assert "which does not say for which target it is: pass --target" in refused(decode.main, served, "--prompt", "x")
    load_drafter(str(served), target_name=TARGET)
    target, _ = load_drafter("none", target_name=TARGET)
    load_drafter(str(served), target)
    assert len([folder for folder in cache.iterdir() if folder.is_dir()]) == 1


def test_the_target_that_is_served(tiny, tmp_path):
    """Where the one that was exported for is not here."""
    mine, served = made(tmp_path, tiny)
    for own, found in ((TARGET, TARGET), (str(tmp_path / "gone"), "org/target"), ("models/gone", "org/target")):
        facts = {"target": own, "served_target": "org/target"}
        to_servers.export(open_source(str(mine), "vllm"), "vllm", served, facts=facts)
        assert drafters.published_target(ModelFolder("served", served), None) == found
    assert drafters.published_target(ModelFolder("served", served), "given") == "given"


def test_the_chat_template_comes_along(tiny, tmp_path, cache):
    """That of an exported folder: a drafter of ours decodes with it. Other folders may have any tokenizer's files."""
    write_eagle(tmp_path / "mine", tiny)
    (tmp_path / "mine/chat_template.jinja").write_text("{{ messages[0].content }}!")
    served = tmp_path / "served"
    to_servers.export(open_source(str(tmp_path / "mine"), "vllm"), "vllm", served, facts={"target": TARGET})
    target, _ = load_drafter(str(served))
    assert target.tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a!"
    (served / "provenance.json").unlink()
    target, _ = load_drafter(str(served), target_name=TARGET)
    assert target.tokenizer.chat_template != "{{ messages[0].content }}!"


def damage_tensors(change):
    def damage(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return damage


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    "damage, reason",
    [
        (
            lambda folder: edit(folder, lambda c: c.update(target_hidden_size=32)),
            "hidden_size 32 ≠ 160 of the target: it was",
        ),
        (cut, "model.safetensors: truncated ("),
        (damage_tensors(lambda t: t.pop("norm.weight")), "'norm.weight' is missing"),
        (damage_tensors(lambda t: t["fc.weight"].fill_(torch.nan)), "'fc.weight' holds NaN or infinity"),
        (damage_tensors(lambda t: t.update(more=torch.ones(2))), "'more' is a tensor that is not known here"),
        (lambda folder: edit(folder, lambda c: c.update(use_mtp_layernorm=True)), "field 'use_mtp_layernorm' is True"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights here"),
    ],
)
def test_a_damaged_folder_is_refused_with_the_reason(tiny, tmp_path, cache, refused, damage, reason):
    _, served = made(tmp_path, tiny)
    load_drafter(str(served))
    shutil.rmtree(cache)
    damage(served)
    line = refused(decode.main, served, "--prompt", "x", "--raw", "--target", TARGET)
    assert str(served) in line and reason in line
    assert not cache.exists() or not any(folder.is_dir() for folder in cache.iterdir())


def test_pickles_are_left_to_the_import(tiny, tmp_path, cache, refused):
    _, served = made(tmp_path, tiny, "medusa", heads="own")
    torch.save(load_file(served / "medusa_lm_head.safetensors"), served / "medusa_lm_head.pt")
    (served / "medusa_lm_head.safetensors").unlink()
    line = refused(decode.main, served, "--prompt", "x", "--raw")
    assert f"import_drafter.py {served} --target {TARGET} --out runs/NAME --allow-pickle" in line and not cache.exists()


def test_other_weights_are_another_copy(tiny, tmp_path, cache, capfd):
    _, served = made(tmp_path, tiny)
    load_drafter(str(served))
    damage_tensors(lambda t: t["fc.weight"][-1].mul_(2))(served)
    load_drafter(str(served))
    assert capfd.readouterr().err.count("converted once") == 2
    assert len([folder for folder in cache.iterdir() if folder.is_dir()]) == 2
