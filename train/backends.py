"""Who answers the conversations of train/distill.py: our own engine, or a server with OpenAI's protocol."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from draftsmith.common.command import counted
from draftsmith.data.chat import encode_prompt, encode_user_turn
from draftsmith.data.endpoint import Answer, Server, in_threads, not_sent_line
from draftsmith.data.formats import TokenIds
from draftsmith.data.rows import UnusableRow
from draftsmith.data.seeds import CUT_THINKING, EMPTY, TOO_LONG, Conversation, RequestFailed, ask_for_user_turn
from draftsmith.data.tokenized import template_for
from draftsmith.inference.commands.memory import rows_that_fit
from draftsmith.inference.engine.cache import free_bytes
from draftsmith.inference.engine.conversations import serve_conversations
from draftsmith.inference.engine.engine import Generation, Request, SpeculativeDecoder
from draftsmith.inference.engine.text import answer_text
from draftsmith.inference.load import load_drafter
from draftsmith.inference.verify.sampling import Sampling
from draftsmith.models.options import choose_device
from draftsmith.models.tokenizer import load_tokenizer
from draftsmith.train.launch import console, own_cores
from draftsmith.train.ranks import own_device
from draftsmith.train.sections.distill import DistillRecipe

TEMPLATE = "chat template"  # a reason of a failure, beside those of data/endpoint.py
End = Callable[[Conversation], None]
# The last argument is the manifest's facts, to which a backend adds what it finds out.
Backend = Callable[[DistillRecipe, Iterator[Conversation], End, dict[str, Any]], None]


def sampling_of(recipe: DistillRecipe, conversation: Conversation) -> Sampling:
    """Sampling parameters of the next message, with a seed of the prompt and the turn, whatever else is decoded."""
    digest = hashlib.sha256(f"{recipe.run.seed} {conversation.seed.id} {conversation.turn}".encode()).digest()
    d, seed = recipe.decoding, int.from_bytes(digest[:8], "big") >> 2
    if conversation.speaker == "user":
        return Sampling(d.user_temperature, seed=seed)
    return Sampling(d.temperature if d.mode == "sample" else 0.0, top_k=d.top_k, top_p=d.top_p, seed=seed)


def check_has_template(tokenizer: PreTrainedTokenizerBase, template: str | None) -> None:
    """Refuse a tokenizer without a chat template, if the recipe names none."""
    if not (template or tokenizer.chat_template):
        raise ValueError(
            "the target's tokenizer has no chat template; set data.template, for example to "
            "recipes/templates/vicuna.jinja"
        )


def by_engine(recipe: DistillRecipe, conversations: Iterator[Conversation], end: End, facts: dict[str, Any]) -> None:
    """Answers of our own engine, ``engine.batch_size`` conversations at a time; the fact of that name says how many."""
    t, e, d = recipe.target, recipe.engine, recipe.decoding
    assert t is not None
    torch.set_num_threads(e.threads or own_cores())
    # Template and drafter are checked before the target's weights are loaded. The template is never the drafter's: a
    # drafter changes no answer.
    tokenizer = load_tokenizer(t.name, t.revision, t.trust_remote_code)
    template = template_for(recipe.data, tokenizer)
    check_has_template(tokenizer, template)
    target, drafter = load_drafter(e.drafter, target_name=t.name, **t.options, device=choose_device(own_device()))
    if target.adapter:
        raise ValueError(
            f"engine.drafter={e.drafter}: its adapter changes the target's answers; use a drafter without one, or none"
        )
    if template and target.tokenizer is not None:
        target.tokenizer.chat_template = template  # what it puts after an answer ends one
    if target.end_warning:
        console.print(target.end_warning, style="yellow", markup=False)
    longest = min(target.context, e.max_length)

    @cache
    def ends_with_stop_id(closing: str) -> bool:
        ids = tokenizer(closing, add_special_tokens=False)["input_ids"]
        return len(ids) == 1 and ids[0] in target.stop_ids

    def next_request(conversation: Conversation) -> Request | None:
        assert conversation.pending is not None
        tokens, closing = d.max_new_tokens, None
        try:
            if conversation.speaker == "user":
                prompt, closing = encode_user_turn(conversation.pending, tokenizer, template)
                tokens = d.user_tokens
            else:
                prompt = encode_prompt(conversation.pending, tokenizer, template)
            if len(prompt) >= longest:
                raise RequestFailed(TOO_LONG, f"{len(prompt)} tokens before the answer, {longest} allowed with it")
        except (UnusableRow, RequestFailed) as error:
            conversation.fail(error if isinstance(error, RequestFailed) else RequestFailed(TEMPLATE, str(error)))
            end(conversation)
            return None
        conversation.closing, conversation.prompt = closing, prompt
        tokens = min(tokens, longest - len(prompt))
        # Not every target stops at the closing. Where it does, nothing needs to look for it in the text at each token.
        strings = [closing] if closing and not ends_with_stop_id(closing) else []
        likely = None if conversation.speaker == "user" else d.logprobs
        options: dict[str, Any] = {"logprobs": likely, "logprobs_mode": d.logprobs_mode}
        return Request(prompt, tokens, sampling_of(recipe, conversation), stop_strings=strings, **options)

    def on_answer(conversation: Conversation, result: Generation) -> bool:
        text, reason = answer_text(target, result.tokens), result.finish_reason
        closing = conversation.closing
        if closing and closing in text:
            text, reason = text.partition(closing)[0], "stop"
        if conversation.speaker == "assistant":
            whole = f"{tokenizer.decode(conversation.prompt[-16:])}{text}"  # the template may begin the thinking
            thinks = reason == "length" and whole.rfind("<think>") > whole.rfind("</think>")
            if thinks or not text.strip():
                conversation.fail(RequestFailed(CUT_THINKING if thinks else EMPTY))
                end(conversation)
                return False
        token_ids = TokenIds(prompt=conversation.prompt, answer=list(result.tokens))
        if result.logprobs:
            token_ids["logprobs"] = result.logprobs.as_json()
        conversation.add(text, reason, token_ids=token_ids)
        if conversation.pending is None:
            end(conversation)
        return conversation.pending is not None

    decoder = SpeculativeDecoder(target, drafter)
    # The user's turns are sampled in either mode; greedy answers in the same batch have temperature 0.
    mode = "sample" if recipe.self_talk or recipe.data.written else d.mode
    rows = e.batch_size
    if rows == "auto":
        rows, each = rows_that_fit(decoder, e.drafter, longest)
        free = f"{free_bytes(target.device) / 1e9:.1f} GB free on {target.device}"
        console.print(f"{counted(rows, 'conversation')} at once, of {each / 1e6:.1f} MB each, {free}", markup=False)
    facts["batch_size"] = rows
    serve_conversations(decoder, conversations, next_request, on_answer, rows, mode=mode, max_length=longest)


def by_endpoint(recipe: DistillRecipe, conversations: Iterator[Conversation], end: End, facts: dict[str, Any]) -> None:
    """Answers of servers, ``endpoint.concurrency`` conversations at a time at each; ``end`` is called in this thread.
    The fact ``not_sent`` names the parameters that one of them refused."""
    e, d = recipe.endpoint, recipe.decoding
    assert e is not None
    stopped, lock = threading.Event(), threading.Lock()
    servers = [Server(url, e.model, e.timeout, e.retries, e.backoff, stopped) for url in e.urls]
    busy, said = [0] * len(servers), [server.not_sent for server in servers]
    arguments = {"chat_template_kwargs": recipe.data.template_arguments} if recipe.data.template_arguments else {}

    def ask(conversation: Conversation, first: int) -> Answer:
        """The next message, from the server of that number, or from another one if it does not answer."""
        user, sampling = conversation.speaker == "user", sampling_of(recipe, conversation)
        options: dict[str, Any] = {"max_tokens": d.user_tokens if user else d.max_new_tokens, "temperature": 0}
        if user or d.mode == "sample":
            seed = sampling.seed % (1 << 31)  # what every server takes
            options |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": seed}
            options |= {"top_k": sampling.top_k} if sampling.top_k else {}
        assert conversation.pending is not None
        messages = ask_for_user_turn(conversation.pending) if user else conversation.pending
        messages = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages]  # some refuse it
        for server in servers[first:] + servers[:first]:
            try:
                return server.answer(messages, **options, **arguments)
            except RequestFailed as error:
                if not error.retry or server is servers[first - 1] or stopped.is_set():
                    raise
        raise AssertionError("unreachable")

    def converse(conversation: Conversation) -> None:
        """All turns by the server with the fewest conversations, which has the earlier ones in its cache."""
        with lock:
            own = busy.index(min(busy))
            busy[own] += 1
        try:
            while conversation.pending is not None:
                found = ask(conversation, own)
                if conversation.speaker == "assistant" and not found.text.strip():
                    raise RequestFailed(EMPTY)
                conversation.add(found.text, found.finish_reason, found.reasoning, found.token_ids)
        except RequestFailed as error:
            conversation.fail(error)
        finally:
            with lock:
                busy[own] -= 1

    with closing(in_threads(converse, conversations, e.concurrency * len(servers), stopped)) as finished:
        for conversation in finished:
            for number, server in enumerate(servers):
                if server.not_sent != said[number]:
                    said[number] = server.not_sent
                    facts["not_sent"] = sorted({*server.not_sent, *facts.get("not_sent", ())})
                    console.print(not_sent_line(server.url, server.not_sent), style="yellow", markup=False)
            end(conversation)
