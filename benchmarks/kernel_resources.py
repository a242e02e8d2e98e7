"""What kernels need of a GPU of 132 multiprocessors (sm_90), found without one: their launches are intercepted.

    python benchmarks/kernel_resources.py [--triton FOLDER]    table of registers, memory and instructions, with checks

FOLDER is an unpacked wheel of another version of Triton, which compiles the kernels, too, in a process of its own.
ptxas, cuobjdump and nvdisasm are inside each wheel.
"""

import argparse
import itertools
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from draftsmith.benchmarks.intercept import PROCESSORS, Launch, intercepted
from draftsmith.kernels import (
    accept_greedy,
    add_norm,
    commit,
    coupled,
    distribution,
    few_rows,
    gated,
    grow,
    head_topk,
    multi_step,
    pair_input,
    res_block,
    rotate_write,
    soft_loss,
    step_attention,
    tree_attention,
)
from draftsmith.kernels.backend import triton

SHARED_MEMORY = 227 * 1024  # bytes that a program may have on sm_90; a multiprocessor has one kilobyte more
# A kernel's tile whose side of so many rows is the left one of tl.dot. Warp groups multiply 64 rows or more (HGMMA).
LEFT = {
    "_tree_attention_kernel": "BLOCK_M",
    "_before_kernel": "BLOCK_M",
    "_few_rows_kernel": "BLOCK_N",
    "_block_topk_kernel": "BLOCK_M",
    "_res_block_kernel": "BLOCK_M",
}
# Offsets may pass 2^31 elements.
WIDE = ("_tree_attention_kernel", "_merge_items_kernel", "_before_kernel", "_path_kernel", "_soft_loss_kernel")
IN_PLACE = ("_commit_kernel", "_advance_kernel")  # an element is moved by one thread, so nothing is shared


class Resources(NamedTuple):
    """Of one program of a compiled kernel: registers and bytes of stack of a thread, bytes of shared memory, threads;
    programs that a multiprocessor's registers allow, and that fit on it; instructions: products of warp groups and of
    warps, accesses to the stack, barriers, loads; percent of the loaded bytes that loads of 16 bytes bring."""

    registers: int
    stack: int
    shared: int
    threads: int
    by_registers: int
    programs: int
    hgmma: int
    hmma: int
    spills: int
    barriers: int
    loads: int
    wide: int


def run_tool(name: str, *options: str, given: bytes) -> str:
    """What a tool of Triton's wheel prints of a file."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(given)
        file.flush()
        command = [Path(triton.__file__).parent / "backends/nvidia/bin" / name, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def machine_code(cubin: bytes) -> bytes:
    """The section .text of a kernel's ELF file."""
    (table,), (size, count, names) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<3H", cubin, 58)
    sections = [struct.unpack_from("<2I4Q", cubin, table + size * number) for number in range(count)]
    strings = sections[names][4]
    (code,) = (
        cubin[place : place + length]
        for name, _, _, _, place, length in sections
        if cubin.startswith(b".text.", strings + name)
    )
    return code


