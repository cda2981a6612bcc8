"""Weights go in and out: a checkpoint of the stock model trains with HBP and goes back.

`torch_dist`, local backend, the host's own `pretrain` on both sides; the stock side trains made-up
tokens without packing.
"""

import shutil

import pytest
import torch

from tests.distributed import flags, handmade
from tests.distributed.documents import packs_of_lengths, save_plan

BUDGET, RANKS = 32, 2
MODELS = {
    "gqa-dense": flags.GQA,
    "mla-moe": [*flags.MLA, *flags.moe(), "--expert-model-parallel-size", "2"],
}
SAVE = ["--save-interval", "1", "--save"]
LOAD = ["--finetune", "--load"]


def _argv(model: list[str]) -> list[str]:
    return [
        *flags.COMMON,
        *flags.SIZE,
        *model,
        *["--num-layers", "2"] * ("--num-experts" not in model),
        *["--seq-length", str(BUDGET), "--global-batch-size", str(RANKS)],
        *["--train-iters", "1"],
    ]


def _plan(folder, steps=1) -> list[str]:
    lens, packs = packs_of_lengths([[40, 20]] * steps)
    corpus = handmade.random_corpus(folder / "corpus", lens)
    sizes = {"budget": BUDGET, "num_ranks": RANKS, "num_microbatches": 1}
    save_plan(folder / "plan", corpus, packs, [2] * steps, **sizes)
    return ["--hbp-plan", str(folder / "plan")]


def _stock(cluster, argv: list[str], *more: str):
    return cluster.run(
        RANKS, "tests.distributed.jobs_stock:pretrain", argv=[*argv, "--eval-iters", "0", *more]
    )


def _hbp(cluster, argv: list[str], *more: str):
    return cluster.run(RANKS, "tests.distributed.jobs_recorded:train", argv=[*argv, *more])


def _assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name


@pytest.mark.parametrize("model", MODELS)
def test_stock_checkpoint_into_hbp_and_back(cluster, tmp_path, model):
    """Bit-equal weights on every rank after each load, one trained step on each side between."""
    from megatron.core.dist_checkpointing.serialization import load_tensors_metadata

    argv, plan = _argv(MODELS[model]), _plan(tmp_path)
    stock, trained = str(tmp_path / "stock"), str(tmp_path / "trained")
    made = _stock(cluster, argv, *SAVE, stock)
    ours = _hbp(cluster, [*argv, *plan], *LOAD, stock, *SAVE, trained)
    back = _stock(cluster, argv, *LOAD, trained)
    saved = [set(load_tensors_metadata(f"{f}/iter_0000001")) for f in (stock, trained)]
    assert saved[0] == saved[1]  # the same keys, the optimizer's too
    for rank in range(RANKS):
        _assert_same(ours[rank]["weights_at_start"], made[rank]["weights"])
        _assert_same(back[rank]["weights_at_start"], ours[rank]["weights"])
        name = next(n for n in ours[rank]["weights"] if "linear_proj" in n)
        assert not torch.equal(ours[rank]["weights"][name], ours[rank]["weights_at_start"][name])


def test_a_run_starts_from_weights_alone_and_goes_on_from_its_own_checkpoint(cluster, tmp_path):
    """Weights as Megatron-Bridge leaves them: iteration 0, nothing of a run beside them. The same
    command starts from them, and the second time from what it saved itself: bit-equal to a run
    that was not interrupted.
    """
    from megatron.core.dist_checkpointing import load_common_state_dict

    argv = _argv(flags.GQA)
    stock, weights = tmp_path / "stock", tmp_path / "weights"
    made = _stock(cluster, argv, "--no-save-optim", "--no-save-rng", *SAVE, str(stock))
    shutil.copytree(stock / "iter_0000001", weights / "iter_0000000")
    (weights / "latest_checkpointed_iteration.txt").write_text("0")
    state = load_common_state_dict(str(weights / "iter_0000000"))
    kept = {key: state[key] for key in ("checkpoint_version", "content_metadata")}
    torch.save(kept | {"iteration": 0}, weights / "iter_0000000" / "common.pt")  # it goes first

    del argv[argv.index("--train-iters") :]
    argv += [*_plan(tmp_path, 2), "--use-distributed-optimizer"]
    argv += ["--dist-ckpt-optim-fully-reshardable", "--pretrained-checkpoint", str(weights)]

    def run(name, *more):
        folder = str(tmp_path / name)
        return _hbp(cluster, [*argv, "--load", folder, *SAVE, folder, *more])

    whole = run("whole")
    first = run("parts", "--exit-interval", "1")
    shutil.rmtree(weights)  # a restart has no need of them
    second = run("parts")
    for rank in range(RANKS):
        _assert_same(first[rank]["weights_at_start"], made[rank]["weights"])
        _assert_same(second[rank]["weights"], whole[rank]["weights"])
        assert [*first[rank]["losses"], *second[rank]["losses"]] == whole[rank]["losses"]
    assert len(whole[0]["losses"]) == 2


def test_a_checkpoint_that_is_not_whole_stops_the_run(cluster, tmp_path):
    plan = _plan(tmp_path)
    _stock(cluster, _argv(flags.GQA), *SAVE, str(tmp_path / "stock"))
    (tmp_path / "stock" / "iter_0000001" / "metadata.json").unlink()
    argv = [*_argv(flags.GQA), *plan, *LOAD, str(tmp_path / "stock")]
    ended = cluster.run(RANKS, "tests.distributed.jobs_recorded:printed_error", argv=argv)
    assert [result["code"] for result in ended] == [1] * RANKS
    assert "iter_0000001 has no metadata.json: it is not whole or of another" in ended[0]["error"]


def test_foreign_and_missing_weights_stop_the_run(cluster, tmp_path):
    """A checkpoint with query and key norms for a model without, and the other way round."""
    plan = _plan(tmp_path)
    with_norms = _argv(flags.GQA)
    without = [flag for flag in with_norms if flag != "--qk-layernorm"]
    for saved, loaded, text in (
        (with_norms, without, "holds weights that this model does not have"),
        (without, with_norms, "lacks weights that this model has"),
    ):
        folder = str(tmp_path / text.split()[0])
        _stock(cluster, saved, *SAVE, folder)
        ended = cluster.run(
            RANKS,
            "tests.distributed.jobs_recorded:printed_error",
            argv=[*loaded, *plan, *LOAD, folder],
        )
        assert [result["code"] for result in ended] == [1] * RANKS
        error = ended[0]["error"]
        assert error.startswith(f"megatron_hbp: error: the checkpoint {folder} {text}: ")
        assert "decoder.layers.self_attention.q_layernorm.weight" in error
        assert error.endswith("or --dist-ckpt-strictness log_all to load what matches\n")
        for other in ended[1:]:
            assert "megatron_hbp" not in other["error"]
