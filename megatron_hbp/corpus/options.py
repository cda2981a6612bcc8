"""How rows become a corpus: what a user may choose, checked."""

from dataclasses import dataclass, field
from pathlib import Path

from megatron_hbp.config import OVERLONG_POLICIES
from megatron_hbp.corpus.rows import RowKeys


@dataclass(frozen=True, kw_only=True)
class Options:
    """How rows become a corpus.

    chat_template: a file with a Jinja template (default: the tokenizer's own, else a built-in one).
    keys: see RowKeys. max_length: tokens a sequence may have (None: any number); overlong: what
    happens to a longer one: error, drop or truncate. valid_share: share of the kept rows, 0 to 0.5,
    that goes to a second corpus in the folder `valid` of the output; equal rows stay together.
    strict: stop at the first row that is rejected or dropped. max_reject_share: stop when more of
    the rows are (None: never). workers: processes that tokenise (None: one for each core).
    """

    chat_template: Path | None = None
    keys: RowKeys = field(default_factory=RowKeys)
    max_length: int | None = None
    overlong: str = "error"
    valid_share: float = 0.0
    valid_seed: int = 1234
    strict: bool = False
    max_reject_share: float | None = None
    workers: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.valid_share < 0.5:
            raise ValueError(
                f"valid share is {self.valid_share}; it must be at least 0 and below 0.5"
            )
        if not -(2**63) <= self.valid_seed < 2**63:
            raise ValueError(f"valid seed is {self.valid_seed}; it must fit into 64 bits")
        if self.overlong not in OVERLONG_POLICIES:
            raise ValueError(
                f"overlong is {self.overlong!r}; it must be one of {', '.join(OVERLONG_POLICIES)}"
            )
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"max length is {self.max_length}; it must be at least 2 tokens")
        if self.max_length is None and self.overlong != "error":
            raise ValueError(f"overlong {self.overlong} needs a --max-length; give one")
        if self.max_reject_share is not None and not 0 <= self.max_reject_share <= 1:
            raise ValueError(f"max reject share is {self.max_reject_share}; it must be from 0 to 1")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers is {self.workers}; it must be at least 1")
