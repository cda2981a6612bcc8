"""Plain text tables of `host_overhead.py`, from what its jobs returned."""

from typing import Any

import numpy as np

Times = dict[str, dict[str, list[float]]]


def overhead_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """HBP against a bare forward step; the first row is the head."""
    times, counts = result["times"], result["counts"]
    rows: list[tuple[str, ...]] = [
        ("per step", "bare", "HBP", "ratio", "95 % of ratio", "us per micro-batch")
    ]
    for clock, title in (("wall", "wall"), ("cpu", "CPU")):
        for arm, name in (("hbp", "time"), ("hbp, logged", "time, every step logged")):
            rows.append(
                (
                    f"{title} {name}, ms",
                    _ms(times["bare"][clock]),
                    _ms(times[arm][clock]),
                    f"{ratio(times, arm, clock):.3f}",
                    "{:.3f} to {:.3f}".format(*median_bounds(_ratios(times, arm, clock))),
                    f"{_per_microbatch(result, arm, clock):+.0f}",
                )
            )
    rows.append(
        ("of it the data set (CPU)", "", "", "", "", f"{result['dataset_seconds'] * 1e6:+.0f}")
    )
    for kind, name in (("collectives", "collectives"), ("syncs", "host synchronisations")):
        totals = {arm: sum(found[kind].values()) for arm, found in counts.items()}
        rows.append((name, str(totals["bare"]), str(totals["hbp"]), "", "", ""))
        rows.append(
            (f"{name}, step logged", str(totals["bare"]), str(totals["hbp, logged"]), "", "", "")
        )
    return rows


def switch_rows(results: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Micro-batches grouped by CP size against CP sizes in turn; the first row is the head."""
    first = results[0]
    rows: list[tuple[str, ...]] = [
        ("per step", "grouped", "in turn", "us per switch", "95 % of it")
    ]
    for clock, name in (("wall", "wall time, ms"), ("cpu", "CPU time of a rank, ms")):
        micros = switch_micros(results, clock)
        low, high = median_bounds(micros)
        rows.append(
            (
                name,
                _ms(per_step(results, "grouped", clock)),
                _ms(per_step(results, "in turn", clock)),
                f"{np.median(micros):+.0f}",
                f"{low:+.0f} to {high:+.0f}" + (": not told from 0" if low <= 0 <= high else ""),
            )
        )
    both = ("grouped", "in turn")
    rows.append(("switches of the CP size", *(str(first["switches"][n]) for n in both), "", ""))
    counts = [first["counts"][name] for name in both]
    for kind, name in (("collectives", "collectives"), ("syncs", "host synchronisations")):
        rows.append((name, *(str(sum(count[kind].values())) for count in counts), "", ""))
    rows.append(("bytes given to collectives", *(str(c["bytes_sent"]) for c in counts), "", ""))
    rows.append(("process groups, before and after", *map(str, first["groups"]), "", ""))
    return rows


def aligned(rows: list[tuple[str, ...]]) -> str:
    """The first column to the left, the others to the right; a line under the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def ratio(times: Times, arm: str, clock: str) -> float:
    """Median over pairs of the arm's time over that of the bare step in the same round."""
    return float(np.median(_ratios(times, arm, clock)))


def per_step(results: list[dict[str, Any]], arm: str, clock: str) -> np.ndarray:
    """Seconds of each step: wall time of the slowest rank, CPU time of the mean rank."""
    ranks = np.array([result["times"][arm][clock] for result in results])
    return ranks.max(axis=0) if clock == "wall" else ranks.mean(axis=0)


def switch_micros(results: list[dict[str, Any]], clock: str) -> np.ndarray:
    """Microseconds of one switch, from each round."""
    switches = results[0]["switches"]
    extra = per_step(results, "in turn", clock) - per_step(results, "grouped", clock)
    return extra * 1e6 / (switches["in turn"] - switches["grouped"])


def median_bounds(values: np.ndarray) -> tuple[float, float]:
    """95 % bounds of the median, from order statistics: no distribution is assumed."""
    ordered = np.sort(values)
    half = 0.98 * np.sqrt(len(ordered))
    low = max(0, int(np.floor(len(ordered) / 2 - half)))
    high = min(len(ordered) - 1, int(np.ceil(len(ordered) / 2 + half)))
    return float(ordered[low]), float(ordered[high])


def _ratios(times: Times, arm: str, clock: str) -> np.ndarray:
    return np.array(times[arm][clock]) / np.array(times["bare"][clock])


def _per_microbatch(result: dict[str, Any], arm: str, clock: str) -> float:
    times = result["times"]
    extra = np.array(times[arm][clock]) - np.array(times["bare"][clock])
    return float(np.median(extra)) * 1e6 / result["num_microbatches"]


def _ms(seconds: list[float] | np.ndarray) -> str:
    return f"{np.median(seconds) * 1e3:.1f}"
