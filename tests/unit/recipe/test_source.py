"""Finding checkpoints: local folders, the hub's cache, and clear words when there is neither."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phasemesh.recipe.errors import RecipeError
from phasemesh.recipe.source import resolve_source

SCRIPT = """
import sys
from phasemesh.recipe.errors import RecipeError
from phasemesh.recipe.source import resolve_source
try:
    print(resolve_source(sys.argv[1], *sys.argv[2:]))
except RecipeError as error:
    print("refused", error)
"""


def offline(home: Path, *arguments: str) -> str:
    """Run in a process of its own, since the hub's client reads its environment once."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home)}
    command = [sys.executable, "-c", SCRIPT, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_a_local_directory(tmp_path: Path) -> None:
    assert resolve_source(str(tmp_path)) == tmp_path
    with pytest.raises(RecipeError, match=r"revision: .*has no revisions"):
        resolve_source(str(tmp_path), "main")


@pytest.mark.parametrize(
    "source", ["/no/such/folder", "./nothing", "~/nothing-here", "a/b/c", "with space/x"]
)
def test_a_missing_directory(source: str) -> None:
    with pytest.raises(RecipeError, match="there is no directory"):
        resolve_source(source)


def test_without_network_it_says_what_it_looked_for(tmp_path: Path) -> None:
    answer = offline(tmp_path, "some-org/some-model", "v1")
    assert answer.startswith("refused source: looked for a local directory 'some-org/some-model'")
    assert "at revision 'v1'" in answer
    assert "give the path of a local directory" in answer


def test_a_cached_snapshot(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--some-org--some-model"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    assert offline(tmp_path, "some-org/some-model") == str(snapshot)
