"""Training modules of EAGLE and DFlash with random weights, and the rows that they train on."""

import torch

from draftsmith.data.packing import Rows, Sample, Tokenized
from draftsmith.models.dflash import DFlash
from draftsmith.models.eagle import Eagle
from draftsmith.train import dflash, eagle

STEPS, SLOTS = 3, 4


def _content(seed, **drafter):
    return {
        "run": {"name": "x", "seed": seed},
        "target": {"name": "t"},
        "drafter": drafter,
        "data": {"train": [{"source": "stdlib"}], "validation": [{"source": "stdlib"}]},
        "stages": [{"optim": {"lr": 1e-3}, "batch": {"sequences": 4}, "steps": 5}],
    }


def eagle_recipe(version=3, **drafter):
    unrolled = {"unroll": STEPS} if version == 3 else {}
    return eagle.EagleRecipe.model_validate(_content(0, version=version, **unrolled | drafter))


def dflash_recipe(**drafter):
    shape = {"block_size": SLOTS, "num_layers": 2, "mask_token_id": 60}
    return dflash.DflashRecipe.model_validate(_content(3, **shape | drafter))


def _random(made, target, ids):
    if ids is not None:
        made.draft_from(ids, target)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return made


def eagle_module(target, ids=None, **drafter):
    """``ids``: its draft vocabulary."""
    recipe = eagle_recipe(**drafter)
    d = recipe.drafter
    made = Eagle.for_target(target, d.version, d.projection, None if ids is None else len(ids), (), **d.options)
    return eagle.EagleTraining(target, _random(made, target, ids), recipe)


def dflash_module(target, ids=None, **drafter):
    recipe = dflash_recipe(**drafter)
    d, size = recipe.drafter, None if ids is None else len(ids)
    made = DFlash.for_target(target, **d.shape, mask_token_id=d.mask_token_id, draft_vocab_size=size)
    return dflash.DFlashTraining(target, _random(made, target, ids), recipe)


def make_rows(vocab_size, share=True):
    """Four samples, of prompt and answer, in two rows if they share them."""
    torch.manual_seed(6)
    sizes = ((9, 3), (5, 1), (7, 4), (6, 2))
    samples = [Sample(torch.randint(1, vocab_size, (n,)).tolist(), [False] * p + [True] * (n - p)) for n, p in sizes]
    return Rows(Tokenized.of(samples), 16, share=share)
