"""Loading micro-batches in one process: ours, a bare copy of the rows, the host's SFT data set.

The bare copy reads the same sequences' tokens and masks from the same memory maps, in the same
order, and copies them into an int64 and a uint8 array of S entries: no targets, weights, positions,
boundaries or padding. The host's SFT data set gets the same packs as rows of conversations and
tokenises them as it goes, which is its way of working. Rates are of real tokens.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megatron_hbp.corpus import Corpus, write_corpus
from megatron_hbp.corpus.prepare import prepare_corpus
from megatron_hbp.dataset import HbpDataset
from megatron_hbp.level import Level
from megatron_hbp.plan import Plan
from megatron_hbp.planner import build_plan
from megatron_hbp.sampler import MicrobatchSampler

_SHARED = Path(__file__).resolve().parents[2] / "shared"
_LEVELS = (Level(16384, 1), Level(131072, 8))
_SEQUENCES = 40_000
_HOST_PACKS = 40
BAR = 0.5


def synthetic_corpus(folder: Path) -> Corpus:
    """Lengths as in the Tulu 3 mixture, random tokens, the later half of each trained."""
    random = np.random.default_rng(0)
    lens = np.clip(random.lognormal(5.9, 1.25, _SEQUENCES), 2, 131072).astype(int)

    def sequences():
        for length in lens:
            mask = np.zeros(length, dtype=np.uint8)
            mask[length // 2 :] = 1
            yield random.integers(0, 100_000, length), mask

    return write_corpus(folder, sequences(), vocab_size=100_000, end_id=2)


def bare_copy(plan: Plan, corpus: Corpus, rank: int) -> Callable[[int], None]:
    """Copies one micro-batch's rows."""
    ((tokens, mask),) = corpus.values
    _, starts = corpus.locate(np.arange(len(corpus)))
    budget = plan.token_budget

    def copy(microbatch: int) -> None:
        pack, cp_rank = plan.pack_index(microbatch, rank)
        row, row_mask = np.zeros(budget, np.int64), np.zeros(budget, np.uint8)
        low, at = cp_rank * budget, 0
        for sequence in plan.pack(pack):
            length, start = int(plan.seq_lens[sequence]), int(starts[sequence])
            first, last = max(at, low), min(at + length, low + budget)
            if first < last:
                here, shift = slice(first - low, last - low), start - at
                row[here] = tokens[first + shift : last + shift]
                row_mask[here] = mask[first + shift : last + shift]
            at += length

    return copy


def seconds(load: Callable[[int], object], microbatches: list[int], turns: int) -> float:
    """For all micro-batches, the best of some turns."""
    best = float("inf")
    for _ in range(turns):
        start = time.perf_counter()
        for microbatch in microbatches:
            load(microbatch)
        best = min(best, time.perf_counter() - start)
    return best


def real_tokens(dataset: HbpDataset, microbatches: list[int]) -> int:
    """Tokens that are no padding."""
    return sum(int((~dataset[m]["padding_mask"]).sum()) for m in microbatches)


def against_bare(folder: Path, turns: int) -> dict[str, float]:
    """Tokens a second of both on synthetic sequences."""
    corpus = synthetic_corpus(folder / "synthetic")
    plan = build_plan(corpus.seq_lens, _LEVELS, 8, 8, first_trained=corpus.first_trained)
    dataset = HbpDataset(plan, corpus, rank=0)
    microbatches = list(MicrobatchSampler(plan))
    tokens = real_tokens(dataset, microbatches)
    copy = bare_copy(plan, corpus, 0)
    ours, bare = [], []
    for _ in range(turns):  # in turn, so that both see the same machine
        ours.append(seconds(dataset.__getitem__, microbatches, 1))
        bare.append(seconds(copy, microbatches, 1))
    return {"ours": tokens / min(ours), "bare": tokens / min(bare)}


def against_host(folder: Path, turns: int) -> dict[str, float]:
    """Tokens a second of both on real chats, the same packs."""
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig  # noqa: PLC0415
    from megatron.core.datasets.utils import Split  # noqa: PLC0415
    from megatron.core.tokenizers import MegatronTokenizer  # noqa: PLC0415
    from megatron.training.datasets.sft_dataset import SFTDataset  # noqa: PLC0415

    source, tokenizer = _SHARED / "data/messages/gsm8k_test.jsonl", _SHARED / "data/tokenizer/tt2k"
    chats = [json.loads(line)["messages"] for line in source.read_text().split("\n") if line]
    corpus = prepare_corpus([source], tokenizer, folder / "chats")
    plan = build_plan(corpus.seq_lens, _LEVELS[:1], 1, first_trained=corpus.first_trained)
    dataset = HbpDataset(plan, corpus, rank=0)
    microbatches = list(MicrobatchSampler(plan))[:_HOST_PACKS]
    rows = folder / "packs.jsonl"
    with rows.open("w") as file:
        for microbatch in microbatches:
            messages = []
            for sequence in plan.pack(microbatch):  # a system message starts a conversation there
                messages += [
                    {"role": "system", "content": "Solve it."},
                    *chats[int(corpus.row_numbers[sequence]) - 1],
                ]
            file.write(json.dumps({"messages": messages}) + "\n")
    host_tokenizer = MegatronTokenizer.from_pretrained(  # type: ignore  # annotated loosely
        tokenizer_path=str(tokenizer), metadata_path={"library": "sft"}, prompt_format="default"
    )
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=2 * plan.token_budget,  # system messages need room
        blend=None,
        split=None,
        tokenizer=host_tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        context_parallel_size=1,
    )
    host = SFTDataset(
        SFTDataset.build_low_level_dataset(str(rows), config),
        str(rows),
        np.arange(len(microbatches)),
        len(microbatches),
        Split.train,
        config,
    )
    assert host[0]["tokens"].shape == (config.sequence_length,)
    tokens = real_tokens(dataset, microbatches)
    return {
        "ours": tokens / seconds(dataset.__getitem__, microbatches, turns),
        "host": tokens / seconds(host.__getitem__, list(range(len(microbatches))), 1),
    }


def main() -> None:
    """Prints the rates; exit code 1 when ours is below the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        bare = against_bare(Path(name), given.turns)
        ratio = bare["ours"] / bare["bare"]
        print(
            f"synthetic rows: ours {bare['ours'] / 1e6:.0f} M tokens/s, a bare copy "
            f"{bare['bare'] / 1e6:.0f} M, ratio {ratio:.2f} (bar {BAR})"
        )
        results: dict[str, object] = {"bare": bare, "ratio": ratio}
        if _SHARED.is_dir():
            host = against_host(Path(name), given.turns)
            results["host"] = host
            print(
                f"chats: ours {host['ours'] / 1e6:.1f} M tokens/s, the host's SFT data set "
                f"{host['host'] / 1e6:.3f} M, {host['ours'] / host['host']:.0f} times"
            )
    if given.json:
        Path(given.json).write_text(json.dumps(results, indent=2) + "\n")
    sys.exit(ratio < BAR)


if __name__ == "__main__":
    main()
