"""Compare shortlists of one drafter's LM head, by kind of text: what each keeps of the whole head, and at what cost.

    python benchmarks/shortlist_heads.py runs/dynaspec runs/fr_spec --prompts P.jsonl --report runs/lists
    python benchmarks/shortlist_heads.py runs/dynaspec --prompts P.jsonl --nodes 24 --depths 6 --max-new-tokens 128

The folders are those of train/dynaspec.py, with one and the same base drafter. The target first answers the prompts
greedily; on these answers the drafter drafts from every position at once, after the true tokens. For each kind of text:

τ         committed tokens of a step (bonus token included), simulated with one fixed tree of N nodes: the best one for
          the whole head's ranks over all texts. Beside it, its ratio to the whole head's.
one draw  expected acceptance Σ min(p, q) of one draw at temperature 1; p: the target over its whole vocabulary; q: the
          drafter over its list. At depth 0, and the mean over the depths.
recall    by depth, how many of the whole head's likeliest token (@1), and of its ten likeliest (@10), are in the list.
tokens    in the list: the mean over the depths.
labels    share of the answers' own tokens that are in the list of the node before them: the mean over the depths.
head      time of router, choice and logits of all depths for one text, each depth with as many nodes as the tree goes
          on from (at least one). The operations are launched one by one, and the router runs before the logits. The
          methods take turns; medians over the rounds. Beside it, its ratio to the whole head's.

The simulation gives each node the list that it would choose for itself. The engine has one list for all nodes of a
level, made from the highest of their scores, so that its τ may differ: inference/decode.py measures that one.

Intervals are 95 % bootstrap intervals over prompts; ratios are of the same prompts.

Shape letters: S prompts, T tokens, K depths, P nodes, V vocabulary of the target, D of the drafter, C places of a list,
n nodes of a level, e width of embeddings, d of hidden states.
"""

import argparse
from pathlib import Path
from typing import Any

from draftsmith.benchmarks.options import check_once, check_options, chosen, machine_options, prompts_option
from draftsmith.common.command import CommandLine, before_imports, run_command
from draftsmith.inference.commands.prompts import check_prompts, encode_prompts, read_prompts
from draftsmith.inference.drafters.names import check_names
from draftsmith.models.options import choose_device


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="drafters of type dynaspec on the same drafter")
    prompts_option(parser)
    parser.add_argument("--target", metavar="FOLDER", help="if it is not where the first folder's config says")
    parser.add_argument("--max-new-tokens", type=int, default=48, help="of an answer (default 48)")
    parser.add_argument("--nodes", type=int, default=16, metavar="N", help="of the tree, root included (default 16)")
    parser.add_argument("--depths", type=int, default=5, metavar="K", help="at which lists are compared (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts and nodes that are timed (default 0)")
    parser.add_argument("--batch-size", type=int, default=8, help="prompts answered at once (default 8)")
    machine_options(parser, "of target and drafter", out=False)
    parser.add_argument(
        "--report", type=Path, metavar="DIR", help="write the figures to DIR/shortlists.json and plot them beside it"
    )
    return parser


if __name__ == "__main__":
    before_imports(parser(), lambda args: (check_names(args.folders, args.target), check_prompts(args.prompts)))

import copy
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

import torch
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.benchmarks.common import answers_of, by_kind, elapsed, load_target_of, read_drafters, take_turns
from draftsmith.benchmarks.shortlist_figures import STATISTICS, WHOLE, Found, figures, plot, print_methods
from draftsmith.benchmarks.tables import facts_of, write_report
from draftsmith.common.files import check_folder
from draftsmith.common.progress import ProgressBar
from draftsmith.inference.commands.terminal import console
from draftsmith.inference.drafters.dynaspec import PART, read_parts
from draftsmith.inference.drafters.shortlists import Shortlists, check_router
from draftsmith.inference.measure.report import OTHER
from draftsmith.inference.measure.rollouts import Drafts, open_eagle_drafts
from draftsmith.inference.measure.tree_statistics import MAX_RANK, best_tree, draft_labels
from draftsmith.inference.trees.by_level import Layout
from draftsmith.inference.verify.tree import Topology
from draftsmith.kernels.linear import apply_linear
from draftsmith.models.shortlist import DEPTHS, ShortlistHead
from draftsmith.models.target import Target

TEXTS = 4  # that the drafter reads at once
ENTRIES = 1 << 23  # of a matrix of nodes by vocabulary that are in memory at once
TIMED, ROUNDS = 8, 5  # prompts of each kind whose head time is measured, at most; rounds over each
FACTS = ("draftsmith_version", "target")  # of a config, not the drafter's shape

Heads = Mapping[str, ShortlistHead | None]  # method → its shortlists; None: the whole LM head


