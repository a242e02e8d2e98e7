"""What is supervised, read as a person would mark it: ⟦ ⟧ around it."""

import itertools
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from draftsmith.common.data_sections import Data
from draftsmith.data.chat import encode as encode_row
from draftsmith.data.chat import encode_prompt, left_out
from draftsmith.data.chat_template import apply_template, check_template, with_arguments
from draftsmith.data.formats import Completion, read_sample
from draftsmith.data.rows import UnusableRow
from draftsmith.data.tokenized import template_for

ROOT = Path(__file__).parents[2]
SPECIAL = {
    "vicuna": ["<s>", "</s>"],
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "qwen3": ["<|im_start|>", "<|im_end|>"],
    "mistral": ["<s>", "</s>"],
    "chatml": ["<|im_start|>", "<|im_end|>"],
}
ENDS = {"vicuna": "</s>", "llama3": "<|eot_id|>", "qwen3": "<|im_end|>", "mistral": "</s>", "chatml": "<|im_end|>"}
CHAT = [
    {"role": "user", "content": "Add 1 and 2."},
    {"role": "assistant", "content": "3, I think."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes: naïve 日本."},
]


def tokenizer_of(name, template=True):
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models/tiny-lm")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[name]})
    tokenizer.eos_token = ENDS[name]
    tokenizer.bos_token = SPECIAL[name][0]
    folder = ROOT / ("recipes/templates" if name == "vicuna" else "tests/data/templates")
    tokenizer.chat_template = (folder / f"{name}.jinja").read_text() if template else None
    return tokenizer


def encode(*arguments, **options):
    """The only sample of a row."""
    [sample] = encode_row(*arguments, **options).samples
    return sample


def marked(sample, tokenizer):
    text, places = "", range(len(sample.ids))
    for supervised, run in itertools.groupby(places, lambda i: sample.supervised[i]):
        part = tokenizer.decode([sample.ids[i] for i in run])
        text += f"⟦{part}⟧" if supervised else part
    return text


SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


@pytest.mark.parametrize(
    "name, text",
    [
        (
            "vicuna",
            f"<s> {SYSTEM} USER: Add 1 and 2. ASSISTANT:⟦ 3, I think.</s>⟧ USER: Sure? "
            "ASSISTANT:⟦ Yes: naïve 日本.</s>⟧",
        ),
        (
            "llama3",
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nAdd 1 and 2.<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n⟦3, I think.<|eot_id|>⟧"
            "<|start_header_id|>user<|end_header_id|>\n\nSure?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Yes: naïve 日本.<|eot_id|>⟧",
        ),
        ("mistral", "<s>[INST] Add 1 and 2. [/INST]⟦ 3, I think.</s>⟧[INST] Sure? [/INST]⟦ Yes: naïve 日本.</s>⟧"),
        (
            "chatml",
            "<|im_start|>user\nAdd 1 and 2.<|im_end|>\n<|im_start|>assistant\n⟦3, I think.<|im_end|>⟧\n"
            "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n⟦Yes: naïve 日本.<|im_end|>⟧\n",
        ),
    ],
)
def test_supervised_tokens_as_marked_by_hand(name, text):
    tokenizer = tokenizer_of(name)
    assert marked(encode(CHAT, tokenizer, None, 10_000), tokenizer) == text


def test_an_answer_that_is_rendered_differently_later_is_a_sample_of_its_own():
    """Qwen3 drops the thinking of earlier turns: each answer is trained on behind its prompt when decoding."""
    tokenizer = tokenizer_of("qwen3")
    done = encode_row(CHAT, tokenizer, None, 10_000)
    first, second = "<|im_start|>user\nAdd 1 and 2.<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>user\nSure?"
    assert [marked(sample, tokenizer) for sample in done.samples] == [
        f"{first}3, I think.<|im_end|>\n{second}<|im_end|>\n<|im_start|>assistant\n"
        "⟦<think>\n\n</think>\n\nYes: naïve 日本.<|im_end|>⟧\n",
        f"{first}⟦<think>\n\n</think>\n\n3, I think.<|im_end|>⟧\n",
    ]
    assert len(done.notes) == 1 and "samples of their own" in done.notes[0]


def test_thinking_is_supervised_where_it_is_kept():
    tokenizer = tokenizer_of("qwen3")
    chat = [CHAT[0], {"role": "assistant", "content": "<think>\n1 + 2\n</think>\n\n3"}]
    assert marked(encode(chat, tokenizer, None, 10_000), tokenizer) == (
        "<|im_start|>user\nAdd 1 and 2.<|im_end|>\n<|im_start|>assistant\n⟦<think>\n1 + 2\n</think>\n\n3<|im_end|>⟧\n"
    )


def test_marks_and_comparison_agree(tokenizer):
    """The bundled target's template has generation marks; without them its renderings are compared."""
    by_marks = encode(CHAT, tokenizer, None, 10_000)
    plain = tokenizer.chat_template.replace("{% generation %}", "{% if true %}").replace("endgeneration", "endif")
    assert plain != tokenizer.chat_template
    assert encode(CHAT, tokenizer, plain, 10_000) == by_marks
    assert "⟦3, I think.<|end|>⟧" in marked(by_marks, tokenizer)


def test_cut_not_dropped():
    tokenizer = tokenizer_of("chatml")
    whole = encode(CHAT, tokenizer, None, 10_000)
    first = whole.supervised.index(True)
    for length in (first, first + 1, first + 3):
        cut = encode(CHAT, tokenizer, None, length)
        assert (cut.ids, cut.supervised) == (whole.ids[:length], whole.supervised[:length])
        assert sum(cut.supervised) == length - first


@pytest.mark.parametrize("name", SPECIAL)
def test_a_cut_answer_did_not_end(name):
    """Its end token stands in the text, for the next turn; the assistant has not said it."""
    tokenizer = tokenizer_of(name)

    def marked_last(reasons):  # beside it, a template may make a sample of an earlier answer
        return marked(encode_row(CHAT, tokenizer, None, 999, reasons).samples[0], tokenizer)

    whole = marked_last(())
    for reasons in (["stop", "length"], ["length", "stop"], ["length", "length"], ["stop", "stop"], []):
        expected = whole
        for answer, reason in zip(("3, I think.", "Yes: naïve 日本."), reasons, strict=False):
            begin = expected.index(answer)
            end = expected.find("⟧", begin)
            if reason == "length" and expected.rfind("⟦", 0, begin) > expected.rfind("⟧", 0, begin):  # it is marked
                said = expected[begin:end]
                cut = said.removesuffix(ENDS[name])
                assert cut != said
                expected = expected[:begin] + cut + "⟧" + ENDS[name] + expected[end + 1 :]
        assert marked_last(reasons) == expected


def test_documents_and_completions():
    tokenizer = tokenizer_of("chatml", template=False)
    document = encode("import os\n", tokenizer, None, 100)
    assert marked(document, tokenizer) == "⟦import os\n⟧"
    completion = encode(Completion("def f(", "x): pass"), tokenizer, None, 100)
    assert marked(completion, tokenizer) == "def f(⟦x): pass<|im_end|>⟧"


# ---- rows

SHAREGPT = [{"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in CHAT]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT},
        {"messages": [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in CHAT]},
        {"conversations": SHAREGPT},
        {"conversations": CHAT, "id": 7},
        {"conversations": [{"from": "gpt", "value": "cut off"}, *SHAREGPT]},
        {"messages": CHAT, "prompt": None, "completion": None, "text": None},
    ],
)
def test_formats(row):
    assert read_sample(row) == CHAT


def test_plain_formats():
    assert read_sample({"text": "x", "messages": None}) == "x"
    assert read_sample({"prompt": "a", "completion": "b"}) == Completion("a", "b")
    system = {"role": "system", "content": "s"}
    assert read_sample({"messages": [system, {"role": "assistant", "content": "hi"}, *CHAT]}) == [system, *CHAT]


@pytest.mark.parametrize(
    "row, message",
    [
        ({"question": 1, "answer": 2}, "it has question, answer; needed is one of messages, conversations, prompt and"),
        ({"messages": "hello"}, "messages is a text; a list of messages is needed"),
        ({"messages": [{"role": "user"}]}, "a turn has no 'role' or no 'content'"),
        ({"messages": [None]}, "a turn has no 'role' or no 'content'"),
        ({"conversations": [*SHAREGPT, {"from": "bard", "value": "y"}]}, "a turn is from an unknown speaker"),
        ({"conversations": [{"from": ["human"], "value": "y"}]}, "a turn is from an unknown speaker"),
        ({"messages": [{"role": "model", "content": "y"}]}, "a turn has an unknown role"),
        ({"messages": [{"role": None, "content": "y"}]}, "a turn has an unknown role"),
        ({"messages": [{"role": {}, "content": "y"}]}, "a turn has an unknown role"),
        ({"messages": [{"role": "user", "content": 5}]}, "a turn's 'content' is a number; a text is needed"),
        ({"messages": [{"role": "user", "content": None}]}, "a turn's 'content' is null"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a turn's 'content' is a list"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "a turn's 'content' is a number"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "'content' holds half of a surrogate pair"),
        ({"messages": []}, "an empty conversation"),
        ({"conversations": []}, "an empty conversation"),
        ({"conversations": [{"from": "gpt", "value": "alone"}]}, "a conversation without a turn of the user"),
        ({"messages": None, "text": None, "id": 3}, "it has id; needed is one of messages"),
        ({}, "it has nothing; needed is one of messages"),
        ({"text": 5}, "text is a number; a text is needed"),
        ({"text": ""}, "text is an empty text; a text is needed"),
        ({"prompt": "x", "completion": ["y"]}, "prompt is a text; a list of messages is needed"),
        ({"prompt": "x", "completion": None}, "it has prompt; needed is one of"),
    ],
)
def test_unusable_rows(row, message):
    """The reason holds nothing of the row, so that equal reasons add up."""
    with pytest.raises(UnusableRow, match=message):
        read_sample(row)


# ---- errors


def test_no_template_is_an_error():
    with pytest.raises(ValueError, match=r"has no chat template; give the recipe a data.template"):
        encode(CHAT, tokenizer_of("vicuna", template=False), None, 100)


def test_a_template_that_opens_a_thinking_block_is_an_error():
    """The prompt opens a thinking block that the stored answer does not have: no guess, and no mask of ones."""
    template = tokenizer_of("chatml").chat_template.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")
    with pytest.raises(ValueError, match=r"assistant's part cannot be found; give the recipe a data.template"):
        encode(CHAT, tokenizer_of("chatml"), template, 100)


def test_a_template_that_refuses_a_chat():
    chat = [{"role": "system", "content": "x"}, *CHAT]
    with pytest.raises(UnusableRow, match="refuses this chat: only user and assistant roles"):
        encode(chat, tokenizer_of("mistral"), None, 100)


FAILS = {
    "{{ 1 / 0 }}": r"fails on this chat: ZeroDivisionError \(division by zero\)",
    "{{ nothing.at.all }}": "refuses this chat: 'nothing' is undefined",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "fails on this chat: RecursionError",
    "{{ messages[0]['content'] + 5 }}": "fails on this chat: TypeError",
    "{% for i in range(1000000) %}x{% endfor %}": "fails on this chat: OverflowError",
    "{{ raise_exception('no') }}": "refuses this chat: no",
}


@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize("failure", FAILS)
def test_templates_that_raise(failure, marks):
    """On one chat, it is that row's fault; on a plain one too, it is the template's."""
    plain, vicuna = (tokenizer_of(name).chat_template for name in ("chatml", "vicuna"))
    if marks:
        plain = vicuna
    some = "{% if messages | length > 2 %}" + failure + "{% endif %}" + plain
    with pytest.raises(UnusableRow, match=FAILS[failure]):
        encode(CHAT, tokenizer_of("chatml"), some, 100)
    with pytest.raises(ValueError, match=FAILS[failure]) as error:
        encode(CHAT, tokenizer_of("chatml"), failure + plain, 100)
    assert not isinstance(error.value, UnusableRow)


@pytest.mark.parametrize(
    "template, message",
    [
        ("{% for %}", r"data\.template: no Jinja template \(line 1: "),
        ("\n{{ messages", r"no Jinja template \(line 2: "),
        ("{% generation %}x", r"no Jinja template \(line 1: "),
        ("{{ x | no_such_filter }}", r"no Jinja template \(line 1: No filter named"),
        ("{% break %}", "no Jinja template"),
        ("{{ " + "(" * 100_000 + " }}", r"no Jinja template \("),
        ("{% if x %}" * 3000 + "{% endif %}" * 3000, r"no Jinja template \("),
        ("x" * 2_000_000, "2,000,000 characters; a chat template has a few thousand"),
    ],
)
def test_templates_that_are_invalid(template, message):
    with pytest.raises(ValueError, match=message) as error:
        check_template(template)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize("what", ["9**(9**9)", "'x'|center(10**10)|length", "'x' * 10**10"])
def test_constants_are_not_computed(what):
    began = time.process_time()
    for template in (f"{{{{ {what} }}}}", f"{{% set x = {what} %}}", f"{{% if {what} %}}{{% endif %}}"):
        check_template(template)
    assert time.process_time() - began < 1


def test_the_tokenizers_own_template_is_checked():
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = "{% for %}"
    with pytest.raises(ValueError, match="the tokenizer's own chat template: no Jinja template") as error:
        encode(CHAT, tokenizer, None, 100)
    assert not isinstance(error.value, UnusableRow)
    several = tokenizer_of("chatml")
    several.chat_template = {"default": several.chat_template, "tool_use": "{{ 1 / 0 }}"}
    assert encode(CHAT, several, None, 999) == encode(CHAT, tokenizer_of("chatml"), None, 999)


def test_of_several_templates_tools_have_their_own():
    """As in decoding, where transformers chooses it."""
    several, one = tokenizer_of("chatml"), tokenizer_of("chatml")
    one.chat_template = "{{ tools[0].function.name }}" + one.chat_template
    several.chat_template = {"default": several.chat_template, "tool_use": one.chat_template}
    tools = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}]
    with_tools = encode(CHAT, several, None, 999, tools=tools)
    assert with_tools == encode(CHAT, one, None, 999, tools=tools) != encode(CHAT, several, None, 999)
    prompt = encode_prompt(CHAT[:1], several, tools=tools)
    assert with_tools.ids[: len(prompt)] == prompt and left_out(CHAT[:1], several, tools) == set()


