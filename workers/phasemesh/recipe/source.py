"""Finds a checkpoint: a local folder, or a snapshot from the Hugging Face hub.

Invariant: pickles, ONNX and code are never downloaded.
"""

from __future__ import annotations

import re
from pathlib import Path

from phasemesh.recipe.errors import RecipeError

#: What recipes, tokenizers and safetensors models are made of.
ALLOWED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.codes", "*.metadata")
IGNORED = ("onnx/*", "openvino/*", "*/onnx/*", "*/openvino/*")

_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")


def resolve_source(source: str, revision: str | None = None) -> Path:
    """Folder of the checkpoint `source`, downloading it to the hub's cache if it isn't local.

    Args:
        source: a local directory, or a repository id such as "org/name".
        revision: commit, branch or tag of the repository; None takes its default branch.

    Raises:
        RecipeError: there is no such directory and no such repository, or the hub can't be reached.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        if revision is not None:
            raise RecipeError(
                f"revision: {source} is a local directory, which has no revisions; leave it out"
            )
        return path.resolve()
    if path.is_absolute() or source.startswith((".", "~")) or not _REPOSITORY.fullmatch(source):
        raise RecipeError(
            f"source: there is no directory {source!r}; give an existing one or a repository id"
        )
    return _snapshot(source, revision)


def _snapshot(repository: str, revision: str | None) -> Path:
    # Imported here, since a service that only reads local folders has no need of the hub's client.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        folder = snapshot_download(
            repository, revision=revision, allow_patterns=list(ALLOWED), ignore_patterns=list(IGNORED)
        )
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        at = "" if revision is None else f" at revision {revision!r}"
        raise RecipeError(
            f"source: looked for a local directory {repository!r} and for the Hugging Face repository"
            f" {repository!r}{at}, and found neither ({type(error).__name__}:"
            f" {str(error).splitlines()[0] if str(error) else 'no details'}); without network access,"
            " give the path of a local directory that holds the checkpoint"
        ) from error
    return Path(folder)