def stored_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors in a drafter's folder and in its parts, by part and name."""
    found = dict[str, Tensor]()
    for file in sorted(folder.rglob("*.safetensors")):
        found |= {str(file.parent.relative_to(folder) / name): weight for name, weight in load_file(file).items()}
    return found


def load_shortlists(
    folders: Sequence[str], target_name: str | None, **options: Any
) -> tuple[Target, Drafts, dict[str, ShortlistHead | None]]:
    """Load the target, the one base drafter and all shortlists.

    Args:
        target_name: a folder or a Hub id; if None, what the first folder's config says.
        options: of :func:`load_target`.

    Returns:
        The target; the drafter; the methods: the whole LM head and the folders, in their order.

    Raises:
        FileNotFoundError, ValueError: a folder is missing, damaged, no drafter of type dynaspec, for another target, or
            on another base drafter than the first.
    """
    stored = read_drafters(folders, "dynaspec")
    heads: dict[str, ShortlistHead | None] = {WHOLE: None}
    heads[folders[0]], base = read_parts(*stored[folders[0]])
    weights = stored_weights(base[0]) if len(folders) > 1 else {}
    for name in folders[1:]:
        heads[name], (folder, config, _) = read_parts(*stored[name])
        fields = [field for field in {**base[1], **config} if field not in FACTS]
        different = [f"field '{field}'" for field in fields if base[1].get(field) != config.get(field)]
        others = stored_weights(folder)
        for key in {**weights, **others}:
            first, other = weights.get(key), others.get(key)
            if first is None or other is None or first.dtype != other.dtype or not torch.equal(first, other):
                different.append(f"weight '{key}'")
        if different:
            raise ValueError(
                f"{folder}: {different[0]} is not that of {base[0]}; give folders whose '{PART}' is the same drafter"
            )
    target = load_target_of(stored, target_name, **options)
    drafts = open_eagle_drafts(*base, target)
    outputs = len(drafts.weight)
    for name, head in heads.items():
        if head is None:
            continue
        if head.config.outputs != outputs:
            raise ValueError(f"{name}: orders {head.config.outputs} rows, and the drafter's LM head has {outputs}")
        try:
            check_router(head, drafts.embedding_size, drafts.feature_size)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return target, drafts, heads


@torch.inference_mode()
def deepest(drafts: Drafts) -> int:
    """How many depths a drafter has recorded drafts of."""
    return sum(1 for _ in drafts.run(torch.tensor([[1, 1, 1]]), torch.tensor([[False, True, True]])))


# ---- lists and what they keep


def list_of(head: ShortlistHead, depth: int, embeddings: Tensor, hidden: Tensor) -> Tensor:
    """The list that each node would have for itself, as the engine makes it for a level of this node alone.

    Args:
        embeddings, hidden: ``[P, e]`` and ``[P, d]``, as :meth:`ShortlistHead.choose`.

    Returns:
        ``[P, C]`` int64 places in the drafter's vocabulary, in the list's order; −1 in padding, which comes last.
    """
    chosen = head.choose(embeddings, hidden, depth)
    if chosen is None:
        return head.order[: head.config.tokens(depth)].expand(len(hidden), -1)
    return torch.where(chosen.rows < 0, -1, head.order[chosen.rows.clamp(min=0)])


