import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from draftsmith.data import prompts as prompts_command
from draftsmith.data import sources
from draftsmith.data.prompts import Prompt, prompts, write
from draftsmith.inference.commands.prompts import read_prompts
from draftsmith.models.tokenizer import load_tokenizer

TINY = Path(__file__).parents[2] / "models/tiny-lm"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"initial_alphabet": alphabet, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<end>"], **options)
    bpe.train_from_iterator([d.text for d in sources.documents("stdlib", "validation")[:6]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>")


@pytest.fixture
def modules(monkeypatch):
    """modules(text, …): a source of these modules."""

    def use(*texts):
        documents = tuple(sources.Document(f"toy/{i}.py", text) for i, text in enumerate(texts))
        monkeypatch.setattr(sources, "documents", lambda source, split: documents)

    return use


def check(cut, length, tokenizer):
    texts = {d.path: d.text for d in sources.documents("stdlib", "test")}
    places = {}
    for prompt in cut:
        assert len(prompt.tokens) == length
        assert tokenizer(prompt.text)["input_ids"] == prompt.tokens
        text = texts[prompt.source]
        starts = [i for i in range(len(text)) if text.startswith(prompt.text, i) and (i == 0 or text[i - 1] == "\n")]
        assert starts, f"not a piece of {prompt.source} at a line's start"
        if len(starts) == 1:  # tables of constants repeat themselves
            places.setdefault(prompt.source, []).append(range(starts[0], starts[0] + len(prompt.text)))
    assert len({p.text for p in cut}) == len(cut)
    assert sum(map(len, places.values())) > 0.9 * len(cut)
    for windows in places.values():
        assert not any(a.start < b.stop and b.start < a.stop for a, b in itertools.combinations(windows, 2))


def test_windows_are_exact_distinct_and_reencode(tokenizer):
    """The same arguments give the same prompts, another seed others."""
    cut = prompts("stdlib", "test", 48, 96, tokenizer, 0)
    check(cut, 96, tokenizer)
    assert prompts("stdlib", "test", 48, 96, tokenizer, 0) == cut != prompts("stdlib", "test", 48, 96, tokenizer, 4)
    check(prompts("stdlib", "test", 300, 33, tokenizer, 1), 33, tokenizer)


def changed(tokenizer, **parts) -> PreTrainedTokenizerFast:
    """A copy with other parts (a normalizer, a post-processor)."""
    copy = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    for name, part in parts.items():
        setattr(copy, name, part)
    return PreTrainedTokenizerFast(tokenizer_object=copy)


@pytest.fixture
def with_start(tokenizer) -> PreTrainedTokenizerFast:
    """Puts a token in front, as Llama's does."""
    template = processors.TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 0)])
    return changed(tokenizer, post_processor=template)


def test_special_tokens_count(with_start):
    cut = prompts("stdlib", "test", 20, 40, with_start, 0)
    check(cut, 40, with_start)
    assert all(p.tokens[0] == 0 for p in cut)


@pytest.mark.parametrize("which", ["tokenizer", "with_start"])
def test_a_full_module_without_overlap(which, modules, request):
    text = "".join(f"    def number_{i}(self, *args, **kwargs):\n        return self\n" for i in range(400))
    modules(text)
    cut = prompts("toy", "test", 60, 40, request.getfixturevalue(which), 0)
    windows = sorted((text.index(p.text), text.index(p.text) + len(p.text)) for p in cut)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(windows))


def test_text_is_verbatim_whatever_the_tokenizer_does(tokenizer, modules):
    modules("".join(f"Name_{i} = {i}\n" if i % 8 == 0 else f"name_{i} = {i}\n" for i in range(500)))
    lowercase = changed(tokenizer, normalizer=normalizers.Lowercase())
    upper = {f"name_{i} " for i in range(0, 500, 8)}  # what would be there in lower case, and is not in the module
    for prompt in prompts("toy", "test", 20, 30, lowercase, 0):
        assert not any(name in prompt.text for name in upper)


def test_every_module_before_any_twice(tokenizer, modules):
    modules(*("".join(f"name_{m}_{i} = {i}\n" for i in range(200)) for m in range(7)))
    found = [p.source for p in prompts("toy", "test", 17, 30, tokenizer, 0)]
    assert len(set(found[:7])) == 7 and len(set(found[7:14])) == 7 and len(set(found[14:])) == 3


