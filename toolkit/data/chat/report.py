"""What became of the rows of a data set of chats."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from toolkit.errors import DataError
from toolkit.recipe.schema import ChatSource, PreferenceSource


@dataclass
class ChatReport:
    """How many rows were kept, cut and dropped, with an example of some, and unread columns."""

    rows: int = 0
    malformed: int = 0
    """Rows that were dropped because they are not conversations."""
    first_malformed: str = ""
    too_long: int = 0
    """Samples longer than a row: truncated, dropped or split."""
    untrained: int = 0
    """Samples dropped because none of their tokens is trained. Pieces of a split one are not
    counted if other pieces remain."""
    rewritten: int = 0
    plain: int = 0
    """Rows of texts, which no template renders."""
    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    unread_columns: tuple[str, ...] = ()
    unread_keys: tuple[str, ...] = ()
    """Keys of messages that nothing reads."""

    @classmethod
    def read(cls, file: Path) -> Self:
        """A report that was written as JSON."""
        return TypeAdapter(cls).validate_json(file.read_bytes())

    def __add__(self, other: "ChatReport") -> "ChatReport":
        """Report on the rows of both, the other's after these."""
        return ChatReport(**{one.name: self._joined(one.name, other) for one in fields(self)})

    def _joined(self, name: str, other: "ChatReport") -> Any:
        mine, theirs = getattr(self, name), getattr(other, name)
        if isinstance(mine, str):
            return mine or theirs
        return tuple(dict.fromkeys(mine + theirs)) if isinstance(mine, tuple) else mine + theirs

    def notes(self, source: ChatSource | PreferenceSource, stated_template: bool) -> list[str]:
        """What was dropped, changed or not read, a line each."""
        did = {"truncate": "truncated", "drop": "dropped", "split": "split"}[source.too_long]
        parts = [
            (self.malformed, f"malformed rows dropped (the first: {self.first_malformed})"),
            (self.too_long, f"too long and {did}"),
            (self.untrained, "without a trained token dropped"),
            (self.rewritten, "made into one sample per assistant turn"),
        ]
        said = ", ".join(f"{number:,} {what}" for number, what in parts if number)
        found = [f"{self.rows:,} rows, {self.samples:,} samples: {said}"] if said else []
        if self.plain and stated_template:
            found.append(
                f"`data.chat_template` is not used for {self.plain:,} rows: prompt and "
                "completion are texts"
            )
        unread = {"columns": self.unread_columns, "keys of messages": self.unread_keys}
        return found + [
            f"{what} that nothing reads: {', '.join(names)}"
            for what, names in unread.items()
            if names
        ]

    def check_enough(self, source: ChatSource | PreferenceSource, sequence_length: int) -> None:
        """Raise DataError if no sample is left, or most have no trained token."""
        if self.samples and self.untrained <= self.samples:
            return
        if not self.rows:
            raise DataError(f"`{source.path}` has no rows", fix="correct its path or split")
        raise DataError(
            f"`{source.path}`: {'; '.join(self.notes(source, False))}",
            fix="check roles and weights of turns, `loss_on`, `{% generation %}` in the "
            "template, and that trained turns lie in the first "
            f"{sequence_length:,} tokens (`too_long`)",
        )
