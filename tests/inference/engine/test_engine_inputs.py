"""Invalid arguments are rejected in one line, before anything runs."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from draftsmith.inference.engine.engine import Request, SpeculativeDecoder
from draftsmith.inference.engine.protocol import PlainDrafter
from draftsmith.inference.engine.step import Step
from draftsmith.inference.engine.text import decode_text
from draftsmith.inference.verify.sampling import Sampling


@pytest.fixture(scope="module")
def decoder(make_target):
    return SpeculativeDecoder(make_target("llama"))


@pytest.mark.parametrize("mode", ["sampel", "", "Greedy", None, 3, ["sample"]])
def test_unknown_modes(decoder, mode):
    target = decoder.target
    for call in (
        lambda: decoder.generate([[1]], 3, mode=mode),
        lambda: decoder.generate([], 3, mode=mode),
        lambda: decoder.serve([Request([1], 3)], 1, mode=mode),
        lambda: Step(target, PlainDrafter(target.device), mode, 1, 16),
    ):
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value) == f"mode {mode!r}: must be one of greedy, sample, mss, typical"


WRONG = [
    ({"prompt": "abc"}, "prompt 2 is of type str; give a list of token ids"),
    ({"prompt": 5}, "prompt 2 is of type int; give a list of token ids"),
    ({"prompt": None}, "prompt 2 is of type NoneType; give a list of token ids"),
    ({"prompt": torch.tensor([[1, 2]])}, "prompt 2 is of type Tensor; give a list of token ids"),
    ({"prompt": np.array(1)}, "prompt 2 is of type ndarray; give a list of token ids"),
    ({"prompt": np.array([1, 2.5])}, "prompt 2: token 1.0 is not a whole number"),
    ({"prompt": torch.tensor([True, False])}, "prompt 2: token True is not a whole number"),
    ({"prompt": [1, np.int64(61)]}, "prompt 2: token 61 is not in the target's vocabulary (0 to 60)"),
    ({"prompt": [1, np.bool_(True)]}, "prompt 2: token np.True_ is not a whole number"),
    ({"prompt": [1, "2"]}, "prompt 2: token '2' is not a whole number"),
    ({"prompt": [1, True]}, "prompt 2: token True is not a whole number"),
    ({"prompt": [1, 2.0]}, "prompt 2: token 2.0 is not a whole number"),
    ({"prompt": [[1, 2]]}, "prompt 2: token [1, 2] is not a whole number"),
    ({"prompt": [1, -1]}, "prompt 2: token -1 is not in the target's vocabulary (0 to 60)"),
    ({"prompt": [61]}, "prompt 2: token 61 is not in the target's vocabulary (0 to 60)"),
    ({"prompt": [10**30]}, f"prompt 2: token {10**30} is not in the target's vocabulary (0 to 60)"),
    ({"max_new_tokens": 2.0}, "prompt 2: max_new_tokens 2.0: must be a whole number"),
    ({"max_new_tokens": True}, "prompt 2: max_new_tokens True: must be a whole number"),
    ({"max_new_tokens": None}, "prompt 2: max_new_tokens None: must be a whole number"),
    ({"max_new_tokens": "9"}, "prompt 2: max_new_tokens '9': must be a whole number"),
    ({"max_new_tokens": -1}, "prompt 2: max_new_tokens -1: must be at least 0"),
    ({"sampling": {"seed": 1}}, "prompt 2: sampling is of type dict; give a Sampling"),
    ({"sampling": None}, "prompt 2: sampling is of type NoneType; give a Sampling"),
    (
        {"sampling": Sampling(logit_bias={61: 1})},
        "prompt 2: logit_bias: token 61 is not in the target's vocabulary (0 to 60)",
    ),
    (
        {"sampling": Sampling(presence_penalty=1)},
        "prompt 2: mode greedy has no logit_bias, presence and frequency penalty; take mode sample with temperature 0, "
        "which is greedy, too",
    ),
    ({"stop_ids": 5}, "prompt 2: stop_ids 5: must be a set of token ids, or None"),
    ({"stop_ids": "5"}, "prompt 2: stop_ids '5': must be a set of token ids, or None"),
    ({"stop_ids": {61}}, "prompt 2: stop id 61 is not in the target's vocabulary (0 to 60)"),
    ({"stop_ids": [-1]}, "prompt 2: stop id -1 is not in the target's vocabulary (0 to 60)"),
    ({"stop_ids": {"5"}}, "prompt 2: stop id '5' is not a whole number"),
    ({"stop_strings": "ab"}, "prompt 2: stop_strings 'ab': must be a list of texts"),
    ({"stop_strings": [1]}, "prompt 2: stop_strings [1]: must be a list of texts"),
    ({"stop_strings": None}, "prompt 2: stop_strings None: must be a list of texts"),
    ({"stop_strings": ("x", "")}, "prompt 2: an empty stop string would end every text; leave it out"),
    ({"stop_strings": ["a"]}, "prompt 2: stop strings need a target with a tokenizer"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG, ids=[message[10:40] for _, message in WRONG])
def test_requests(decoder, fields, message):
    request = Request(**{"prompt": [1, 2], "max_new_tokens": 3} | fields)
    for max_length in (None, 20):  # checked at once, or when its turn comes
        with pytest.raises(ValueError) as error:
            decoder.serve([Request([1], 3), request], 1, max_length=max_length)
        assert str(error.value) == message
    with pytest.raises(ValueError, match="prompt 2 is of type list; give a Request"):
        decoder.serve([Request([1], 3), [1, 2]], 1)


def test_numbers_of_numpy_and_torch(decoder):
    """Tensors, arrays and NumPy integers are accepted like Python's."""
    ids = [1, 2, 3]
    wanted = [decoder.generate([ids], 5, stop_ids=frozenset())[0].tokens]
    for prompt in (np.array(ids), np.array(ids, dtype=np.uint8), torch.tensor(ids), [np.int64(i) for i in ids]):
        for limit in (5, np.int64(5), np.uint8(5)):
            results = decoder.generate([prompt], limit, batch_size=np.int32(1), stop_ids=frozenset())
            assert [result.tokens for result in results] == wanted
    (long,) = decoder.generate([[1] * 200], np.uint8(100), stop_ids=frozenset())
    assert len(long.tokens) == 56 and long.finish_reason == "context"


