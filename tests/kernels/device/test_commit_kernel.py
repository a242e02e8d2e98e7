"""The commit kernel against moves written out one after the other."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.kernels.commit import commit, commit_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@st.composite
def moves(draw):
    """Rows of (cached length, path, accepted length); the path increases up to the accepted length."""
    nodes = draw(st.integers(1, 40))
    deepest = draw(st.integers(0, min(7, nodes - 1)))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        length = draw(st.integers(0, deepest))
        kind = draw(st.sampled_from(["any", "chain", "next to a chain"]))
        if kind == "any":
            path = sorted(draw(st.permutations(range(1, nodes)))[:length])
        else:  # moved by one slot, or not at all
            path = [min(d + (kind != "chain"), nodes - 1 - length + d) for d in range(1, length + 1)]
        junk = [draw(st.integers(0, nodes - 1)) for _ in range(deepest - length)]  # behind the end nothing is read
        rows.append((draw(st.integers(0, 20)), [0, *path, *junk], length))
    heads, width = draw(st.sampled_from([(1, 16), (2, 8), (3, 5), (9, 64)]))
    return nodes, rows, heads, width, draw(st.sampled_from([torch.float32, torch.float16])), draw(st.integers(1, 3))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(moves())
def test_commit(case):
    nodes, rows, heads, width, dtype, layers = case
    slots = max(row[0] for row in rows) + nodes + 1
    before = torch.randn(layers, 2, len(rows), heads, slots, width).to(dtype)
    expected = before.clone()
    for row, (cached, path, length) in enumerate(rows):
        before[:, :, row, :, cached + nodes :] = float("nan")
        expected[:, :, row, :, cached + nodes :] = float("nan")
        for depth in range(1, length + 1):  # from what stood there before any move
            expected[:, :, row, :, cached + depth] = before[:, :, row, :, cached + path[depth]]
    lengths, path, length = (torch.tensor(part, device=DEVICE) for part in zip(*rows, strict=True))
    for function in (commit, commit_reference):
        storage = before.clone().to(DEVICE)
        function(storage, lengths, path, length)
        assert torch.equal(storage.cpu().nan_to_num(99.0), expected.nan_to_num(99.0)), function
