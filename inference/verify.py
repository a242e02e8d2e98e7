"""Verification: the path of a token tree that the target accepts, and the bonus token after it.

    greedy    a child is accepted iff it is the target's argmax
    sample    the rule of ALGORITHMS §2: committed tokens have the distribution of plain sampling
    typical   Medusa's criterion (arXiv 2401.10774 §2.3.1): lossy, and reported as such

Shape letters: B batch, N nodes, K draws of a node, V vocabulary, A depth of the deepest node + 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.inference.sampling import Settings
from draftsmith.inference.tree import Draws, TokenTree, one_hot_draws
from draftsmith.kernels import verify as kernels


@dataclass(frozen=True)
class Verdict:
    """Result of verifying a tree, on the device.

    path: ``[B, A]`` int64 node numbers by depth, the root (0) first; entry d beyond the accepted length is d.
    length: ``[B]`` int64 number of accepted drafted tokens, the root excluded.
    node: ``[B]`` int64 the last accepted node.
    bonus: ``[B]`` int64 the target's token after it: the next root.
    finite: ``[B]`` bool, False if the target's logits at a node of the path are NaN or +∞, or all −∞; nothing may be
        committed then.
    own_path: ``[B, A]`` int64, for a drafter whose tree was merged with others: the numbers of ``path`` in its own
        tree, −1 where it did not propose the node; None if the tree is its own.
    """

    path: Tensor
    length: Tensor
    node: Tensor
    bonus: Tensor
    finite: Tensor
    own_path: Tensor | None = None


def _finite(values: Tensor) -> Tensor:
    return values.abs() < torch.inf  # half as many operations as isfinite


def _finite_on_path(values: Tensor, path: Tensor, length: Tensor) -> Tensor:
    """``[B]`` bool, whether the values ``[B, N]`` of all nodes on the accepted path are finite."""
    nodes = values.shape[1]
    on_path = values.gather(1, path if path.shape[1] <= nodes else path.clamp(max=nodes - 1))  # [B, A]
    beyond = torch.arange(path.shape[1], device=path.device) > length[:, None]
    return (_finite(on_path) | beyond).all(-1)


def verify_greedy(tree: TokenTree, mask: Tensor, logits: Tensor, max_depth: int) -> Verdict:
    """Accept a node iff it is the argmax at its parent and its parent is accepted (ALGORITHMS §2, mode greedy).

    Args:
        tree: the drafted tree.
        mask: ``[B, N, N]`` bool, row i True at the ancestors of i and at i.
        logits: ``[B, N, V]`` the target's, for the token after each node.
        max_depth: of any tree (A − 1).
    """
    best, choice = logits.max(-1)  # [B, N]; best is NaN where a logit is
    if max_depth == 0:  # plain decoding: the root alone
        zero = torch.zeros_like(choice[:, 0])
        return Verdict(zero[:, None], zero, zero, choice[:, 0], _finite(best[:, 0]))
    if tree.static is not None:  # every node is valid, and its ancestors are known
        wrong = tree.tokens != choice.gather(1, tree.static.parent_index.expand_as(choice))
        rejected = (tree.static.drafted_path & wrong[:, None, :]).any(-1)
        length, node = tree.static.depth_index.masked_fill(rejected, -1).max(-1)
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
    """The verdict for the deepest accepted node.

    Args:
        choice: ``[B, N]`` int64, the bonus token after each node.
        values: ``[B, N]``, finite where the target's logits are.
    """
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
    tree: TokenTree, logits: Tensor, settings: Settings, uniforms: Tensor, bonus_uniform: Tensor, max_depth: int,
    draws: Draws | None = None,
) -> Verdict:  # fmt: skip
    """Test each node's draws in order against the target's distribution p; draw the bonus token from the residual.

        r ← p;  for each draw (x, q):  accept x iff u < r[x] / q[x],  else  r ← norm((r − q)+);  bonus ~ r

    Committed tokens have the distribution of plain sampling if each draw comes from its q (ALGORITHMS §2).

    Args:
        tree: the drafted tree.
        logits: ``[B, N, V]`` of any float dtype, for the token after each node; penalised already if a repetition
            penalty is in use. The kernels compute p from them where they need it.
        settings: the sampling parameters but the penalty.
        uniforms: ``[B, N, K]`` float32 in [0, 1), fresh.
        bonus_uniform: ``[B]`` float32 in [0, 1), fresh.
        max_depth: of any tree (A − 1).
        draws: the tree's own if left out; one-hot draws, at most K of a node, if it has none.
    """
    draws = draws or tree.draws or one_hot_draws(tree.parent, tree.valid, uniforms.shape[2])
    s = settings
    return Verdict(
        *kernels.verify_logits(
            logits, s.temperature, s.top_k, s.top_p, s.min_p, tree.tokens, draws.child, draws.kind, draws.q_row,
            draws.q, uniforms, bonus_uniform, max_depth, draws.ids, s.uses[:3],
        )
    )  # fmt: skip


def verify_typical(
    tree: TokenTree, mask: Tensor, p: Tensor, max_depth: int, epsilon: Tensor | float, delta: Tensor | float
) -> Verdict:
    """Accept a node iff ``p(x) > min(ε, δ·exp(−H(p)))`` at its parent, H in nats, and its parent is accepted.

    The longest accepted path wins, ties by Σ log p; the bonus token is the argmax (arXiv 2401.10774 §2.3.1). **Lossy.**

    Args:
        mask: ``[B, N, N]`` bool, row i True at the ancestors of i and at i.
        p: ``[B, N, V]`` float32, the target's distribution after each node; all NaN where its logits are not finite.
        epsilon, delta: ``[B, 1]``, or one number for all rows.
    """
    choice = p.argmax(-1)
    entropy = -torch.where(p > 0, p * p.clamp(min=1e-30).log(), 0.0).sum(-1)
    bound = torch.minimum(delta * (-entropy).exp(), torch.as_tensor(epsilon, dtype=p.dtype, device=p.device))
    parent = tree.parent.clamp(min=0).long()
    p_parent = p.gather(1, parent[..., None].expand(-1, -1, p.shape[-1]))
    p_node = p_parent.gather(-1, tree.tokens[..., None])[..., 0]  # [B, N], p(x) of each node
    agrees = (p_node > bound.gather(1, parent)) & tree.valid
    agrees[:, 0].fill_(True)
    p_node = torch.where(torch.arange(p_node.shape[1], device=p_node.device) == 0, 1.0, p_node)
    accepted = agrees & ~(mask & ~agrees[:, None, :]).any(-1)
    score = (mask * p_node.clamp(min=1e-30).log()[:, None, :]).sum(-1)  # Σ log p along each path, at least −70 per node
    depth = tree.depth.long()
    node = torch.where(accepted, depth.double() * 1e4 + score.double(), -torch.inf).argmax(-1)
    length = depth.gather(1, node[:, None])[:, 0]
    return _verdict(tree, mask, node, length, choice, p[..., 0], max_depth)