def keep(lists: Iterable[Tensor | None], logits: Tensor, p: Tensor, label: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """What lists keep of the whole LM head, by node.

    Args:
        lists: of each method ``[P, C]`` as :func:`list_of` returns them; None: the whole vocabulary.
        logits: ``[P, D]`` float32 of the whole LM head.
        p: ``[P, D]``, the target's probabilities of these tokens.
        label: ``[P]`` int64 place of the true token; D if the drafter's vocabulary does not have it.

    Yields:
        For each method ``[5, P]`` float64, :data:`STATISTICS`: Σ min(p, q); the shares of the likeliest token and of
        the ten likeliest that are in the list; its tokens; whether the label is in it. And ``[P]`` int64: the label's
        rank in the list, of equal logits by the place in the vocabulary; at most :data:`MAX_RANK`, which also stands
        for a label that is not in it.
    """
    outputs = logits.shape[1]
    known, place = label < outputs, label.clamp(max=outputs - 1)[:, None]
    own = logits.gather(1, place)
    ahead = (logits > own) | ((logits == own) & (torch.arange(outputs, device=logits.device) < place))
    best = logits.topk(min(10, outputs), -1).indices
    for each in lists:
        if each is None:
            each = torch.arange(outputs, device=logits.device).expand_as(logits)
        padding, at = each < 0, each.clamp(min=0)
        q = logits.gather(1, at).masked_fill(padding, -torch.inf).softmax(-1)
        acceptance = torch.minimum(p.gather(1, at), q).sum(-1)
        taken = torch.zeros(len(logits), outputs + 1, dtype=torch.bool, device=logits.device)
        taken = taken.scatter_(1, each.masked_fill(padding, outputs), value=True)[:, :-1]
        inside, top = known & taken.gather(1, place)[:, 0], taken.gather(1, best).double()
        rank = torch.where(inside, (ahead & taken).sum(1).clamp(max=MAX_RANK), MAX_RANK)
        found = (acceptance, top[:, 0], top.mean(1), (~padding).sum(1), inside)
        yield torch.stack([part.double() for part in found]), rank


@torch.inference_mode()
def measure_lists(
    target: Target,
    drafts: Drafts,
    heads: Heads,
    tokens: Tensor,
    supervised: Tensor,
    depths: int,
    on_done: Callable[[int], None] | None = None,
) -> Found:
    """Apply all methods to the drafts of each position of the answers.

    Args:
        tokens, supervised: ``[S, T]`` as :func:`draftsmith.inference.engine.answers.answer` returns them.
        depths: K.
        on_done: called with the number of texts done so far.
    """
    device, outputs, vocabulary = target.device, len(drafts.weight), target.vocab_size
    ids = torch.arange(outputs, device=device) if drafts.ids is None else drafts.ids.to(device)
    places = torch.full((vocabulary,), outputs, device=device)
    places = places.scatter(0, ids, torch.arange(outputs, device=device))  # in the drafter's vocabulary
    heads = {name: None if head is None else head.to(device) for name, head in heads.items()}
    labels = draft_labels(tokens, supervised, depths)
    sums = {name: torch.zeros(len(STATISTICS), len(tokens), depths, dtype=torch.float64) for name in heads}
    ranks = {name: torch.full_like(labels, -1) for name in heads}
    for start in range(0, len(tokens), TEXTS):
        part = slice(start, start + TEXTS)
        length = max(2, int((supervised[part].any(0)).nonzero().max()) + 1)
        rows, marks = tokens[part, :length].long(), supervised[part, :length]
        begins = torch.zeros_like(marks)
        begins[:, :-1] = marks[:, 1:]
        text, begin = begins.nonzero().unbind(1)  # [P] of the rollouts
        hidden = target.hidden(rows.to(device))
        for k, rollout in enumerate(islice(drafts.run(rows, marks), depths)):
            label = labels[start + text, begin, k]
            for at in (label >= 0).nonzero()[:, 0].split(max(1, ENTRIES // vocabulary)):
                row, place, here = text[at], begin[at], at.to(device)
                # The root is at begin + 1, and the node at begin + 1 + k.
                p = target.logits(hidden[row.to(device), place.to(device) + 1 + k]).float().softmax(-1)[:, ids]
                logits, known = drafts.logits(rollout.out[here]), places[label[at].to(device)]
                embeddings = drafts.embed(rollout.tokens[here]).float()
                lists = list[Tensor | None]()
                for head in heads.values():
                    reads = rollout.out if head is not None and head.low_rank else rollout.hidden
                    lists.append(None if head is None else list_of(head, k, embeddings, reads[here].float()))
                for name, (found, rank) in zip(heads, keep(lists, logits, p, known), strict=True):
                    sums[name][:, :, k].index_add_(1, start + row, found.cpu())
                    ranks[name][start + row, place, k] = rank.cpu()
        if on_done:
            on_done(min(start + TEXTS, len(tokens)))
    return Found((labels >= 0).sum(1).double(), sums, ranks)


# ---- head time


Levels = Sequence[tuple[Tensor, Tensor, Tensor]]  # of each depth: embeddings, hidden states, what the LM head reads


@torch.inference_mode()
def draw_nodes(
    target: Target,
    drafts: Drafts,
    tokens: Tensor,
    supervised: Tensor,
    widths: Sequence[int],
    generator: torch.Generator,
) -> Levels | None:
    """Nodes of a text ``[1, T]``, at positions drawn from those that have a label at every depth; None if none has."""
    length = int(supervised[0].nonzero().max()) + 1
    tokens, supervised = tokens[:, :length].long(), supervised[:, :length]
    labels = draft_labels(tokens, supervised, len(widths))
    begin = supervised[0, 1:].nonzero()[:, 0]
    whole = (labels[0, begin] >= 0).all(-1).nonzero()[:, 0]
    if not len(whole):
        return None
    at = whole[torch.randint(len(whole), (max(widths),), generator=generator)].to(target.device)
    levels = list[tuple[Tensor, Tensor, Tensor]]()
    for count, rollout in zip(widths, drafts.run(tokens, supervised), strict=False):
        some = at[:count]
        levels.append((drafts.embed(rollout.tokens[some])[None], rollout.hidden[some][None], rollout.out[some][None]))
    return levels


def time_heads(target: Target, drafts: Drafts, heads: Heads, drawn: Sequence[Levels]) -> Tensor:
    """Seconds of router, choice and logits of all depths: ``[methods, texts]``, medians over :data:`ROUNDS` rounds in
    which the methods take turns."""
    lists: list[Shortlists | None] = []
    for head in heads.values():
        own = copy.deepcopy(head)  # decoding takes the router in the target's dtype
        options = drafts.head, drafts.ids, drafts.after_head
        lists.append(None if own is None else Shortlists(own, *options))
        if lists[-1] is not None:
            lists[-1].allocate(static=False)

    def run(of_head: Shortlists | None, levels: Levels) -> None:
        for depth, (embeddings, hidden, read) in enumerate(levels):
            if of_head is not None:
                of_head.choose(embeddings, hidden, depth)
                of_head.logits(read)
            else:
                logits = apply_linear(drafts.head, read)
                _ = logits if drafts.after_head is None else drafts.after_head(logits)

    seconds = torch.zeros(len(lists), len(drawn), dtype=torch.float64)
    with torch.inference_mode():
        for number, levels in enumerate(drawn):
            runs = [partial(elapsed, partial(run, of_head, levels), target.device) for of_head in lists]
            for first in runs:
                first()  # allocates and tunes
            rounds = take_turns(runs, ROUNDS)
            seconds[:, number] = torch.tensor([statistics.median(times) for times in rounds], dtype=torch.float64)
    return seconds


# ---- the command


def check(args: argparse.Namespace) -> None:
    check_options(args, "depths", "max_new_tokens", "batch_size")
    if args.nodes < 2:
        raise ValueError(f"--nodes {args.nodes}: must be at least 2, the root and a draft")
    if args.depths > DEPTHS:
        raise ValueError(f"--depths {args.depths}: must be at most {DEPTHS}; deeper nodes have the last one's list")
    if args.max_new_tokens <= args.depths:
        raise ValueError(
            f"--max-new-tokens {args.max_new_tokens}: must be above --depths {args.depths}, or no answer "
            "is as long as the drafts are deep"
        )
    check_once("", args.folders)
    check_folder("--report", args.report)


def main() -> None:
    args = parser().parse_intermixed_args()
    check(args)
    given = read_prompts(args.prompts)
    torch.set_num_threads(args.threads)
    options: dict[str, Any] = {"dtype": args.dtype, "device": choose_device(args.device)}
    target, drafts, heads = load_shortlists(args.folders, args.target, **options)
    if args.depths > (most := deepest(drafts)):
        raise ValueError(f"--depths {args.depths}: this drafter drafts {most} tokens deep; give at most {most}")
    prompts = encode_prompts(given, target)
    kinds = [prompt.kind or OTHER for prompt in given]
    tokens, supervised = answers_of(target, prompts, args.max_new_tokens, args.batch_size)
    with ProgressBar("drafts of the answers", len(prompts), console, transient=True) as advance:
        found = measure_lists(target, drafts, heads, tokens, supervised, args.depths, advance)
    tree = best_tree(found.ranks[WHOLE], args.nodes)
    tree = tree if tree.paths else Topology(((0,),))

    of_kind = by_kind(kinds)
    runs = Layout(tree).runs
    widths = [max(1, runs[depth]) if depth < len(runs) else 1 for depth in range(args.depths)]
    generator = torch.Generator().manual_seed(args.seed)
    drawn = dict[int, Levels]()  # by prompt
    for numbers in of_kind.values():
        for place in torch.randperm(len(numbers), generator=generator)[:TIMED].tolist():
            row = slice(numbers[place], numbers[place] + 1)
            nodes = draw_nodes(target, drafts, tokens[row], supervised[row], widths, generator)
            if nodes is not None:
                drawn[numbers[place]] = nodes
    console.print(f"timing {', '.join(heads)}: {len(drawn)} prompts, {ROUNDS} rounds", markup=False)
    seconds = time_heads(target, drafts, heads, list(drawn.values()))

    def figures_of(numbers: Sequence[int]) -> Any:
        return figures(found, tree, seconds, list(drawn), numbers)

    report = facts_of(__file__, target) | {
        **chosen(args, "folders", "max_new_tokens", "nodes", "depths", "seed", "threads"),
        "outputs": len(drafts.weight),
        "prompts": len(prompts),
        "tree": [list(path) for path in tree.paths],
        "timed_nodes": widths,
        "timed_prompts": len(drawn),
        "all": figures_of(range(len(prompts))),
        "kinds": {kind: figures_of(numbers) for kind, numbers in of_kind.items()} if len(of_kind) > 1 else {},
    }
    for kind, part in report["kinds"].items():
        print_methods(kind, part)
    print_methods("all texts", report["all"])
    if args.report:
        write_report(args.report / "shortlists.json", report, plot)


if __name__ == "__main__":
    run_command(main)
