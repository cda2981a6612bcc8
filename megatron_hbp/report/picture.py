"""A plan as a few lines of text: who runs what, micro-batch by micro-batch.

    rank    step 0    step 1
      0     1 2       1 4
      1     1 2'      1 4

A cell is the CP size of the pack that the rank works on. Neighbouring packs of one micro-batch
alternate between plain and primed cells, so that the ranks of one pack can be seen; a filler is a
dot.
"""

from megatron_hbp.plan import Plan


def plan_picture(plan: Plan, first_step: int = 0, num_steps: int = 8) -> str:
    """Text of steps first_step .. first_step + num_steps - 1 of a plan, one line per rank."""
    last_step = min(plan.num_steps, first_step + num_steps)
    steps = range(first_step, last_step)
    width = 3 * plan.num_microbatches + 1
    lines = ["rank  " + "".join(f"step {step}".ljust(max(width, 8)) for step in steps)]
    for rank in range(plan.num_ranks):
        cells = "".join(_cells(plan, step, rank).ljust(max(width, 8)) for step in steps)
        lines.append(f"{rank:4d}  {cells}".rstrip())
    return "\n".join(lines)


def _cells(plan: Plan, step: int, rank: int) -> str:
    text = ""
    for m in range(step * plan.num_microbatches, (step + 1) * plan.num_microbatches):
        pack, _ = plan.pack_index(m, rank)
        cp_size = plan.levels[plan.microbatch_level[m]].cp_size
        cell = str(cp_size) if len(plan.pack(pack)) else "."
        mark = "'" if cp_size > 1 and (rank // cp_size) % 2 else ""
        text += f"{cell}{mark}".ljust(3)
    return text
