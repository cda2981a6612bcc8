"""Plans to make pages of, and what a page says."""

from dataclasses import dataclass, field
from html.parser import HTMLParser

import numpy as np

from megatron_hbp import Level, Plan, build_plan
from megatron_hbp.cost_model import CostModel, analytic
from megatron_hbp.hardware import DEVICES
from megatron_hbp.models import MODELS
from megatron_hbp.run_layout import RunLayout

NASTY = ("/data/</script><b>bold", '/data/"quoted" & <i>', "/data/" + "long" * 30)


def small_plan() -> Plan:
    """Three sequences."""
    return build_plan(np.array([5, 9, 40]), (Level(16, 1), Level(64, 4)), 4)


def rich_plan() -> Plan:
    """Drops for two reasons, a cut, sources with weights, pipeline stages, two epochs."""
    rng = np.random.default_rng(0)
    lens = np.concatenate([[0, 0, 0], rng.integers(2, 500, 300), rng.integers(600, 2600, 12)])
    sources = np.concatenate([[0, 0, 0], rng.integers(0, 2, 300), np.full(12, 2)])
    first_trained = np.ones(len(lens), int)
    first_trained[100:105] = 10**6
    return build_plan(
        lens,
        (Level(512, 1, 2), Level(1024, 2, 4), Level(2048, 4, "full")),
        8,
        4,
        2,
        num_virtual_stages=2,
        epochs=2,
        overlong="truncate",
        first_trained=first_trained,
        source_ids=sources,
        source_weights=(1, 2.0, 1),
        corpus_hash="ab" * 32,
        corpus_paths=NASTY,
    )


def cost_for(plan: Plan, model: str = "llama-3.1-8b") -> CostModel:
    """The analytic cost model of a run over the plan."""
    layout = RunLayout(
        num_ranks=plan.num_ranks,
        num_microbatches=plan.num_microbatches,
        num_stages=plan.num_stages,
        num_virtual_stages=plan.num_virtual_stages,
    )
    return analytic(MODELS[model], DEVICES["h100-80gb"], layout)


@dataclass
class Seen(HTMLParser):
    """What a page holds. tables: by id of the section, rows of cells: words, then <data> values."""

    tags: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    numbers: list[tuple[float, str]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    tables: dict[str, list[list[tuple[str, list[float]]]]] = field(default_factory=dict)
    tips: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._section = ""
        self._value: float | None = None

    @classmethod
    def of(cls, html: str) -> "Seen":
        seen = cls()
        seen.feed(html)
        seen.close()
        return seen

    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def rows(self, section: str) -> list[list[tuple[str, list[float]]]]:
        """All rows of all tables of a section."""
        return [row for row in self.tables[section] if row]

    def row(self, section: str, name: str) -> list[tuple[str, list[float]]]:
        """The first row of a section's tables that starts with `name`."""
        return next(row for row in self.rows(section) if row[0][0] == name)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.links += [str(given[name]) for name in ("href", "src", "srcset") if name in given]
        if tag in ("h2", "section") and "id" in given:
            self._section = str(given["id"])
        if tag == "tr":
            self.tables.setdefault(self._section, []).append([])
        if tag in ("td", "th"):
            self.tables[self._section][-1].append(("", []))
        if tag == "data":
            self._value = float(str(given["value"]))
        if given.get("data-tip"):
            self.tips.append(str(given["data-tip"]))

    def handle_endtag(self, tag: str) -> None:
        if tag == "data":
            self._value = None
        if tag == "table":
            self.tables[self._section].append([])
        if tag in ("script", "style"):
            self.words.pop()

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self._value is not None:
            self.numbers.append((self._value, data))
        rows = self.tables.get(self._section)
        if rows and rows[-1]:
            words, values = rows[-1][-1]
            if self._value is not None:
                values = [*values, self._value]
            rows[-1][-1] = ((words + data).strip(), values)
