"""Growth of dynamic trees by kernels: the same candidates, frontiers and trees as by the definition, to the bit."""

import pytest
import torch

from draftsmith.kernels.grow import (
    Candidates,
    Level,
    grow_level,
    grow_level_reference,
    select_tree,
    select_tree_reference,
)


def own_bits(count, device):
    bits = torch.zeros(count, -(-count // 64), dtype=torch.int64, device=device)
    number = torch.arange(count, device=device)
    bits[number, number // 64] = torch.ones_like(number) << (number % 64)
    return bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("k", "depth", "nodes", "kind"),
    [(1, 1, 2, "any"), (2, 6, 16, "ties"), (3, 2, 13, "any"), (4, 3, 6, "missing"), (10, 8, 70, "ties")],
)
def test_a_tree(device, k, depth, nodes, kind, dtype):
    """From levels of random log q: any, quarters with many ties and zeros (−0 too), and mostly −∞ and NaN."""
    rows, generator = 3, torch.Generator().manual_seed(k * depth)
    most = 1 + k + (depth - 1) * k * k
    run_bits = own_bits(max((depth - 1) * k, 1), device)
    sides = []
    for _ in range(2):
        tokens, parents = (torch.full((rows, most + 3), -9, device=device)[:, :most] for _ in range(2))
        root = torch.full((rows, 1), 7, device=device)
        candidates = Candidates(tokens, torch.full((rows, most + 3), 9.0, device=device)[:, :most], parents)
        zeros = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        sides.append([Level(root, zeros, zeros.float(), (run_bits[:1] & 0).expand(rows, -1, -1), zeros), candidates])
    count = 1
    for number in range(depth):
        n = 1 if number == 0 else k
        log_q = -torch.rand(rows, n, k, generator=generator)
        if kind == "any":
            log_q[:, :, 0] = 0.25  # rounded above 0: taken for 0
        if kind == "ties":
            log_q = (log_q * 4).round() / 4
        if kind == "missing":
            log_q = torch.where(torch.rand(rows, n, k, generator=generator) < 0.6, -torch.inf, log_q)
            log_q[:, :, -1] = torch.nan
        proposed = torch.randint(0, 1000, (rows, n, k), generator=generator).to(device)
        first = number * k
        bits = run_bits[first : min(first + k, (depth - 1) * k)]
        given = proposed, log_q.to(device, dtype)
        sides[0][0] = grow_level(sides[0][0], *given, sides[0][1], count, bits, first)
        sides[1][0] = grow_level_reference(sides[1][0], *given, sides[1][1], count, bits)
        count += n * k
        for ours, defined in zip(sides[0][0], sides[1][0], strict=True):
            assert torch.equal(ours, defined)
    for ours, defined in zip(sides[0][1], sides[1][1], strict=True):
        assert torch.equal(ours, defined)
    counts = torch.tensor([1, k, *[k * k] * (depth - 1)], device=device)
    depths = torch.arange(depth + 1, dtype=torch.int32, device=device).repeat_interleave(counts)
    given = sides[1][1], depths, own_bits(nodes, device), depth
    for place, (ours, defined) in enumerate(zip(select_tree(*given), select_tree_reference(*given), strict=True)):
        if place == 5:  # exp
            torch.testing.assert_close(ours, defined, rtol=1e-6, atol=0)
        else:
            assert ours.dtype == defined.dtype and torch.equal(ours, defined), place
    assert kind != "missing" or not bool(select_tree(*given)[4].all())  # padding occurs
