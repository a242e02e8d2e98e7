"""Requests to a running server with OpenAI's protocol, one at a time, with the times of their tokens."""

import http.client
import json
import time
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from draftsmith.common.command import first_line
from draftsmith.data.endpoint import api_key, check_server


@dataclass(frozen=True)
class Answer:
    """tokens: as the server returned them, or as many zeros as it counted, if it returns none. first, last: seconds on
    the clock of ``time.perf_counter`` when the first and the last part of the answer came."""

    tokens: list[int]
    first: float
    last: float


@dataclass(frozen=True)
class RemoteServer:
    """A server that answers ``POST URL/completions`` in parts, greedily.

    url: with its version, ``http://localhost:8000/v1``. model: the name that it knows the model by; its only one if
    empty. timeout: seconds without a byte.

    Raises:
        ConnectionError: no server is there, or it names no model.
    """

    url: str
    model: str = ""
    timeout: float = 600.0
    execution: str = field(default="a running server", init=False)

    def __post_init__(self) -> None:
        check_server(self.url, said_by="--url")
        if not self.model:
            try:
                (name,) = (each["id"] for each in json.loads(self._request("GET", "/models").read())["data"])
            except (ValueError, LookupError, TypeError):
                raise ConnectionError(f"--url {self.url}: it does not name one model; give it by --model") from None
            object.__setattr__(self, "model", name)

    def _request(self, method: str, path: str, content: Any = None) -> http.client.HTTPResponse:
        """
        Raises:
            ConnectionError: no connection, or another status than 200.
        """
        parts = urllib.parse.urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        headers = {"Content-Type": "application/json", "User-Agent": "draftsmith"}
        if key := api_key():
            headers["Authorization"] = f"Bearer {key}"
        try:
            connection = kind(parts.netloc, timeout=self.timeout)
            body = None if content is None else json.dumps(content)
            connection.request(method, parts.path.rstrip("/") + path, body, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionError(f"--url {self.url}: {first_line(error) or type(error).__name__}") from None
        if response.status != 200:
            said = " ".join(response.read(2000).decode("utf-8", "replace").split())[:160]
            raise ConnectionError(f"--url {self.url}{path}: status {response.status} ({said})")
        return response

    def answer(self, prompt: Sequence[int], limit: int) -> Answer:
        """Continue a prompt's token ids by ``limit`` tokens at most.

        Raises:
            ConnectionError: no answer, or none that can be read.
        """
        asked = {
            "model": self.model, "prompt": list(prompt), "max_tokens": limit, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, "return_token_ids": True,
        }  # fmt: skip
        tokens, count, first, last = list[int](), 0, 0.0, 0.0
        try:
            for line in self._request("POST", "/completions", asked):
                if not line.startswith(b"data:") or (data := line[5:].strip()) == b"[DONE]":
                    continue
                part, now = json.loads(data), time.perf_counter()
                if "error" in part:
                    raise ConnectionError(f"--url {self.url}: {str(part['error'])[:160]}")
                for choice in part["choices"]:
                    first, last = first or now, now
                    tokens += choice.get("token_ids") or []
                count = (part.get("usage") or {}).get("completion_tokens", count)
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:
            if isinstance(error, ConnectionError) and str(error).startswith("--url"):
                raise
            raise ConnectionError(f"--url {self.url}: the answer broke off ({first_line(error)})") from None
        if not first:
            raise ConnectionError(f"--url {self.url}: an answer without a part")
        return Answer(tokens if len(tokens) == count or not count else [0] * count, first, last)
