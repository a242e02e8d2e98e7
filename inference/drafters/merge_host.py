"""Merging of token trees on the host, for eager steps whose nodes are all deterministic."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftsmith.inference.drafters.host_tree import HostTree, kept_nodes
from draftsmith.inference.verify.tree import TokenTree

if TYPE_CHECKING:
    from draftsmith.inference.engine.budget import Budget


def merge_on_host(
    trees: Sequence[TokenTree], sources: Sequence[str], roots: Sequence[int], budget: "Budget | None", limit: int
) -> tuple[list[HostTree], list[list[list[int]]]]:
    """Merge the trees of each row, and keep the nodes that pay.

    Args:
        trees: of each source, with ``acceptance``.
        sources: their names.
        roots: root token of each row.
        budget, limit: as :func:`kept_nodes`.

    Returns:
        The merged tree of each row; by source and row, the number that each merged node has in the source's tree, −1
        if it has none or beyond the row's nodes.
    """
    rows = len(roots)
    merged = [HostTree([root], [-1], [0], [1.0]) for root in roots]
    known: list[dict[tuple[int, int], int]] = [{} for _ in range(rows)]  # (parent, token) → merged node
    places: list[list[list[int]]] = []  # by source and row: merged node of each of its nodes
    for number, (tree, name) in enumerate(zip(trees, sources, strict=True)):
        if tree.tokens.shape[1] == 1:
            places.append([[0]] * rows)
            continue
        assert tree.acceptance is not None, f"{name}: its trees have no acceptance probabilities"
        parts = (tree.tokens, tree.parent, tree.valid, tree.acceptance)
        lists = [part.expand(rows, -1).tolist() for part in parts]
        places.append([_add(1 << number, *row) for row in zip(merged, known, *lists, strict=True)])
    kept = kept_nodes([tree.acceptance for tree in merged], budget, limit)
    count = max(map(len, kept))
    own_numbers: list[list[list[int]]] = []
    for by_row in places:
        own_numbers.append([])
        for nodes, place in zip(kept, by_row, strict=True):
            number_of = {at: node for node, at in enumerate(place)}
            own_numbers[-1].append([number_of.get(node, -1) for node in nodes] + [-1] * (count - len(nodes)))
    return [tree.subtree(nodes) for tree, nodes in zip(merged, kept, strict=True)], own_numbers


def _add(
    bit: int,
    merged: HostTree,
    known: dict[tuple[int, int], int],
    tokens: Sequence[int],
    parents: Sequence[int],
    valid: Sequence[bool],
    acceptance: Sequence[float],
) -> list[int]:
    """Add a source's nodes to a row's merged tree.

    Acceptance probabilities of several sources are combined as if they were independent.

    Returns:
        The merged node of each of the source's nodes; −1 where it is not valid.
    """
    place = [0]
    for node in range(1, len(tokens)):
        if not valid[node]:
            place.append(-1)
            continue
        key = (place[parents[node]], tokens[node])
        at = known.get(key)
        if at is None:
            at = known[key] = len(merged.tokens)
            merged.tokens.append(tokens[node])
            merged.parents.append(key[0])
            merged.sources.append(bit)
            merged.acceptance.append(acceptance[node])
        else:
            merged.sources[at] |= bit
            merged.acceptance[at] = 1 - (1 - merged.acceptance[at]) * (1 - acceptance[node])
        place.append(at)
    return place
