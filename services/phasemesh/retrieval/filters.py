"""A request's filter as the store takes it.

Invariant: a filter restricts or fails. What can't be expressed yet is refused; no input makes a condition
vanish.
"""

from __future__ import annotations

from google.protobuf.struct_pb2 import Value

from phasemesh.errors import InvalidArgument, Unimplemented
from phasemesh.index.spec import CollectionSpec, FieldType, FieldValue
from phasemesh.retrieval.values import ValueFault, value_from_wire
from phasemesh.v1 import retrieval_pb2 as pb

#: Deepest nesting that is looked into; more is nobody's question.
MAX_DEPTH = 16


def equality_filter(wire: pb.Filter, spec: CollectionSpec) -> dict[str, FieldValue]:
    """Field → value of a filter made of `equals`, alone or within `all`; never empty.

    Raises:
        InvalidArgument: a field isn't declared, a value isn't of its type, or a condition is empty.
        Unimplemented: another condition, or two conditions on one field.
    """
    equals: dict[str, FieldValue] = {}
    _collect(wire, spec, "filter", 0, equals)
    return equals


def _collect(
    wire: pb.Filter, spec: CollectionSpec, path: str, depth: int, equals: dict[str, FieldValue]
) -> None:
    condition = wire.WhichOneof("condition")
    if condition is None:
        raise _fault("the filter has no condition; set `equals`, or leave the filter out", path)
    if condition == "equals":
        name, value = _equals(wire.equals.field, wire.equals.value, spec, f"{path}.equals")
        if name in equals:
            raise Unimplemented(
                f"two conditions on the field {name!r} come with a later release; give one", field=path
            )
        equals[name] = value
    elif condition == "all":
        filters = wire.all.filters
        if not filters:
            raise _fault("`all` lists no filters; give at least one", f"{path}.all.filters")
        if depth >= MAX_DEPTH:
            raise _fault(f"filters nest deeper than {MAX_DEPTH}", path)
        for position, inner in enumerate(filters):
            _collect(inner, spec, f"{path}.all.filters[{position}]", depth + 1, equals)
    else:
        raise Unimplemented(
            f"a filter by `{condition}` comes with a later release; use `equals`, or `all` of them",
            field=path,
        )


def _equals(name: str, wire: Value, spec: CollectionSpec, path: str) -> tuple[str, FieldValue]:
    types = {declared.name: declared.type for declared in spec.fields}
    if name not in types:
        declared = ", ".join(types) or "none"
        raise _fault(f"{name[:64]!r} isn't a declared field; declared are {declared}", f"{path}.field")
    # One element of a list equals the value, so the value is a text.
    field_type = FieldType.STRING if types[name] is FieldType.STRING_LIST else types[name]
    try:
        value = value_from_wire(wire, field_type)
    except ValueFault as fault:
        raise _fault(f"the value of {name!r} {fault}", f"{path}.value") from None
    if value is None:
        raise _fault(f"{name!r} can't equal null", f"{path}.value")
    return name, value


def _fault(message: str, field: str) -> InvalidArgument:
    return InvalidArgument(message, reason="INVALID_FILTER", field=field)
