"""What an engine raises beside `ComputeFailed`.

Invariant: both survive pickling, because they cross from the worker's process.
"""

from __future__ import annotations


class ModelLoadError(Exception):
    """A checkpoint's weights or tokenizer can't be served; the message says which and what to do."""


class DeviceLost(Exception):
    """The device's context is broken and every later call would fail; the process has to be replaced."""