def test_short_modules_and_repeated_text_are_passed_over(tokenizer, modules):
    modules("x = 1\n", "", "y = 2\n" * 3, "repeat(me)\n" * 400, "".join(f"name_{i} = {i}\n" for i in range(50)))
    found = prompts("toy", "test", 3, 30, tokenizer, 0)
    assert sorted({p.source for p in found}) == ["toy/3.py", "toy/4.py"]
    assert [p.source for p in found].count("toy/3.py") == 1


def test_characters_are_not_cut_in_half(tokenizer, modules):
    modules("".join(f"s{i} = '日本語のテキスト{i}'\n" for i in range(300)))
    for length in (20, 21, 22):
        for prompt in prompts("toy", "test", 5, length, tokenizer, 0):
            assert "\ufffd" not in prompt.text and tokenizer(prompt.text)["input_ids"] == prompt.tokens


def test_too_many_are_refused(tokenizer, modules):
    modules("".join(f"name_{i} = {i}\n" for i in range(50)), "x = 1\n")
    with pytest.raises(ValueError, match=r"source 'toy' split 'test' gives only \d+ prompts of 30 tokens, from 2 mod"):
        prompts("toy", "test", 500, 30, tokenizer, 0)


def test_files_are_whole_or_absent(tmp_path, monkeypatch):
    path = tmp_path / "new" / "p.jsonl"
    write(path, [Prompt("é\n", "a.py", [1])])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"prompt": "é\n", "source": "a.py"}]
    with pytest.raises(AttributeError):
        write(path, [Prompt("x", "a.py", [1]), None])  # type: ignore[list-item]
    assert len(path.read_text().splitlines()) == 1


