"""The tiny target and a drafter of it; prompts, and what the target itself writes after them."""

import json

import pytest
from tiny_drafter import drafter, target

__all__ = ["drafter", "target"]


@pytest.fixture(scope="session")
def write_prompts(tmp_path_factory):
    """``write_prompts(texts, *kinds)`` → a file of prompts, whose kinds take turns."""

    def write(texts, *kinds):
        path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
        rows = [{"prompt": text} | ({"kind": kinds[n % len(kinds)]} if kinds else {}) for n, text in enumerate(texts)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture(scope="module")
def written(target, greedy_texts):
    """``written(prompts, count)`` → (prompt, answer), as the target writes it token by token, up to a stop id."""

    def write(prompts, count):
        texts = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()]
        starts, found = [target.tokenizer(text)["input_ids"] for text in texts], []
        for start, answer in zip(starts, greedy_texts(target, starts, count), strict=True):
            end = next((n + 1 for n, token in enumerate(answer) if token in target.stop_ids), count)
            found.append((start, answer[:end]))
        return found

    return write
