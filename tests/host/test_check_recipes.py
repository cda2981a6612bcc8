"""Every bundled recipe passes `hbp check`, with the published numbers of parameters."""

import json
import tomllib
from pathlib import Path

import pytest

from megatron_hbp import cli

pytest.importorskip("megatron.training", reason="needs the extra [train]")

RECIPES = sorted((Path(__file__).parents[2] / "examples" / "recipes").glob("*.toml"))
WHOLE = [path for path in RECIPES if "title" in tomllib.loads(path.read_text())]
# GPUs and published counts, total and active, in billions
KNOWN = {
    "deepseek-v2-128k": (256, 235.7, 21.4),
    "deepseek-v2-128k-2048gpus": (2048, 235.7, 21.4),
    "deepseek-v2-32k": (256, 235.7, 21.4),
    "deepseek-v2-lite": (16, 15.7, 2.4),
    "llama-3.1-70b": (32, 70.6, 70.6),
    "llama-3.1-8b": (32, 8.03, 8.03),
    "qwen2.5-32b": (32, 32.8, 32.8),
    "qwen2.5-72b": (64, 72.7, 72.7),
    "qwen3-30b-a3b": (32, 30.5, 3.3),
}


def test_every_recipe_is_known_here():
    assert {path.stem for path in WHOLE} == set(KNOWN)


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: path.stem)
def test_a_bundled_recipe_fits(path, capsys):
    code = cli.main(["check", str(path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    assert code == 0
    gpus, total, active = KNOWN[path.stem]
    assert found["gpus"] == gpus
    assert found["parameters"] == pytest.approx(total * 1e9, rel=0.005)
    counts = found["active_parameters"], found["active_without_embedding"]
    assert min(abs(count - active * 1e9) for count in counts) <= 0.025 * active * 1e9
    assert len(found["lockstep"]["rank_hashes"]) == gpus
    assert found["plan"]["counts"]["sequences_dropped"] == 0
    for stage in found["stages"]:
        for memory in stage["memory_gib"].values():
            assert memory["total"] <= found["device_gib"]
