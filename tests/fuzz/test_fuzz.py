"""Odd input of every kind, made at random from good input: recipes, prompts, rows, drafters, targets, trees. The answer
is one line and exit code 2, or the right result; never a traceback, never a wrong result. Command lines and overrides:
test_commands.py.

The examples are the same in every run; ``--hypothesis-seed=N`` gives others, and ``FUZZ=20`` twenty times as many.
"""

import copy
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from draftsmith.common.data_sections import Data, Source
from draftsmith.common.recipe import read_recipe, write_recipe
from draftsmith.data.tokenized import tokenized
from draftsmith.inference import decode
from draftsmith.inference.commands.prompts import encode_prompts, read_prompts
from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.verify.tree import read_tree
from draftsmith.models.artifact import read_drafter
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import load_target
from draftsmith.train import dflash, distill, dynaspec, eagle, lm, medusa, ssm

pytestmark = pytest.mark.whole_runs  # random recipes and artifacts

ROOT = Path(__file__).parents[2]
SEEDED = any(argument.startswith("--hypothesis-seed") for argument in sys.argv)
MORE = int(os.environ.get("FUZZ", "1"))


def examples(count: int) -> Callable[[Any], Any]:
    return settings(
        max_examples=count * MORE,
        derandomize=not SEEDED,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def said(error: BaseException) -> str:
    """An error's message, which has to be one line."""
    text = str(error)
    assert text and "\n" not in text and len(text) < 3000, text
    return text


def answered(code: int, err: str) -> bool:
    """Whether a command did its work; if not, one line says why."""
    assert code in (0, 2), (code, err)
    if code == 0:
        return True
    last = err.removesuffix("\n").rpartition("\n")[2]
    assert re.match(r"(\S+: )?error: ", last), err
    assert sum(line.startswith("error: ") for line in err.split("\n")) == 1, err
    return False


# ---- odd values

NUMBERS = st.sampled_from([0, -1, 1, 2, 3, 7, 1 << 31, 1 << 63, 10**9, 10**30, -(10**30), 10**400]) | st.integers()
FLOATS = st.sampled_from([0.5, -0.5, 1e-300, 1e300, float("nan"), float("inf"), -0.0]) | st.floats()
WORDS = st.sampled_from(
    ["", " ", "x", "..", "../x", "/", "~", "null", "nan", "1e400", "\0", "\ud800", "\u2028", "\ufeff", "{{",
     "{% for %}", "a" * 300, "é" * 120, "stdlib", "package:../x", "package:json", "user/name", "a/b/c", "x.jsonl",
     "cuda:99", "<<", "*a", "&a", "!!python/object:x", "2024-01-01", "0x1F", "1:30", "[", "- -"]
) | st.text(max_size=8)  # fmt: skip
SCALARS = st.none() | st.booleans() | NUMBERS | FLOATS | WORDS
JUNK = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=6
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path to each value within."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, below in inner for place in places(below, (*at, key)))]


@st.composite
def changed(draw: Any, good: Any, most: int = 3) -> Any:
    """A good JSON-like value with one to ``most`` changes: fields left out, renamed, replaced, swapped, wrapped."""
    value = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, most))):
        where = draw(st.sampled_from(places(value)))
        if not where:
            continue
        above = value
        for part in where[:-1]:
            above = above[part]
        last = where[-1]
        match draw(st.sampled_from(["replace", "replace", "leave out", "rename", "wrap", "move", "name", "double"])):
            case "replace":
                above[last] = draw(WORDS | JUNK)
            case "leave out":
                del above[last]
            case "rename" if isinstance(above, dict):
                above[draw(WORDS)] = above.pop(last)
            case "wrap":
                above[last] = draw(st.sampled_from([[above[last]], {"x": above[last]}, [[above[last]] * 2]]))
            case "move":
                other = value
                for part in draw(st.sampled_from(places(value))):
                    other = other[part]
                above[last] = copy.deepcopy(other)
            case "name":
                above[last] = str(above[last])
            case "double" if isinstance(above, list):
                above.append(copy.deepcopy(above[last]))
    return value


