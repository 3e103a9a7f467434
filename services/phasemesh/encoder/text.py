"""Tokenize and Detokenize: the tokenizer by itself, exactly as Embed uses it.

Nothing is cut here, so that the work is bounded by the request: all of its texts, or all of its ids, are held
to what Embed takes of a single input.
"""

from __future__ import annotations

from phasemesh.encoder.requests import (
    check_count,
    check_reply,
    check_text,
    prompt_of,
    role_of,
    timings_of,
)
from phasemesh.encoder.rows import Row
from phasemesh.encoder.work import Job, Workshop
from phasemesh.errors import InvalidArgument
from phasemesh.v1 import encoder_pb2 as pb

#: Most bytes of a token's id in a reply, and of its span.
_ID_BYTES = 5
_SPAN_BYTES = 10
#: Most bytes of an entry beside its content: tags and lengths.
_ENTRY_BYTES = 32
#: An id counts as so many bytes of text, as in Embed.
_BYTES_PER_ID = 4


async def tokenize(shop: Workshop, job: Job, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
    """Answer `request`.

    Raises:
        PhasemeshError: the request or one of its texts is at fault.
    """
    model = shop.models.find(request.model)
    job.serve(model)
    check_count(len(request.texts), shop, "texts")
    for i, text in enumerate(request.texts):
        check_text(text, shop, f"texts[{i}]")
    _check_total(sum(len(text.encode()) for text in request.texts), shop, "texts", "bytes")
    role = role_of(request.role)
    prompt = prompt_of(model, role, request.prompt_name if request.HasField("prompt_name") else None)
    special = request.add_special_tokens if request.HasField("add_special_tokens") else True
    texts = list(request.texts)
    shown = await job.tokenize(
        lambda: model.encoder.show(texts, prompt=prompt, role=role, special=special), request.ByteSize()
    )
    check_reply(_shown_bytes(shown, request.include_tokens), shop, "send fewer or shorter texts", "texts")
    reply = pb.TokenizeResponse(model=model.name, max_tokens=model.encoder.limit(role))
    for row, tokens in shown:
        one = reply.texts.add(ids=row.ids.tolist())
        if request.include_tokens:
            assert row.span_starts is not None
            assert row.span_ends is not None
            one.tokens.extend(tokens)
            one.span_starts.extend(row.span_starts.tolist())
            one.span_ends.extend(row.span_ends.tolist())
    reply.timings.CopyFrom(timings_of(job))
    return reply


async def detokenize(shop: Workshop, job: Job, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
    """Answer `request`.

    Raises:
        PhasemeshError: the request or one of its sequences is at fault.
    """
    model = shop.models.find(request.model)
    job.serve(model)
    check_count(len(request.sequences), shop, "sequences")
    ids = sum(len(sequence.ids) for sequence in request.sequences)
    _check_total(ids * _BYTES_PER_ID, shop, "sequences", f"bytes, {_BYTES_PER_ID} for each token id")
    skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
    sequences = [list(sequence.ids) for sequence in request.sequences]
    texts = await job.tokenize(lambda: model.encoder.decode(sequences, skip_special=skip), request.ByteSize())
    check_reply(
        sum(len(text.encode()) + _ENTRY_BYTES for text in texts), shop, "send fewer token ids", "sequences"
    )
    reply = pb.DetokenizeResponse(model=model.name, texts=texts)
    reply.timings.CopyFrom(timings_of(job))
    return reply


def _check_total(size_bytes: int, shop: Workshop, field: str, unit: str) -> None:
    if size_bytes > shop.max_input_bytes:
        raise InvalidArgument(
            f"the {field} together have {size_bytes} {unit} and the limit is {shop.max_input_bytes};"
            " split the request",
            reason="INPUT_TOO_LARGE",
            field=field,
        )


def _shown_bytes(shown: list[tuple[Row, list[str]]], include_tokens: bool) -> int:
    size = 0
    for row, tokens in shown:
        size += _ENTRY_BYTES + _ID_BYTES * len(row)
        if include_tokens:
            size += sum(len(token.encode()) + 2 for token in tokens) + _SPAN_BYTES * len(row)
    return size
