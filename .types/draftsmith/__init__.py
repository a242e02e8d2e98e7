"""Train drafters for speculative decoding, and decode with them.

from draftsmith import SpeculativeDecoder, load_drafter

target, drafter = load_drafter("models/smollm2-medusa")
(result,) = SpeculativeDecoder(target, drafter).generate([prompt], max_new_tokens=64)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftsmith.inference.engine.engine import SpeculativeDecoder
    from draftsmith.inference.engine.request import Generation, Request
    from draftsmith.inference.engine.text import TextStream
    from draftsmith.inference.load import load_drafter
    from draftsmith.inference.measure.evaluation import evaluate
    from draftsmith.inference.verify.sampling import Sampling
    from draftsmith.models.target import load_target

__version__ = "0.1.0"
__all__ = [
    "SpeculativeDecoder",
    "Request",
    "Generation",
    "TextStream",
    "Sampling",
    "evaluate",
    "load_drafter",
    "load_target",
]

_MODULES = {
    "SpeculativeDecoder": "inference.engine.engine",
    "Request": "inference.engine.request",
    "Generation": "inference.engine.request",
    "TextStream": "inference.engine.text",
    "Sampling": "inference.verify.sampling",
    "evaluate": "inference.measure.evaluation",
    "load_drafter": "inference.load",
    "load_target": "models.target",
}


def __getattr__(name: str) -> Any:
    """Import a name of ``__all__`` when it is first asked for: torch takes seconds, and ``--help`` needs none of it."""
    if name not in _MODULES:
        raise AttributeError(f"module 'draftsmith' has no attribute '{name}'; it has: {', '.join(__all__)}")
    return getattr(import_module(f"draftsmith.{_MODULES[name]}"), name)
