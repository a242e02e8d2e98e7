"""Print a recipe's data before training on it: samples with the supervised part in colour, lengths, shares.

    python data/preview.py recipes/tiny-medusa.yaml                      # three samples of each source
    python data/preview.py recipes/x.yaml --count 10 --validation        # ten of the validation sources
    python data/preview.py recipes/x.yaml data.max_length=1024           # with a field changed

Supervised tokens are green and underlined on a terminal, and stand between ⟦ and ⟧ elsewhere.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import ConfigDict

from draftsmith.common.command import make_console, recipe_parser, run_command, slow_imports
from draftsmith.common.recipe import read_content, read_recipe
from draftsmith.common.sections import Recipe, TargetSection
from draftsmith.data.prompts import positive
from draftsmith.models.files.locate import known_folder
from draftsmith.models.tokenizer import load_tokenizer

if TYPE_CHECKING:  # take seconds to import, and --help needs none of it
    from rich.text import Text
    from transformers import PreTrainedTokenizerBase

    from draftsmith.data.packing import Tokenized
    from draftsmith.data.rows import Skipped


STREAMED = 1000  # rows of a streamed source that are read, at most


class PreviewRecipe(Recipe):
    """The data and target of any script's recipe; the script itself checks the rest."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)
    target: TargetSection | None = None


def show(samples: Tokenized, number: int, tokenizer: PreTrainedTokenizerBase, colour: bool) -> Text:
    """One sample as text; runs of supervised tokens are decoded together, so that no character is torn."""
    import numpy as np
    from rich.text import Text

    part = slice(*samples.starts[number : number + 2])
    ids, marks = samples.tokens[part], samples.supervised[part]
    text = Text()
    borders = [0, *(np.flatnonzero(np.diff(marks)) + 1).tolist(), len(ids)] if len(ids) else []
    for begin, end in itertools.pairwise(borders):
        run = str(tokenizer.decode(ids[begin:end].tolist(), clean_up_tokenization_spaces=False))
        if marks[begin] and colour:
            text.append(run, "green underline")
        else:
            text.append(f"⟦{run}⟧" if marks[begin] else run)
    return text


def summary(samples: Tokenized, max_length: int) -> str:
    """Counts, lengths and shares in two lines, a table of the skipped rows, and what of the others is not used."""
    import numpy as np

    sizes = np.diff(samples.starts)
    low, middle, high = np.percentile(sizes, [5, 50, 95]).astype(int)
    notes = "".join(f"\n{line}" for line in replace(samples.skipped, reasons={}).lines())
    cut, without = (sizes == max_length).mean(), samples.without_label()
    return (
        f"{len(samples):,} samples, {len(samples.tokens):,} tokens, "
        f"{samples.supervised.mean() if len(samples.tokens) else 0:.1%} supervised; {without} samples without a label\n"
        f"lengths: 5 % below {low}, half below {middle}, 95 % below {high}, longest {sizes.max()}; "
        f"{cut:.1%} fill max_length={max_length} (cut, if longer)" + skipped_table(samples.skipped) + notes
    )


def skipped_table(skipped: Skipped) -> str:
    """A table of the skipped rows by reason; empty if there are none."""
    if not skipped.count:
        return ""
    table = [("rows", "reason", "first"), *((f"{count:,}", reason, place) for count, reason, place in skipped.table())]
    width = max(len(place) for _, _, place in table)
    lines = (f"{count:>8}  {place:<{width}}  {reason}" for count, reason, place in table)
    return "\n".join([f"\n{skipped.count:,} of {skipped.rows:,} rows skipped:", *lines])


def main() -> None:
    parser = recipe_parser(__doc__, "recipes/tiny-medusa.yaml", "data.max_length=1024")
    parser.add_argument("--count", type=positive, default=3, help="samples of each source (default 3)")
    parser.add_argument("--validation", action="store_true", help="the validation sources instead of the training ones")
    parser.add_argument("--tokenizer", help="a folder or Hub id; the recipe's target if left out")
    args = parser.parse_intermixed_args()
    asked = read_content(args.recipe)[1].get("data")
    if isinstance(asked, dict) and {"seeds", "written"} & asked.keys():
        raise ValueError(
            f"{args.recipe}: it asks for answers, and has no data to train on; python train/distill.py {args.recipe} "
            "--dry-run shows the first prompt"
        )
    recipe = read_recipe(args.recipe, PreviewRecipe, args.overrides)
    t = recipe.target
    if t is None and not args.tokenizer:
        raise ValueError(f"{args.recipe} has no target whose tokenizer could be used; pass --tokenizer FOLDER")

    known_folder(args.tokenizer or t.name)  # said before the imports
    with slow_imports():
        import numpy as np

        from draftsmith.data.tokenized import tokenized

    if args.tokenizer or t is None:
        tokenizer = load_tokenizer(args.tokenizer)
    else:
        tokenizer = load_tokenizer(t.name, t.revision, t.trust_remote_code)
    console = make_console()
    for source in recipe.data.validation if args.validation else recipe.data.train:
        console.print(f"\n── {source.label}, weight {source.weight:g}", style="bold")
        if source.answers is not None:
            ask = source.answers
            console.print(
                f"the target itself answers {ask.prompts} prompts of {ask.prompt_tokens} tokens with up to "
                f"{ask.new_tokens} tokens, all of them supervised; they exist once training has begun"
            )
            continue
        if source.streaming:  # as many rows as one may want to look at
            source = source.model_copy(update={"limit": min(source.limit or STREAMED, STREAMED)})
            console.print(f"streamed: its first {source.limit:,} rows, at most")
        samples = tokenized(source, recipe.data, tokenizer)
        console.print(summary(samples, recipe.data.max_length))
        for number in np.linspace(0, len(samples) - 1, min(args.count, len(samples))).astype(int).tolist():
            console.print(f"\n· sample {number + 1}", style="bold")
            console.print(show(samples, number, tokenizer, console.is_terminal))


if __name__ == "__main__":
    run_command(main)
