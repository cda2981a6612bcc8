"""`make bench-host`: what HBP costs inside a training process, and what a switch of CP costs.

python -m benchmarks.host_overhead [--pairs 40] [--json FILE]. Ends with 1 when a bar is missed:
- HBP's step takes at most 1.05 of a step with a bare forward step (median over pairs, wall time);
- both have the same collectives and host synchronisations, and return the same losses;
- over steps that switch the CP size no process group is made, and CP sizes in turn send exactly
  what micro-batches grouped by CP size send.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.host_jobs import overhead_job, switch_job
from benchmarks.host_table import aligned, overhead_rows, ratio, switch_rows

MAX_RATIO = 1.05


def overhead_bars(result: dict[str, Any]) -> dict[str, bool]:
    """Each bar in words, and whether it is met."""
    bare, hbp = result["counts"]["bare"], result["counts"]["hbp"]
    found = ratio(result["times"], "hbp", "wall")
    return {
        f"a step takes at most {MAX_RATIO} of a bare step (measured {found:.3f})": found
        <= MAX_RATIO,
        "the same collectives as a bare step": bare["collectives"] == hbp["collectives"]
        and bare["bytes_sent"] == hbp["bytes_sent"],
        "the same host synchronisations as a bare step": bare["syncs"] == hbp["syncs"],
        "the same losses as a bare step, bit for bit": result["losses_equal"],
    }


def switch_bars(results: list[dict[str, Any]]) -> dict[str, bool]:
    """Each bar in words, and whether it is met on every rank."""
    counts = [(r["counts"]["grouped"], r["counts"]["in turn"]) for r in results]
    losses = [(r["losses"]["grouped"], r["losses"]["in turn"]) for r in results]
    return {
        "a switch makes no process group": all(
            before == after for before, after in (r["groups"] for r in results)
        ),
        "a switch sends nothing": all(
            a["collectives"] == b["collectives"] and a["bytes_sent"] == b["bytes_sent"]
            for a, b in counts
        ),
        "a switch waits for nothing": all(a["syncs"] == b["syncs"] for a, b in counts),
        "the same loss in both orders, to 1e-6": all(
            abs(a[name] - b[name]) <= 1e-6 * abs(a[name]) for a, b in losses for name in a
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What HBP costs inside a training process.")
    parser.add_argument("--pairs", type=int, default=40, help="timed rounds (default 40)")
    parser.add_argument("--json", type=Path, help="keep all measurements in this file")
    options = parser.parse_args()
    if options.pairs < 1:
        parser.error(f"--pairs is {options.pairs}; it must be at least 1")
    with tempfile.TemporaryDirectory() as folder:
        (overhead,) = overhead_job().run(Path(folder) / "overhead", options.pairs)
        switch = switch_job().run(Path(folder) / "switch", options.pairs)
    if options.json is not None:
        options.json.write_text(
            json.dumps({"overhead": overhead, "switch": switch}), encoding="utf-8"
        )
    print(
        f"One process: {overhead['parameters'] / 1e6:.1f} M parameters, S = "
        f"{overhead['token_budget']} tokens, {overhead['documents']:.1f} documents a pack, "
        f"{overhead['num_microbatches']} micro-batches a step, {options.pairs} pairs; "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n"
    )
    print(aligned(overhead_rows(overhead)))
    print(f"\nTwo processes: S = {switch[0]['token_budget']} tokens, CP 1 and CP 2\n")
    print(aligned(switch_rows(switch)))
    print()
    bars = overhead_bars(overhead) | switch_bars(switch)
    for words, met in bars.items():
        print(f"{'met   ' if met else 'MISSED'}  {words}")
    if not all(bars.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
