"""A draft model beside transformers' assisted generation: another text is counted."""

from draftsmith.benchmarks import assisted
from draftsmith.inference.engine.engine import Generation
from draftsmith.inference.measure.timing import Timed


def test_other_text_is_counted():
    """A method whose text is not plain decoding's is not called identical."""
    timed = {}
    for name, tokens in (("draft_model", 5), ("plain", 5), ("assisted", 6), ("generate", 5)):
        timed[name] = Timed()
        answer = [Generation([1, tokens], [1])] if name in ("draft_model", "plain") else [[1, tokens]]
        timed[name].run(lambda some, answer=answer: answer, [[1]], range(1), 0)
    rows = assisted.compare(timed)
    assert [row["different"] for row in rows.values()] == [0, 0, 1, 0]
