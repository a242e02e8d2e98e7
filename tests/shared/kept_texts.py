"""A drafter's side of each text, for tests that compare what it drafts with the text so far."""

from collections import Counter

from draftsmith.inference.engine.protocol import Drafter
from draftsmith.inference.verify.sampling import row_numbers


class KeepsTexts(Drafter):
    """To be mixed into a drafter: the tokens of each row's text, while it proposes with the root.

    texts: by row. seen: counts of what occurred.
    """

    texts: dict[int, list[int]]
    seen: Counter[object]

    def __init__(self, *args, **options):
        self.texts, self.prompts, self.seen = {}, {}, Counter()
        super().__init__(*args, **options)

    def prefill(self, features, chunk):
        super().prefill(features, chunk)
        for row, token in zip(chunk.rows.tolist(), chunk.tokens.tolist(), strict=True):
            self.prompts.setdefault(row, []).append(token)

    def reuse(self, source, row, tokens):
        super().reuse(source, row, tokens)
        self.prompts[row] = [*tokens]

    def begin(self, rows):
        super().begin(rows)
        self.texts |= {row: self.prompts.pop(row) for row in row_numbers(rows)}

    def propose(self, state):
        for row, text in self.texts.items():
            del text[int(state.length[row]) :]  # of steps that were undone
            assert len(text) == int(state.length[row])
            text.append(int(state.root[row]))
        return super().propose(state)

    def absorb(self, state, verdict, tree, features):
        super().absorb(state, verdict, tree, features)
        for row, text in self.texts.items():
            text += tree.tokens[row, verdict.path[row, 1 : 1 + int(verdict.length[row])]].tolist()

    def end(self, row):
        super().end(row)
        self.texts.pop(row, None)