@dataclass(frozen=True)
class Damage:
    """Of a file's bytes a part is replaced; small to print, however long the file is."""

    place: float  # where, as a share of its length
    length: int
    new: bytes
    doubled: bool

    def of(self, good: bytes) -> bytes:
        at = int(self.place * len(good))
        end = min(len(good), at + self.length)
        return good[:at] + self.new + good[at:end] * 2 * self.doubled + good[end:]


DAMAGE = st.builds(
    Damage,
    st.sampled_from([0.0, 1.0]) | st.floats(0, 1),
    st.sampled_from([0, 1, 1, 2, 8, 64, 1 << 20]),
    st.sampled_from(
        [b"", b"\t", b"\n", b"[", b"{", b"}", b'"', b"&a ", b"*a", b"<<: ", b"!!x ", b": ", b"- ", b"\0", b"\xff",
         b"\xef\xbb\xbf", b"\xff\xfe", b"\r", b"---\n", b"|", b"%", b"\xed\xa0\x80"]
    ) | st.binary(max_size=6),
    st.booleans(),
)  # fmt: skip


# ---- what is mutated


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module", autouse=True)
def caches(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTSMITH_CACHE", str(folder / "cache"))
        patch.setenv("HF_HOME", str(folder / "hub"))
        patch.setattr(tempfile, "tempdir", None)
        yield


PROMPT = ["--prompt", "import os", "--raw", "--max-new-tokens", "24", "--threads", "1", "--device", "cpu"]


@pytest.fixture(scope="module")
def plain(run_main, tiny_lm):
    """What the target writes by itself."""
    code, out, err = run_main(decode.main, "none", "--target", tiny_lm, *PROMPT)
    assert code == 0, err
    return out


# ---- recipes

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
TRAINING = {"medusa": medusa, "ssm": ssm, "eagle": eagle, "lm": lm, "distill": distill, "dynaspec": dynaspec}
TRAINING["dflash"] = dflash


def class_of(path: Path) -> Any:
    first = path.read_text().partition("\n")[0]
    (script,) = (script for script in TRAINING if f"train/{script}.py" in first)
    return getattr(TRAINING[script], f"{script.capitalize()}Recipe")


def read_odd(path: Path, recipe: Any) -> None:
    try:
        read = read_recipe(path, recipe)
    except (ValueError, FileNotFoundError) as error:
        assert type(error) in (ValueError, FileNotFoundError)
        assert said(error).startswith((str(path), "'"))
        return
    assert isinstance(read, recipe)
    write_recipe(read, path.with_name("again.yaml"), "the command")
    assert read_recipe(path.with_name("again.yaml"), recipe) == read


@examples(150)
@given(data=st.data())
def test_recipes(folder, data):
    shipped = data.draw(st.sampled_from(RECIPES))
    content = data.draw(changed(yaml.safe_load(shipped.read_text())))
    path = folder / "odd.yaml"
    path.write_bytes(yaml.safe_dump(content, allow_unicode=False).encode("utf-8", "surrogatepass"))
    read_odd(path, class_of(shipped))


@examples(150)
@given(data=st.data())
def test_recipes_as_text(folder, data):
    shipped = data.draw(st.sampled_from(RECIPES))
    content = data.draw(DAMAGE).of(shipped.read_bytes())
    path = folder / "odd.yaml"
    path.write_bytes(content)
    read_odd(path, class_of(shipped))


# ---- prompts

MESSAGE = {"role": "user", "content": "a"}
PROMPT_ROWS = [
    {"prompt": "import os"},
    {"messages": [{"role": "system", "content": "b"}, MESSAGE, {"role": "assistant", "content": "c"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "d"}]}]},
    {"turns": ["e", "f"], "category": "x"},
]


@st.composite
def lines(draw: Any, good: list[Any]) -> bytes:
    """A JSONL file: rows changed, or anything at all, now and then cut or damaged."""
    rows = draw(st.lists(st.sampled_from(good).flatmap(changed) | st.sampled_from(good) | JUNK, max_size=4))
    ascii_only = draw(st.booleans())
    text = "\n".join(json.dumps(row, ensure_ascii=ascii_only) for row in rows)
    content = draw(st.sampled_from([b"", b"", b"\xef\xbb\xbf"])) + text.encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 3)) == 0:
        content = draw(DAMAGE).of(content)
    return content


