"""Tokenize and Detokenize: the tokenizer by itself, exactly as Embed uses it."""

from __future__ import annotations

from phasemesh.encoder.requests import check_count, check_text, prompt_of, role_of, timings_of
from phasemesh.encoder.work import Job, Workshop
from phasemesh.v1 import encoder_pb2 as pb


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
    role = role_of(request.role)
    prompt = prompt_of(model, role, request.prompt_name if request.HasField("prompt_name") else None)
    special = request.add_special_tokens if request.HasField("add_special_tokens") else True
    texts = list(request.texts)
    shown = await job.tokenize(lambda: model.encoder.show(texts, prompt=prompt, role=role, special=special))
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
    skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
    sequences = [list(sequence.ids) for sequence in request.sequences]
    texts = await job.tokenize(lambda: model.encoder.decode(sequences, skip_special=skip))
    reply = pb.DetokenizeResponse(model=model.name, texts=texts)
    reply.timings.CopyFrom(timings_of(job))
    return reply
