"""What a command writes replaces no file but one that it wrote itself."""

import importlib
import os
import time

import pytest

from draftsmith.common.files import check_file, write_text

# Each option that names a file for results, and the words with which its command gets that far; F is that file.
OUTPUTS = {
    "data.prompts": ("human-eval --count 2 --out F", "F.jsonl"),
    "tools.overlap": ("ROWS --clean F", "F.jsonl"),
    "tools.overlap, hashes": ("ROWS --save F", "F.safetensors"),
    "tools.made_up": ("--count 2 --out F", "F.jsonl"),
    "tools.curves": ("models/smollm2-medusa --out F", "F.png"),
    "tools.schema": ("--out DIR", "medusa.json"),
    "tools.pieces": ("join DIR --out F", "F.gguf"),
    "inference.decode": ("none --target models/tiny-lm --prompts ROWS --answers F", "F.jsonl"),
    "inference.decode, reports": ("none --target models/tiny-lm --prompts ROWS --report DIR", "report.json"),
    "inference.compare": ("runs/a runs/b --json F", "F.json"),
    "inference.planner": ("--target models/tiny-lm --contexts 64 --batch-sizes 1 --out F", "F.json"),
    "inference.planner, plot": ("--target models/tiny-lm --contexts 64 --batch-sizes 1 --out F.json", "F.png"),
    "models.export": ("models/smollm2-eagle3 --to vllm --out DIR", "provenance.json"),
    "models.import_drafter": ("models/smollm2-eagle3 --target models/tiny-lm --out DIR", "provenance.json"),
    "benchmarks.quality": ("models/smollm2-medusa --out F", "F.json"),
    "benchmarks.serving": ("none --target models/tiny-lm --prompts ROWS --out F", "F.json"),
    "benchmarks.roofline": ("--out F", "F.json"),
    "benchmarks.roofline, plot": ("--out F.json", "F.png"),
    "benchmarks.kernel_times": ("attention --out F", "F.json"),
    "benchmarks.step_times": ("--target models/tiny-lm --profile F", "F.txt"),
    "benchmarks.tau_by_tokens": ("models/smollm2-medusa --prompts ROWS --out F", "F.json"),
    "benchmarks.tau_by_tokens, table": ("models/smollm2-medusa --prompts ROWS --out F.json", "F.md"),
    "benchmarks.budget": ("none --target models/tiny-lm --prompts ROWS --out F", "F.json"),
    "benchmarks.coupled": ("draft_model:models/tiny-lm --target models/tiny-lm --prompts ROWS --out F", "F.json"),
    "benchmarks.typical": ("models/smollm2-medusa --prompts ROWS --out DIR", "typical.json"),
}


@pytest.mark.parametrize("command", OUTPUTS)
def test_what_somebody_else_wrote_is_kept(tmp_path, refused, command):
    words, name = OUTPUTS[command]
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n')
    mine = tmp_path / name
    mine.write_text("mine")
    given = words.replace("ROWS", str(tmp_path / "rows.jsonl")).replace("DIR", str(tmp_path))
    given = given.replace(" F.json", f" {tmp_path / 'F.json'}")
    given = " ".join(str(mine) if word == "F" else word for word in given.split())
    line = refused(importlib.import_module(f"draftsmith.{command.partition(',')[0]}").main, *given.split())
    assert str(mine) in line or "there is a " in line, line
    assert mine.read_text() == "mine" and sorted(p.name for p in tmp_path.iterdir()) == sorted({name, "rows.jsonl"})


def test_what_we_wrote_is_replaced_until_it_is_changed(tmp_path):
    file = tmp_path / "a.json"
    for text in ("{}", "[]"):
        check_file("--out", file)
        write_text(file, text)
    os.utime(file, ns=(time.time_ns(), time.time_ns() + 1))
    with pytest.raises(ValueError, match="did not write here or which was changed since"):
        check_file("--out", file)
    file.write_text("")
    check_file("--out", file)
