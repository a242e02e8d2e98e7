"""Load a drafter to decode with: its steps leave out the nodes that do not pay on this machine."""

from typing import Any

from draftsmith.inference.drafters.load import open_named
from draftsmith.inference.engine.protocol import Drafter
from draftsmith.inference.measure.step_costs import StepClock, step_costs
from draftsmith.models.target import Target


def load_drafter(
    name: str,
    target: Target | None = None,
    *,
    target_name: str | None = None,
    tree: str = "auto",
    all_nodes: bool = False,
    lean: bool | None = None,
    **options: Any,
) -> tuple[Target, Drafter | None]:
    """Load a drafter by name and, unless given, its target. All files but the target's are read and checked first.

    A drafter folder may hold the chat template of the recipe it was trained with; a target loaded here then uses it. A
    given target keeps the template it has.

    Args:
        name: ``none``; a folder or Hub id, also of a published drafter; ``ngram`` or ``ngram:SHORTEST-LONGEST``,
            matches of so many tokens; ``draft_model:PATH`` or ``draft_model:PATH@2,2,1``, a causal LM and its expansion
            (a chain of 8 if left out); ``snapkv:K``, ``streamingllm:K`` or ``topk:K``, the target over a compressed
            cache, also with an expansion; ``FOLDER,streamingllm:K@1,1``, an EAGLE drafter over one, with a chain; or
            several of these joined by ``+``, merged into one tree.
        target_name: folder or Hub id of the target; if left out, what the drafter's config says.
        tree: a file, or ``auto``: the drafter's own.
        all_nodes: every step has all nodes of the tree, also where fewer are faster.
        lean: as ``SpeculativeDecoder`` takes it; step costs are measured accordingly.
        options: of :func:`load_target`.

    Returns:
        Target and drafter; the drafter is None for ``none``.

    Raises:
        FileNotFoundError, ValueError: drafter or target is missing or damaged, they do not belong together, or a tree
            is given and no drafter takes one.
    """
    loaded, drafter = open_named(name, target, target_name, tree, options)
    if drafter is not None and not all_nodes:
        drafter.clock = StepClock()
        # Static steps (on a GPU) need no costs: trees of several sizes are timed as they run.
        if loaded.device.type == "cpu" or loaded.spread:
            drafter.costs = step_costs(loaded, lean)
    return loaded, drafter
