"""Made-up names, addresses, words of many languages and codes, to be repeated, numbered or written as JSON: chats whose
answers have rare tokens, as JSON lines.

    python tools/made_up.py --count 1200 --seed 0 --out runs/made-up.jsonl

Training data for drafters of rare text. The package Faker (MIT), which is needed, makes up the lines. The evaluation
set `rare` (data/evaluation.py) asks for tasks of the same kind, with lines from elsewhere and in other words.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.common.command import CommandLine, run_command
from draftsmith.common.files import check_file, write_text
from draftsmith.data.formats import Message
from draftsmith.data.prompts import positive

if TYPE_CHECKING:
    from faker import Faker

# 14 of these write in other alphabets than Latin. In some locales Faker has sentences in Latin only.
LOCALES = (
    "ru_RU", "zh_CN", "ja_JP", "ar_AA", "el_GR", "uk_UA", "th_TH", "hy_AM", "bg_BG", "zh_TW", "fa_IR", "he_IL",
    "ko_KR", "hi_IN", "de_DE", "fr_FR", "es_MX", "pl_PL", "cs_CZ", "vi_VN", "hu_HU", "tr_TR", "fi_FI", "pt_BR",
    "it_IT", "nl_NL", "sv_SE", "ro_RO", "da_DK", "hr_HR", "en_IN", "en_NG",
)  # fmt: skip
KINDS = ("name", "address", "sentence", "company", "person", "booking", "translation")
TASKS = {
    "copy": ("Copy the following lines exactly.", "Write down these lines once more.", "Say this again, literally."),
    "number": ("Make a numbered list of these lines.", "Put a number before each line."),
    "json": ("Give me this list in JSON.", "Turn the lines into a JSON array."),
    "bullets": ("Make a bulleted list of these lines.", "Put a dash before each of the lines."),
}
LONGEST = 60  # bytes of a line; in some scripts a token is one or two


def line(fakers: Mapping[str, Faker], kind: str, locales: Sequence[str], draw: random.Random) -> str:
    """One line of a kind (:data:`KINDS`), in one of the locales."""
    locale = draw.choice(locales)
    faker = fakers[locale]
    if kind == "address":
        return str(faker.address()).replace("\n", ", ")
    if kind == "person":
        return f"{faker.name()} <{fakers['en_NG'].user_name()}@{faker.free_email_domain()}> {draw.randrange(10**5)}"
    if kind == "booking":
        return f"{faker.bothify('??##?#').upper()} {faker.bothify('???-???').upper()} {faker.name()}"
    if kind == "translation":
        return f"{locale[:2]}: {faker.sentence()}"
    return str(getattr(faker, kind)())


def written(form: str, lines: Sequence[str]) -> str:
    """The lines as a task (:data:`TASKS`) asks for them."""
    if form == "json":
        return json.dumps(lines, ensure_ascii=False)
    marks = {"copy": "", "bullets": "- "}
    return "\n".join(marks.get(form, f"{number}. ") + text for number, text in enumerate(lines, 1))


def chats(count: int, seed: int) -> list[list[Message]]:
    """``count`` chats, the same for the same seed and version of Faker: a task with its answer, then the same task with
    other lines.

    The answers are the right ones, not the target's. Drafters learn its distributions on them, and with an example
    before it the target repeats lines as they are.

    Raises:
        ModuleNotFoundError: Faker is not installed.
    """
    from faker import Faker

    draw = random.Random(seed)
    fakers = {locale: Faker(locale) for locale in LOCALES}
    for number, faker in enumerate(fakers.values()):
        faker.seed_instance(seed * len(LOCALES) + number)
    result: list[list[Message]] = []
    while len(result) < count:
        form = draw.choice(list(TASKS))
        task, kind = draw.choice(TASKS[form]), draw.choice(KINDS)
        # Translations are of several languages; other lists are of one or of several.
        locales = list(LOCALES) if kind == "translation" or draw.random() < 0.5 else [draw.choice(LOCALES)]
        shown, asked = draw.randint(1, 3), draw.randint(2, 6)
        lines: list[str] = []
        while len(lines) < shown + asked:
            if len((text := line(fakers, kind, locales, draw)).encode()) <= LONGEST:
                lines.append(text)
        messages = list[Message]()
        for part in (lines[:shown], lines[shown:]):
            messages.append({"role": "user", "content": f"{task}\n\n" + "\n".join(part)})
            messages.append({"role": "assistant", "content": written(form, part)})
        result.append(messages)
    return result


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("--count", type=positive, default=1200, help="how many chats (default 1200)")
    parser.add_argument("--seed", type=int, default=0, help="another one gives other chats (default 0)")
    parser.add_argument("--out", required=True, type=Path, help="the JSONL file to write")
    args = parser.parse_args()
    check_file("--out", args.out, ".jsonl")
    try:
        rows = chats(args.count, args.seed)
    except ModuleNotFoundError:
        parser.error("the package faker makes up the lines and is not installed; pip install faker")
    write_text(args.out, "".join(json.dumps({"messages": row}, ensure_ascii=False) + "\n" for row in rows))
    print(f"{args.out}: {args.count} chats")


if __name__ == "__main__":
    run_command(main)
