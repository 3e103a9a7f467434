"""Errors of the index. Services map them onto their own tree; nothing here knows of a transport."""

from __future__ import annotations


class IndexFailure(Exception):
    """Base of every error that the index raises on purpose."""


class InvalidName(IndexFailure):
    """A tenant or collection name that can't safely become a path."""


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
