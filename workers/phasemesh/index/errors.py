"""Errors of the index. Services map them onto their own tree; nothing here knows of a transport."""

from __future__ import annotations

import errno
import os
import re


class IndexFailure(Exception):
    """Base of every error that the index raises on purpose."""


class InvalidName(IndexFailure):
    """A tenant or collection name that can't safely become a path."""


class InvalidTag(InvalidName):
    """A tag's name that can't safely become a file's."""


class InvalidSpec(IndexFailure):
    """A collection's specification contradicts itself."""


class InvalidDocument(IndexFailure):
    """A document doesn't fit its collection's specification."""


class FilterError(IndexFailure):
    """A filter names an undeclared field or a value of another type."""


class CollectionExists(IndexFailure):
    """There is a collection of this name already."""


class CollectionNotFound(IndexFailure):
    """There is no collection of this name."""


class CatalogueCorrupt(IndexFailure):
    """A catalogue entry was damaged or written by a later release."""


class VersionGone(IndexFailure):
    """The version never existed, belongs to another incarnation, or was cleaned up."""


class VersionNotReached(IndexFailure):
    """The collection hasn't come to the version asked for; a retry may find it."""


class WriteConflict(IndexFailure):
    """Concurrent commits to the same documents kept winning; a retry may succeed."""


class HeadMoved(IndexFailure):
    """The newest version isn't the one that the caller knows; nothing was changed."""


class LeaseHeld(IndexFailure):
    """Another thread or process maintains the collection; a retry may succeed."""


class TagExists(IndexFailure):
    """There is a tag of this name already."""


class TagNotFound(IndexFailure):
    """There is no tag of this name."""


class StorageFailure(IndexFailure):
    """The medium refused: an input or output error, a folder that is gone or may not be touched."""


class DataMissing(StorageFailure):
    """The catalogue has the collection, and its data isn't there."""


class StorageFull(StorageFailure):
    """The medium has no room left; what was acknowledged before is there."""


def storage_failure(error: BaseException) -> StorageFailure | None:
    """What a failed call of the operating system or of Lance says about the medium, or None if nothing.

    Lance wraps the operating system's errors into text, so they are known by it: `std::io::Error` writes
    "(os error N)". The message names no path; the cause has it.
    """
    number = error.errno if isinstance(error, OSError) else None
    if number is None:
        found = _OS_ERROR.search(str(error))
        number = int(found[1]) if found else None
    if number in _FULL:
        return StorageFull("the medium of data_dir is full; free some room or enlarge it, then try again")
    if number in _FORBIDDEN:
        return StorageFailure(f"data_dir can't be written: {os.strerror(number).lower()}")
    if number is not None or isinstance(error, OSError):
        words = os.strerror(number).lower() if number is not None else "input/output error"
        return StorageFailure(f"data_dir can't be read or written now: {words}")
    return None


_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EROFS, errno.EACCES, errno.EPERM}