@pytest.mark.parametrize("size", [2.0, True, "2", 10**20 + 0.5, 0, -1])
def test_batch_sizes(decoder, size):
    with pytest.raises(ValueError) as error:
        decoder.generate([[1]], 3, batch_size=size)
    expected = "at least 1" if type(size) is int else "a whole number"
    assert str(error.value) == f"batch_size {size!r}: must be {expected}"


@pytest.mark.parametrize("length", [20.0, True, "20", -1])
def test_max_lengths(decoder, length):
    with pytest.raises(ValueError) as error:
        decoder.serve([Request([1], 3)], 1, max_length=length)
    assert str(error.value) == f"max_length {length!r}: must be a whole number of at least 0"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_strings": "ab"}, "prompt 1: stop_strings 'ab': must be a list of texts"),
        ({"sampling": 0.7}, "sampling is of type float; give a Sampling, or one for each prompt"),
        ({"sampling": {"temperature": 1}}, "sampling is of type dict; give a Sampling, or one for each prompt"),
        ({"sampling": []}, "0 samplings for 1 prompt; give one, or one for each"),
        ({"sampling": [0.7]}, "prompt 1: sampling is of type float; give a Sampling"),
        ({"stop_ids": [5, 99]}, "prompt 1: stop id 99 is not in the target's vocabulary (0 to 60)"),
    ],
)
def test_generate(decoder, options, message):
    with pytest.raises(ValueError) as error:
        decoder.generate([[1]], 3, **options)
    assert str(error.value) == message
    assert decoder.generate([[1]], 3, batch_size=10**9, stop_ids=frozenset())[0].tokens


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [float("nan"), float("inf"), 1e40, -1, -1e-300, True, "1", None]),
        ("top_k", [2.0, True, "5", None, -1, -(10**21)]),
        ("top_p", [float("nan"), float("inf"), 0, 0.0, 1.1, True, "1", None]),
        ("min_p", [float("nan"), -1e-300, 1, 1.0, False, None]),
        ("repetition_penalty", [float("nan"), float("inf"), 0, 1e-300, 1e-40, 1e40, 0.009, 101, True, None]),
        ("presence_penalty", [float("nan"), 2.1, -2.1, True, "1", None]),
        ("frequency_penalty", [float("nan"), 2.1, -2.1, True, "1", None]),
        ("logit_bias", [{"5": 1}, {5: "1"}, {True: 1}, {5: True}, {5: 100.1}, {5: float("nan")}, {5.0: 1}, 5, None]),
        ("epsilon", [float("nan"), float("inf"), 0, True, None]),
        ("delta", [float("nan"), float("inf"), 0, 1.1, True, "1"]),
        ("seed", [1 << 62, 1.0, True, None, -1]),
    ],
)
def test_sampling_parameters(field, values):
    for value in values:
        with pytest.raises(ValueError, match=f"^{field} .*: must be [^\n]*$"):
            Sampling(**{field: value})
    given = {np.int64(5): np.float32(2)}
    sampling = Sampling(temperature=np.float32(0.5), top_k=np.int64(3), seed=(1 << 62) - 1, logit_bias=given)
    given.clear()
    assert sampling.logit_bias == {5: 2.0} and len({sampling, replace(sampling, logit_bias={})}) == 2


