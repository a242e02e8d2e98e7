"""A scripted drafter, which drafts each row's true continuation with a mistake at a chosen depth; common fixtures."""

import functools
import json
import random
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_drafter import drafter, target
from torch import Tensor

from draftsmith.inference.engine.prompts import Chunk, Part
from draftsmith.inference.engine.protocol import Drafter, State
from draftsmith.inference.verify.tree import TokenTree, bitsets
from draftsmith.inference.verify.verify import Verdict

__all__ = ["drafter", "target"]
VOCAB = 61


class ScriptedDrafter(Drafter):
    """Drafter with which every accepted length 0 … D occurs (drafts of untrained heads would never be accepted).

    In each step it makes a new tree for each row: the true continuation along D random nodes, always including the last
    node of the tree (and nodes 32 and 63 if it has them), with a wrong token at a cycling depth; all other nodes are
    wrong siblings, with subtrees that sometimes have the true tokens of their depth. Every second row has a smaller
    tree, padded with invalid nodes, some of which have the right token.

    Args:
        prompts, truth: of each row; ``truth`` is at least ``max_depth + 1`` tokens longer than ``wanted``.
        wanted: number of tokens each row will be asked for; later ones are not checked.
    """

    def __init__(
        self,
        target: Any,
        prompts: Sequence[Sequence[int]],
        truth: Sequence[Sequence[int]],
        wanted: Sequence[int],
        num_nodes: int,
        max_depth: int,
        seed: int = 0,
    ) -> None:
        self.target, self.prompts, self.truth, self.wanted = target, prompts, truth, wanted
        self.num_nodes, self.max_depth, self.branching, self.static = num_nodes, max_depth, num_nodes, False
        self.random = random.Random(seed)
        self.rows = [_Row(self.random.sample(range(max_depth + 1), max_depth + 1)) for _ in prompts]
        self.prefilled: list[tuple[Part, list[int]]] = []
        self.begun = 0
        self.at: list[int] = []  # number of the prompt in each row of the batch
        self.sizes = [num_nodes]  # of the trees, in turn
        self.steps = 0
        self.moves = 0  # steps whose accepted path is not 0, 1, 2, …

    def prefill(self, features: Tensor, chunk: Chunk) -> None:
        assert features.shape == (len(chunk.tokens), self.target.hidden_size)
        for part, first in zip(chunk.parts, chunk.firsts, strict=False):
            self.prefilled.append((part, chunk.tokens[first : first + part.count].tolist()))
        for row, start, _ in chunk.parts:
            if start == 0:
                self.at += [-1] * (row + 1 - len(self.at))
                self.at[row] = self.begun
                self.begun += 1

    def propose(self, state: State) -> TokenTree:
        trees = []
        size = self.sizes[self.steps % len(self.sizes)]
        self.steps += 1
        assert len(self.at) == len(state.root)
        for place, number in enumerate(self.at):
            truth, row = self.truth[number], self.rows[number]
            done = int(state.length[place]) - len(self.prompts[number])  # the root is the new token number `done`
            row.active = done >= 0 and done + 1 < self.wanted[number]  # an ended row has no prefix
            if row.active:
                assert int(state.root[place]) == truth[done], f"row {place}: root of new token {done}"
                assert int(self.target.logits(state.feature[place]).argmax()) == truth[done], "its feature"
            nodes = size if place % 2 == 0 or size < 3 else self.random.randint(2, size)
            trees.append(self._tree(row, int(state.root[place]), truth[max(done, -1) + 1 :], nodes, size - nodes))
        tokens, parents, depths, valid = (torch.tensor(part) for part in zip(*trees, strict=True))
        ancestors = torch.stack([bitsets(parent) for parent in parents.tolist()])
        for place, row in enumerate(self.rows[number] for number in self.at):
            if row.bare_padding:
                ancestors[place][~valid[place]] = 0
        parts = (tokens, parents.int(), depths.int(), ancestors, valid)
        return TokenTree(*(part.to(self.target.device) for part in parts))

    def _tree(
        self, row: "_Row", root: int, future: Sequence[int], nodes: int, padding: int
    ) -> tuple[list[int], list[int], list[int], list[bool]]:
        rng = self.random
        depth = min(self.max_depth, nodes - 1)
        forced = {node for node in (nodes - 1, 32, 63) if 0 < node < nodes}
        others = [node for node in range(1, nodes) if node not in forced]
        forced = set(sorted(forced)[len(forced) - min(len(forced), depth) :])
        path = [0, *sorted(forced | set(rng.sample(others, depth - len(forced))))]
        chosen = row.next_length(depth)
        future = [*future, *(rng.randrange(VOCAB) for _ in range(self.max_depth + 1))]

        def wrong(at: int) -> int:
            return (future[at] + rng.randrange(1, VOCAB)) % VOCAB

        tokens, parents, depths = [root], [-1], [0]
        for node in range(1, nodes):
            if node in path:
                at = path.index(node)
                parents.append(path[at - 1])
                depths.append(at)
                tokens.append(wrong(at - 1) if at == chosen + 1 else future[at - 1])
            else:
                above = rng.choice([n for n in range(node) if depths[n] < self.max_depth])
                at = depths[above] + 1
                parents.append(above)
                depths.append(at)
                tokens.append(wrong(at - 1) if above in path or rng.random() < 0.5 else future[at - 1])
        row.path, row.length = path, chosen
        row.bare_padding = padding > 0 and rng.random() < 0.5
        # Token 0 as a child of the last correct node: were padding verified, it would be accepted if 0 came next.
        above, at = (0, 1) if row.bare_padding else (path[chosen], chosen + 1)
        valid = [True] * nodes + [False] * padding
        return tokens + [0] * padding, parents + [above] * padding, depths + [at] * padding, valid

    def absorb(self, state: State, verdict: Verdict, tree: TokenTree, features: Tensor) -> None:
        for place, number in enumerate(self.at):
            row = self.rows[number]
            if not row.active:
                continue
            length = int(verdict.length[place])
            row.lengths.append(length)
            fits = self.wanted[number] - sum(row.accepted) - 1  # the truth ends there
            assert length == row.length or min(length, row.length) + 1 >= fits
            if length == row.length and length <= fits:  # beyond the truth, chance decides which nodes are right
                expected = row.path[: length + 1] + list(range(length + 1, self.max_depth + 1))
                assert verdict.path[place].tolist() == expected
                assert int(verdict.node[place]) == row.path[length]
                self.moves += expected != list(range(self.max_depth + 1))
            row.accepted.append(min(row.length + 1, fits))

    @property
    def accepted(self) -> list[list[int]]:
        """Expected number of committed tokens of each step of each row."""
        return [row.accepted for row in self.rows]

    def assert_every_length_occurred(self) -> None:
        assert {length for row in self.rows for length in row.lengths} == set(range(self.max_depth + 1))
        assert self.moves or self.num_nodes == 1


