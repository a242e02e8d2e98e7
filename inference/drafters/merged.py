"""Several drafters as one: their trees merged into one token tree within a node budget (SpecInfer, arXiv 2305.09781
§4.1).

The set of node sequences of the merged tree is the union of theirs: nodes of the same path are one node, which keeps
the draws of each source. In sampling mode every draw is tested with the distribution it was drawn from; what is merged
is computation, not probability.

Which nodes are kept is decided step by step by the sources' own estimates of acceptance (``TokenTree.chance``) and by
what a step costs by its rows: the N likeliest nodes, where N maximises expected tokens / time. Nodes that were drawn at
random are all kept, and which of the others are does not depend on what was drawn (ALGORITHMS §2, C2).

Where steps have fixed shapes, or something is drawn at random, all of this is tensor operations, about 60; in other
eager steps the host does it.

Shape letters: B rows, M candidates (the root and every source's nodes), N nodes kept, D depth of the deepest node,
K draws of a node, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftsmith.inference.cache import KVCache
from draftsmith.inference.costs import STANDARD, StepCosts, paying
from draftsmith.inference.host_tree import HostTree, HostTrees
from draftsmith.inference.host_tree import paying as paying_on_host
from draftsmith.inference.step import Drafter, State
from draftsmith.inference.tree import Draws, StaticTree, TokenTree, one_hot_draws
from draftsmith.inference.verify import Verdict
from draftsmith.kernels.tree_attention import ancestor_mask
from draftsmith.models.target import Target

MERGE_SECONDS = 3e-4  # what merging takes on a CPU, here and in each drafter's own record of it
MARGIN = 1.1  # by so much it has to pay: a step that accepts nodes of several sources takes longer than was measured
TRUST = 8.0  # tokens that count as much as a drafter's price says, beside what its nodes brought in a text so far
DRAWN = 2.0  # tokens that drafters which draw at random are taken to bring in a step, when others' nodes are chosen


@dataclass
class Candidates:
    """The root and all other nodes of all trees, one tree after the other.

    tokens, parent, depth: ``[B, M]`` int64; the root is its own parent.
    wanted: ``[B, M]`` bool, at first: valid; then: kept.
    chance: ``[B, M]`` float32.
    path: ``[B, M, D]`` the tokens on the way to each node plus 1, 0 behind it.
    same: ``[B, M]`` int64 the first wanted candidate of the same path; M if there is none.
    proposed: ``[B, M]`` bool, False where a source's node is not valid, or was left out before sources were compared.
    """

    tokens: Tensor
    parent: Tensor
    depth: Tensor
    wanted: Tensor
    chance: Tensor
    path: Tensor
    same: Tensor
    proposed: Tensor


class MergedDrafter(Drafter):
    """A merge of drafters. No two valid nodes of one drafter's tree may stand for the same path, and each says how
    likely its nodes are (``TokenTree.chance``).

    Args:
        drafters: by name; the order is that in which draws at random are tested, before all others.
        num_nodes: of the merged tree at most, the root included; what may be drawn at random has room in any case.
        costs: of the target's steps; left out: as many nodes as the budget allows.
    """

    def __init__(
        self, drafters: Mapping[str, Drafter], target: Target, num_nodes: int, costs: StepCosts | None = None
    ) -> None:
        self.drafters, self.target, self.costs = list(drafters.values()), target, costs
        self.sources = tuple(drafters)
        self.static = all(drafter.static for drafter in self.drafters)
        self.max_depth = max(drafter.max_depth for drafter in self.drafters)
        self.branching = sum(drafter.branching for drafter in self.drafters)
        self.most = 1 + sum(drafter.num_nodes - 1 for drafter in self.drafters)
        self.reserved = 1 + sum(drafter.num_nodes - 1 for drafter in self.drafters if drafter.random)
        self.num_nodes = min(max(num_nodes, self.reserved), self.most)
        self.random = self.reserved > 1
        self.models = tuple(model for drafter in self.drafters for model in drafter.models)
        self.captures = tuple(sorted({layer for drafter in self.drafters for layer in drafter.captures}))
        # Of each drafter the columns of the features it reads; None if all of them.
        self.columns: list[Tensor | None] = []
        for drafter in self.drafters:
            width, places = target.hidden_size, [0, *(1 + self.captures.index(layer) for layer in drafter.captures)]
            columns = [torch.arange(place * width, (place + 1) * width, device=target.device) for place in places]
            self.columns.append(None if tuple(drafter.captures) == self.captures else torch.cat(columns))
        self.states: tuple[State, list[State]] | None = None  # the engine's, and as each drafter sees it
        self.bits = [1 << number for number in range(len(self.drafters))]

    def allocate(self, cache: KVCache, max_depth: int, static: bool) -> None:
        self.fixed, self.states = static, None
        for drafter in self.drafters:
            drafter.allocate(cache, max_depth, static)
        device = self.target.device
        # Of trees of 1, 2, … nodes; in sampling mode each row decides for itself, and the same on every machine.
        each = self.costs.table(self.most, cache.rows) if self.costs else [1.0] * self.most
        standard = STANDARD.table(self.most, 1) if self.costs else each
        self.times, self.standard_times = each[: self.num_nodes], standard[: self.num_nodes]
        self.cost, self.standard_cost = torch.tensor(each, device=device), torch.tensor(standard, device=device)
        self.merging = MERGE_SECONDS / self.costs.seconds(cache.rows) if self.costs else 0.0
        self.trees = HostTrees(device, max_depth)
        self.root = StaticTree([-1], device, max_depth)
        # Of each drafter by row: accepted nodes that it proposed, and as many as its price promised.
        self.brought, self.promised = ([[TRUST] * cache.rows for _ in self.drafters] for _ in range(2))
        self.asked: dict[int, list[float]] = {}  # drafters with a price that were in this step → by row, promised
        self.flags = torch.arange(2, device=device).bool()[:, None].repeat(1, self.most)  # a row False, a row True
        self.numbers = torch.arange(max(self.most, max_depth + 1), device=device)
        self.bit = torch.ones(1, dtype=torch.int64, device=device) << torch.arange(64, device=device)
        self.nothing = torch.zeros(cache.rows, 1, dtype=torch.int64, device=device)
        self.certain = torch.ones(cache.rows, 1, device=device)

    def buffers(self) -> Sequence[Tensor]:
        return [buffer for drafter in self.drafters for buffer in drafter.buffers()]

    def begin(self, rows: slice) -> None:
        for drafter, brought, promised in zip(self.drafters, self.brought, self.promised, strict=True):
            drafter.begin(rows)
            brought[rows] = promised[rows] = [TRUST] * (rows.stop - rows.start)

    def prefill(self, features: Tensor, tokens: Tensor, start: int, rows: slice) -> None:
        for drafter, columns in zip(self.drafters, self.columns, strict=True):
            drafter.prefill(_part(features, columns), tokens, start, rows)

    def propose(self, state: State) -> TokenTree:
        together, self.only = state.settings is None, -1
        trees = self._ask(state, together)
        drawn = [tree.draws is not None and tree.draws.q is not None for tree in trees]
        assert all(each <= drafter.random for each, drafter in zip(drawn, self.drafters, strict=True))
        sizes = [tree.tokens.shape[1] - 1 for tree in trees]
        if not self.fixed and not any(drawn):
            some = [number for number, size in enumerate(sizes) if size]
            if len(some) == 1 and self._all_pay(trees[some[0]], state, together):
                return self._alone(trees[some[0]], some[0])
            return self._on_host(trees, sizes, state, together)
        candidates = self._candidates(trees)
        count = self._choose(candidates, sizes, drawn, together)
        return self._assemble(candidates, count, trees, sizes, drawn)

    def _ask(self, state: State, together: bool) -> list[TokenTree]:
        """Each drafter's tree. Eagerly, a drafter whose price is known is asked after the others, and only if what its
        nodes bring, going by the texts so far, is worth its time beside theirs."""
        states = self._states(state)
        self.asked = {}
        if self.fixed or not together or not self.costs:
            return [drafter.propose(its) for drafter, its in zip(self.drafters, states, strict=True)]
        nothing = self.root.fill(state.root[:, None], self.nothing, self.certain)
        trees = [nothing] * len(self.drafters)
        later = [number for number, drafter in enumerate(self.drafters) if drafter.price is not None]
        tokens, nodes = 1.0, 0  # of a row, expected
        for number, (drafter, its) in enumerate(zip(self.drafters, states, strict=True)):
            if number not in later:
                tree = trees[number] = drafter.propose(its)
                assert tree.chance is not None
                if tree.tokens.shape[1] > 1:
                    tokens += (float(tree.chance.sum()) - len(tree.chance)) / len(tree.chance)
                    nodes += tree.tokens.shape[1] - 1
        time = self.times[min(nodes, self.num_nodes - 1)]
        for number in later:
            price = self.drafters[number].price
            assert price is not None
            more = nodes + price.nodes - 1
            its_time = self.times[min(more, self.num_nodes - 1)] + price.time + (self.merging if nodes else 0.0)
            ratios = [a / b for a, b in zip(self.brought[number], self.promised[number], strict=True)]
            gain = (price.tokens - 1) * sum(ratios) / len(ratios)
            if (tokens + gain) / its_time > MARGIN * tokens / time:
                trees[number] = self.drafters[number].propose(states[number])
                tokens, nodes, time = tokens + gain, more, its_time
                self.asked[number] = [price.tokens - 1] * len(self.nothing)
        return trees

    def _all_pay(self, tree: TokenTree, state: State, together: bool) -> bool:
        """Whether none of a tree's nodes would be left out."""
        assert tree.chance is not None
        rows = tree.chance.expand(len(self.nothing), -1).tolist()
        nodes = list(range(len(rows[0])))
        kept = paying_on_host(
            [HostTree(nodes, [], [], chance) for chance in rows], self.times if together else self.standard_times,
            state.active.tolist() if together else None,
        )  # fmt: skip
        return all(len(each) >= sum(chance > 0 for chance in row) for each, row in zip(kept, rows, strict=True))

    def _alone(self, tree: TokenTree, number: int) -> TokenTree:
        """The tree of the only drafter that proposes something, as it is."""
        self.only = number
        source = (tree.depth > 0) & tree.valid if tree.source is None else tree.source
        return replace(tree, source=source.expand_as(tree.tokens).long() << number)

    def _on_host(self, trees: Sequence[TokenTree], sizes: Sequence[int], state: State, together: bool) -> TokenTree:
        """The merged tree, and in ``own`` each drafter's numbers of its nodes."""
        rows = len(self.nothing)
        active = state.active.tolist()
        merged = [HostTree([root], [-1], [0], [1.0]) for root in state.root.tolist()]
        known: list[dict[tuple[int, int], int]] = [{} for _ in range(rows)]  # (parent, token) → node
        places: list[list[list[int]]] = []  # by drafter and row, where each of its nodes is in the merged tree
        chances: dict[int, list[list[float]]] = {}
        for number, tree in enumerate(trees):
            if not sizes[number]:
                places.append([[0]] * rows)
                continue
            assert tree.chance is not None, f"{self.sources[number]}: its trees do not say how likely their nodes are"
            parts = (tree.tokens, tree.parent, tree.valid, tree.chance)
            lists = [part.expand(rows, -1).tolist() for part in parts]
            chances[number] = lists[-1]
            places.append([
                _add(self.bits[number], *row) for row in zip(merged, known, *lists, strict=True)
            ])  # fmt: skip
        if sum(sizes):
            kept = paying_on_host(
                merged, self.times if together else self.standard_times, active if together else None
            )  # fmt: skip
        else:
            kept = [[0]] * rows
        count = max(map(len, kept))
        self.own = []
        for number, its_places in enumerate(places):
            owns = []
            for nodes, place in zip(kept, its_places, strict=True):
                its = {at: node for node, at in enumerate(place)}
                owns.append([its.get(node, -1) for node in nodes] + [-1] * (count - len(nodes)))
            self.own.append(torch.tensor(owns, device=self.nothing.device))
            if number in self.asked:  # for what was left out it is not blamed
                self.asked[number] = [
                    sum(chance[node] for node in own if node > 0)
                    for chance, own in zip(chances[number], owns, strict=True)
                ]
        if count == 1:
            return self.root.fill(state.root[:, None], self.nothing, self.certain)
        return self.trees.make([tree.kept(nodes) for tree, nodes in zip(merged, kept, strict=True)])

    def absorb(self, state: State, verdict: Verdict, tree: TokenTree, features: Tensor) -> None:
        self._note(state, verdict)
        for number, (drafter, its) in enumerate(zip(self.drafters, self._states(state), strict=True)):
            if type(drafter).absorb is not Drafter.absorb:  # it keeps something
                own = verdict.own if number == self.only else self._own_path(number, verdict)
                drafter.absorb(its, replace(verdict, own=own), tree, _part(features, self.columns[number]))

    def _own_path(self, number: int, verdict: Verdict) -> Tensor:
        """``Verdict.own`` for one of the drafters."""
        depth = self.numbers[: verdict.path.shape[1]]
        path = verdict.path if verdict.own is None else verdict.own
        if self.only >= 0:
            return torch.where(depth == 0, path, -1)
        path = path.masked_fill(depth > verdict.length[:, None], -1)
        return torch.where(path >= 0, self.own[number].gather(1, path.clamp(min=0)), -1)

    def _note(self, state: State, verdict: Verdict) -> None:
        """What the drafters brought that were asked for their price."""
        if not self.asked:
            return
        paths, lengths, active = verdict.path.tolist(), verdict.length.tolist(), state.active.tolist()
        for number, promised in self.asked.items():
            owns = None if number == self.only else self.own[number].tolist()
            for row, (path, length) in enumerate(zip(paths, lengths, strict=True)):
                if active[row]:
                    its = length if owns is None else sum(owns[row][node] >= 0 for node in path[1 : length + 1])
                    self.brought[number][row] += its
                    self.promised[number][row] += promised[row]

    def end(self, row: int) -> None:
        for drafter in self.drafters:
            drafter.end(row)

    def _states(self, state: State) -> list[State]:
        if self.states is None or self.states[0] is not state:  # the engine changes its buffers in place
            views = [replace(state, stream=16 * state.stream + number) for number in range(len(self.drafters))]
            self.states = state, views
        for its, columns in zip(self.states[1], self.columns, strict=True):
            its.feature = _part(state.feature, columns)
        return self.states[1]

    def _candidates(self, trees: Sequence[TokenTree]) -> Candidates:
        levels = self.numbers[1 : self.max_depth + 1]
        parts: list[tuple[Tensor, ...]] = []
        shift = 0
        for tree, name in zip(trees, self.sources, strict=True):
            assert tree.chance is not None, f"{name}: its trees do not say how likely their nodes are"
            mask = ancestor_mask(tree.ancestors, tree.tokens.shape[1]) if tree.mask is None else tree.mask
            # A sum of one number and zeros: exact.
            by_depth = torch.where(tree.depth[..., None] == levels, tree.tokens[..., None] + 1, 0).double()
            parent = tree.parent.long().clamp(min=0)
            parent = torch.where(parent > 0, parent + shift, 0)
            its = (tree.tokens, parent, tree.depth.long(), tree.valid, tree.chance, mask.double() @ by_depth)
            parts.append(tuple(part[:, 1:] for part in its) if parts else its)  # one root is that of all
            shift += tree.tokens.shape[1] - 1
        rows = len(self.nothing)
        joined = [
            torch.cat([part.expand(rows, *part.shape[1:]) for part in column], 1) for column in zip(*parts, strict=True)
        ]
        return Candidates(*joined, same=joined[0], proposed=joined[3])

    def _choose(self, c: Candidates, sizes: Sequence[int], drawn: Sequence[bool], together: bool) -> int:
        """Narrow ``wanted`` to the nodes that are kept, one of each path; how many nodes the merged tree has."""
        total = c.tokens.shape[1]
        numbers, cost = self.numbers[:total], self.cost if together else self.standard_cost
        equal = (c.path[:, :, None] == c.path[:, None]).all(-1)  # [B, M, M]
        c.same = (equal & c.wanted[:, None]).int().argmax(-1)
        # Of several sources' estimates: as if they were right or wrong independently of each other.
        doubt = torch.log1p(-c.chance.clamp(max=0.9999)) * c.wanted
        joint = -torch.expm1(torch.zeros_like(doubt).scatter_add_(1, c.same, doubt))
        if not any(drawn):
            c.wanted = c.wanted & (c.same == numbers)
            c.chance = torch.where(c.wanted, joint, 0.0)
            c.chance[:, 0].fill_(1.0)
            likeliest, order = c.chance.sort(dim=-1, descending=True, stable=True)
            most = min(self.num_nodes, total)
            pays = numbers[most - 1 : most] + 1 if self.fixed else paying(likeliest[:, :most], cost[:most], together)
            c.wanted = c.wanted & (order.argsort(-1) < pays[:, None])
            return most if self.fixed else int(pays.max())
        # Nodes drawn at random stay; of the others a number that does not depend on them, chosen among themselves.
        parts = [self.flags[int(each), :size] for size, each in zip(sizes, drawn, strict=True)]
        by_chance = torch.cat([self.flags[0, :1], *parts])  # [M]
        others = c.wanted & ~by_chance
        others[:, 0].fill_(False)
        first = (equal & others[:, None]).int().argmax(-1)
        others = others & (first == numbers)
        likeliest, order = torch.where(others, c.chance, 0.0).sort(dim=-1, descending=True, stable=True)
        reserved = self.reserved
        room = min(self.num_nodes - reserved, total)
        pays = torch.full_like(self.nothing[:1, 0], room)
        if room and not self.fixed:
            before = torch.full_like(likeliest[:, :1], DRAWN)
            likeliest = torch.cat((before, likeliest[:, :room]), 1)
            pays = paying(likeliest, cost[reserved - 1 : reserved + room], together=False) - 1
        c.wanted = (c.wanted & by_chance) | (others & (order.argsort(-1) < pays[:, None]))
        c.wanted[:, 0].fill_(True)
        c.proposed = c.wanted
        equal = equal & c.wanted[:, None]
        c.same = torch.where(equal.any(-1), equal.int().argmax(-1), total)
        c.wanted = c.wanted & (c.same == numbers)
        c.chance = joint
        return min(self.num_nodes, total) if self.fixed else int(c.wanted.sum(-1).max())

    def _assemble(
        self, c: Candidates, count: int, trees: Sequence[TokenTree], sizes: Sequence[int], drawn: Sequence[bool]
    ) -> TokenTree:
        total = c.tokens.shape[1]
        order = torch.where(c.wanted, self.numbers[:total], total).sort(-1).values[:, :count]  # parents come first
        valid = order < total
        # Where each candidate is in the merged tree; ``count`` if nowhere.
        place = torch.full((len(order), total + 1), count, device=order.device)
        place = place.scatter_(1, torch.where(valid, order, total), torch.where(valid, self.numbers[:count], count))
        place = place.gather(1, c.same)
        order = order.clamp(max=total - 1)
        tokens, depth, chance = (part.gather(1, order) for part in (c.tokens, c.depth, c.chance))
        parent = torch.where(valid, place.gather(1, c.parent.gather(1, order)), 0)
        parent[:, 0].fill_(-1)
        path = c.path.gather(1, order[..., None].expand(-1, -1, c.path.shape[2]))
        above = path[:, None]
        mask = ((path[:, :, None] == above) | (above == 0)).all(-1) & valid[:, None]  # [B, N, N]
        self.own, source = [], self.nothing.repeat(1, count + 1)
        first = 0
        for number, size in enumerate(sizes):
            its = slice(first + 1, first + 1 + size)
            its_place = torch.where(c.proposed[:, its], place[:, its], count)
            its_place = torch.cat((self.nothing, its_place), 1)
            own = torch.full_like(source, -1).scatter_(1, its_place, self.numbers[: size + 1].expand(len(place), -1))
            self.own.append(own[:, :count])
            source = source + ((own > 0).long() << number)
            first += size
        source = source[:, :count]
        tree = TokenTree(
            tokens, parent.int(), depth.int(), self._bitsets(mask), valid, mask, None, None, source, chance
        )
        return replace(tree, draws=self._draws(tree, trees, drawn)) if any(drawn) else tree

    def _bitsets(self, mask: Tensor) -> Tensor:
        """``[B, N, N]`` bool → ``[B, N, W]`` int64."""
        words = mask.split(64, -1)
        return torch.stack([(word * self.bit[: word.shape[-1]]).sum(-1) for word in words], -1)

    def _draws(self, tree: TokenTree, trees: Sequence[TokenTree], drawn: Sequence[bool]) -> Draws:
        """Each source's draws at every node: those at random first, then the others in the order of the nodes."""
        children, kinds, laws, distributions = [], [], [], list[Tensor]()
        rows, count = tree.tokens.shape
        source = tree.source
        assert source is not None
        certain = 0  # bits of the sources that leave nothing to chance
        for number, its in enumerate(trees):
            if not drawn[number]:
                certain |= 1 << number
                continue
            d, own = its.draws, self.own[number]
            assert d is not None and d.q is not None
            at = own.clamp(min=0)[..., None].expand(-1, -1, d.child.shape[2])
            # Where its own nodes are in the merged tree.
            place = torch.zeros(rows, its.tokens.shape[1] + 1, dtype=torch.int64, device=own.device)
            place.scatter_(1, torch.where(own >= 0, own, its.tokens.shape[1]), self.numbers[:count].expand(rows, -1))
            child = d.child.expand(rows, -1, -1).gather(1, at)
            moved = place.gather(1, child.clamp(min=0).flatten(1)).view_as(child)
            children.append(torch.where((child >= 0) & (own >= 0)[..., None], moved, -1))
            kinds.append(d.kind.expand(rows, -1, -1).gather(1, at))
            laws.append(d.law.expand(rows, -1, -1).gather(1, at) + sum(q.shape[1] for q in distributions))
            q = d.q.expand(rows, -1, -1)
            if d.ids is not None or q.shape[2] != self.target.vocab_size:
                assert d.ids is not None
                wide = q.new_zeros(rows, q.shape[1], self.target.vocab_size)
                q = wide.scatter_(2, d.ids.expand(q.shape), q)
            distributions.append(q)
        if certain:
            most = sum(drafter.branching for drafter, each in zip(self.drafters, drawn, strict=True) if not each)
            rest = one_hot_draws(tree.parent, tree.valid & (source & certain != 0), min(most, count - 1))
            children.append(rest.child)
            kinds.append(rest.kind)
            laws.append(rest.law)
        return Draws(torch.cat(children, 2), torch.cat(kinds, 2), torch.cat(laws, 2), torch.cat(distributions, 1))


def _add(
    bit: int, merged: HostTree, known: dict[tuple[int, int], int], tokens: Sequence[int], parents: Sequence[int],
    valid: Sequence[bool], chance: Sequence[float],
) -> list[int]:  # fmt: skip
    """Add a source's nodes to a row's tree; where each of them is there, −1 where it is not valid.

    Estimates of several sources are combined as if they were right or wrong independently of each other."""
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
            merged.chance.append(chance[node])
        else:
            merged.sources[at] |= bit
            merged.chance[at] = 1 - (1 - merged.chance[at]) * (1 - chance[node])
        place.append(at)
    return place


def _part(features: Tensor, columns: Tensor | None) -> Tensor:
    return features if columns is None else features[..., columns]
