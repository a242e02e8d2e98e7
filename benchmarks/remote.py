"""Requests to a running server with OpenAI's protocol, one at a time, with the times of their tokens."""

import http.client
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from draftsmith.common.command import first_line
from draftsmith.data.endpoint import Server, check_server
from draftsmith.data.seeds import RequestFailed

TIMEOUT = 600.0  # seconds without a byte


@dataclass(frozen=True)
class Answer:
    """tokens: as the server returned them, or as many zeros as it counted, if it returns none. first, last: seconds on
    the clock of ``time.perf_counter`` when the first and the last part of the answer came."""

    tokens: list[int]
    first: float
    last: float


class RemoteServer:
    """A server that answers ``POST URL/completions`` in parts, greedily.

    Args:
        url: with its version, ``http://localhost:8000/v1``.
        model: the name that it knows the model by; its only one if empty.

    Raises:
        ConnectionError: no server is there, or it names no model.
    """

    execution = "a running server"

    def __init__(self, url: str, model: str = "") -> None:
        check_server(url, said_by="--url")
        self.server = Server(url, model, TIMEOUT, retries=0, backoff=0.0)
        if not model:
            try:
                with self.server.open("/models") as response:
                    (self.server.model,) = (each["id"] for each in json.loads(response.read())["data"])
            except RequestFailed as error:
                raise self._failed(error) from None
            except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
                raise ConnectionError(f"--url {url}: it does not name one model; give it by --model") from None

    def _failed(self, error: RequestFailed) -> ConnectionError:
        return ConnectionError(f"--url {self.server.url}: {error.reason} ({error.detail})")

    def answer(self, prompt: Sequence[int], limit: int) -> Answer:
        """Continue a prompt's token ids by ``limit`` tokens at most. Raises ConnectionError: no answer, or none that
        can be read."""
        asked = {
            "prompt": list(prompt),
            "max_tokens": limit,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        tokens, count, first, last = list[int](), 0, 0.0, 0.0
        try:
            with self.server.stating(asked, lambda body: self.server.open("/completions", body)) as response:
                for line in response:
                    if not line.startswith(b"data:") or (data := line[5:].strip()) == b"[DONE]":
                        continue
                    part, now = json.loads(data), time.perf_counter()
                    if "error" in part:
                        raise RequestFailed("an error", self.server.short(str(part["error"])))
                    for choice in part["choices"]:
                        first, last = first or now, now
                        tokens += choice.get("token_ids") or []
                    count = (part.get("usage") or {}).get("completion_tokens", count)
        except RequestFailed as error:
            raise self._failed(error) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._failed(self.server.broken(error)) from None
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise self._failed(RequestFailed("malformed answer", first_line(error))) from None
        if not first:
            raise ConnectionError(f"--url {self.server.url}: an answer without a part")
        return Answer(tokens if len(tokens) == count or not count else [0] * count, first, last)
