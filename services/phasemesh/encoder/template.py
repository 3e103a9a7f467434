"""The special tokens that a tokenizer puts around one text or a pair, and how a pair is cut to fit.

Templates are found by probing the tokenizer, never guessed from its family: what it adds around a probe is
what it adds around everything. Cutting happens on the ids between them: no special token is ever lost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tokenizers import Encoding, Tokenizer

from phasemesh.pool.protocol import Int32

#: Tried in turn until one gives tokens; a vocabulary without any of them has no use here.
_PROBES = ("a", "the", "0", ".", "一", "\u2581", "x y z")


@dataclass(frozen=True, slots=True)
class Piece:
    """Special tokens that stand together.

    Attributes:
        ids: int32[k].
        type_ids: int32[k].
    """

    ids: Int32
    type_ids: Int32

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class SingleTemplate:
    """Around one text: prefix, content, suffix.

    Attributes:
        prefix: before the content, e.g. [CLS].
        suffix: after it, e.g. [SEP], `<|endoftext|>`, or nothing.
        type_id: token type of the content.
    """

    prefix: Piece
    suffix: Piece
    type_id: int

    @property
    def added(self) -> int:
        """Special tokens in all."""
        return len(self.prefix) + len(self.suffix)


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """Around two texts: prefix, first, middle, second, suffix.

    Attributes:
        prefix: before the first text.
        middle: between the two, e.g. [SEP] or `</s></s>`.
        suffix: after the second.
        first_type: token type of the first text.
        second_type: token type of the second.
    """

    prefix: Piece
    middle: Piece
    suffix: Piece
    first_type: int
    second_type: int

    @property
    def added(self) -> int:
        """Special tokens in all."""
        return len(self.prefix) + len(self.middle) + len(self.suffix)

    def assemble(self, first: Int32, second: Int32) -> tuple[Int32, Int32]:
        """Ids and token types, int32[n] each, of the pair whose contents are `first` and `second`."""
        ids = np.concatenate((self.prefix.ids, first, self.middle.ids, second, self.suffix.ids))
        type_ids = np.concatenate(
            (
                self.prefix.type_ids,
                np.full(len(first), self.first_type, np.int32),
                self.middle.type_ids,
                np.full(len(second), self.second_type, np.int32),
                self.suffix.type_ids,
            )
        )
        return ids, type_ids


def single_template(tokenizer: Tokenizer) -> SingleTemplate:
    """What `tokenizer` adds around one text.

    Raises:
        ValueError: no probe gives a token.
    """
    probe = _probe(tokenizer)
    encoding = tokenizer.encode_batch([probe])[0]
    start, end = _extent(encoding, 0)
    return SingleTemplate(
        prefix=_piece(encoding, 0, start),
        suffix=_piece(encoding, end, len(encoding.ids)),
        type_id=encoding.type_ids[start],
    )


def pair_template(tokenizer: Tokenizer) -> PairTemplate:
    """What `tokenizer` adds around a pair.

    Raises:
        ValueError: no probe gives a token.
    """
    probe = _probe(tokenizer)
    # The batch form, because the single call of the reference library drops an empty second text.
    encoding = tokenizer.encode_batch([(probe, probe)])[0]
    first_start, first_end = _extent(encoding, 0)
    second_start, second_end = _extent(encoding, 1)
    return PairTemplate(
        prefix=_piece(encoding, 0, first_start),
        middle=_piece(encoding, first_end, second_start),
        suffix=_piece(encoding, second_end, len(encoding.ids)),
        first_type=encoding.type_ids[first_start],
        second_type=encoding.type_ids[second_start],
    )


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Lengths that remain of two contents of `first` and `second` tokens when `room` are left for both.

    The rule of the `tokenizers` library's strategy of that name: the longer is cut until both are equal, then
    both are; an odd token goes to the longer.
    """
    if first + second <= room:
        return first, second
    swapped = first > second
    short, long = (second, first) if swapped else (first, second)
    long = short if short > room else max(short, room - short)
    if short + long > room:
        short = room // 2
        long = short + room % 2
    return (long, short) if swapped else (short, long)


def _probe(tokenizer: Tokenizer) -> str:
    for text in _PROBES:
        if tokenizer.encode_batch([text], add_special_tokens=False)[0].ids:
            return text
    raise ValueError(f"the tokenizer gives no token for any of {', '.join(map(repr, _PROBES))}")


def _extent(encoding: Encoding, sequence: int) -> tuple[int, int]:
    positions = [i for i, owner in enumerate(encoding.sequence_ids) if owner == sequence]
    return positions[0], positions[-1] + 1


def _piece(encoding: Encoding, start: int, end: int) -> Piece:
    return Piece(
        np.array(encoding.ids[start:end], np.int32), np.array(encoding.type_ids[start:end], np.int32)
    )