@pytest.mark.parametrize("mode", ["sample", "mss", "typical"])
def test_extreme_parameters_behave_as_their_limit(decoder, mode):
    """Temperatures and top-p near 0 are greedy decoding; cut-offs that remove nothing change nothing. In a fresh row,
    and in one that held another request."""
    prompts = [[7, 3, 19], [9], [58, 1, 30, 12]]

    def texts(all_parameters, rows):
        """Of all prompts with each of the parameters, in rows that are refilled."""
        requests = [Request(p, 8, Sampling(**each, seed=5), frozenset()) for each in all_parameters for p in prompts]
        return [result.tokens for result in decoder.serve(requests, rows, mode=mode)]

    greedy = [result.tokens for result in decoder.generate(prompts, 8, stop_ids=frozenset())]
    coldest = [{"temperature": t} for t in (0, 1e-300, 1e-40, 1e-30, 1e-12)] + [{"top_p": 1e-300}, {"top_p": 1e-40}]
    coldest += [{"min_p": 1 - 1e-12}, {"temperature": 1e-9, "top_p": 0.5, "min_p": 0.1}]
    for rows in (3 * len(coldest), 3):  # fresh, and behind another request
        assert texts(coldest, rows) == greedy * len(coldest)
    nothing = [{}, {"top_k": 10**21}, {"min_p": 1e-300}, {"top_k": 61, "top_p": 1 - 1e-12}]
    plain = texts([{}], 1)
    for rows in (3 * len(nothing), 1):
        assert texts(nothing, rows) == plain * len(nothing)
    decoder.generate(prompts, 8, mode=mode, sampling=Sampling(epsilon=1e-300), stop_ids=frozenset())


def test_text_and_chat_prompts(tiny_lm):
    """A chat template's result as a prompt, alone or a batch of one; a text without stop token and stop string."""
    import draftsmith

    target = draftsmith.load_target(str(tiny_lm))
    decoder = draftsmith.SpeculativeDecoder(target)
    messages = [{"role": "user", "content": "Name a module."}]
    ids = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    forms = [ids, torch.tensor(ids)]
    for options in ({}, {"return_tensors": "pt"}, {"return_tensors": "np"}):
        forms.append(target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options))
    assert len({tuple(result.tokens) for result in decoder.generate(forms, 12)}) == 1

    (whole,) = decoder.generate([ids], 12, stop_ids=frozenset())
    assert whole.text == decode_text(target.tokenizer, whole.tokens)
    stop = whole.text.strip()[3:6]
    assert stop
    (cut,) = decoder.generate([ids], 12, stop_ids=frozenset(), stop_strings=["not there", stop])
    assert cut.text == whole.text[: whole.text.find(stop)] and cut.finish_reason == "stop"
    (request,) = decoder.serve([draftsmith.Request(ids, 12, stop_ids=frozenset())], 1)
    assert request == whole
    with pytest.raises(ValueError, match="has no tokenizer"):
        _ = draftsmith.Generation([1]).text
