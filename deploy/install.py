"""Installs Phasemesh with one of its extras into the environment that runs this file.

torch goes in first and by itself: once a build is there, nothing that depends on torch pulls in another.

With --kernels it builds and installs the compiled search kernels (workers/kernels) instead. They are the one
part that needs a compiler, and Phasemesh runs without them: a failure is told, with what to do, and is none.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: The release that Phasemesh is tested with.
TORCH = "torch==2.13.0"
KERNELS = ROOT / "workers" / "kernels"


def pip(*arguments: str) -> None:
    """Run pip of this environment; its failure is ours."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True)  # noqa: S603 -- arguments are our own


def torch_build() -> str:
    """Which torch is installed: "cuda", "cpu" or ""."""
    probe = "import torch; print('cuda' if torch.version.cuda else 'cpu')"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout.strip()


def compiler() -> str | None:
    """The C++ compiler that CMake would take, or None."""
    asked = os.environ.get("CXX", "").split()[:1]
    return next(filter(None, map(shutil.which, asked or ["c++", "g++", "clang++"])), None)


def install_kernels(stamp: Path | None) -> None:
    """Build and install the kernels, or say why not and what that means.

    The stamp is touched once there is nothing to try again before the sources change; a missing compiler is
    looked for every time.
    """
    if compiler() is None:
        lost_kernels("there is no C++ compiler here (no c++, g++ or clang++ in the PATH; CXX names another)")
        return
    print("building the search kernels (workers/kernels) ...", flush=True)
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", str(KERNELS)]
    done = subprocess.run(  # noqa: S603 -- arguments are our own
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
    )
    if done.returncode == 0:
        # In a process of its own: it also shows that what was built can be loaded.
        probe = "import phasemesh_kernels as k; c = k.capabilities(); print(c['version'], 'for', c['isa'])"
        done = subprocess.run(  # noqa: S603 -- arguments are our own
            [sys.executable, "-c", probe],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    if done.returncode == 0:
        print(f"installed phasemesh-kernels {done.stdout.strip()}")
    else:
        print(done.stdout, file=sys.stderr)
        lost_kernels("building them failed; the compiler's or pip's own words are above")
    if stamp:
        stamp.touch()


def lost_kernels(why: str) -> None:
    """Say that there are no kernels."""
    lines = [
        "",
        "warning: the compiled search kernels were NOT installed (an earlier build, if there is one, stays).",
        f"  why:  {why}",
        "  lost: speed only: scorers search with numpy, about 20 times (int8 codes: 100 times) slower",
        "  fix:  install a C++17 compiler (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++;",
        "        macOS: xcode-select --install), then run `make kernels`; CMake and Ninja come with pip",
        "",
    ]
    print("\n".join(lines), file=sys.stderr)


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", choices=["cpu", "cuda"], default="cpu", help="build of torch to ask for")
    parser.add_argument(
        "--extra", choices=["demo", "dev"], default="demo", help="extra of Phasemesh to install"
    )
    parser.add_argument("--kernels", action="store_true", help="build and install the search kernels, only")
    parser.add_argument("--stamp", type=Path, help="with --kernels: file to touch when they were tried")
    options = parser.parse_args()
    if options.kernels:
        install_kernels(options.stamp)
        return 0

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
