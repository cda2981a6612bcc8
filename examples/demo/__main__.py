"""python -m examples.demo [--data ROWS.jsonl] [--tokenizer DIR]

Prepares text, plans it twice (hierarchical, and one level packed by ISF), trains both with Megatron
on 8 CPU processes, and prints what HBP saved.
"""

import argparse
import shutil
import sys
import time
from pathlib import Path

from examples.demo import table
from examples.demo.data import demo_corpora
from examples.demo.job import NUM_MICROBATCHES, NUM_RANKS, ModelShape, train
from examples.demo.plans import hbp_plan, isf_plan
from megatron_hbp.level import Level
from megatron_hbp.report.picture import plan_picture

BUDGET = 2048  # S: tokens per rank and micro-batch
LEVELS = (Level(BUDGET, 1), Level(2 * BUDGET, 2), Level(4 * BUDGET, 4))
CURRICULUM_STEPS = 2  # with at least this many tokens, else none:
CURRICULUM_TOKENS = 100_000
MAX_TOKENS = 320_000


def main() -> int:
    """Runs the demo; returns the exit code."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--data", help="chat rows, .jsonl (default: Python's standard library)")
    parser.add_argument("--tokenizer", help="tokenizer folder or file (default: made here)")
    parser.add_argument("--output", default="demo_output", help="where everything is written")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="tokens trained at most")
    arguments = parser.parse_args()
    try:
        _run(arguments, Path(arguments.output))
    except (ValueError, RuntimeError) as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(arguments: argparse.Namespace, output: Path) -> None:
    start = time.monotonic()
    for name in ("isf", "hbp"):
        for kind in ("plan", "steps", "tensorboard"):
            shutil.rmtree(output / f"{name}-{kind}", ignore_errors=True)
    corpus, valid = demo_corpora(
        output,
        arguments.data,
        arguments.tokenizer,
        longest=LEVELS[-1].pack_len,
        max_tokens=arguments.max_tokens,
    )
    enough = corpus.seq_lens.sum() >= CURRICULUM_TOKENS
    curriculum = CURRICULUM_STEPS if enough else 0
    plans = {
        "isf": isf_plan(corpus, LEVELS[-1], NUM_RANKS, NUM_MICROBATCHES),
        "hbp": hbp_plan(corpus, LEVELS, NUM_RANKS, NUM_MICROBATCHES, curriculum),
    }
    for name, plan in plans.items():
        plan.save(output / f"{name}-plan")
    print(
        f"\nplan over {NUM_RANKS} ranks (cell: CP size of the pack a rank works on; ' parts packs)"
        f"\n{plan_picture(plans['hbp'])}\n"
    )
    shape = ModelShape()
    runs = {}
    for name in plans:
        step_log = train(
            name, output / f"{name}-plan", valid, shape, vocab=corpus.vocab_size, output=output
        )
        runs[name] = table.measured(step_log, output / f"{name}.log")
    flops = shape.flops(corpus.vocab_size)
    figures = {name: table.planned(plan, flops, corpus.num_trained) for name, plan in plans.items()}
    level = LEVELS[-1]
    print(
        f"\nISF: every pack {level.pack_len} tokens on CP {level.cp_size}, in random order. "
        f"HBP: levels {' '.join(map(str, LEVELS))}, balanced.\n"
    )
    print(
        table.comparison(
            ("ISF", "HBP"), (figures["isf"], figures["hbp"]), (runs["isf"], runs["hbp"])
        )
    )
    print(
        "\nSlowest rank: sum over micro-batches of the most work of any rank, which is the time of "
        f"a cluster\nwhose ranks wait for each other. Here {NUM_RANKS} processes share the "
        f"machine's cores, so wall time\ncannot show balance. Logs and plans: {output}/ "
        f"({time.monotonic() - start:.0f} s in all)"
    )


if __name__ == "__main__":
    sys.exit(main())
