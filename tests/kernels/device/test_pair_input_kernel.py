"""The kernel of the input of EAGLE's layer, against its definition in float64."""

import pytest
import torch
from bounds import assert_within, roundings_of_sum, sum_bound
from cases import DTYPES

from draftsmith.kernels.pair_input import pair_input, pair_input_reference


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("rows", "nodes", "parents", "width"), [(1, 1, 1, 64), (2, 3, 3, 37), (3, 5, 2, 100)])
def test_pairs(device, dtype, normed, rows, nodes, parents, width):
    generator = torch.Generator().manual_seed(width)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    embedding, hidden = random(50, width + 3)[:, :width], random(rows, parents + 1, width)[:, 1:]
    tokens = torch.randint(0, 50, (rows, nodes + 2), generator=generator).to(device)[:, 1:-1]
    above = None if nodes == parents else torch.randint(0, parents, (nodes,), generator=generator).to(device)
    lengths, depth = torch.arange(rows, device=device) * 7, torch.arange(nodes, device=device).int().expand(rows, -1)
    norms = (1 + random(width), 1 + random(width), 1e-3) if normed else None
    places = lengths, depth, 4, 15
    found = pair_input(tokens, embedding, hidden, above, norms, *places)
    plain = pair_input_reference(tokens, embedding, hidden, above, norms, *places)
    wide = None if norms is None else (norms[0].double(), norms[1].double(), norms[2])
    parents_of = hidden if above is None else hidden[:, above]
    exact = [embedding[tokens].double(), parents_of.double()]
    if wide is not None:
        exact = [
            part / (part.pow(2).mean(-1, keepdim=True) + wide[2]).sqrt() * weight
            for part, weight in zip(exact, wide[:2], strict=True)
        ]
        normed_pairs = torch.cat(exact, -1).flatten(0, 1).cpu()
        bound = sum_bound(normed_pairs, normed_pairs.abs(), roundings_of_sum(width) + 4, dtype)
        assert_within(found[0], normed_pairs, bound)
        assert_within(plain[0], normed_pairs, bound)
    assert normed or torch.equal(found[0].double(), torch.cat(exact, -1).flatten(0, 1))
    assert found[0].dtype == dtype and torch.equal(found[1], parents_of.flatten(0, 1))
    assert found[1].data_ptr() != hidden.data_ptr(), "a copy: the layer adds to it in place"
    for ours, theirs in zip(found[2:], plain[2:], strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    assert int(found[2].max()) == 15 or rows < 3, "positions end at the last one"