def test_a_template_may_need_arguments_of_calls_as_text():
    """DeepSeek's joins them to others."""
    tokenizer = tokenizer_of("chatml")
    calls = "{% for call in m.tool_calls or [] %}{{ call.function.name + call.function.arguments }}{% endfor %}"
    tokenizer.chat_template = (
        f"{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}{calls}<|im_end|>\n{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1, "b": "é"}'}}]}
    rows = [CHAT[0], call, {"role": "tool", "content": "3"}, CHAT[1]]
    content = read_sample({"messages": rows})
    assert content[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": "é"}
    sample = encode(content, tokenizer, None, 999)
    assert '⟦add{"a": 1, "b": "é"}<|im_end|>⟧' in marked(sample, tokenizer)
    prompt = encode_prompt(content[:3], tokenizer)
    assert sample.ids[: len(prompt)] == prompt and left_out(content[:3], tokenizer) == set()


def test_no_sample_without_a_label_beside_others():
    """Qwen3 renders an answer otherwise once another turn follows, which makes it a sample of its own."""
    tokenizer, template = tokenizer_of("qwen3"), (ROOT / "tests/hub/templates/qwen3.jinja").read_text()
    for chat, count in ((CHAT[:3], 1), (CHAT, 2), ([*CHAT, CHAT[2]], 2)):
        samples = encode_row(chat, tokenizer, template, 999).samples
        assert len(samples) == count and all(any(sample.supervised) for sample in samples)
    lengths = [len(sample.ids) for sample in samples]
    short = encode_row([*CHAT, CHAT[2]], tokenizer, template, min(lengths) - 3).samples
    assert len(short) == 1 and any(short[0].supervised), "the other one's answer lies behind the cut"
    assert len(encode_row(CHAT, tokenizer, template, 4).samples) == 1


@pytest.mark.parametrize("thinks", [True, False])
def test_arguments_of_a_template(thinks):
    """Qwen3's own, whose prompts end in an empty thinking block where thinking is off: one text renders a chat as the
    template does with the argument."""
    tokenizer, template = tokenizer_of("chatml"), (ROOT / "tests/hub/templates/qwen3.jinja").read_text()
    one = with_arguments(template, {"enable_thinking": thinks})
    check_template(one)
    for prompt in (True, False):
        options = {"add_generation_prompt": prompt, "tokenize": False}
        wanted = tokenizer.apply_chat_template(CHAT, chat_template=template, enable_thinking=thinks, **options)
        assert apply_template(CHAT, tokenizer, one, **options) == wanted
    block = apply_template(CHAT[:1], tokenizer, one, add_generation_prompt=True, tokenize=False)
    assert block.endswith("<think>\n\n</think>\n\n") == (not thinks)
    arguments = {"enable_thinking": thinks, "style": 'a "b"', "n": 2}
    section = SimpleNamespace(template=template, template_arguments=arguments)
    assert template_for(section, tokenizer).endswith(template) and "set n = 2" in template_for(section, tokenizer)
    quoted = with_arguments("\n{{ style }}", {"style": 'a "b"'})
    assert apply_template(CHAT, tokenizer, quoted, tokenize=False) == '\na "b"'
    section.template_arguments = {}
    assert template_for(section, tokenizer) == template


def test_arguments_need_names():
    with pytest.raises(ValueError, match="template_arguments"):
        Data(train=[{"source": "stdlib"}], validation=[{"source": "stdlib"}], template_arguments={"a b": True})