class _Row:
    """One row's cycle of accepted lengths, and the expected verdict on its current tree."""

    def __init__(self, cycle: list[int]) -> None:
        self.cycle, self.turn = cycle, 0
        self.active, self.bare_padding = True, False
        self.path: list[int] = []
        self.length = 0
        self.lengths: list[int] = []
        self.accepted: list[int] = []

    def next_length(self, depth: int) -> int:
        self.turn += 1
        return min(self.cycle[self.turn % len(self.cycle)], depth)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A file of two prompts."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "import os"}\n{"prompt": "def f(x):"}\n')
    return path


@pytest.fixture(scope="session")
def four_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of four prompts."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    texts = ("import os", "def read(path):", "The software is provided", "copyright notice")
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="session")
def run_decode(run_main: Any) -> Callable[[str], tuple[int, str, str]]:
    """``run_decode(line)`` → exit code, stdout and stderr of decode.py with the arguments of a shell's ``line``."""
    from draftsmith.inference import decode

    return lambda line: run_main(decode.main, "--threads", 1, *shlex.split(line), script="inference/decode.py")


@pytest.fixture
def report_of(run_decode: Any, tmp_path: Path) -> Callable[[str], tuple[dict[str, Any], str]]:
    """``report_of(line)`` → the report of decode.py, which has to succeed, and what it wrote to stderr."""

    def run(line: str) -> tuple[dict[str, Any], str]:
        code, _, err = run_decode(f"{line} --report {tmp_path / 'report'}")
        assert code == 0, err
        return json.loads((tmp_path / "report" / "report.json").read_text()), err

    return run


@pytest.fixture(scope="module")
def written(request: pytest.FixtureRequest, make_target: Any, greedy_texts: Any) -> Callable[[str], Any]:
    """``written(family)`` → a target, and the LONGEST tokens it writes after each of the module's PROMPTS."""

    @functools.cache
    def get(family: str) -> tuple[Any, list[list[int]]]:
        target = make_target(family)
        texts = greedy_texts(target, request.module.PROMPTS, request.module.LONGEST)
        assert all(len(set(row)) > 4 for row in texts), f"{family} repeats itself: choose another seed"
        return target, texts

    return get


@pytest.fixture(scope="session")
def scripted() -> Callable[..., ScriptedDrafter]:
    """``scripted(target, prompts, truth, wanted, num_nodes, max_depth, seed=0)`` → a :class:`ScriptedDrafter`."""
    return ScriptedDrafter
