"""Rows and tokens, in and out: what `hbp prepare` accounts for."""

from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_hbp.corpus.row_encoder import EncodedBlock


@dataclass
class RowCounts:
    """rows_in == rows_kept + rows_rejected + rows_dropped; blank lines are not rows.

    rows_held_out and rows_truncated are among those kept. tokens_in: of rows that were tokenised.
    reasons: rows by why they were rejected, dropped or truncated. forms: rows by their form.
    """

    rows_in: int = 0
    rows_kept: int = 0
    rows_held_out: int = 0
    rows_rejected: int = 0
    rows_dropped: int = 0
    rows_truncated: int = 0
    tokens_in: int = 0
    tokens_kept: int = 0
    tokens_dropped: int = 0
    tokens_truncated: int = 0
    blank_lines: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    forms: dict[str, int] = field(default_factory=dict)

    @property
    def lost_share(self) -> float:
        """Share of the rows that were rejected or dropped."""
        return (self.rows_rejected + self.rows_dropped) / max(1, self.rows_in)

    def add(self, block: EncodedBlock) -> None:
        """Counts a block of rows."""
        self.rows_in += block.rows_in
        self.rows_kept += len(block.kept) + len(block.held_out)
        self.rows_held_out += len(block.held_out)
        self.tokens_in += block.tokens_in
        self.tokens_kept += len(block.kept.tokens) + len(block.held_out.tokens)
        self.blank_lines += block.blank_lines
        for reject in block.rejects:
            self.reasons[reject.kind] = self.reasons.get(reject.kind, 0) + 1
            self.rows_rejected += reject.action == "rejected"
            self.rows_dropped += reject.action == "dropped"
            self.rows_truncated += reject.action == "truncated"
            self.tokens_dropped += reject.tokens if reject.action == "dropped" else 0
            self.tokens_truncated += reject.tokens if reject.action == "truncated" else 0
        for form, count in block.forms.items():
            self.forms[form] = self.forms.get(form, 0) + count

    def reasons_text(self) -> str:
        """E.g. "no answer 3, unknown role 1", the most frequent first."""
        ordered = sorted(self.reasons.items(), key=lambda item: (-item[1], item[0]))
        return ", ".join(f"{kind} {count}" for kind, count in ordered)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
