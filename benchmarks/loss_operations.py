"""Count what EAGLE-3's training asks of memory and of a GPU's launches, without one: PyTorch's operations in a step.

    python benchmarks/loss_operations.py                   on a CPU: PyTorch's form of the loss
    python benchmarks/loss_operations.py --kernel          with the loss as one launch, as on a GPU (it is not run)

A random drafter of toy size, a draft vocabulary, and random tokens, forward and backward in float32. As for an 8B
target at rows of 2,048, the gradient of the LM head has twice as many numbers as a step's logits. Views and
allocations are no launches; an operation's bytes are those of its inputs and outputs, as if nothing stayed in a cache.
Attention is in PyTorch's form. An unrolled step's share is the difference of --unroll steps and one, by their number.
"""

from collections import Counter
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

from draftsmith.common.command import CommandLine, before_imports, run_command

PARSER = CommandLine(__doc__)
PARSER.add_argument("--unroll", type=int, default=7, help="steps (%(default)s)")
PARSER.add_argument("--tokens", type=int, default=64, help="of each of two rows (%(default)s)")
PARSER.add_argument("--draft-vocabulary", type=int, default=2000, help="of 4,000 tokens (%(default)s)")
PARSER.add_argument(
    "--kernel", action="store_true", help="count the kernel of the loss instead of PyTorch's operations"
)
if __name__ == "__main__":
    before_imports(PARSER)

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.models.eagle import Eagle
from draftsmith.models.target import Target
from draftsmith.train import losses
from draftsmith.train.eagle import EagleTraining
from draftsmith.train.sections.eagle import EagleRecipe

FREE = set("empty empty_like empty_strided new_empty new_empty_strided detach lift_fresh _unsafe_view".split())


class Operations(TorchDispatchMode):
    """Launches and bytes by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.bytes = Counter[str](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket.__name__ not in FREE:
            self.launches[func.overloadpacket.__name__] += 1
            tensors = [each for each in tree_leaves((args, kwargs, out)) if isinstance(each, Tensor)]
            self.bytes += sum(each.numel() * each.element_size() for each in tensors)
        return out


def counted(unroll: int, tokens: int, size: int, kernel: bool) -> tuple[int, int, int]:
    """Launches and bytes of a training step, and the bytes that are kept for its backward pass."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}
    target = Target(LlamaForCausalLM(LlamaConfig(vocab_size=4000, num_key_value_heads=2, **shape)), None, "toy", "")
    source = [{"source": "stdlib"}]
    stage: dict[str, Any] = {"optim": {"lr": 1e-4}, "batch": {"sequences": 1}, "steps": 1}
    content: dict[str, Any] = {"run": {"name": "toy"}, "target": {"name": "toy"}, "stages": [stage]}
    content |= {"drafter": {"version": 3, "unroll": unroll}, "data": {"train": source, "validation": source}}
    eagle = Eagle.for_target(target, 3, "own", size)
    module = EagleTraining(target, eagle, EagleRecipe.model_validate(content)).train()
    batch = {"tokens": torch.randint(size, (2, tokens)), "supervised": torch.ones(2, tokens, dtype=torch.bool)}
    seen, kept, counts = Operations(), dict[int, int](), module.count(batch)

    def as_one_launch(logits: Tensor, teacher: Any, rows: Tensor, *_: Any) -> None:
        seen.launches["soft_loss"] += 1
        seen.bytes += 2 * logits.numel() * logits.element_size() + 4 * len(rows) * logits.shape[1]

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with patch.object(losses, "soft_loss", as_one_launch) if kernel else nullcontext():
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), seen:
            loss, _ = module(batch, counts, 0)
        with seen:
            loss.backward()
    return seen.launches.total(), seen.bytes, sum(kept.values())


def main() -> None:
    args = PARSER.parse_args()
    given = args.tokens, args.draft_vocabulary, args.kernel
    whole, one = counted(args.unroll, *given), counted(1, *given)
    print(
        f"{args.unroll} unrolled steps: {whole[0]:,} launches, {whole[1] / 1e6:,.0f} MB, {whole[2] / 1e6:,.1f} MB kept"
    )
    launches, moved, kept = ((all_of - first) / (args.unroll - 1) for all_of, first in zip(whole, one, strict=True))
    print(f"each after the first: {launches:,.0f} launches, {moved / 1e6:,.0f} MB, {kept / 1e6:,.1f} MB kept")


if __name__ == "__main__":
    run_command(main)
