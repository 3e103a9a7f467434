"""Which names may become part of a path, decided in one place.

Tenants and collections name files, so the rule is a positive list of ASCII characters: a name that passes
can't leave its folder, can't collide with another by case folding of unicode, and fits every file system.
"""

from __future__ import annotations

import re

from phasemesh.index.errors import InvalidName, InvalidTag

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)
_RULE = "use 1 to 128 of a-z, A-Z, 0-9, dot, underscore and hyphen"


def check_collection_name(name: str) -> str:
    """Return `name` if it may name a collection.

    Raises:
        InvalidName: It holds other characters, is too long, or is `.` or `..`.
    """
    if not _NAME.fullmatch(name) or name in {".", ".."}:
        raise InvalidName(f"collection: {name[:64]!r} isn't a collection name; {_RULE}")
    return name


def check_tag(tag: str) -> str:
    """Return `tag` if it may name a version.

    Raises:
        InvalidTag: It holds other characters or is too long, or Lance keeps such names for itself.
    """
    kept = tag.startswith(".") or tag.endswith((".", ".lock")) or ".." in tag
    if not _NAME.fullmatch(tag) or kept:
        raise InvalidTag(
            f"tag: {tag[:64]!r} isn't a tag; {_RULE}, without a dot at either end, two dots together or "
            "`.lock` at the end"
        )
    return tag


def check_tenant(tenant: str) -> str:
    """Return `tenant` if it may name a tenant's folder.

    Raises:
        InvalidName: It holds other characters, is too long, or begins with a dot, which is kept for files of
            the root itself.
    """
    if not _NAME.fullmatch(tenant) or tenant.startswith("."):
        raise InvalidName(f"tenant: {tenant[:64]!r} isn't a tenant name; {_RULE}, not starting with a dot")
    return tenant
