"""Requests to a server with OpenAI's protocol (vLLM, SGLang, …): retries, and a reason where there is no answer."""

import email.utils
import http.client
import json
import os
import queue
import random
import re
import socket
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, TypeVar, cast

from draftsmith.data.formats import Message, TokenIds, is_ids
from draftsmith.data.seeds import CUT_THINKING, EMPTY, TOO_LONG, RequestFailed

KEY = "OPENAI_API_KEY"  # the only place a key is read from; it is neither stored nor printed
LONGEST_PAUSE, LONGEST_RETRY_AFTER = 60.0, 600.0  # seconds
CONNECT = 4.5  # seconds in which a server has to be reachable before a run begins
_DETAIL = 200  # characters kept of a server's message
# Every parameter that changes the distribution, without effect: what a request leaves out, servers may take from the
# model's generation_config.json (Qwen2.5's repetition penalty of 1.05 holds at temperature 0, too).
NO_EFFECT: dict[str, Any] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
TOKEN_IDS = {"return_token_ids": True}  # of the prompt and the answer; vLLM has them
_EXTENSIONS = {"top_k", "min_p", "repetition_penalty", *TOKEN_IDS}  # not in OpenAI's own protocol
T = TypeVar("T")


def check_server(url: str, seconds: float = CONNECT, said_by: str = "endpoint.url") -> None:
    """Check that a server listens at a URL (or at its proxy), before any request is made.

    ``GET /`` is sent to a server without TLS, to find out whether it expects TLS.
    Raises ConnectionError: unknown host, connection refused, no connection within ``seconds``, or only one side uses
    TLS."""
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        raise ConnectionError(f"endpoint {url}: it names no host and port; correct {said_by}") from None
    host, tls = parts.hostname or "", parts.scheme == "https"
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and not urllib.request.proxy_bypass(host):
        through = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        host, port, tls = through.hostname or "", through.port or 80, through.scheme == "https"
    result: queue.SimpleQueue[str] = queue.SimpleQueue()
    # In a thread: nothing else bounds how long the resolver takes.
    threading.Thread(target=lambda: result.put(_problem(host, port, tls, seconds)), daemon=True).start()
    try:
        problem = result.get(timeout=seconds)
    except queue.Empty:
        problem = f"no connection within {seconds:g} seconds"
    if problem:
        raise ConnectionError(
            f"endpoint {url}: no server answers at {host}:{port} ({problem}); start it, or correct {said_by}"
        )


