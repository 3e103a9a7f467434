"""Texts to the very token ids that the reference library would feed the model.

One `TextEncoder` per model runs the serialised Rust tokenizer that the worker built. Truncation is done here
on ids: the tokenizer object is shared work in progress as soon as its truncation is set on it ("Already
borrowed"), so that none ever is. Each running call has a clone of its own.

What stands around the text (special tokens, markers, the prompt) is never cut, unless it leaves no room for
the text at all: cutting the beginning takes it from behind the prompt.

Reference: sentence-transformers 6.2 (`Transformer.preprocess`, `MultiVectorMask`), PyLate 1.6 for markers and
expansion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from tokenizers import Tokenizer

from phasemesh.encoder.cutting import Content, keep, keep_behind, tokenize
from phasemesh.encoder.rows import Row
from phasemesh.encoder.template import longest_first, pair_template, single_template
from phasemesh.errors import InvalidArgument, PhasemeshError
from phasemesh.pool.protocol import Bool, Int32, LoadedModel
from phasemesh.recipe.model import LateInteraction, ModelKind, Role


@dataclass(frozen=True, slots=True)
class Cut:
    """What to do with inputs over the limit.

    Attributes:
        enabled: cut them; False refuses them.
        left: cut the beginning of the text, behind the prompt, instead of the end.
        max_tokens: a limit below the model's own, special tokens included; None for the model's own.
    """

    enabled: bool = False
    left: bool = False
    max_tokens: int | None = None


class TextEncoder:
    """See the module docstring. Every method may be called from any thread.

    Methods that take several inputs return a row or an error for each, in order; the error's `field` is
    empty, because only the caller knows where the input stood.
    """

    def __init__(self, model: LoadedModel) -> None:
        """Build the tokenizer of `model`.

        Raises:
            ValueError: the tokenizer lacks a token that the recipe needs.
        """
        self.recipe = model.recipe
        self._json = model.tokenizer_json
        tokenizer = self._build()
        self._idle = [tokenizer]
        self._single = single_template(tokenizer)
        self._pair = pair_template(tokenizer) if model.recipe.kind is ModelKind.CROSS_ENCODER else None
        self._special_ids = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._late = model.recipe.late_interaction
        self._markers: dict[Role | None, int | None] = {Role.QUERY: None, Role.DOCUMENT: None, None: None}
        self._skip_ids: Int32 = np.zeros(0, np.int32)
        self._mask_id = -1
        if self._late is not None:
            self._read_conventions(model.name, self._late, tokenizer, model.mask_token_id)
        self._prompt_tokens: dict[str, tuple[Int32, int]] = {}

    def limit(self, role: Role | None) -> int:
        """Longest sequence on that side, special tokens and markers included."""
        if self._late is None or role is None:
            return self.recipe.max_tokens
        return self._late.query_length if role is Role.QUERY else self._late.document_length

    def encode(
        self, texts: Sequence[str], *, prompt: str, role: Role | None, cut: Cut, spans: bool = False
    ) -> list[Row | PhasemeshError]:
        """Rows of texts, each with `prompt` put before it.

        Raises:
            InvalidArgument: `cut.max_tokens` doesn't even hold the special tokens.
        """
        limit = self._limit(role, cut)
        added = self._single.added + (self._markers[role] is not None)
        room = self._room(limit, added)
        with self._tokenizer() as tokenizer:
            contents = tokenize(
                tokenizer, [prompt + text for text in texts], room=room, left=cut.left, spans=spans
            )
            lead = self._prompt_content(tokenizer, prompt) if prompt and cut.left else None
            head = self._prompt_head(tokenizer, prompt)[1] if self._excludes(prompt) else 0
        rows: list[Row | PhasemeshError] = []
        for content in contents:
            too_long = content.cut or len(content.ids) > room
            if too_long and not cut.enabled:
                rows.append(_too_long(None if content.cut else len(content.ids) + added, limit))
                continue
            kept, has_prompt = keep(content, room, cut.left), True
            if too_long and lead is not None:
                has_prompt = len(lead) < room
                kept = keep_behind(lead, content, room) if has_prompt else kept
            row = self._assemble(kept, role, len(prompt), expand=True)
            prompt_tokens = min(head, len(row)) if has_prompt else 0
            rows.append(replace(row, truncated=too_long, prompt_tokens=prompt_tokens))
        return rows

    def encode_ids(self, ids: Sequence[int], *, prompt: str, role: Role | None, cut: Cut) -> Row:
        """The row of token ids that the caller made, taken as they stand.

        Trailing mask tokens of a query count as its expansion, and leading tokens of `prompt` as the prompt,
        so that what `Tokenize` returned gives the vectors of the text.

        Raises:
            InvalidArgument: there are none, one isn't in the vocabulary (`field` is "ids[j]"), or there are
                too many.
        """
        row = self._checked(ids)
        limit = self._limit(role, cut)
        if len(row) > limit:
            if not cut.enabled:
                raise _too_long(len(row), limit)
            suffix = self._single.suffix.ids
            keep_prefix = self._lead(row, prompt, role, limit, left=cut.left)
            keep_suffix = len(suffix) if len(suffix) and np.array_equal(row[-len(suffix) :], suffix) else 0
            room = self._room(limit, keep_prefix + keep_suffix)
            inner = row[keep_prefix : len(row) - keep_suffix]
            inner = inner[len(inner) - room :] if cut.left else inner[:room]
            whole = np.concatenate((row[:keep_prefix], inner, row[len(row) - keep_suffix :]))
        else:
            whole = row
        head = 0
        if self._excludes(prompt):
            with self._tokenizer() as tokenizer:
                prompt_ids, count = self._prompt_head(tokenizer, prompt)
            # The last token of a prompt may have grown together with the first of the text.
            if np.array_equal(whole[: max(count - 1, 1)], prompt_ids[: max(count - 1, 1)]):
                head = min(count, len(whole))
        return Row(
            ids=whole,
            attended=self._attended_of(whole, role),
            kept=self._kept(whole, role),
            prompt_tokens=head,
            truncated=len(row) > limit,
        )

    def encode_pairs(
        self, query: str | Sequence[int], documents: Sequence[str | Sequence[int]], *, cut: Cut
    ) -> list[Row | PhasemeshError]:
        """Rows of (query, document) for a cross-encoder; token ids are bare content.

        Raises:
            InvalidArgument: the query's ids are bad, or `cut.max_tokens` doesn't hold the special tokens.
        """
        assert self._pair is not None, "only cross-encoders take pairs"
        limit = self._limit(None, cut)
        room = self._room(limit, self._pair.added)
        texts = [text for text in (query, *documents) if isinstance(text, str)]
        with self._tokenizer() as tokenizer:
            tokenized = iter(tokenize(tokenizer, texts, room=room, left=cut.left, spans=False))
        first = next(tokenized) if isinstance(query, str) else _bare(self._checked(query, may_be_empty=True))
        rows: list[Row | PhasemeshError] = []
        for document in documents:
            if isinstance(document, str):
                second = next(tokenized)
            else:
                try:
                    second = _bare(self._checked(document, may_be_empty=True))
                except PhasemeshError as error:
                    rows.append(error)
                    continue
            # A content that was cut short holds more than room: both rules below see it as too long.
            over = len(first.ids) + len(second.ids) > room
            if over and not cut.enabled:
                known = not (first.cut or second.cut)
                length = len(first.ids) + len(second.ids) + self._pair.added
                rows.append(_too_long(length if known else None, limit))
                continue
            one, two = longest_first(len(first.ids), len(second.ids), room)
            ids, type_ids = self._pair.assemble(
                keep(first, one, cut.left).ids, keep(second, two, cut.left).ids
            )
            rows.append(Row(ids=ids, type_ids=type_ids if type_ids.any() else None, truncated=over))
        return rows

    def show(
        self, texts: Sequence[str], *, prompt: str, role: Role | None, special: bool
    ) -> list[tuple[Row, list[str]]]:
        """Uncut rows of texts, with spans, and each token as the vocabulary spells it.

        Without `special` there are neither special tokens nor markers nor expansion.
        """
        with self._tokenizer() as tokenizer:
            contents = tokenize(
                tokenizer, [prompt + text for text in texts], room=None, left=False, spans=True
            )
            shown = []
            for content in contents:
                if special:
                    row = self._assemble(content, role, len(prompt), expand=True)
                else:
                    starts, ends = _spans(content, len(prompt), 0, 0)
                    row = Row(content.ids, span_starts=starts, span_ends=ends)
                tokens = [tokenizer.id_to_token(token_id) or "" for token_id in row.ids.tolist()]
                shown.append((row, tokens))
        return shown

    def decode(self, sequences: Sequence[Sequence[int]], *, skip_special: bool) -> list[str]:
        """Texts of token ids.

        Raises:
            InvalidArgument: an id isn't in the vocabulary; `field` is "sequences[i].ids[j]".
        """
        for i, ids in enumerate(sequences):
            try:
                self._checked(ids, may_be_empty=True)
            except InvalidArgument as error:
                error.field = f"sequences[{i}].{error.field}"
                raise
        with self._tokenizer() as tokenizer:
            return tokenizer.decode_batch([list(ids) for ids in sequences], skip_special_tokens=skip_special)

    def _lead(self, row: Int32, prompt: str, role: Role | None, limit: int, *, left: bool) -> int:
        """Leading tokens of the caller's ids that stay: special tokens, the marker, and the prompt."""
        marker, prefix = self._markers[role], self._single.prefix.ids
        before = prefix if marker is None else np.append(prefix, np.int32(marker))
        lead = len(before) if np.array_equal(row[: len(before)], before) else 0
        if not lead and np.array_equal(row[: len(prefix)], prefix):
            lead = len(prefix)
        if not (left and prompt):
            return lead
        with self._tokenizer() as tokenizer:
            content = self._prompt_content(tokenizer, prompt)
        # All but the last, which may have grown together with the first of the text.
        sure = max(len(content) - 1, 1)
        has_prompt = np.array_equal(row[lead : lead + sure], content[:sure])
        room = limit - lead - len(self._single.suffix)
        return lead + len(content) if has_prompt and len(content) < room else lead

    def _assemble(self, content: Content, role: Role | None, prompt_chars: int, *, expand: bool) -> Row:
        single, marker = self._single, self._markers[role]
        prefix, suffix = single.prefix, single.suffix
        before = prefix.ids if marker is None else np.append(prefix.ids, np.int32(marker))
        ids = np.concatenate((before, content.ids, suffix.ids))
        expansion = 0
        if expand and self._late is not None and self._late.expand_queries and role is Role.QUERY:
            expansion = max(0, self._late.query_length - len(ids))
            ids = np.append(ids, np.full(expansion, self._mask_id, np.int32))
        type_ids = None
        if single.type_id or prefix.type_ids.any() or suffix.type_ids.any():
            type_ids = np.full(len(ids), single.type_id, np.int32)
            type_ids[: len(prefix)] = prefix.type_ids
            end = len(before) + len(content.ids)
            type_ids[end : end + len(suffix)] = suffix.type_ids
        attended: Bool | None = None
        if expansion and self._late is not None and not self._late.attend_to_expansion:
            attended = np.arange(len(ids)) < len(ids) - expansion
        starts, ends = _spans(content, prompt_chars, len(before), len(suffix) + expansion)
        return Row(
            ids=ids.astype(np.int32, copy=False),
            type_ids=type_ids,
            attended=attended,
            kept=self._kept(ids, role),
            span_starts=starts,
            span_ends=ends,
        )

    def _kept(self, ids: Int32, role: Role | None) -> Bool | None:
        # As in MultiVectorMask, a text of neither side counts as a document.
        if role is Role.QUERY or not len(self._skip_ids):
            return None
        kept: Bool = ~np.isin(ids, self._skip_ids)
        return None if kept.all() else kept

    def _attended_of(self, ids: Int32, role: Role | None) -> Bool | None:
        late = self._late
        if late is None or role is not Role.QUERY or not late.expand_queries or late.attend_to_expansion:
            return None
        real = np.flatnonzero(ids != self._mask_id)
        end = int(real[-1]) + 1 if len(real) else len(ids)
        return None if end == len(ids) else np.arange(len(ids)) < end

    def _checked(self, ids: Sequence[int], *, may_be_empty: bool = False) -> Int32:
        wide = np.asarray(ids, dtype=np.int64)
        if not len(wide) and not may_be_empty:
            raise InvalidArgument("there are no token ids; give at least one", reason="EMPTY_INPUT")
        bad = np.flatnonzero((wide < 0) | (wide >= self.recipe.vocab_size))
        if len(bad):
            raise InvalidArgument(
                f"token id {wide[bad[0]]} isn't in the model's vocabulary of {self.recipe.vocab_size};"
                " use ids that Tokenize returns for this model",
                reason="TOKEN_OUT_OF_RANGE",
                field=f"ids[{bad[0]}]",
            )
        return wide.astype(np.int32)

    def _limit(self, role: Role | None, cut: Cut) -> int:
        limit = self.limit(role)
        return limit if cut.max_tokens is None else min(limit, cut.max_tokens)

    def _room(self, limit: int, added: int) -> int:
        if limit < added:
            raise InvalidArgument(
                f"a limit of {limit} doesn't hold the {added} special tokens; give at least {added}",
                reason="LIMIT_TOO_LOW",
                field="truncation.max_tokens",
            )
        return limit - added

    def _excludes(self, prompt: str) -> bool:
        return bool(prompt) and not self.recipe.include_prompt

    def _prompt_content(self, tokenizer: Tokenizer, prompt: str) -> Int32:
        """The prompt's own ids, without special tokens."""
        return np.array(tokenizer.encode_batch([prompt], add_special_tokens=False)[0].ids, np.int32)

    def _prompt_head(self, tokenizer: Tokenizer, prompt: str) -> tuple[Int32, int]:
        """The prompt's own ids, and how many leading tokens pooling leaves out for it."""
        known = self._prompt_tokens.get(prompt)
        if known is None:
            ids = np.array(tokenizer.encode_batch([prompt])[0].ids, np.int32)
            # sentence-transformers' rule: all but one trailing special token, as read in
            # Transformer._get_prompt_length.
            count = len(ids) - (len(ids) > 0 and int(ids[-1]) in self._special_ids)
            known = self._prompt_tokens[prompt] = (ids, count)
        return known

    def _read_conventions(
        self, name: str, late: LateInteraction, tokenizer: Tokenizer, mask_id: int | None
    ) -> None:
        for role, marker in ((Role.QUERY, late.query_marker), (Role.DOCUMENT, late.document_marker)):
            if marker is None:
                continue
            token_id = tokenizer.token_to_id(marker)
            if token_id is None:
                raise ValueError(f"model {name!r}: the tokenizer has no token {marker!r}, the {role} marker")
            self._markers[role] = token_id
        # Words that aren't one token resolve to UNK elsewhere; skipping every unknown word would be wrong.
        skip = [tokenizer.token_to_id(word) for word in late.skip_words]
        self._skip_ids = np.array(sorted({i for i in skip if i is not None}), np.int32)
        if late.expand_queries:
            if mask_id is None:
                raise ValueError(f"model {name!r}: queries are expanded, but the tokenizer has no mask token")
            self._mask_id = mask_id

    def _build(self) -> Tokenizer:
        tokenizer = Tokenizer.from_str(self._json)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @contextmanager
    def _tokenizer(self) -> Iterator[Tokenizer]:
        """A clone that nobody else uses; there come to be as many as threads that ever ran at once."""
        try:
            # list.pop and append are atomic.
            tokenizer = self._idle.pop()
        except IndexError:
            tokenizer = self._build()
        try:
            yield tokenizer
        finally:
            self._idle.append(tokenizer)


def _bare(ids: Int32) -> Content:
    return Content(ids, None, None, cut=False)


def _spans(content: Content, prompt_chars: int, before: int, after: int) -> tuple[Int32 | None, Int32 | None]:
    """Spans in the caller's own text, empty for everything that isn't of it."""
    if content.starts is None or content.ends is None:
        return None, None
    starts = np.maximum(content.starts - prompt_chars, 0)
    ends = np.maximum(content.ends - prompt_chars, 0)
    starts[ends == 0] = 0
    pad = (before, after)
    return (
        np.pad(starts, pad).astype(np.int32, copy=False),
        np.pad(ends, pad).astype(np.int32, copy=False),
    )


def _too_long(tokens: int | None, limit: int) -> InvalidArgument:
    length = "more tokens than that" if tokens is None else f"{tokens} tokens"
    return InvalidArgument(
        f"the model takes {limit} tokens, special tokens included, and this has {length};"
        " shorten it or set truncation.enabled",
        reason="INPUT_TOO_LONG",
    )
