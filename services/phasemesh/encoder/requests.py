"""What Embed, Score and Tokenize requests have in common: inputs, limits, roles, and the shape of replies.

Invariant: a fault of one input becomes that input's error, a fault of the request fails the request, and a
request of which nothing succeeded fails with its first fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from phasemesh.encoder.models import ServedModel
from phasemesh.encoder.rows import Row
from phasemesh.encoder.tokenizing import Cut
from phasemesh.encoder.work import Job, Workshop
from phasemesh.errors import FailedPrecondition, InvalidArgument, PhasemeshError
from phasemesh.recipe.model import Role
from phasemesh.v1 import encoder_pb2 as pb
from phasemesh.v1.common_pb2 import (
    INPUT_ROLE_DOCUMENT,
    INPUT_ROLE_QUERY,
    INPUT_ROLE_UNSPECIFIED,
    TRUNCATION_SIDE_LEFT,
    Input,
    InputRole,
    ItemError,
    PhaseTiming,
    Priority,
    Timings,
    Truncation,
    TruncationSide,
    Usage,
)

T = TypeVar("T")

_ROLES: dict[InputRole.ValueType, Role | None] = {
    INPUT_ROLE_UNSPECIFIED: None,
    INPUT_ROLE_QUERY: Role.QUERY,
    INPUT_ROLE_DOCUMENT: Role.DOCUMENT,
}


def role_of(role: InputRole.ValueType) -> Role | None:
    """The recipe's word for a role.

    Raises:
        InvalidArgument: there is no such role.
    """
    if role not in _ROLES:
        raise InvalidArgument(
            f"there is no role {role}; use one of {', '.join(InputRole.keys())}",
            reason="UNKNOWN_ROLE",
            field="role",
        )
    return _ROLES[role]


def prompt_of(model: ServedModel, role: Role | None, name: str | None) -> str:
    """Text of the prompt `name`, or of the role's where it is None; the empty name means no prompt.

    Raises:
        InvalidArgument: the model has no such prompt.
    """
    recipe = model.recipe
    if name is None:
        return recipe.prompt_text(recipe.prompt_for(role))
    if not name:
        return ""
    known = [known for known, _ in recipe.prompts]
    if name not in known:
        offered = f"it has {', '.join(map(repr, known))}" if known else "it has none; leave it out"
        raise InvalidArgument(
            f"the model {model.name!r} has no prompt {name[:256]!r}; {offered}",
            reason="UNKNOWN_PROMPT",
            field="prompt_name",
        )
    return recipe.prompt_text(name)


def cut_of(truncation: Truncation) -> Cut:
    """What a request's `truncation` asks for.

    Raises:
        InvalidArgument: there is no such side, or the limit is zero.
    """
    if truncation.side not in TruncationSide.values():
        raise InvalidArgument(
            f"there is no side {truncation.side}; use one of {', '.join(TruncationSide.keys())}",
            reason="UNKNOWN_SIDE",
            field="truncation.side",
        )
    given = truncation.HasField("max_tokens")
    if given and truncation.max_tokens == 0:
        raise InvalidArgument(
            "a limit of 0 tokens leaves nothing; leave it out for the model's own",
            reason="LIMIT_TOO_LOW",
            field="truncation.max_tokens",
        )
    return Cut(
        enabled=truncation.enabled,
        left=truncation.side == TRUNCATION_SIDE_LEFT,
        max_tokens=truncation.max_tokens if given else None,
    )


def check_priority(priority: Priority.ValueType) -> None:
    """Refuse a priority that doesn't exist; those that do are all served alike, in order of arrival.

    Raises:
        InvalidArgument: there is no such priority.
    """
    if priority not in Priority.values():
        raise InvalidArgument(
            f"there is no priority {priority}; use one of {', '.join(Priority.keys())}",
            reason="UNKNOWN_PRIORITY",
            field="priority",
        )


def check_count(count: int, shop: Workshop, field: str) -> None:
    """Refuse an empty list and one over the limit.

    Raises:
        InvalidArgument: one of both.
    """
    if count == 0:
        raise InvalidArgument(f"{field} is empty; give at least one", reason="EMPTY_LIST", field=field)
    if count > shop.max_inputs:
        raise InvalidArgument(
            f"{field} has {count} entries and the limit is {shop.max_inputs}; split the request",
            reason="TOO_MANY_INPUTS",
            field=field,
        )


def check_text(text: str, shop: Workshop, field: str) -> None:
    """Refuse a text over the limit of bytes.

    Raises:
        InvalidArgument: it is.
    """
    # UTF-8 takes 1 to 4 bytes per code point, so that most texts needn't be encoded to be measured.
    limit = shop.max_input_bytes
    if len(text) * 4 > limit and (size := len(text.encode())) > limit:
        raise InvalidArgument(
            f"the text has {size} bytes and the limit is {limit}; split it",
            reason="INPUT_TOO_LARGE",
            field=field,
        )


def content_of(wire: Input, shop: Workshop, field: str) -> str | list[int]:
    """Text or token ids of an input.

    Raises:
        InvalidArgument: there is none, or it is too large.
        FailedPrecondition: it is an image.
    """
    match wire.WhichOneof("content"):
        case "text":
            check_text(wire.text, shop, f"{field}.text")
            return wire.text
        case "token_ids":
            # Four bytes an id, as in the message's own limit of a text.
            if len(wire.token_ids.ids) * 4 > shop.max_input_bytes:
                raise InvalidArgument(
                    f"there are {len(wire.token_ids.ids)} token ids; give fewer",
                    reason="INPUT_TOO_LARGE",
                    field=f"{field}.token_ids",
                )
            return list(wire.token_ids.ids)
        case "image":
            raise FailedPrecondition(
                "no model of this service takes images; give text or token_ids",
                reason="MODALITY_NOT_SUPPORTED",
                field=f"{field}.image",
            )
        case _:
            raise InvalidArgument(
                "the input has no content; set text or token_ids", reason="EMPTY_INPUT", field=field
            )


def located(error: PhasemeshError, field: str) -> PhasemeshError:
    """`error` with its field below `field`, unless it is a field of the request itself."""
    if error.field.startswith("ids["):
        error.field = f"{field}.token_ids.{error.field}"
    elif not error.field:
        error.field = field
    return error


def encode_inputs(
    model: ServedModel,
    wires: Sequence[tuple[str, Input]],
    shop: Workshop,
    *,
    role: Role | None,
    prompt: str,
    cut: Cut,
    spans: bool = False,
) -> list[Row | PhasemeshError]:
    """Rows of inputs, each given with its field; runs on a tokenizer thread.

    Raises:
        InvalidArgument: `cut` can't be met.
    """
    texts: dict[int, str] = {}
    rows: dict[int, Row | PhasemeshError] = {}
    for i, (field, wire) in enumerate(wires):
        try:
            content = content_of(wire, shop, field)
            if isinstance(content, str):
                texts[i] = content
            else:
                rows[i] = model.encoder.encode_ids(content, prompt=prompt, role=role, cut=cut)
        except PhasemeshError as error:
            if error.field.startswith("truncation"):
                raise
            part = field if error.reason != "INPUT_TOO_LONG" else f"{field}.token_ids"
            rows[i] = located(error, part)
    if texts:
        encoded = model.encoder.encode(list(texts.values()), prompt=prompt, role=role, cut=cut, spans=spans)
        for i, row in zip(texts, encoded, strict=True):
            rows[i] = row if isinstance(row, Row) else located(row, f"{wires[i][0]}.text")
    return [rows[i] for i in range(len(wires))]


def spread(
    rows: Sequence[Row | PhasemeshError], results: Sequence[T | PhasemeshError]
) -> list[T | PhasemeshError]:
    """Results of the rows that are rows, put among the errors of those that aren't."""
    remaining = iter(results)
    return [row if isinstance(row, PhasemeshError) else next(remaining) for row in rows]


