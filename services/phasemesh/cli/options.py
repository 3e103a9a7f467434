"""Command-line options that several commands share, and how they become settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from phasemesh.config.settings import Settings, SettingsError, load_settings

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", help="YAML file of settings; one file serves all roles.", show_default=False
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        help="Set one setting, e.g. encoder.replicas=2.",
        show_default=False,
    ),
]
ModelOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        "-m",
        metavar="[NAME=]SOURCE",
        help="Serve the checkpoint SOURCE, a directory or a Hugging Face id, as NAME. Repeatable.",
        show_default=False,
    ),
]
RuntimeDirOption = Annotated[
    Path | None,
    typer.Option("--runtime-dir", help="Folder for sockets, tokens and port reports.", show_default=False),
]
DataDirOption = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Root of all collections.", show_default=False),
]
NoRayOption = Annotated[
    bool, typer.Option("--no-ray", help="Run one worker inside the encoder's process instead of Ray actors.")
]


def settings_from(
    config: Path | None,
    assignments: Sequence[str] | None = None,
    *,
    models: Sequence[str] | None = None,
    runtime_dir: Path | None = None,
    data_dir: Path | None = None,
    **flags: Any,
) -> Settings:
    """Settings from the file, the environment and the flags that were given.

    Args:
        config: YAML file.
        assignments: `key=value` texts of `--set`.
        models: `[name=]source` texts of `--model`; they replace the file's models.
        runtime_dir: of `--runtime-dir`.
        data_dir: of `--data-dir`.
        flags: dotted setting names with `__` for the dot; None means not given.

    Raises:
        SettingsError: anything of it is wrong.
    """
    given: dict[str, Any] = {}
    for assignment in assignments or ():
        key, separator, value = assignment.partition("=")
        if not separator:
            raise SettingsError(f"--set {assignment}: has to be KEY=VALUE, e.g. encoder.replicas=2")
        given[key.strip()] = value
    given.update({name.replace("__", "."): value for name, value in flags.items() if value is not None})
    if models:
        given["encoder.models"] = [_model(text) for text in models]
    if runtime_dir is not None:
        given["runtime_dir"] = runtime_dir
    if data_dir is not None:
        # Roles of one mesh may be started in other folders than this one.
        given["data_dir"] = data_dir.absolute()
    return load_settings(config, given)


def _model(text: str) -> dict[str, str]:
    name, separator, source = text.partition("=")
    if not separator:
        source = text
        if text.startswith(("/", "./", "../", "~")) and not Path(text).expanduser().is_dir():
            raise SettingsError(f"--model {text}: there is no such directory")
        # A directory is served under its own name, a repository under its id.
        name = Path(text).name if Path(text).is_dir() else text
    return {"name": name, "source": source}
