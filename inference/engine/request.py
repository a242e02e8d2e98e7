"""A text to decode, what came of it, and the checks of its fields."""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from draftsmith.inference.engine.logprobs import LOGPROBS_MODES, MOST, LogprobsMode, TokenLogprobs
from draftsmith.inference.engine.text import TextStream, answer_tokens
from draftsmith.inference.verify.sampling import Sampling
from draftsmith.models.target import Target


@dataclass(frozen=True)
class Request:
    """One text to decode. Its fields are checked when its decoding begins.

    prompt: token ids, at least one; a one-dimensional tensor or array is converted to a list, and of what a tokenizer
        or its ``apply_chat_template`` returns for one text, the ``input_ids`` are taken.
    max_new_tokens: limit of new tokens.
    sampling: sampling parameters, for modes other than greedy; temperature 1 if left out. Greedy decoding with
        penalties or biases is mode ``sample`` with temperature 0.
    stop_ids: token ids that end the text; the target's own if None.
    stop_strings: strings that end the text; the token that completes one is the last. Needs the target's tokenizer.
    max_draft_nodes: nodes that are drafted in each of its steps, at most, by it or any text decoded with it (static
        steps: the next smaller of their sizes); 0: plain decoding. Only in greedy decoding and coupled sampling, whose
        texts do not depend on it.
    logprobs: for each new token its log-probability, and those of so many of the most likely tokens, 0 to 20; none if
        None. The same with drafts and without, see :class:`~draftsmith.inference.engine.logprobs.TokenLogprobs`.
    prompt_logprobs: the same for the prompt's tokens, always raw.
    logprobs_mode: those of new tokens before (``raw_logprobs``) or after the sampling parameters are applied
        (``processed_logprobs``); the same in mode greedy, which has none.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: frozenset[int] | None = None
    stop_strings: Sequence[str] = ()
    max_draft_nodes: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw_logprobs"

    def __post_init__(self) -> None:
        given: Any = self.prompt
        prompt: Any = given["input_ids"] if isinstance(given, Mapping) and "input_ids" in given else given
        if prompt is not given and len(prompt) == 1 and not is_whole(prompt[0]):  # a batch of one
            prompt = prompt[0]
        if getattr(prompt, "ndim", None) == 1:
            prompt = prompt.tolist()
        object.__setattr__(self, "prompt", prompt)
        if is_whole(self.max_new_tokens):
            object.__setattr__(self, "max_new_tokens", int(self.max_new_tokens))  # sums of NumPy integers may overflow


@dataclass
class Generation:
    """Result of one request.

    tokens: new tokens, up to and including the first stop id.
    accepted: committed tokens of each step, bonus token included, after trimming; without the prefill's token.
    drafted_by: for each token, the bits of the drafter's ``sources`` that proposed it (1 if it names none); 0 if the
        token is the target's own.
    finish_reason: ``stop`` (a stop id or string), ``length`` (the limit), ``context`` (the target's last position) or
        ``cancelled`` (by ``on_tokens``).
    drafted: number of proposed nodes, roots excluded, padding too unless the drafter names its ``sources``.
    proposed, accepted_from: for each source, how many nodes it proposed, and how many of these were committed; a node
        proposed by several sources counts for each.
    logprobs, prompt_logprobs: of the new tokens and of the prompt's, if the request asks for them.
    seconds: from the beginning of the prompt's pass to the end of the text, other rows' work included.
    source: the target, the stop ids and the stop strings, for ``text``.
    """

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafted_by: list[int] = field(default_factory=list)
    finish_reason: str = ""
    drafted: int = 0
    proposed: list[int] = field(default_factory=list)
    accepted_from: list[int] = field(default_factory=list)
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    seconds: float = field(default=0.0, compare=False)
    source: "tuple[Target, Collection[int], Sequence[str]] | None" = field(default=None, compare=False, repr=False)

    @property
    def text(self) -> str:
        """The text of the tokens: without the stop token that ends it, and up to a stop string, which is no part of it.
        Raises ValueError: the target has no tokenizer."""
        if self.source is None or self.source[0].tokenizer is None:
            raise ValueError("the target has no tokenizer, which a text needs; take result.tokens")
        target, stops, strings = self.source
        stream = TextStream(target.tokenizer, strings)
        return stream.add(answer_tokens(self.tokens, stops)) + stream.end()


@dataclass
class Counts:
    """What a call of the engine ran.

    steps: steps of the batch.
    prefill_passes: forward passes of prompts, of as many prompts each as begin together.
    prefilled_tokens: tokens of prompts that were run, without padding.
    reused_tokens: tokens of prompts whose keys and values were in the cache already.
    idle_row_steps: rows of steps, summed over the steps, in which no text was being decoded.
    """

    steps: int = 0
    prefill_passes: int = 0
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    idle_row_steps: int = 0


def checked_length(request: Request, number: int, target: Target) -> int:
    """Tokens of a request's prompt and answer, by the ``number`` it has, from 0. Raises ValueError: it is not valid."""
    where, context, vocabulary = f"prompt {number + 1}", target.context, target.vocab_size
    if not isinstance(request, Request):
        raise ValueError(f"{where} is of type {type(request).__name__}; give a Request")
    if not _is_list(request.prompt):
        raise ValueError(f"{where} is of type {type(request.prompt).__name__}; give a list of token ids")
    prompt = len(request.prompt)
    if not prompt:
        raise ValueError(f"{where} is empty; give it at least one token")
    if wrong := _wrong_id(request.prompt, vocabulary):
        raise ValueError(f"{where}: token {wrong}")
    if prompt >= context:
        raise ValueError(
            f"{where} has {prompt} tokens; the target's context holds {context} with the answer; shorten it"
        )
    if not is_whole(request.max_new_tokens):
        raise ValueError(f"{where}: max_new_tokens {request.max_new_tokens!r}: must be a whole number")
    if request.max_new_tokens < 0:
        raise ValueError(f"{where}: max_new_tokens {request.max_new_tokens}: must be at least 0")
    if not isinstance(request.sampling, Sampling):
        raise ValueError(f"{where}: sampling is of type {type(request.sampling).__name__}; give a Sampling")
    if wrong := _wrong_id(request.sampling.logit_bias, vocabulary):
        raise ValueError(f"{where}: logit_bias: token {wrong}")
    stops, strings = request.stop_ids, request.stop_strings
    if stops is not None and not (isinstance(stops, Set) or _is_list(stops)):
        raise ValueError(f"{where}: stop_ids {stops!r}: must be a set of token ids, or None")
    if wrong := _wrong_id(stops or (), vocabulary):
        raise ValueError(f"{where}: stop id {wrong}")
    if not (_is_list(strings) and all(isinstance(string, str) for string in strings)):
        raise ValueError(f"{where}: stop_strings {strings!r}: must be a list of texts")
    if "" in strings:
        raise ValueError(f"{where}: an empty stop string would end every text; leave it out")
    bound = request.max_draft_nodes
    if bound is not None and not (is_whole(bound) and bound >= 0):
        raise ValueError(f"{where}: max_draft_nodes {bound!r}: must be a whole number of at least 0")
    for name in ("logprobs", "prompt_logprobs"):
        likely = getattr(request, name)
        if likely is not None and not (is_whole(likely) and 0 <= likely <= MOST):
            raise ValueError(f"{where}: {name} {likely!r}: must be a whole number from 0 to {MOST}, or None")
    if request.logprobs_mode not in LOGPROBS_MODES:
        raise ValueError(f"{where}: logprobs_mode {request.logprobs_mode!r}: must be {' or '.join(LOGPROBS_MODES)}")
    if strings and target.tokenizer is None:
        raise ValueError(f"{where}: stop strings need a target with a tokenizer")
    return min(prompt + request.max_new_tokens, context)


def is_whole(value: object) -> bool:
    """Whether it is an integer, NumPy's included, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_list(value: object) -> bool:
    """Whether it is a sequence other than a string."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _wrong_id(ids: Collection[int], vocabulary: int) -> str:
    """Error message for the first value that is not a token id; empty if all are."""
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocabulary):
        return ""
    for value in ids:
        if not is_whole(value):
            return f"{value!r} is not a whole number"
        if not 0 <= value < vocabulary:
            return f"{value} is not in the target's vocabulary (0 to {vocabulary - 1})"
    return ""  # integers of another class, such as NumPy's
