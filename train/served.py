"""A target that a server runs: its features come from there, and only its embeddings, final norm and LM head are here.

vLLM's method ``extract_hidden_states`` with its ``ExampleHiddenStatesConnector`` writes a safetensors file for each
request, whose name is in the answer: ``token_ids [T]`` int64 and ``hidden_states [T, C + 1, d]`` in the model's dtype.
These are the inputs of the C captured layers, in ascending order, and number n of n layers, the last one's output
before the final norm. Each sample is a request of its own, of one new token; its file is read and deleted.

Shape letters: B batch, S rows, T tokens, C captured layers, d hidden width, F features per token.
"""

import contextlib
import copy
import fcntl
import json
import os
import shlex
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from draftsmith.common.sections import Features, TargetSection
from draftsmith.data.endpoint import Server, check_server
from draftsmith.data.packing import Rows
from draftsmith.data.seeds import RequestFailed
from draftsmith.models.eagle import layers_to_capture
from draftsmith.models.pretrained import describe_wrong, without_weights
from draftsmith.models.ssm import config_of_layers
from draftsmith.models.target import Loader, Target, load_target
from draftsmith.train.samples import Batch, WithHidden

NORMS = ("norm", "final_layernorm", "ln_f", "final_layer_norm")  # names of the final norm
RETRIES, BACKOFF = 3, 1.0  # of a request; seconds before the first one, doubled before each further one
CHECKED = "The next token of this text says whether a server runs the model whose ends are here."
LIKELY = 2  # the server's next token has to be among so many of ours: rounding may exchange two


def server_command(name: str, layers: Sequence[int]) -> str:
    """How to start vLLM for a target, so that it writes the inputs of these layers."""
    config = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}
    method = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": config}
    connector = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"}
    connector["kv_connector_extra_config"] = {"shared_storage_path": "/dev/shm/features"}  # type: ignore[assignment]
    options = ["--speculative-config", json.dumps(method), "--kv-transfer-config", json.dumps(connector)]
    return shlex.join(["vllm", "serve", name, *options, "--no-enable-prefix-caching"])


