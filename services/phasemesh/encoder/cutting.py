"""Tokenizing no more of a long text than can matter.

A megabyte of text takes about a second to tokenize, of which a model then reads 256 tokens. So only as many
characters as could fill the model are tokenized, and more of them only where the tokens that are kept come
close to the cut: there a token (a word beyond WordPiece's limit, a merge) might depend on what was left out.

Invariant: what is returned is what tokenizing the whole text and cutting its ids would have given, for every
tokenizer in which no token depends on characters farther than `MARGIN_CHARS` behind it (before it, where the
end of a text is kept). That holds for WordPiece, and for BPE over words; a tokenizer that reads a stretch
without any space as one word can see farther, and may differ in the last tokens of such a text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tokenizers import Encoding, Tokenizer

from phasemesh.pool.protocol import Int32

#: Characters tokenized per token that fits. English has 4 to 5; long digit runs and code stay below 32.
CHARS_PER_TOKEN = 32
#: Characters next to a cut whose tokens aren't trusted. WordPiece's own limit of a word is 100.
MARGIN_CHARS = 256
_GROWTH = 8


@dataclass(frozen=True, slots=True)
class Content:
    """Tokens of a text without special tokens.

    Attributes:
        ids: int32[t].
        starts: int32[t], first character of each token in the text, code points; None if not asked for.
        ends: int32[t], one past its last.
        cut: whether tokens are missing. They are then missing from one end, and at least `room` + 1 of the
            tokens next to the other end are here.
    """

    ids: Int32
    starts: Int32 | None
    ends: Int32 | None
    cut: bool


def tokenize(
    tokenizer: Tokenizer, texts: list[str], *, room: int | None, left: bool, spans: bool
) -> list[Content]:
    """Tokens of `texts`, without special tokens.

    Args:
        tokenizer: neither cuts nor pads.
        texts: any; the empty text has no tokens.
        room: tokens that the caller will keep of each; None for all.
        left: whether the caller keeps the end of the text instead of its beginning.
        spans: whether the caller wants characters.
    """
    bound = None if room is None else (room + 1) * CHARS_PER_TOKEN + 2 * MARGIN_CHARS
    whole = [i for i, text in enumerate(texts) if bound is None or len(text) <= bound]
    # The fast form leaves offsets out.
    encode = tokenizer.encode_batch if spans else tokenizer.encode_batch_fast
    encodings = encode([texts[i] for i in whole], add_special_tokens=False) if whole else []
    contents: dict[int, Content] = {
        i: _content(encoding, 0, spans) for i, encoding in zip(whole, encodings, strict=True)
    }
    if room is not None and bound is not None:
        for i, text in enumerate(texts):
            if i not in contents:
                contents[i] = _bounded(tokenizer, text, room, bound, left)
    return [contents[i] for i in range(len(texts))]


def keep(content: Content, room: int, left: bool) -> Content:
    """The first `room` tokens of `content`, or the last ones where `left` is cut; all if there are fewer."""
    if len(content.ids) <= room:
        return content
    part = slice(len(content.ids) - room, None) if left else slice(0, room)
    starts = None if content.starts is None else content.starts[part]
    ends = None if content.ends is None else content.ends[part]
    return Content(content.ids[part], starts, ends, cut=True)


def keep_behind(lead: Int32, content: Content, room: int) -> Content:
    """`lead`, int32[k], with empty spans, then as many of the last tokens of `content` as `room` allows."""
    tail = keep(content, room - len(lead), True)
    blank = np.zeros(len(lead), np.int32)
    starts = None if tail.starts is None else np.concatenate((blank, tail.starts))
    ends = None if tail.ends is None else np.concatenate((blank, tail.ends))
    return Content(np.concatenate((lead, tail.ids)), starts, ends, cut=True)


def _bounded(tokenizer: Tokenizer, text: str, room: int, bound: int, left: bool) -> Content:
    while bound < len(text):
        offset = len(text) - bound if left else 0
        encoding = tokenizer.encode(text[offset : offset + bound], add_special_tokens=False)
        # One more than fits, so that the caller sees that the text is too long.
        if len(encoding.ids) > room:
            at = len(encoding.ids) - room - 1 if left else room
            start, end = encoding.offsets[at]
            if (start >= MARGIN_CHARS) if left else (end <= bound - MARGIN_CHARS):
                content = _content(encoding, offset, True)
                return Content(content.ids, content.starts, content.ends, cut=True)
        bound *= _GROWTH
    return _content(tokenizer.encode(text, add_special_tokens=False), 0, True)


def _content(encoding: Encoding, offset: int, spans: bool) -> Content:
    ids = np.array(encoding.ids, np.int32)
    if not spans:
        return Content(ids, None, None, cut=False)
    offsets = np.array(encoding.offsets, np.int32).reshape(-1, 2) + np.int32(offset)
    return Content(ids, offsets[:, 0], offsets[:, 1], cut=False)
