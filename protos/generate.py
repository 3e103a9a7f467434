"""Generates the committed Python code from the protos; `--check` fails if it is out of date.

Run by `make protos` and `make protos-check`. The versions of grpcio-tools and mypy-protobuf are pinned in
pyproject.toml, because generated code refuses a runtime that is older than its generator.
"""

from __future__ import annotations

import argparse
import filecmp
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
GENERATED = SOURCES / "gen"


def generate(out: Path) -> None:
    """Write the Python modules and their stubs for every proto into `out`."""
    files = sorted(str(path.relative_to(SOURCES)) for path in (SOURCES / "phasemesh").rglob("*.proto"))
    flags = [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    # Named by path, because the environment's programs need not be in PATH.
    programs = Path(sys.executable).parent
    plugins = [
        f"--plugin=protoc-gen-{name}={programs / f'protoc-gen-{name}'}" for name in ("mypy", "mypy_grpc")
    ]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{SOURCES}", *plugins, *flags, *files]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603 -- arguments are our own


def drift(fresh: Path) -> list[str]:
    """Names of generated files that differ between `fresh` and the committed tree, sorted."""
    new = {path.relative_to(fresh) for path in fresh.rglob("*_pb2*")}
    old = {
        path.relative_to(GENERATED)
        for path in GENERATED.rglob("*_pb2*.py*")
        if "__pycache__" not in path.parts
    }
    changed = {name for name in new & old if not filecmp.cmp(fresh / name, GENERATED / name, shallow=False)}
    return sorted(str(name) for name in (new ^ old) | changed)


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the committed code, write nothing")
    if not parser.parse_args().check:
        for stale in GENERATED.rglob("*_pb2*.py*"):
            stale.unlink()
        GENERATED.mkdir(exist_ok=True)
        generate(GENERATED)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        names = drift(Path(scratch))
    for name in names:
        print(f"protos/gen/{name} is out of date; run `make protos` and commit the result", file=sys.stderr)
    return 1 if names else 0


if __name__ == "__main__":
    raise SystemExit(main())
