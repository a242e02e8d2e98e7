"""One answer from a server that speaks OpenAI's protocol (vLLM, SGLang, …): patience, and a reason if there is none."""

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
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, TypeVar, cast

from draftsmith.data.formats import Message
from draftsmith.data.seeds import TOO_LONG, Unanswered

KEY = "OPENAI_API_KEY"  # the only place a key is read from; it is neither stored nor printed
LONGEST_PAUSE, LONGEST_RETRY_AFTER = 60.0, 600.0  # seconds
CONNECT = 4.5  # seconds in which a server has to be reachable before a run begins
_DETAIL = 200  # characters kept of what a server said
T = TypeVar("T")


def api_key() -> str:
    """The key in the environment, or none.

    Raises:
        ValueError: no header could hold it.
    """
    key = os.environ.get(KEY, "").strip()
    if not (key.isascii() and (key.isprintable() or not key)):  # http.client's own message would show it
        raise ValueError(f"{KEY}: holds a line break or a character that no header may hold; set it again")
    return key


def check_server(url: str, seconds: float = CONNECT) -> None:
    """Find out whether anybody listens at a URL (or at the proxy that leads there), before any question is asked.

    A server that is spoken to without TLS is sent ``GET /``, to find out whether it wants TLS.

    Raises:
        ConnectionError: unknown host, connection refused, no connection within ``seconds``, or one side speaks TLS and
            the other does not.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        raise ConnectionError(f"endpoint {url}: no host and port can be read from it; correct endpoint.url") from None
    host, tls = parts.hostname or "", parts.scheme == "https"
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and not urllib.request.proxy_bypass(host):
        through = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        host, port, tls = through.hostname or "", through.port or 80, through.scheme == "https"
    found: queue.SimpleQueue[str] = queue.SimpleQueue()
    # In a thread: nothing else bounds how long the resolver takes.
    threading.Thread(target=lambda: found.put(_problem(host, port, tls, seconds)), daemon=True).start()
    try:
        problem = found.get(timeout=seconds)
    except queue.Empty:
        problem = f"no connection within {seconds:g} seconds"
    if problem:
        raise ConnectionError(
            f"endpoint {url}: nobody answers at {host}:{port} ({problem}); start the server, or correct endpoint.url"
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
        return f"no TLS spoken there: {error.reason}"
    except (OSError, UnicodeError) as error:  # the latter of a host name that is none
        return getattr(error, "strerror", None) or str(error) or type(error).__name__
    return "" if tls or not _speaks_tls(host, port) else "it speaks TLS, so that the URL begins with https://"


def _speaks_tls(host: str, port: int) -> bool:
    """Whether a server that is spoken to without TLS wants it. One that is slow to answer does not."""
    try:
        with socket.create_connection((host, port), timeout=1.0) as connection:
            connection.sendall(f"GET / HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
            said = connection.recv(1000)
        if said.startswith(b"HTTP/"):
            return b" 400 " in said and b"HTTPS" in said  # nginx says so
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
    """A redirected POST becomes a GET without its content, and may lead elsewhere."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


@dataclass
class Server:
    """An endpoint and how patient we are with it. Threads may share it.

    url: what ``/chat/completions`` is appended to.
    timeout: seconds without a byte from the server.
    retries: how often a question is asked again after an answer that may be better next time.
    backoff: seconds before the first retry; doubled, with jitter, before each further one.
    stopped: set by whoever wants no more answers; pauses end at once.
    """

    url: str
    model: str
    timeout: float
    retries: int
    backoff: float
    stopped: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._key = api_key()

    def answer(self, messages: Sequence[Message], **options: Any) -> tuple[str, str]:
        """What the model says and why it ended (``stop``, ``length``, …).

        Args:
            options: further fields of the request: temperature, max_tokens, …

        Raises:
            Unanswered: not after all retries, or retries are pointless.
        """
        body = json.dumps({"model": self.model, "messages": list(messages), "stream": False, **options}).encode()
        for attempt in range(self.retries + 1):
            try:
                return self._ask(body)
            except Unanswered as error:
                if not error.again or attempt == self.retries or self.stopped.is_set():
                    raise
                pause = min(self.backoff * 2**attempt, LONGEST_PAUSE) * random.uniform(0.5, 1.5)
                if error.after is not None:  # jitter here too: all others wait for the same moment
                    pause = min(error.after, LONGEST_RETRY_AFTER) + pause * random.random()
                self.stopped.wait(pause)
        raise AssertionError("unreachable")

    def _ask(self, body: bytes) -> tuple[str, str]:
        request = urllib.request.Request(
            f"{self.url.rstrip('/')}/chat/completions", body,
            {"Content-Type": "application/json", "User-Agent": "draftsmith"},
        )  # fmt: skip
        if self._key:
            request.add_unredirected_header("Authorization", f"Bearer {self._key}")
        try:
            with self._opener.open(request, timeout=self.timeout) as response:
                content = response.read()
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(error.code, error, error.headers.get("Retry-After")) from None
        except (OSError, http.client.HTTPException) as error:
            cause = getattr(error, "reason", error)  # urllib wraps what happens before the answer
            reason = "timeout" if isinstance(cause, TimeoutError) else "connection"
            raise Unanswered(reason, self._short(str(cause)), again=True) from None
        try:
            choice = json.loads(content)["choices"][0]
            text, finish_reason = choice["message"]["content"], choice.get("finish_reason") or "unknown"
            if not isinstance(text, str):
                raise TypeError
        except (ValueError, LookupError, TypeError, AttributeError):
            said = self._short(content.decode("utf-8", "replace"))
            raise Unanswered("malformed answer", said, again=True) from None
        return text, str(finish_reason)

    def _refusal(self, code: int, body: IO[bytes], retry_after: str | None) -> Unanswered:
        try:
            said = self._short(body.read(10_000).decode("utf-8", "replace"))
        except (OSError, http.client.HTTPException):
            said = ""
        if code in (400, 413, 422) and re.search("context.length", said):
            return Unanswered(TOO_LONG, said)
        again = code in (408, 429) or code >= 500
        return Unanswered(f"http {code}", said, again, _seconds(retry_after))

    def _short(self, said: str) -> str:
        said = said.replace(self._key, "***") if self._key else said  # some servers repeat it
        return " ".join(said.split())[:_DETAIL]


def _seconds(retry_after: str | None) -> float | None:
    """A Retry-After header: seconds, or a date."""
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
    """Items as their work is done, in whatever order, ``count`` at a time; what ``work`` raises is raised here.

    The threads are daemons: Ctrl-C does not wait for answers under way. ``stopped`` is set when the iteration ends,
    also when it is closed before its time.
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
