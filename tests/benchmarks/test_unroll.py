"""The cost of training-time test: dense attention is the same operation; a wrong form is not timed."""

import pytest
import torch

from draftsmith.benchmarks import unroll
from draftsmith.models import eagle as models
from draftsmith.models.eagle import unrolled_attention

pytestmark = pytest.mark.measurement

TOY = ("--shape", "tiny-lm", "--sequences", 2, "--tokens", 12, "--threads", 1, "--device", "cpu")


def test_dense_attention_is_the_same_operation():
    """Grouped queries, samples that do not see each other, no later step and two of them."""
    torch.manual_seed(0)
    draw = lambda heads: torch.randn(2, heads, 7, 4, dtype=torch.float64)  # noqa: E731
    q, first, later = draw(6), (draw(3), draw(3)), [(draw(3), draw(3)), (draw(3), draw(3))]
    sample = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0] * 7])
    mask = (sample[:, :, None] == sample[:, None]) & torch.ones(7, 7, dtype=torch.bool).tril()
    for count in (0, 2):
        found = unroll.dense_attention(q, first, later[:count], mask)
        torch.testing.assert_close(found, unrolled_attention(q, first, later[:count], mask), rtol=1e-9, atol=1e-9)


def without_last_key(q, first, later, mask):
    return unrolled_attention(q, first, later[:-1], mask)


def without_gradient_of_keys(q, first, later, mask):
    return unrolled_attention(q, (first[0].detach(), first[1].detach()), later, mask)


def nothing(q, first, later, mask):
    return unrolled_attention(q, first, later, mask) * 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("broken", [without_last_key, without_gradient_of_keys, nothing])
def test_a_wrong_form_is_not_timed(run_main, tmp_path, monkeypatch, broken, dtype):
    monkeypatch.setattr(models, "unrolled_attention", broken)
    out = tmp_path / "unroll.json"
    code, text, err = run_main(unroll.main, *TOY, "--dtype", dtype, "--steps", 3, "--repeat", 1, "--out", out)
    assert code == 2 and not text and not out.exists() and err.count("\n") == 1
    what = "gradient of " if broken is without_gradient_of_keys else "output "
    assert err.startswith(f"error: 3 steps, {what}") and "with dense attention by" in err