@examples(400)
@given(content=lines(PROMPT_ROWS))
@example(b'{"prompt": "\\ud800"}')
@example(b'{"turns": ["\\udc00a"]}')
def test_prompts(folder, target, content):
    path = folder / "odd.jsonl"
    path.write_bytes(content)
    try:
        prompts = read_prompts(path)
    except ValueError as error:
        assert said(error).startswith(str(path))
        return
    assert len(prompts) == sum(bool(line.strip()) for line in content.decode("utf-8-sig").split("\n"))
    for prompt in prompts:
        if isinstance(prompt.content, str):
            prompt.content.encode()  # no half surrogate pair
            continue
        for message in prompt.content:
            assert isinstance(message["content"], str) and message["content"].encode() is not None
            assert message["content"] not in ("None", "null") or b"None" in content or b"null" in content
    try:
        encoded = encode_prompts(prompts, target)
    except ValueError as error:
        assert said(error).startswith(str(path))
        return
    for prompt, ids in zip(prompts, encoded, strict=True):
        if isinstance(prompt.content, str):
            assert target.tokenizer.decode(ids, clean_up_tokenization_spaces=False) == prompt.content


# ---- data rows

DATA_ROWS = [
    {"messages": [MESSAGE, {"role": "assistant", "content": "b c"}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"prompt": "a", "completion": "b"},
    {"text": "some text"},
    {"messages": [MESSAGE, {"role": "assistant", "content": "b"}], "finish_reason": ["stop"]},
]


@pytest.mark.parametrize("suffix, streaming", [(".jsonl", False), (".json", False), (".jsonl", True)])
def test_rows(folder, target, suffix, streaming):
    path = folder / f"rows{streaming}{suffix}"
    source = Source(source=str(path), streaming=streaming)
    data = Data(train=[source], validation=[Source(source="stdlib")], max_skipped=1.0, max_unsupervised=1.0)

    @examples(70)
    @given(content=lines(DATA_ROWS), rows=st.none() | st.lists(st.sampled_from(DATA_ROWS).flatmap(changed) | JUNK))
    def check(content: bytes, rows: list[Any] | None) -> None:
        if suffix == ".json" and rows is not None:
            content = json.dumps(rows).encode()
        path.write_bytes(content)
        try:
            made = tokenized(source, data, target.tokenizer)
        except ValueError as error:
            said(error)
            assert str(path) in str(error)
            return
        assert len(made) + made.skipped.count == made.skipped.rows
        if suffix == ".json" and rows is not None:
            assert made.skipped.rows == len(rows)
        else:
            assert made.skipped.rows == sum(
                bool(line.strip()) for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
            )
        assert made.starts[-1] == len(made.tokens) == len(made.supervised)

    check()


# ---- drafters


def rewrite(path: Path, content: Any) -> None:
    path.write_bytes(json.dumps(content).encode("utf-8", "surrogatepass"))


def copy_of(good: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return Path(shutil.copytree(good, folder))


def decodes_exactly(run_main: Any, drafter: Path, plain: str) -> None:
    code, out, err = run_main(decode.main, drafter, *PROMPT)
    if answered(code, err):
        assert out == plain, "exit code 0 with a text that is not the target's own"
    else:
        assert out == ""


@examples(50)
@given(data=st.data())
def test_drafter_configs(folder, drafter, run_main, plain, data):
    odd = copy_of(drafter, folder / "odd-heads")
    if data.draw(st.integers(0, 4)):
        rewrite(odd / "config.json", data.draw(changed(json.loads((drafter / "config.json").read_text()))))
    else:
        (odd / "config.json").write_bytes(data.draw(DAMAGE).of((drafter / "config.json").read_bytes()))
    decodes_exactly(run_main, odd, plain)


@examples(40)
@given(data=st.data())
def test_drafter_weights(folder, drafter, run_main, plain, data):
    odd = copy_of(drafter, folder / "odd-heads")
    whole = (drafter / "model.safetensors").read_bytes()
    size = 8 + int.from_bytes(whole[:8], "little")
    match data.draw(st.sampled_from(["length", "header", "text of the header", "weights"])):
        case "length":
            whole = data.draw(st.integers(0, (1 << 64) - 1)).to_bytes(8, "little") + whole[8:]
        case "header":
            header = json.dumps(data.draw(changed(json.loads(whole[8:size])))).encode()
            whole = len(header).to_bytes(8, "little") + header + whole[size:]
        case "text of the header":
            whole = whole[:8] + data.draw(DAMAGE).of(whole[8:size]) + whole[size:]
        case "weights":
            whole = whole[:size] + data.draw(DAMAGE).of(whole[size:])
    (odd / "model.safetensors").write_bytes(whole)
    decodes_exactly(run_main, odd, plain)


# ---- trees


@pytest.fixture(scope="module")
def heads(drafter, target):
    _, config, weights = read_drafter(str(drafter))
    return MedusaHeads.from_artifact(config, weights, str(drafter))


RANKS = st.lists(st.lists(st.integers(-2, 12) | JUNK, max_size=4) | JUNK, max_size=6)


@examples(200)
@given(content=st.data())
def test_odd_trees(folder, target, heads, content):
    good = {"paths": [[0], [0, 0], [0, 0, 0], [0, 1], [1]], "calibration": {"positions": 3}}
    path = folder / "tree.json"
    match content.draw(st.sampled_from(["paths", "changed", "text", "tuples"])):
        case "paths":
            rewrite(path, content.draw(RANKS))
        case "changed":
            rewrite(path, content.draw(changed(good)))
        case "text":
            path.write_bytes(content.draw(DAMAGE).of(json.dumps(good).encode()))
        case "tuples":
            path.write_bytes(content.draw(DAMAGE).of(b"[(0,), (0, 0), (1,)]"))
    try:
        topology = read_tree(path)
        MedusaDrafter(heads, topology, target)
    except ValueError as error:
        said(error)
        return
    assert {path[:-1] for path in topology.paths} <= {(), *topology.paths}


# ---- targets


def as_transformers_does(folder: Path, tokens: list[int], count: int) -> bool:
    """Whether what follows the first ``count`` tokens is what the model, loaded by transformers itself, finds most
    likely at each place (a tie counts)."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, count - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens[count:])[:, None])[:, 0]
    best = logits.max(-1).values
    return bool((best - chosen <= 1e-3 * logits.abs().max(-1).values).all())


def odd_target(folder: Path, tiny_lm: Path) -> Path:
    odd = copy_of(tiny_lm, folder / "odd-lm")
    (odd / "one.jsonl").write_text('{"prompt": "import os"}')
    return odd


def loads_or_says(folder: Path) -> None:
    """A target folder is refused in one line, or decoded as transformers does."""
    try:
        target = load_target(str(folder), device="cpu")
        ids = encode_prompts(read_prompts(folder / "one.jsonl"), target)
    except (ValueError, FileNotFoundError) as error:
        said(error)
        return
    (result,) = SpeculativeDecoder(target).generate(ids, 6)
    assert result.tokens and as_transformers_does(folder, [*ids[0], *result.tokens], len(ids[0]))


@examples(40)
@given(data=st.data())
def test_target_configs(folder, tiny_lm, data):
    odd = odd_target(folder, tiny_lm)
    name = data.draw(st.sampled_from(["config.json", "config.json", "config.json", "generation_config.json"]))
    if data.draw(st.integers(0, 4)):
        rewrite(odd / name, data.draw(changed(json.loads((tiny_lm / name).read_text()), 2)))
    else:
        (odd / name).write_bytes(data.draw(DAMAGE).of((tiny_lm / name).read_bytes()))
    loads_or_says(odd)


@examples(20)
@given(data=st.data())
def test_target_tokenizers(folder, tiny_lm, data):
    odd = odd_target(folder, tiny_lm)
    name = data.draw(st.sampled_from(["tokenizer.json", "tokenizer.json", "tokenizer_config.json"]))
    if data.draw(st.booleans()):
        content = json.loads((tiny_lm / name).read_text())
        small = {key: value for key, value in content.items() if key != "model"} if "model" in content else content
        odd_content = data.draw(changed(small, 2))
        rewrite(odd / name, odd_content | ({"model": content["model"]} if "model" in content else {}))
    else:
        (odd / name).write_bytes(data.draw(DAMAGE).of((tiny_lm / name).read_bytes()))
    loads_or_says(odd)
