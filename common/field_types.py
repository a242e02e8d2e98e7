"""Types of recipe fields with their bounds."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

# Bounds reject typing errors that would need more memory or threads than any machine has.
Positive = Annotated[int, Field(gt=0, le=1_000_000_000)]
Tokens = Annotated[int, Field(gt=0, le=1 << 20)]  # of a sequence
Sequences = Annotated[int, Field(gt=0, le=1 << 16)]  # at once
Layers = Annotated[int, Field(gt=0, le=64)]
Threads = Annotated[int, Field(gt=0, le=1024)]
Seed = Annotated[int, Field(ge=0, lt=1 << 63)]
Share = Annotated[float, Field(ge=0, le=1)]
Factor = Annotated[float, Field(ge=1e-6, le=1e6)]
Name = Annotated[str, Field(min_length=1)]
DraftVocabSize = Annotated[
    Positive | None,
    Field(
        description="draft only the most frequent tokens of the training rows' answers, so many (each source counts by "
        "its weight); null: all tokens"
    ),
]
Replay = Annotated[
    Share,
    Field(
        description="share of Draft-OPD's loss (arXiv 2605.29343) in the loss: the target's distributions at the "
        "drafter's own drafts teach it, also at rejected ones. 1: as published; for a second training (init_from)"
    ),
]
TemplateArguments = Annotated[
    dict[Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_]*$")], bool | int | float | str],
    Field(
        description="values of the chat template's own variables, such as enable_thinking: false; a drafter keeps the "
        "template with them, so that data, training and decoding render chats alike"
    ),
]
SAMPLES = 100_000_000  # sequences of a stage, at most: their order is kept in memory
TINY_STEPS, TINY_LENGTH = 2, 96  # of --tiny: steps of a stage, tokens of a row
TINY_EVALUATE = {"every": TINY_STEPS, "sequences": 4}  # its evaluations, where they decode nothing


def check_repository(text: str) -> str:
    """Check a Hub id (USER/NAME) by the Hub's rules."""
    parts = text.split("/")
    part = r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
    if len(parts) != 2 or not all(re.fullmatch(part, p) for p in parts) or re.search(r"--|\.\.|\.git$", text):
        raise ValueError(
            "a Hub id is USER/NAME; both are letters, digits, '-', '_' and '.', at most 96, with neither '--' nor '..'"
        )
    return text


HubId = Annotated[str, AfterValidator(check_repository)]
Licence = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}$")]
