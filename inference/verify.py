"""Verification: which path of a token tree the target itself would have written.

Shape letters: B batch, N nodes, V vocabulary, A depth of the deepest node + 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.inference.tree import TokenTree


@dataclass(frozen=True)
class Verdict:
    """What a step commits, on the device.

    path: ``[B, A]`` int64 node numbers by depth, the root (0) first; entry d behind the accepted length is d.
    length: ``[B]`` int64 drafted tokens accepted (the root does not count).
    node: ``[B]`` int64 the last accepted node.
    bonus: ``[B]`` int64 the target's token behind it: the next root.
    """

    path: Tensor
    length: Tensor
    node: Tensor
    bonus: Tensor


def verify_greedy(tree: TokenTree, mask: Tensor, logits: Tensor, max_depth: int) -> Verdict:
    """Accept a node iff it is the argmax behind its parent and its parent is accepted (ALGORITHMS §2, mode greedy).

    Args:
        tree: the drafted tree.
        mask: ``[B, N, N]`` bool, row i True at the ancestors of i and at i.
        logits: ``[B, N, V]`` the target's, row i behind node i.
        max_depth: of the deepest node (A − 1).
    """
    choice = logits.argmax(-1)  # [B, N]
    if max_depth == 0:  # plain decoding: the root alone, nothing to agree with
        none = torch.zeros_like(choice[:, 0])
        return Verdict(none[:, None], none, none, choice[:, 0])
    agrees = tree.tokens == choice.gather(1, tree.parent.clamp(min=0).long())
    agrees = agrees & tree.valid
    agrees[:, 0] = True
    accepted = agrees & ~(mask & ~agrees[:, None, :]).any(-1)  # padding may have no bits at all
    depth = tree.depth.long()
    length, node = torch.where(accepted, depth, -1).max(-1)
    on_path = mask.gather(1, node[:, None, None].expand(-1, 1, mask.shape[2])).squeeze(1)  # [B, N]
    rows, nodes = on_path.shape
    numbers = torch.arange(max(nodes, max_depth + 2), device=node.device)
    path = numbers[: max_depth + 2].repeat(rows, 1)  # the last column collects the nodes off the path
    path.scatter_(1, torch.where(on_path, depth, max_depth + 1), numbers[:nodes].expand(rows, -1))
    return Verdict(path[:, :-1], length, node, choice.gather(1, node[:, None]).squeeze(1))
