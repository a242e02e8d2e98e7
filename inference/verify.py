"""Verification: which path of a token tree the target itself would have written.

    greedy    a child is accepted iff it is the target's argmax
    sample    the rule of ALGORITHMS §2: what is committed has the law of plain sampling, whatever was drafted
    typical   Medusa's criterion (arXiv 2401.10774 §2.3.1): lossy, and said to be

Shape letters: B batch, N nodes, K draws of a node, V vocabulary, A depth of the deepest node + 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.inference.tree import Draws, TokenTree, one_hot_draws
from draftsmith.kernels import verify as kernels


@dataclass(frozen=True)
class Verdict:
    """What a step commits, on the device.

    path: ``[B, A]`` int64 node numbers by depth, the root (0) first; entry d behind the accepted length is d.
    length: ``[B]`` int64 drafted tokens accepted (the root does not count).
    node: ``[B]`` int64 the last accepted node.
    bonus: ``[B]`` int64 the target's token behind it: the next root.
    finite: ``[B]`` bool, False where the target's logits behind a node of the path are NaN or +∞, or all −∞: then
        nothing may be committed.
    own: ``[B, A]`` int64, for a drafter whose tree was merged into another's: the numbers that the nodes of ``path``
        had in its own tree, −1 where it did not propose the node; None if the tree is its own.
    """

    path: Tensor
    length: Tensor
    node: Tensor
    bonus: Tensor
    finite: Tensor
    own: Tensor | None = None


def _finite(values: Tensor) -> Tensor:
    return values.abs() < torch.inf  # half the operations of isfinite


def _finite_on_path(values: Tensor, path: Tensor, length: Tensor) -> Tensor:
    """Whether the values ``[B, N]`` of all nodes on the accepted path are finite: ``[B]`` bool."""
    nodes = values.shape[1]
    on_path = values.gather(1, path if path.shape[1] <= nodes else path.clamp(max=nodes - 1))  # [B, A]
    behind = torch.arange(path.shape[1], device=path.device) > length[:, None]
    return (_finite(on_path) | behind).all(-1)


def verify_greedy(tree: TokenTree, mask: Tensor, logits: Tensor, max_depth: int) -> Verdict:
    """Accept a node iff it is the argmax behind its parent and its parent is accepted (ALGORITHMS §2, mode greedy).

    Args:
        tree: the drafted tree.
        mask: ``[B, N, N]`` bool, row i True at the ancestors of i and at i.
        logits: ``[B, N, V]`` the target's, row i behind node i.
        max_depth: of the deepest node (A − 1).
    """
    best, choice = logits.max(-1)  # [B, N]; best is NaN where a logit is
    if max_depth == 0:  # plain decoding: the root alone, nothing to agree with
        none = torch.zeros_like(choice[:, 0])
        return Verdict(none[:, None], none, none, choice[:, 0], _finite(best[:, 0]))
    if tree.static is not None:  # every node is one, and little is left to find out
        wrong = tree.tokens != choice.gather(1, tree.static.above.expand_as(choice))
        astray = (tree.static.others & wrong[:, None, :]).any(-1)
        length, node = tree.static.levels.masked_fill(astray, -1).max(-1)
        return _verdict(tree, mask, node, length, choice, best, max_depth)
    agrees = tree.tokens == choice.gather(1, tree.parent.clamp(min=0).long())
    agrees = agrees & tree.valid
    agrees[:, 0].fill_(True)
    accepted = agrees & ~(mask & ~agrees[:, None, :]).any(-1)  # padding may have no bits at all
    depth = tree.depth.long()
    length, node = torch.where(accepted, depth, -1).max(-1)
    return _verdict(tree, mask, node, length, choice, best, max_depth)


def _verdict(
    tree: TokenTree, mask: Tensor, node: Tensor, length: Tensor, choice: Tensor, values: Tensor, max_depth: int
) -> Verdict:
    """The verdict of a deepest accepted node: its path, and the token that ``choice [B, N]`` puts behind it;
    ``values [B, N]`` are finite where the target's logits are."""
    bonus = choice.gather(1, node[:, None]).squeeze(1)
    if tree.static is not None:
        path = tree.static.paths[node]
        return Verdict(path, length, node, bonus, _finite_on_path(values, path, length))
    on_path = mask.gather(1, node[:, None, None].expand(-1, 1, mask.shape[2])).squeeze(1)  # [B, N]
    rows, nodes = on_path.shape
    numbers = torch.arange(max(nodes, max_depth + 2), device=node.device)
    path = numbers[: max_depth + 2].repeat(rows, 1)  # the last column collects the nodes off the path
    path.scatter_(1, torch.where(on_path, tree.depth.long(), max_depth + 1), numbers[:nodes].expand(rows, -1))
    path = path[:, :-1]
    return Verdict(path, length, node, bonus, _finite_on_path(values, path, length))


