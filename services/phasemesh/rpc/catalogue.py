"""Which services the contract has, and which role serves each: read from the descriptors, never listed twice.

The label sets of metrics are bounded by it, and a call that reached the wrong role is told the right one.
"""

from __future__ import annotations

from google.protobuf.descriptor import FileDescriptor, ServiceDescriptor

from phasemesh.v1 import encoder_pb2, retrieval_pb2, scorer_pb2

#: Prefix of the full names of our services.
PACKAGE = "phasemesh.v1"

HEALTH = "grpc.health.v1.Health"
REFLECTION = "grpc.reflection.v1alpha.ServerReflection"
CHANNELZ = "grpc.channelz.v1.Channelz"

_FILES: dict[str, FileDescriptor] = {
    "encoder": encoder_pb2.DESCRIPTOR,
    "retrieval": retrieval_pb2.DESCRIPTOR,
    "scorer": scorer_pb2.DESCRIPTOR,
}

#: Descriptor of each service, and the role whose process serves it.
SERVICES: dict[str, tuple[ServiceDescriptor, str]] = {
    service.full_name: (service, role)
    for role, file in _FILES.items()
    for service in file.services_by_name.values()
}

#: Every method of the contract, as "phasemesh.v1.EncoderService/Embed".
METHODS: frozenset[str] = frozenset(
    f"{name}/{method}" for name, (service, _) in SERVICES.items() for method in service.methods_by_name
)


def split_method(path: str) -> tuple[str, str]:
    """Service and method of a path such as "/phasemesh.v1.EncoderService/Embed"."""
    service, _, method = path.lstrip("/").rpartition("/")
    return service, method


def metric_label(method: str) -> str:
    """`method`, if the contract or gRPC itself has it, else "other": callers must not make label values."""
    service = split_method(method)[0]
    return method if method in METHODS or service in (REFLECTION, CHANNELZ) else "other"