def name_fields(
    results: Sequence[T | PhasemeshError], field: Callable[[int], str]
) -> list[T | PhasemeshError]:
    """`results`, with each error located at its input; errors shared by inputs are not changed."""
    named: list[T | PhasemeshError] = []
    for i, result in enumerate(results):
        named.append(result)
        if isinstance(result, PhasemeshError) and not result.field:
            copy = result.__class__.__new__(result.__class__)
            copy.__dict__.update(result.__dict__)
            copy.args = result.args
            copy.field = field(i)
            named[i] = copy
    return named


def raise_if_all_failed(results: Sequence[T | PhasemeshError]) -> None:
    """Fail the request with its first fault if nothing of it succeeded.

    Raises:
        PhasemeshError: it is that fault.
    """
    if results and all(isinstance(result, PhasemeshError) for result in results):
        first = results[0]
        assert isinstance(first, PhasemeshError)
        raise first


def encoded_items(
    rows: Sequence[Row | PhasemeshError], results: Sequence[object], shop: Workshop, model: ServedModel
) -> list[pb.EncodedItem]:
    """The reply's entry of each input."""
    items = []
    for row, result in zip(rows, results, strict=True):
        if isinstance(result, PhasemeshError):
            if isinstance(row, PhasemeshError):
                shop.metrics.failed_items.labels(model.name, result.reason).inc()
            items.append(pb.EncodedItem(error=item_error(result)))
        else:
            assert isinstance(row, Row)
            items.append(pb.EncodedItem(tokens=len(row), truncated=row.truncated))
    return items


def item_error(error: PhasemeshError) -> ItemError:
    """The wire's form of one input's fault."""
    return ItemError(code=error.code, reason=error.reason, message=error.message, field=error.field)


def usage_of(
    rows: Sequence[Row | PhasemeshError], results: Sequence[object], shop: Workshop, model: ServedModel
) -> Usage:
    """Tokens of the rows that have a result."""
    done = [
        row
        for row, result in zip(rows, results, strict=True)
        if isinstance(row, Row) and not isinstance(result, PhasemeshError)
    ]
    truncated = sum(row.truncated for row in done)
    if truncated:
        shop.metrics.truncated.labels(model.name).inc(truncated)
    return Usage(tokens=sum(map(len, done)), truncated_inputs=truncated)


def timings_of(job: Job) -> Timings:
    """The job's phases as they stand; the reply must be assembled."""
    clock = job.clock
    return Timings(
        total_ns=clock.total_ns(),
        phases=[
            PhaseTiming(
                phase=phase.name,
                start_offset_ns=phase.start_ns - clock.start_ns,
                duration_ns=phase.duration_ns,
            )
            for phase in clock.phases
        ],
    )


def check_reply(size_bytes: int, shop: Workshop, advice: str, field: str = "inputs") -> None:
    """Refuse what couldn't be sent, before it is computed.

    Args:
        size_bytes: about what the reply would have.
        shop: has the limit.
        advice: what the caller could do about it.
        field: of the request, the one that makes the reply so large.

    Raises:
        InvalidArgument: the reply would be over the limit of a message.
    """
    if size_bytes > shop.max_message_bytes:
        raise InvalidArgument(
            f"the reply would have about {size_bytes} bytes and a message holds {shop.max_message_bytes}"
            f" (rpc.max_message_bytes); {advice}",
            reason="REPLY_TOO_LARGE",
            field=field,
        )