def disassembled(cubins: Sequence[bytes]) -> list[str]:
    """The instructions of each kernel, by one call: nvdisasm takes far longer to start than for a kernel."""
    codes = [machine_code(cubin) for cubin in cubins]
    lines = re.findall(
        r"^\s*/\*[0-9a-f]+\*/(.*)$", run_tool("nvdisasm", "-b", "SM90a", given=b"".join(codes)), re.MULTILINE
    )
    assert 16 * len(lines) == sum(map(len, codes)), "bytes of an instruction"
    ends = list(itertools.accumulate(len(code) // 16 for code in codes))
    return ["\n".join(lines[begin:end]) for begin, end in itertools.pairwise([0, *ends])]


def resources(done: Any, code: str) -> Resources:
    """Those of Triton's compiled kernel with these instructions, by the tools of its wheel."""
    usage = run_tool("cuobjdump", "--dump-resource-usage", given=done.asm["cubin"])
    used = {name: int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", usage)}
    shared, threads = done.metadata.shared, 32 * done.metadata.num_warps
    by_registers = min(2048, 65536 // (-(-used["REG"] // 8) * 8)) // threads
    fit = min(32, by_registers, (SHARED_MEMORY + 1024) // (shared + 1024))  # the system takes 1 KB for each

    widths = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
    loads = re.findall(r"\b(?:LDG|LDGSTS)\.E([.\w]*)", code)
    sizes = [next((size for width, size in widths.items() if width in load.split(".")), 4) for load in loads]
    wide = 100 * sum(size for size in sizes if size == 16) // (sum(sizes) or 1)
    patterns = (r"\bHGMMA\.", r"\bHMMA\.", r"\b(?:STL|LDL)\b", r"\bBAR\.")
    hgmma, hmma, spills, barriers = (len(re.findall(pattern, code)) for pattern in patterns)
    of_code = hgmma, hmma, spills, barriers, len(loads), wide
    return Resources(used["REG"], used["STACK"], shared, threads, by_registers, fit, *of_code)


def narrow_products(ttir: str) -> list[tuple[str, str]]:
    """The 32-bit products of two variables, such as an index and a stride, in a kernel's intermediate code."""
    constants = set(re.findall(r"(%\S+) = arith\.constant", ttir))
    products = re.findall(r"arith\.muli (%\S+), (%\S+) : (?:tensor<[\dx]+x)?i32", ttir)
    return [pair for pair in products if not constants & set(pair)]


def complaints(launch: Launch, done: Any, found: Resources, main: bool) -> list[str]:
    """What is wrong with a launch and Triton's compiled kernel; ``main``: of a step of the usual models in 16 bits."""
    _, signature, constants, _ = launch.pack()
    names = launch.kernel.arg_names
    left = constants.get((names.index(LEFT[launch.name]),), 0) if launch.name in LEFT else 0
    short = any(kind in str(signature) for kind in ("*bf16", "*fp16"))  # in tuples, too
    wrong = [] if found.stack == found.spills == 0 else ["registers spill to the stack"]
    if found.shared > SHARED_MEMORY:
        wrong.append("too much shared memory")
    if main and found.by_registers < 2:
        wrong.append("its registers leave no second program on a multiprocessor")
    if short and left >= 64 and not found.hgmma:
        wrong.append("no products of warp groups")
    if launch.name == "_vector_kernel":
        folds = (0, 3) not in constants or constants[(names.index("ADD"),)]  # (0, 3): the norm's weight
        least = 80 if folds else 90  # of a norm and of the residual a thread loads a few elements
        if found.wide < least:
            wrong.append(f"loads of 16 bytes bring less than {least} % of the bytes")
    if launch.name in IN_PLACE and (found.shared or found.barriers):
        wrong.append("it shares memory, and works in place")
    if launch.name in WIDE and narrow_products(done.asm["ttir"]):
        wrong.append("its offsets are products of 32 bits")
    return wrong


empty = partial(torch.empty, device="meta")
BF16, INT = torch.bfloat16, torch.int64


def attention(
    queries: int,
    kv_heads: int,
    rows: int = 1,
    width: int = 128,
    heads: int = 32,
    dtype: torch.dtype = BF16,
    window: int = 0,
    softcap: float | None = None,
    last_merges: bool = False,
    slots: int = 2048,
    same_bits: bool = False,
) -> None:
    q = empty(rows, queries, heads, width, dtype=dtype).transpose(1, 2)
    cache = empty(2, rows, kv_heads, slots, width, dtype=dtype)
    lengths, depth = empty(rows, dtype=INT), empty(rows, queries, dtype=torch.int32)
    ancestors = empty(rows, queries, -(-queries // 64), dtype=INT)
    if same_bits:
        keys = tree_attention.TreeKeys(lengths, ancestors, depth, depth, None, True)
        step_attention.attend_tree(q, cache[0], cache[1], keys, 0.1, window, softcap)
        return
    tree_attention.tree_attention_cached(
        q, cache[0], cache[1], lengths, ancestors, queries, 0.1, depth, depth, window, softcap, last_merges=last_merges
    )


def _prompts(parts: int, window: int = 0) -> None:
    """Parts of several prompts of an 8B model, 512 tokens at most each."""
    q, cache = empty(1, 2048, 32, 128, dtype=BF16).transpose(1, 2), empty(2, 32, 8, 2048, 128, dtype=BF16)
    of_part = empty(parts, dtype=INT)
    segments = tree_attention.Segments(of_part, of_part, of_part, of_part, 512)
    tree_attention.segment_attention(q, cache[0], cache[1], segments, 0.1, window)


def products(rows: int, dtype: torch.dtype = BF16, bias: bool = False, same_bits: bool = False) -> None:
    """Each block size that is measured on such a GPU, or the one for any number of rows."""
    x, matrix = empty(rows, 4096, dtype=dtype), empty(4096, 4096, dtype=dtype).t()
    forms = few_rows.candidates(rows, 4096, 4096, dtype, PROCESSORS)
    if same_bits:
        forms = [form] if (form := few_rows.same_bits_form(4096, 4096, dtype, PROCESSORS)) else []
    for form in {one._replace(parts=0): one for one in forms}.values():
        parts = few_rows.few_rows_product(x, matrix, form)
    few_rows.sum_parts(parts, empty(rows, 4096, dtype=dtype), x[0] if bias else None)


def _folded(rows: int) -> None:
    """Products of an 8B model's layer that do what stands around them."""
    x, weight = empty(rows, 4096, dtype=BF16), empty(4096, dtype=BF16)
    gate_up, down = empty(28672, 4096, dtype=BF16).t(), empty(4096, 14336, dtype=BF16).t()
    tiles = {one._replace(parts=1) for one in few_rows.candidates(rows, 4096, 28672, BF16, PROCESSORS)}
    for form in sorted(tiles):
        if rows > 1 or form.kernel == "vector":
            mlp = few_rows.few_rows_product(x, gate_up, form, norm=(weight, 1e-6), act="silu")[0]
    few_rows.few_rows_product(mlp, down, form, x[None], add=True)


def _level(nodes: int) -> None:
    """Around the layer of EAGLE-3, with a draft vocabulary; and the target's greedy choice."""
    tokens, depth, lengths = empty(1, nodes, dtype=INT), empty(1, nodes, dtype=torch.int32), empty(1, dtype=INT)
    hidden, weight = empty(1, nodes, 4096, dtype=BF16), empty(4096, dtype=BF16)
    embedding = empty(128256, 4096, dtype=BF16)
    norms = weight, weight, 1e-6
    pair_input.pair_input(tokens, embedding, hidden, None, norms, lengths, depth, 1, 2047)
    ids = empty(32000, dtype=INT)
    head_topk.head_topk(hidden[0], embedding[:32000], 10, log_q=True, tokens=ids)
    head_topk.head_argmax(hidden, embedding)


def _layer(nodes: int, parts: int) -> None:
    """What stands between the products of an 8B model's layer."""
    dtype = torch.float if parts > 1 else BF16
    x, y, weight = empty(nodes, 4096, dtype=BF16), empty(parts, nodes, 4096, dtype=dtype), empty(4096, dtype=BF16)
    add_norm.add_norm(x, y, weight, 1e-6, x)
    gated.gated(empty(parts, nodes, 28672, dtype=dtype), empty(nodes, 14336, dtype=BF16), "silu")
    cache, numbers = empty(2, 1, 8, 2048, 128, dtype=BF16).permute(1, 3, 0, 2, 4), empty(1, nodes, dtype=INT)
    qkv, table = empty(parts, nodes, 6144, dtype=dtype), empty(2048, 256, dtype=BF16)
    q = empty(1, nodes, 32, 128, dtype=BF16)
    rotate_write.rotate_write(qkv, table, numbers, numbers, cache, q)


def _heads(rows: int, heads: int = 3) -> None:
    """Medusa's."""
    block, bias = empty(heads, 4096, 4096, dtype=BF16), empty(heads, 1, 4096, dtype=BF16)
    with torch.no_grad():
        res_block.res_block(empty(rows, 4096, dtype=BF16).expand(heads, -1, -1), block, bias)
    head_topk.head_topk(empty(heads * rows, 4096, dtype=BF16), empty(32000, 4096, dtype=BF16), 10)


def acceptance(nodes: int, dtype: torch.dtype = BF16) -> None:
    numbers, small = empty(1, nodes, dtype=INT), empty(1, nodes, dtype=torch.int32)
    of_row, flag = empty(1, dtype=INT), empty(1, nodes, dtype=torch.bool)
    parts = numbers, empty(1, nodes, dtype=dtype), numbers, small, small, empty(1, nodes, -(-nodes // 64), dtype=INT)
    accept_greedy.accept_greedy(*parts, flag, flag[:, 0].clone(), numbers.new_empty(1, 8), 5)
    features = empty(1, nodes, 4096, dtype=dtype)
    accept_greedy.advance(of_row, of_row, features[:, 0], features, of_row, of_row, of_row, flag[:, 0].clone())
    commit.commit(empty(32, 2, 1, 8, 2048, 128, dtype=dtype), of_row, empty(1, 6, dtype=INT), of_row)


def _growth(k: int, depth: int, nodes: int) -> None:
    """A level and the choice of a dynamic tree."""
    most, runs = 1 + k + (depth - 1) * k * k, (depth - 1) * k
    candidates = grow.Candidates(empty(1, most, dtype=INT), empty(1, most), empty(1, most, dtype=INT))
    number, bits = empty(1, k, dtype=INT), empty(runs, -(-runs // 64), dtype=INT)
    level = grow.Level(number, number, empty(1, k), bits[None, :k], number)
    grow.grow_level(level, empty(1, k, k, dtype=INT), empty(1, k, k), candidates, 1 + k, bits[:k], k)
    own_bits = empty(nodes, -(-nodes // 64), dtype=INT)
    grow.select_tree(candidates, empty(most, dtype=torch.int32), own_bits, depth)


def _verification(draws: int, with_q: bool = False, uses: tuple[bool, bool, bool] = (False, False, False)) -> None:
    logits, child = empty(1, 64, 128256, dtype=BF16), empty(1, 64, draws, dtype=INT)
    q, uniforms, of_row = empty(1, 64, 128256) if with_q else None, empty(1, 64, draws), empty(1)
    top_k, tokens, kind = empty(1, dtype=INT), empty(1, 64, dtype=INT), empty(child.shape, dtype=torch.int8)
    multi_step.verify_logits(
        logits, of_row, top_k, of_row, of_row, tokens, child, kind, child, q, uniforms, of_row, 5, uses=uses
    )
    distribution.philox_uniforms(top_k, top_k, 641)


def _coupled(nodes: int, count: int, uses: tuple[bool, bool, bool] = (False, False, False)) -> None:
    of_row, numbers = empty(1), empty(1, dtype=INT)
    logits, positions = empty(1, nodes, 128256, dtype=BF16), empty(1, nodes, dtype=INT)
    coupled.coupled_topk(logits, of_row, numbers, of_row, of_row, numbers, positions, count, uses=uses)


def _soft_loss(loss: str) -> None:
    """Of training EAGLE-3 on a draft vocabulary."""
    of_row, rows = empty(4096), empty(2048, dtype=INT)
    entropy = of_row if loss == "lk" else None
    teacher = soft_loss.Teacher(empty(4096, 32000), empty(4096, dtype=INT), of_row, entropy, loss)
    soft_loss.soft_loss(empty(2048, 32000, dtype=BF16), teacher, rows, empty(2048), empty(3, 2048))


ALL = True, True, True
# Main paths, and others; 7B has 32 key/value heads, 8B has 8.
MAIN: dict[str, Callable[[], None]] = {
    "attention 7B, 1 node": partial(attention, 1, 32),
    "attention 8B, 1 node": partial(attention, 1, 8),
    "attention 7B, 64 nodes": partial(attention, 64, 32),
    "attention 8B, 64 nodes": partial(attention, 64, 8),
    "products, 1 row": partial(products, 1),
    "products, 16 rows": partial(products, 16),
    "products, 32 rows": partial(products, 32),
    "products, 64 rows": partial(products, 64),
    "folded products, 1 row": partial(_folded, 1),
    "folded products, 64 rows": partial(_folded, 64),
    "level, 1 node": partial(_level, 1),
    "level, 10 nodes": partial(_level, 10),
    "same bits, 7B, 1 node": partial(attention, 1, 32, same_bits=True),
    "same bits, 8B, 64 nodes": partial(attention, 64, 8, same_bits=True),
    "same bits, products": partial(products, 1, same_bits=True),
    "layer, 1 node": partial(_layer, 1, 4),
    "layer, 64 nodes": partial(_layer, 64, 1),
    "Medusa, 1 row": partial(_heads, 1),
    "Medusa, 64 rows": partial(_heads, 64),
    "acceptance": partial(acceptance, 64),
    "dynamic tree of 60 nodes": partial(_growth, 10, 6, 60),
    "verification": partial(_verification, 10),
    "coupled sampling": partial(_coupled, 64, 1),
    "drafts under noise": partial(_coupled, 4, 10),
    "training, cross-entropy": partial(_soft_loss, "ce"),
    "training, loss on acceptance": partial(_soft_loss, "lk"),
    "training, total variation": partial(_soft_loss, "tv"),
    "training, logarithm of acceptance": partial(_soft_loss, "nla"),
}
OTHERS: dict[str, Callable[[], None]] = {
    "attention 8B, 64 nodes, 20 rows": partial(attention, 64, 8, 20),
    "verification, top-k and top-p": partial(_verification, 10, False, ALL),
    "coupled sampling, top-k and top-p": partial(_coupled, 64, 1, ALL),
    "verification with q": partial(_verification, 4, True, ALL),
    "attention 8B, 1 node, merging": partial(attention, 1, 8, last_merges=True),
    "attention, window, cap": partial(attention, 64, 8, window=512, softcap=30.0),
    "prompts": partial(_prompts, 8),  # a tile of 256 threads, one program on a multiprocessor
    "prompts, window": partial(_prompts, 8, 512),
    "attention, D = 256": partial(attention, 64, 8, width=256, heads=16),
    "attention, D = 256, window, cap": partial(attention, 64, 8, width=256, heads=16, window=512, softcap=30.0),
    "same bits, D = 256, window, cap": partial(
        attention, 64, 8, width=256, heads=16, window=512, softcap=30.0, same_bits=True
    ),
    "same bits, window, cap": partial(attention, 64, 8, window=512, softcap=30.0, same_bits=True),
    "same bits, D = 256": partial(attention, 64, 8, width=256, heads=16, same_bits=True),
    "same bits, float32": partial(attention, 16, 8, dtype=torch.float32, same_bits=True),
    "attention, float32, 16 nodes": partial(attention, 16, 8, dtype=torch.float32),
}


def report(cases: dict[str, bool]) -> list[tuple[str, Launch, Resources, list[str]]]:
    """Compile the launches of these entries of ``MAIN`` (True) and ``OTHERS`` (False): each of them once, with what is
    wrong with it."""
    compiled: dict[str, tuple[str, Launch, Any]] = {}
    for case, main in cases.items():
        launches: list[Launch] = []
        with intercepted(launches.append):
            (MAIN if main else OTHERS)[case]()
        for launch in launches:
            if launch.key not in compiled:
                compiled[launch.key] = case, launch, launch.compiled()
    codes = disassembled([done.asm["cubin"] for *_, done in compiled.values()])
    rows: list[tuple[str, Launch, Resources, list[str]]] = []
    for (case, launch, done), code in zip(compiled.values(), codes, strict=True):
        found = resources(done, code)
        rows.append((case, launch, found, complaints(launch, done, found, cases[case])))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", type=Path, metavar="FOLDER", help="an unpacked wheel of another version")
    args = parser.parse_args()
    if triton is None:
        parser.error("triton is not installed; pip install triton")
    other = None
    if args.triton is not None:
        if not (args.triton / "triton").is_dir():
            parser.error(
                f"--triton {args.triton}: there is no folder triton in it; give the folder of an unpacked wheel"
            )
        path = os.pathsep.join([str(args.triton.resolve()), os.environ.get("PYTHONPATH", "")])
        other = subprocess.Popen([sys.executable, __file__], env={**os.environ, "PYTHONPATH": path})
    rows = report({**dict.fromkeys(MAIN, True), **dict.fromkeys(OTHERS, False)})
    lines = [f"Triton {triton.__version__}, sm_90, {PROCESSORS} multiprocessors"]
    fields = " ".join(name.rjust(max(6, len(name))) for name in Resources._fields)
    lines.append(f"{'launch':32}{'kernel':16}{'grid':>11} {fields}")
    for case, launch, found, wrong in rows:
        numbers = zip(Resources._fields, found, strict=True)
        columns = " ".join(f"{number:{max(6, len(name))}}" for name, number in numbers)
        lines.append(
            f"{case:32}{launch.name[1:-7]:16}{'x'.join(map(str, launch.grid)):>11} {columns} {'; '.join(wrong)}"
        )
    failed = sum(bool(wrong) for *_, wrong in rows)
    print(*lines, f"{len(rows)} kernels, {failed} of them not as they should be", sep="\n", flush=True)
    return int(bool(failed or (other and other.wait())))


if __name__ == "__main__":
    sys.exit(main())
