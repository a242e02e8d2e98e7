"""Command-line options of a target, and choices that recipes share; checks of device and dtype. torch is imported only
where it is needed."""

import argparse
from typing import Any, Literal

from draftsmith.models.precision import DTYPES, say

QUANTIZE = ("none", "8bit", "4bit")
DEVICE_MAPS = ("none", "auto", "cpu", "disk")
ShortlistKind = Literal["fr_spec", "vocab_trim", "dynaspec", "low_rank"]
ShortlistSchedule = Literal["fixed", "position_aware"]
DECODERS = {"auto": None, "lean": True, "transformers": False}  # --decoder → ``SpeculativeDecoder``'s ``lean``


def target_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every command that loads a target for a drafter."""
    parser.add_argument("--target", help="the target, if it is not where the drafter's config says")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, … (default: cuda where there is one)")
    dtype_option(parser, "of the target's weights")
    parser.add_argument(
        "--quantize", default="none", choices=QUANTIZE, help="the target's linear layers (bitsandbytes)"
    )
    parser.add_argument(
        "--device-map",
        default="none",
        choices=DEVICE_MAPS,
        help="a target larger than the device's memory: its layers wait in CPU memory or on disk until they are used; "
        "auto: spread over GPUs, CPU memory and disk",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the target")
    decoder_option(parser)


def dtype_option(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--dtype``, with the values of ``load_target``'s ``dtype``. ``what`` begins the help: the dtype of what."""
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", *DTYPES),
        help=f"{what}; auto, the default: on a GPU the dtype that the target is stored in, on a CPU float32, or "
        "bfloat16 where that is faster",
    )


def decoder_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--decoder``, which chooses what runs the target's layers; its values are the keys of :data:`DECODERS`."""
    parser.add_argument(
        "--decoder",
        default="auto",
        choices=tuple(DECODERS),
        help="what runs the target's layers: lean, our own decoder of few operations, for families built like Llama; "
        "transformers, the model's own modules; auto: lean where that can be (default)",
    )


def target_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The options of :func:`target_options` as keyword arguments of ``load_target``, without the decoder. The device is
    chosen and checked; ``load_target`` will print the dtype it chooses on stderr.
    Raises ValueError: the device is unknown or not available; the lean decoder cannot use such weights."""
    for option, value in (("--quantize", args.quantize), ("--device-map", args.device_map)):
        if args.decoder == "lean" and value != "none":
            raise ValueError(f"--decoder lean cannot run with {option} {value}; leave out one of the two")
    names = ("dtype", "quantize", "device_map", "trust_remote_code")
    return {"device": choose_device(args.device), "say": say, **{name: getattr(args, name) for name in names}}


def choose_device(device: str | None) -> str:
    """The requested device, or the best one available. Raises ValueError: it is unknown or not available."""
    import torch  # a second or two

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device '{device}': unknown; use cpu, cuda or cuda:N") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device '{device}': this torch sees no GPU; use --device cpu, or install a CUDA build")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device '{device}': there are {torch.cuda.device_count()} GPUs, counted from cuda:0")
    try:
        if chosen.type == "meta":
            raise RuntimeError
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError):
        raise ValueError(f"device '{device}': not available on this machine; use cpu, cuda or cuda:N") from None
    return device
