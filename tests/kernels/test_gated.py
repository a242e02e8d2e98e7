"""The activations that the gated kernel knows, by their modules."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from draftsmith.kernels.gated import act_name

SILU, GELU = "llama mistral qwen2 qwen3 phi3 granite cohere".split(), "gemma gemma2 gemma3".split()


@pytest.mark.parametrize("family", SILU + GELU)
def test_acts_of_the_families(make_target, family):
    mlp = make_target(family).decoder.layers[0].mlp
    act = mlp.activation_fn if family == "phi3" else mlp.act_fn
    assert act_name(act) == ("silu" if family in SILU else "gelu_tanh")


@pytest.mark.parametrize("name", sorted(set(ACT2FN) - {"xielu"}))  # xielu has weights
def test_only_the_same_function_is_recognised(name):
    """Of everything that a config can name. The exact GELU differs from the tanh GELU by more than the tolerance."""
    act = ACT2FN[name]
    known = act_name(act)
    assert known is not None or name not in ("silu", "swish", "gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu")
    if known:
        gate = torch.linspace(-6, 6, 101).double()
        same = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "gelu": F.gelu}[known]
        torch.testing.assert_close(act(gate), same(gate))


def test_modules_and_functions():
    assert act_name(nn.SiLU()) == act_name(F.silu) == "silu"
    assert act_name(nn.GELU(approximate="tanh")) == "gelu_tanh" and act_name(nn.GELU()) == "gelu"

    class SiLUActivation(nn.Module):  # someone else's
        pass

    class Scaled(nn.SiLU):
        pass

    others = (F.gelu, nn.ReLU(), SiLUActivation(), Scaled(), partial(F.gelu, approximate="none"), F.relu)
    assert [act_name(act) for act in others] == [None] * len(others)
