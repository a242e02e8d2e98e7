"""vLLM's connector for hidden states on a CPU: it copies them by CUDA streams, in whose place plain copies stand here.

benchmarks/served_features.py names this module to vLLM (``kv_connector_module_path``), in whose environment it runs.
"""

import contextlib
import importlib
from typing import Any
from unittest.mock import patch

import torch

theirs: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector")


class _Done:
    """A stream or an event whose work is over."""

    def record(self, *_: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def _empty_like(tensor: torch.Tensor, *, pin_memory: bool = False, **options: Any) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, **options)


class CpuHiddenStatesConnector(theirs.ExampleHiddenStatesConnector):
    def _submit_async_write(self, pending: Any) -> None:
        on_a_cpu = {"Stream": _Done, "Event": _Done, "stream": lambda _: contextlib.nullcontext()}
        with patch.multiple(torch.cuda, **on_a_cpu), patch.object(torch, "empty_like", _empty_like):
            super()._submit_async_write(pending)
