"""What one sequence of a batch is: token ids and everything that the engine is told about each of them."""

from __future__ import annotations

from dataclasses import dataclass

from phasemesh.pool.protocol import Bool, Int32


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One tokenized input.

    Attributes:
        ids: int32[t], special tokens, markers and expansion included.
        type_ids: int32[t]; None for all zero.
        attended: bool[t], False where no token attends; None for all True.
        kept: bool[t], which token vectors are returned and scored; None for all True.
        prompt_tokens: leading tokens that mean pooling leaves out.
        truncated: whether the input was cut.
        span_starts: int32[t], first character of each token in the caller's text, in code points; 0 for what
            isn't part of the text. None where spans weren't asked for.
        span_ends: int32[t], one past the last character.
    """

    ids: Int32
    type_ids: Int32 | None = None
    attended: Bool | None = None
    kept: Bool | None = None
    prompt_tokens: int = 0
    truncated: bool = False
    span_starts: Int32 | None = None
    span_ends: Int32 | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def rows(self) -> int:
        """Token vectors that are returned."""
        return len(self.ids) if self.kept is None else int(self.kept.sum())

    def key(self) -> tuple[bytes, bytes | None, bytes | None, bytes | None, int]:
        """Equal for two rows that the engine can't tell apart."""
        type_ids, attended, kept = (
            None if part is None else part.tobytes() for part in (self.type_ids, self.attended, self.kept)
        )
        return self.ids.tobytes(), type_ids, attended, kept, self.prompt_tokens