def _problem(host: str, port: int, tls: bool, seconds: float) -> str:
    """Why there is no connection; empty if there is one."""
    try:
        with socket.create_connection((host, port), timeout=seconds) as connection:
            if tls:
                ssl.create_default_context().wrap_socket(connection, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is not trusted: {error.verify_message}"
    except ssl.SSLError as error:
        return f"it does not use TLS: {error.reason}"
    except (OSError, UnicodeError) as error:  # UnicodeError: not a host name
        return getattr(error, "strerror", None) or str(error) or type(error).__name__
    return "" if tls or not _uses_tls(host, port) else "it uses TLS: the URL begins with https://"


def _uses_tls(host: str, port: int) -> bool:
    """Whether a server expects TLS; False if it is slow to answer without."""
    try:
        with socket.create_connection((host, port), timeout=1.0) as connection:
            connection.sendall(f"GET / HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
            reply = connection.recv(1000)
        if reply.startswith(b"HTTP/"):
            return b" 400 " in reply and b"HTTPS" in reply  # nginx's answer
    except TimeoutError:
        return False
    except OSError:
        pass
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent
    try:
        with socket.create_connection((host, port), timeout=1.0) as connection:
            context.wrap_socket(connection, server_hostname=host).close()
    except OSError:
        return False
    return True


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """No redirects: a redirected POST becomes a GET without its content, and may lead to another server."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


@dataclass(frozen=True)
class Answer:
    """An answer of a chat model.

    finish_reason: ``stop``, ``length``, …; ``unknown`` if the server gives none.
    reasoning: what it thought before, where the server returns that apart from the answer; else empty.
    token_ids: of the prompt as the model read it, and of all that it wrote; None if the server does not return them.
    """

    text: str
    finish_reason: str
    reasoning: str = ""
    token_ids: TokenIds | None = None


@dataclass
class Server:
    """An endpoint with its timeouts and retries. Threads may share it.

    url: ``/chat/completions`` is appended to it.
    timeout: seconds without a byte from the server.
    retries: how often a request is repeated after a failure that may be temporary.
    backoff: seconds before the first retry; doubled, with jitter, before each further one.
    stopped: once it is set, no pause before a retry goes on.
    not_sent: the parameters of ``NO_EFFECT`` and ``TOKEN_IDS`` that the server refused; they are left out of its
        requests.
    taken: those of a request that it answered; a refusal without a name does not mean them.
    """

    url: str
    model: str
    timeout: float
    retries: int
    backoff: float
    stopped: threading.Event = field(default_factory=threading.Event)
    not_sent: frozenset[str] = frozenset()
    taken: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._key = os.environ.get(KEY, "").strip()
        if not (self._key.isascii() and self._key.isprintable()):  # http.client's own message would show it
            raise ValueError(f"{KEY}: holds a line break or a character that no header may hold; set it again")

    def answer(self, messages: Sequence[Message], **options: Any) -> Answer:
        """The model's answer to a conversation, with its token ids if the server has them.
        ``options``: further fields of the request: temperature, max_tokens, …
        Raises RequestFailed: no answer after all retries, or the failure is not temporary."""
        asked = {"messages": list(messages), "stream": False, **options}
        return self.stating(asked, lambda body: self.retried(lambda: self._post(body)), NO_EFFECT | TOKEN_IDS)

    def stating(
        self, fields: Mapping[str, Any], send: Callable[[bytes], T], optional: Mapping[str, Any] = NO_EFFECT
    ) -> T:
        """What ``send`` returns of a request's body with these fields, the model, and all of ``optional`` that the
        fields do not have. A parameter that the server's refusal names is left out; if it names none, those are that
        are not in OpenAI's protocol. The server gets no parameter again without which it answered.
        Raises RequestFailed: as ``send`` does."""
        not_sent = self.not_sent
        while True:
            stated = {name: value for name, value in optional.items() if name not in not_sent and name not in fields}
            try:
                found = send(json.dumps({"model": self.model, **stated, **fields}).encode())
            except RequestFailed as error:
                unnamed = error.reason in ("http 400", "http 422")
                refused = stated.keys() & (error.fields or (_EXTENSIONS - self.taken if unnamed else ()))
                if not refused:
                    raise
                not_sent |= refused
            else:
                self.not_sent, self.taken = self.not_sent | not_sent, self.taken | stated.keys()
                return found

    def retried(self, send: Callable[[], T]) -> T:
        """What ``send`` returns, called again after failures that may be temporary. Raises RequestFailed: the last."""
        for attempt in range(self.retries + 1):
            try:
                return send()
            except RequestFailed as error:
                if not error.retry or attempt == self.retries or self.stopped.is_set():
                    raise
                pause = min(self.backoff * 2**attempt, LONGEST_PAUSE) * random.uniform(0.5, 1.5)
                if error.retry_after is not None:  # jitter here too: all threads wait for the same moment
                    pause = min(error.retry_after, LONGEST_RETRY_AFTER) + pause * random.random()
                self.stopped.wait(pause)
        raise AssertionError("unreachable")

    def open(self, path: str, body: bytes | None = None) -> Any:
        """Send a body to ``url`` + ``path``, or get what is there; the response, whose content is still to be read.
        Raises RequestFailed: no connection, or an error of the server's; no detail holds the key."""
        request = urllib.request.Request(
            self.url.rstrip("/") + path, body, {"Content-Type": "application/json", "User-Agent": "draftsmith"}
        )
        if self._key:
            request.add_unredirected_header("Authorization", f"Bearer {self._key}")
        try:
            return self._opener.open(request, timeout=self.timeout)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(error.code, error, error.headers.get("Retry-After")) from None
        except (OSError, http.client.HTTPException) as error:
            raise self.broken(error) from None

    def broken(self, error: Exception) -> RequestFailed:
        """What a connection's error is."""
        cause = getattr(error, "reason", error)  # urllib wraps what happens before the answer
        reason = "timeout" if isinstance(cause, TimeoutError) else "connection"
        return RequestFailed(reason, self.short(str(cause)), retry=True)

    def _post(self, body: bytes) -> Answer:
        try:
            with self.open("/chat/completions", body) as response:
                content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self.broken(error) from None
        try:
            whole = json.loads(content)
            choice = whole["choices"][0]
            message, finish_reason = choice["message"], str(choice.get("finish_reason") or "unknown")
            text = message.get("content") or ""
            if isinstance(text, list) and all(isinstance(part.get("text"), str) for part in text):
                text = "".join(part["text"] for part in text)
            reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
            if not (isinstance(text, str | list) and isinstance(reasoning, str)):
                raise TypeError
        except (ValueError, LookupError, TypeError, AttributeError):
            detail = self.short(content.decode("utf-8", "replace"))
            raise RequestFailed("malformed answer", detail, retry=True) from None
        for reason, found in (("tool calls", message.get("tool_calls")), ("parts other than text", text)):
            if found and not isinstance(found, str):
                raise RequestFailed(reason, self.short(json.dumps(found)))
        assert isinstance(text, str)
        if finish_reason in ("abort", "error", "content_filter"):  # not where the model ended its answer
            raise RequestFailed("broken off", finish_reason, retry=finish_reason != "content_filter")
        if reasoning and not text.strip():
            thought = self.short(f"it thought: {reasoning}")
            raise RequestFailed(CUT_THINKING if finish_reason == "length" else EMPTY, thought)
        prompt, ids = whole.get("prompt_token_ids"), choice.get("token_ids")
        token_ids = TokenIds(prompt=prompt, answer=ids) if is_ids(prompt) and is_ids(ids) else None
        return Answer(text, finish_reason, reasoning, token_ids)

    def _refusal(self, code: int, body: IO[bytes], retry_after: str | None) -> RequestFailed:
        try:
            text = body.read(10_000).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException):
            text = ""
        detail = self.short(text)
        if code in (400, 413, 422) and re.search("context.(length|size)", text):
            return RequestFailed(TOO_LONG, detail)
        retry = code in (408, 429) or code >= 500
        named = frozenset(name for name in NO_EFFECT | TOKEN_IDS if not retry and re.search(rf"\b{name}\b", text))
        return RequestFailed(f"http {code}", detail, retry, _seconds(retry_after), named)

    def short(self, message: str) -> str:
        """The beginning of a server's message, on one line, without the key."""
        message = message.replace(self._key, "***") if self._key else message  # some servers repeat it
        return " ".join(message.split())[:_DETAIL]


def not_sent_line(url: str, names: Collection[str]) -> str:
    """What to say of the parameters that a server refuses."""
    return f"warning: {url} refuses {', '.join(sorted(names))}: not sent any more, so that the server's defaults hold"


def _seconds(retry_after: str | None) -> float | None:
    """Seconds of a Retry-After header, which holds seconds or a date; None if it cannot be read."""
    if retry_after is None:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except ValueError:
        return None


def in_threads(
    work: Callable[[T], None], items: Iterator[T], count: int, stopped: threading.Event
) -> Generator[T, None, None]:
    """Yield items as ``work`` on them ends, in any order, ``count`` at a time; exceptions of ``work`` are raised here.

    The threads are daemons: Ctrl-C does not wait for requests under way. ``stopped`` is set when the iteration ends,
    also when it is closed early.
    """
    lock, over, done = threading.Lock(), object(), queue.SimpleQueue[tuple[T] | BaseException | None]()

    def run() -> None:
        try:
            while not stopped.is_set():
                with lock:
                    item = next(items, over)
                if item is over:
                    break
                work(cast(T, item))
                done.put((cast(T, item),))
        except BaseException as error:
            done.put(error)
        done.put(None)

    for _ in range(count):
        threading.Thread(target=run, daemon=True).start()
    try:
        while count:
            finished = done.get()
            if isinstance(finished, BaseException):
                raise finished
            if finished is None:
                count -= 1
            else:
                yield finished[0]
    finally:
        stopped.set()
