"""Draw the loss and the simulated τ of a Medusa run over its training, from the run's metrics.jsonl.

    python docs/curves.py runs/smollm2-medusa --out models/smollm2-medusa/curves.png

A shipped drafter has that picture beside its weights.
"""

import argparse
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from draftsmith.common.command import run_command
from draftsmith.common.files import check_folder, parse_json, read_text, replacing


def draw(lines: list[dict[str, Any]], path: Path) -> None:
    """Write the picture.

    Args:
        lines: of metrics.jsonl.

    Raises:
        ValueError: there is no line with a loss, or none with a simulated τ.
    """
    trained = [line for line in lines if "loss" in line]
    evaluated = [line for line in lines if "simulated_tau" in line]
    if not trained or not evaluated:
        raise ValueError(
            "there are no losses or no simulated τ in metrics.jsonl; give the folder of a train/medusa.py run"
        )
    figure, (loss, tau) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    heads = sorted(name for name in trained[0] if name.startswith("head") and name.endswith("_loss"))
    for name in heads:
        loss.plot([line["step"] for line in trained], [line.get(name) for line in trained], label=name[: -len("_loss")])
    loss.set_title("Training loss of each head, nats")
    loss.legend(frameon=False)
    tau.plot([line["step"] for line in evaluated], [line["simulated_tau"] for line in evaluated], marker="o")
    tau.set_title("Simulated τ on held-out answers")
    for axis in (loss, tau):
        axis.set_xlabel("step")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=90)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--out", type=Path, required=True, help="the picture to write")
    args = parser.parse_args()
    check_folder("--out", args.out.parent)
    file = args.run / "metrics.jsonl"
    lines = [parse_json(line, f"{file}:{number}") for number, line in enumerate(read_text(file).splitlines(), 1)]
    draw(lines, args.out)
    print(args.out)


if __name__ == "__main__":
    run_command(main)
