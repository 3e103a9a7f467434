"""Installs Phasemesh with one of its extras into the environment that runs this file.

torch goes in first and by itself: once a build is there, nothing that depends on torch pulls in another.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: The release that Phasemesh is tested with.
TORCH = "torch==2.13.0"


def pip(*arguments: str) -> None:
    """Run pip of this environment; its failure is ours."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True)  # noqa: S603 -- arguments are our own


def torch_build() -> str:
    """Which torch is installed: "cuda", "cpu" or ""."""
    probe = "import torch; print('cuda' if torch.version.cuda else 'cpu')"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout.strip()


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", choices=["cpu", "cuda"], default="cpu", help="build of torch to ask for")
    parser.add_argument(
        "--extra", choices=["demo", "dev"], default="demo", help="extra of Phasemesh to install"
    )
    options = parser.parse_args()

    have = torch_build()
    index = os.environ.get("TORCH_INDEX_URL")
    # A build of the other kind is only replaced where an index may have the one that was asked for: the
    # ordinary one would give the same again, gigabytes of it.
    if not have or (have != options.torch and index):
        again = ["--force-reinstall", "--no-deps"] if have else []
        pip("--progress-bar", "on", *again, *(["--index-url", index] if index else []), TORCH)
        have = torch_build()
        if have != options.torch:
            print(
                f"note: asked for the {options.torch} build of torch, the package index gave the "
                f"{have or 'no'} one; set TORCH_INDEX_URL to an index that carries the other"
            )
    pip("--quiet", "--editable", f"{ROOT}[{options.extra}]")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
