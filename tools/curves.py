"""Draw the loss and the simulated τ of a Medusa run over its training, from the run's metrics.jsonl.

    python tools/curves.py runs/smollm2-medusa --out models/smollm2-medusa/curves.png
    python tools/curves.py runs/smollm2-medusa runs/half runs/quarter --out models/smollm2-medusa/curves.png

With further runs of the same recipe on less data (``limit`` of its sources), a third panel draws each run's τ over the
labels of its data, from provenance.json: whether more data still pays. A shipped drafter has that picture beside its
weights.
"""

import argparse
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from draftsmith.common.command import run_command
from draftsmith.common.files import check_file, json_object, parse_json, read_text, replacing


def draw(lines: list[dict[str, Any]], by_labels: list[tuple[int, float]], path: Path) -> None:
    """Write the picture.

    Args:
        lines: of metrics.jsonl.
        by_labels: labels (tokens of answers) in a run's data, and its τ.

    Raises:
        ValueError: there is no line with a loss, or none with a simulated τ.
    """
    trained = [line for line in lines if "loss" in line]
    evaluated = [line for line in lines if "simulated_tau" in line]
    if not trained or not evaluated:
        raise ValueError(
            "there are no losses or no simulated τ in metrics.jsonl; give the folder of a train/medusa.py run"
        )
    panels = 2 + (len(by_labels) > 1)
    figure, axes = plt.subplots(1, panels, figsize=(5 * panels, 3.6), layout="constrained")
    loss, tau = axes[:2]
    parts = sorted(name for name in trained[0] if name.startswith(("head", "step")) and name.endswith("_loss"))
    for name in parts or ["loss"]:
        loss.plot(
            [line["step"] for line in trained], [line.get(name) for line in trained], label=name.removesuffix("_loss")
        )
    loss.set_title("Training loss, nats")
    loss.legend(frameon=False)
    tau.plot([line["step"] for line in evaluated], [line["simulated_tau"] for line in evaluated], marker="o")
    tau.set_title("Simulated τ on held-out answers")
    for axis in (loss, tau):
        axis.set_xlabel("step")
    if panels == 3:
        axes[2].plot(*zip(*sorted(by_labels), strict=True), marker="o")
        axes[2].set(xscale="log", xlabel="tokens of answers in the data", title="The same by the amount of data")
        axes[2].set_xticks([tokens for tokens, _ in by_labels], [f"{tokens / 1e3:,.0f} k" for tokens, _ in by_labels])
        axes[2].minorticks_off()
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=90)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="the run's folder; then those of runs on less data")
    parser.add_argument("--out", type=Path, required=True, help="the picture to write")
    args = parser.parse_args()
    check_file("--out", args.out, ".png")
    file = args.runs[0] / "metrics.jsonl"
    lines = [parse_json(line, f"{file}:{number}") for number, line in enumerate(read_text(file).splitlines(), 1)]
    by_labels: list[tuple[int, float]] = []
    for run in args.runs if len(args.runs) > 1 else ():
        facts = json_object(run / "provenance.json")
        try:
            by_labels.append((sum(facts["data_labels"]), float(facts["simulated_tau"])))
        except (KeyError, TypeError):
            raise ValueError(
                f"{run}/provenance.json: no data_labels (streamed data has no count) or simulated_tau; leave it out"
            ) from None
    draw(lines, by_labels, args.out)
    print(args.out)


if __name__ == "__main__":
    run_command(main)