class ServedTarget(Target):
    """A target whose :meth:`features` a server computes. ``model`` has no layers, ``config`` is that of all of it.

    Raises:
        ConnectionError: no server answers.
        ValueError: it runs another model, or writes no hidden states.
    """

    def __init__(self, ends: Target, config: Any, asked: Features) -> None:
        self._config, self._asked, self._pools = config, asked, dict[int, ThreadPoolExecutor]()
        decoder = ends.model.get_decoder()
        norms = [norm for name in NORMS if isinstance(norm := getattr(decoder, name, None), nn.Module)]
        if not norms:
            raise ValueError(
                f"target.features: a {type(ends.model).__name__} has no final norm by a name that is known"
            )
        self._norm = copy.deepcopy(norms[0]).cpu()  # batches are made in processes without a GPU
        self._server = Server(asked.url, "", asked.timeout, RETRIES, BACKOFF)
        facts = (ends.model, ends.tokenizer, ends.name, ends.fingerprint, ends.revision)
        super().__init__(*facts, older_fingerprint=ends.older_fingerprint)

    @property
    def longest(self) -> int:
        """One token less, since a server writes one behind a sample."""
        return self.context - 1

    def hidden_scale(self) -> float:
        states, _ = self._ask(self.spread_ids())
        return float(self._norm(states[:, -1].to(self.dtype)).float().square().mean().sqrt())

    @property
    def config(self) -> Any:  # type: ignore[override]
        return self._config.get_text_config()

    def hidden(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        return self.features(tokens, (), positions)

    def features(self, tokens: Tensor, captures: Sequence[int] = (), positions: Tensor | None = None) -> Tensor:
        """As :meth:`Target.features`, in the dtype of the model here."""
        segment = torch.ones_like(tokens) if positions is None else (positions == 0).cumsum(1)
        return self.of_segments(tokens.cpu(), segment.cpu(), captures).to(tokens.device)

    def of_segments(self, tokens: Tensor, segment: Tensor, captures: Sequence[int]) -> Tensor:
        """Features ``[S, T, F]`` on the CPU of rows ``[S, T]``, whose samples ``segment`` tells apart; zeros where it
        is 0, at padding."""
        width = self.hidden_size * (1 + len(captures))
        found = torch.zeros(*tokens.shape, width, dtype=self.dtype)
        places = [
            (row, slice(int(at[0]), int(at[-1]) + 1))
            for row, numbers in enumerate(segment)
            for number in range(1, int(numbers.max()) + 1)
            if len(at := (numbers == number).nonzero()[:, 0])
        ]
        samples = [tokens[row, part].tolist() for row, part in places]
        made_of = self._threads().map(lambda ids: self._of(ids, captures), samples)
        for (row, part), made in zip(places, made_of, strict=True):
            found[row, part] = made
        return found

    def prepare_packing(self, attention: str = "auto") -> str:
        """Nothing to choose: samples are asked for one by one."""
        return ""

    @torch.no_grad()
    def _check(self) -> None:
        """Check that a server answers, that it writes hidden states, and that our final norm and LM head give its next
        token. Which layers it captures cannot be seen."""
        check_server(self._asked.url, said_by="target.features.url")
        try:
            self._server.model = str(self._request("/models")["data"][0]["id"])
        except (LookupError, TypeError):
            raise self._wrong("it names no model") from None
        assert self.tokenizer is not None
        ids = list(self.tokenizer(CHECKED)["input_ids"])
        states, token = self._ask(ids)
        likely = (
            self.logits(self._norm(states[-1:, -1].to(self.dtype)).to(self.device)).topk(LIKELY).indices[0].tolist()
        )
        if token not in likely:
            raise self._wrong(f"behind {ids} it writes token {token}, and by the weights here {likely} are likeliest")
        self.kv_shapes, self.kv_devices = [], []

    @torch.no_grad()
    def _of(self, ids: list[int], captures: Sequence[int]) -> Tensor:
        """Features of a sample ``[T, F]``."""
        states, _ = self._ask(ids)
        order = sorted(captures)
        if states.shape[1] != len(order) + 1:
            layers = [*order, self.config.num_hidden_layers]
            raise self._wrong(
                f"it writes the states of {states.shape[1]} layers, and {layers} are needed; start it by: "
                f"{server_command(self.name, layers)}"
            )
        states = states.to(self.dtype)
        return torch.cat([self._norm(states[:, -1]), *(states[:, order.index(layer)] for layer in captures)], -1)

    def _ask(self, ids: list[int]) -> tuple[Tensor, int]:
        """The states of a sample ``[T, C + 1, d]``, and the token that the server writes next."""
        fields = {"prompt": ids, "max_tokens": 1, "temperature": 0.0, "return_token_ids": True}
        answer = self._request("/completions", json.dumps({"model": self._server.model, **fields}).encode())
        try:
            path, (token,) = answer["kv_transfer_params"]["hidden_states_path"], answer["choices"][0]["token_ids"]
        except (LookupError, TypeError, ValueError):
            last = self.config.num_hidden_layers
            command = server_command(self.name, [*layers_to_capture(last), last])
            raise self._wrong(f"it writes no hidden states; start it, for EAGLE-3, by: {command}") from None
        stored = self._read(Path(path))
        states = stored["hidden_states"]
        if stored["token_ids"].tolist() != ids or states.shape[::2] != (len(ids), self.hidden_size):
            raise self._wrong(f"{path} holds other tokens than were asked for, or states of another shape")
        return states, token

    def _request(self, path: str, body: bytes | None = None) -> Any:
        """What the server answers, asked again after failures that may be temporary."""

        def send() -> Any:
            try:
                with self._server.open(path, body) as response:
                    return json.loads(response.read())
            except (OSError, ValueError) as error:
                raise self._server.broken(error) from None

        try:
            return self._server.retried(send)
        except RequestFailed as failed:
            raise self._wrong(f"{path}: {failed.reason}{f' ({failed.detail})' if failed.detail else ''}") from None

    def _read(self, path: Path) -> dict[str, Tensor]:
        """The tensors of a request's file, which is deleted. It is whole once its lock is free."""
        lock, ends = Path(f"{path}.lock"), time.monotonic() + self._asked.timeout
        try:
            with lock.open() if lock.exists() else contextlib.nullcontext() as held:
                while held is not None:
                    with contextlib.suppress(BlockingIOError):
                        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
                        break
                    if time.monotonic() > ends:
                        raise self._wrong(f"{path} is not written after {self._asked.timeout:g} seconds")
                    time.sleep(0.001)
                stored = load(path.read_bytes())
            if not {"token_ids", "hidden_states"} <= stored.keys():  # a file of somebody else, not to be deleted
                raise self._wrong(f"{path} is no file of hidden states")
            for done in (path, lock):
                done.unlink(missing_ok=True)
            return stored
        except FileNotFoundError:
            raise self._wrong(
                f"it writes to {path}, which is not here: both have to see its shared_storage_path"
            ) from None
        except (OSError, SafetensorError) as error:
            raise self._wrong(f"{path} cannot be read and deleted ({error})") from None

    def _threads(self) -> ThreadPoolExecutor:
        """Of this process: a worker that makes batches is a fork, which has none of its parent's threads."""
        if (process := os.getpid()) not in self._pools:
            self._pools[process] = ThreadPoolExecutor(self._asked.concurrency)
        return self._pools[process]

    def _wrong(self, what: str) -> ValueError:
        return ValueError(f"target.features.url={self._asked.url}: {what}")


class WithServed(WithHidden):
    """Rows with features that are asked for as the batches are made: ahead of training, by ``data.workers``."""

    def __init__(self, rows: Rows, target: ServedTarget, captures: Sequence[int]) -> None:
        super().__init__(rows, torch.empty(0))
        self.target, self.captures = target, captures

    def batch(self, numbers: Sequence[int], length: int | None = None) -> Batch:
        batch = self.rows.batch(numbers, length)
        return {**batch, "hidden": self.target.of_segments(batch["tokens"], batch["segment"], self.captures)}


class _Ends:
    """Loads what a target has besides its layers. ``config``: of all of it."""

    config: Any

    def __init__(self, device: str) -> None:
        self.device = device

    def load(self, folder: Path, options: dict[str, Any]) -> PreTrainedModel:
        self.config = AutoConfig.from_pretrained(folder, trust_remote_code=options["trust_remote_code"])
        small = config_of_layers(self.config, [])
        vars(small).pop("quantization_config", None)  # of the layers
        model = without_weights(folder, small, options)
        wanted, found = model.state_dict().keys(), dict[str, Tensor]()
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as stored:
                found |= {name: stored.get_tensor(name).to(options["dtype"]) for name in wanted & stored.keys()}
        model.load_state_dict(found, strict=False, assign=True)
        model.tie_weights()
        if missing := [name for name, weight in model.named_parameters() if weight.is_meta]:
            raise ValueError(f"{folder}: {describe_wrong('missing weights', missing)}")
        return model.to(self.device)  # type: ignore[arg-type]


def load_served(t: TargetSection, device: str) -> ServedTarget:
    """The target of a recipe with a section ``target.features``.
    Raises as :func:`load_target` and :class:`ServedTarget`."""
    assert t.features is not None
    ends, named = _Ends(device), {"revision": t.revision, "trust_remote_code": t.trust_remote_code}
    here = load_target(t.name, dtype=t.dtype, device=device, loader=Loader(ends.load, lambda make: make()), **named)
    return ServedTarget(here, ends.config, t.features)