def verify_sample(
    tree: TokenTree, p: Tensor, coins: Tensor, last_coin: Tensor, max_depth: int, draws: Draws | None = None
) -> Verdict:
    """Test each node's draws in order against the target's law, and draw the bonus token from what is left of it.

        r ← p;  for each draw (x, q):  accept x iff u < r[x] / q[x],  else r ← norm((r − q)+);  bonus ~ r

    What is committed has the law of plain sampling if the draws have the laws they say (ALGORITHMS §2).

    Args:
        tree: the drafted tree.
        p: ``[B, N, V]`` float32 the distribution behind each node; NaN throughout where its logits are not finite.
        coins: ``[B, N, K]`` float32 in [0, 1), fresh.
        last_coin: ``[B]`` float32 in [0, 1), fresh.
        max_depth: of the deepest node (A − 1).
        draws: those of the tree, or all one-hot, if left out.
    """
    draws = draws or tree.draws or one_hot_draws(tree.parent, tree.valid, tree.tokens.shape[1] - 1)
    path, length, node, bonus = kernels.verify_sample(
        p, tree.tokens, draws.child, draws.kind, draws.law, draws.q, coins, last_coin, max_depth, ids=draws.ids
    )
    return Verdict(path, length, node, bonus, _finite_on_path(p[..., 0], path, length))


def verify_typical(
    tree: TokenTree, mask: Tensor, p: Tensor, max_depth: int, epsilon: Tensor | float, delta: Tensor | float
) -> Verdict:
    """Accept a node iff ``p(x) > min(ε, δ·exp(−H(p)))`` behind its parent, H in nats, and its parent is accepted; the
    longest such path wins, ties by Σ log p. The bonus token is the argmax (arXiv 2401.10774 §2.3.1). **Lossy.**

    Args:
        mask: ``[B, N, N]`` bool, row i True at the ancestors of i and at i.
        p: ``[B, N, V]`` float32, the distribution behind each node at the wanted temperature, NaN throughout where its
            logits are not finite; its argmax is the bonus token.
        epsilon, delta: ``[B, 1]``, or the same for all rows.
    """
    choice = p.argmax(-1)
    entropy = -torch.where(p > 0, p * p.clamp(min=1e-30).log(), 0.0).sum(-1)
    bound = torch.minimum(delta * (-entropy).exp(), torch.as_tensor(epsilon, dtype=p.dtype, device=p.device))
    above = tree.parent.clamp(min=0).long()
    behind = p.gather(1, above[..., None].expand(-1, -1, p.shape[-1]))
    own = behind.gather(-1, tree.tokens[..., None])[..., 0]  # [B, N]
    agrees = (own > bound.gather(1, above)) & tree.valid
    agrees[:, 0].fill_(True)
    own = torch.where(torch.arange(own.shape[1], device=own.device) == 0, 1.0, own)
    accepted = agrees & ~(mask & ~agrees[:, None, :]).any(-1)
    score = (mask * own.clamp(min=1e-30).log()[:, None, :]).sum(-1)  # Σ log p along each path, above −70 a node
    depth = tree.depth.long()
    node = torch.where(accepted, depth.double() * 1e4 + score.double(), -torch.inf).argmax(-1)
    length = depth.gather(1, node[:, None])[:, 0]
    return _verdict(tree, mask, node, length, choice, p[..., 0], max_depth)