def test_the_command(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    out = tmp_path / "p.jsonl"
    script = Path(sources.__file__).with_name("prompts.py")
    options = ["--count", "5", "--prompt-tokens", "20", "--tokenizer", tmp_path / "tokenizer", "--out", out]
    done = subprocess.run([sys.executable, script, "stdlib", *options], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{out}: 5 prompts of 20 tokens from 5 modules\n"
    assert len(out.read_text().splitlines()) == 5


@pytest.fixture(scope="module")
def stored(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    tokenizer.save_pretrained(folder)
    return folder


def command(run_main, tokenizer, out, *more):
    arguments = ("--count", 3, "--prompt-tokens", 20, "--tokenizer", tokenizer, "--out", out, *more)
    return run_main(prompts_command.main, "stdlib", *arguments)


def folder_of(**files):
    """Makes a folder with these JSON files."""

    def make(path):
        path.mkdir()
        for name, text in files.items():
            (path / f"{name}.json").write_text(text)

    return make


TOKENIZERS = {
    "missing": lambda path: None,
    "loop": lambda path: path.symlink_to(path),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "file": lambda path: path.write_text(""),
    "empty": folder_of(),
    "damaged": folder_of(tokenizer="{", tokenizer_config='{"tokenizer_class": "PreTrainedTokenizerFast"}'),
    "odd": folder_of(tokenizer_config="[]"),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_invalid_tokenizers(kind, run_main, tmp_path):
    TOKENIZERS[kind](tmp_path / "t")
    code, _, err = command(run_main, tmp_path / "t", tmp_path / "p.jsonl")
    assert code == 2 and err.replace("'", "").startswith(f"error: {tmp_path / 't'}: "), err
    assert err.count("\n") == 1 and len(err) < 500 and not (tmp_path / "p.jsonl").exists()


def test_a_folder_with_nothing_but_sentencepiece(tmp_path):
    import sentencepiece

    text = tmp_path / "text"
    text.write_text("".join(d.text for d in sources.documents("stdlib", "validation")[:3]))
    (tmp_path / "t").mkdir()
    options = {"vocab_size": 400, "byte_fallback": True, "minloglevel": 2, "hard_vocab_limit": False}
    sentencepiece.SentencePieceTrainer.train(input=str(text), model_prefix=str(tmp_path / "t/tokenizer"), **options)
    (tmp_path / "t/tokenizer.vocab").unlink()
    (tmp_path / "t/tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    tokenizer = load_tokenizer(str(tmp_path / "t"))
    assert tokenizer.is_fast and tokenizer.decode(tokenizer("import os")["input_ids"][1:]).strip() == "import os"


def test_evaluation_prompts(packages, tokenizer, stored, run_main, tmp_path):
    """As inference/decode.py reads them, without a tokenizer; with one, the long prompts are left out."""
    out = tmp_path / "p.jsonl"
    code, said, err = run_main(prompts_command.main, "questions", "chat", "questions", "--count", 1, "--out", out)
    assert (code, err, said) == (0, "", f"{out}: 1 prompt each of questions, chat\n")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    found = [(row["kind"], row["source"].split("/")[0], len(row["messages"])) for row in rows]
    assert found == [("questions", "questions", 1), ("chat", "chat", 3)]
    assert [p.content for p in read_prompts(out)] == [row["messages"] for row in rows]

    longest = "Which river is the longest one that ends in a lake without an outlet?"
    most = len(tokenizer(longest)["input_ids"]) - 1
    limited = ("questions", "--count", 2, "--tokenizer", stored, "--prompt-tokens", most, "--out", out)
    assert run_main(prompts_command.main, *limited)[0] == 0 and longest not in out.read_text()
    code, _, err = run_main(prompts_command.main, *limited, "--count", 3)
    assert code == 2 and err == "error: there are only 2 such prompts in 'questions'; 3 are needed. Lower --count\n"


@pytest.mark.parametrize(
    "arguments, what",
    [
        (("chat", "--split", "test"), "--split test: evaluation prompts have no splits"),
        (("chat", "--prompt-tokens", 40), "--tokenizer and --prompt-tokens limit evaluation prompts together"),
        (("chat", "stdlib"), "only evaluation sets can be given together"),
        (("stdlib",), "--tokenizer is needed to cut windows of 'stdlib'"),
        (
            ("chats",),
            "source 'chats' is none of 'package:NAME', 'stdlib', 'readmes', 'books', 'manuals', 'passages', 'values', ",
        ),
    ],
)
def test_arguments_that_do_not_go_together(arguments, what, packages, run_main, tmp_path):
    code, _, err = run_main(prompts_command.main, *arguments, "--out", tmp_path / "p.jsonl")
    assert code == 2 and f"error: {what}" in err and not (tmp_path / "p.jsonl").exists()


def test_readmes(tokenizer):
    """Installed packages' descriptions, on which nothing can be trained by asking for the training split."""
    cut = prompts("readmes", "test", 12, 48, tokenizer, 0)
    assert cut == prompts("readmes", "test", 12, 48, tokenizer, 0) and len({p.text for p in cut}) == 12
    assert {p.source.split("/")[0] for p in cut} == {"readmes"} and "readmes/rich" in {
        d.path for d in sources.documents("readmes", "test")
    }
    for split in ("train", "validation"):
        with pytest.raises(ValueError, match=f"source 'readmes' has no text in split '{split}'"):
            sources.documents("readmes", split)


def test_long_texts():
    """Windows longer than any module, of held-out text."""
    tokenizer = load_tokenizer(str(TINY))
    cut = prompts("books", "test", 70, 3584, tokenizer, 0)
    assert {len(tokenizer(p.text)["input_ids"]) for p in cut} == {3584} and len({p.text for p in cut}) == 70
    held_out = "\n".join(
        d.text for source in ("stdlib", "package:sympy", "package:torch") for d in sources.documents(source, "test")
    )
    lines = {*held_out.split("\n"), ""}
    assert all({*prompt.text.split("\n")[:-1]} <= lines for prompt in cut)


@pytest.mark.parametrize("which", ["tokenizer", "with_start"])
def test_look_up_prompts(which, request):
    """They end in a question, or in the beginning of a passage, that only their middle answers."""
    tokenizer = request.getfixturevalue(which)
    for source in ("passages", "values"):
        cut = prompts(source, "test", 6, 1000, tokenizer, 0)
        assert cut[:2] == prompts(source, "test", 2, 1000, tokenizer, 0) and len({p.text for p in cut}) == 6
        for prompt in cut:
            assert prompt.tokens == tokenizer(prompt.text)["input_ids"] and len(prompt.tokens) == 1000
            end = "The access code is" if source == "values" else prompt.text[-60:]
            stated = prompt.text.index(end)
            assert prompt.text.endswith(end) and 0.02 < stated / len(prompt.text) < 0.8  # its first tokens are cut
            assert source == "passages" or re.match(r" \d{5}\.\n", prompt.text[stated + len(end) :])
