"""The kernels that are launched: Triton's, and PyTorch's operations that are no views and no allocations."""

from collections import Counter
from contextlib import contextmanager

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

FREE = set("empty empty_like empty_strided new_empty new_empty_strided detach lift_fresh _unsafe_view".split())


class Launches(TorchDispatchMode):
    """Kernels by name. Of PyTorch's composite operators the parts are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.inside = False  # a Triton kernel, which the interpreter runs by operations of its own

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self.inside:
            if func._can_decompose():
                with self:
                    out = func.decompose(*args, **kwargs)
                if out is not NotImplemented:
                    return out
            if not func.is_view and func.overloadpacket.__name__ not in FREE:
                self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs)

    @contextmanager
    def counting(self):
        patch = pytest.MonkeyPatch()
        for kind in (InterpretedFunction, JITFunction):
            run = kind.run

            def counted(kernel, *args, run=run, **kwargs):
                self.seen[kernel.fn.__name__] += not kwargs.get("warmup")
                self.inside = True
                try:
                    return run(kernel, *args, **kwargs)
                finally:
                    self.inside = False

            patch.setattr(kind, "run", counted)
        try:
            with self:
                yield
        finally:
            patch.undo()
