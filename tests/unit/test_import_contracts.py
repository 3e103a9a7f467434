"""Each import contract is kept, and is seen to break under one planted violation."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# contract id: (module file to plant in, line that violates it)
VIOLATIONS = {
    "base": ("services/phasemesh/telemetry/names.py", "import phasemesh.recipe.model"),
    "layers": ("services/phasemesh/rpc/codec.py", "import phasemesh.gateway.fields"),
    "services-free-of-compute": ("services/phasemesh/encoder/admission.py", "import phasemesh.pool.slots"),
    "gateway-free-of-workers": ("services/phasemesh/gateway/app.py", "import phasemesh.recipe.model"),
    "search-free-of-encoding": ("workers/phasemesh/index/spec.py", "import phasemesh.recipe.model"),
    "workers-free-of-transport": ("workers/phasemesh/pool/protocol.py", "import grpc"),
    "torch-only-in-engine": ("workers/phasemesh/pool/protocol.py", "import torch"),
    "kernels-only-in-index-and-engine": (
        "services/phasemesh/scorer/admission.py",
        "import phasemesh_kernels",
    ),
    "ray-only-in-pool": ("workers/phasemesh/engine/engine.py", "import ray"),
    "grpc-only-in-rpc-and-servicers": ("services/phasemesh/encoder/batcher.py", "import grpc"),
    "dialects-independent": (
        "services/phasemesh/gateway/dialects/openai/__init__.py",
        "import phasemesh.gateway.dialects.rerank",
    ),
}


def contracts() -> set[str]:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return {contract["id"] for contract in config["tool"]["importlinter"]["contracts"]}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("tree")
    for folder in ("services", "workers", "protos/gen"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "kernels"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


def lint(tree: Path, *contract_ids: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(str(tree / folder) for folder in ("services", "workers", "protos/gen"))
    selected = [argument for contract_id in contract_ids for argument in ("--contract", contract_id)]
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", program, "--no-cache", *selected],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": paths, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def assert_broken(tree: Path, contract_id: str, name: str, line: str) -> None:
    file = tree / name
    original = file.read_text()
    future = "from __future__ import annotations\n"
    planted = f"{future}{line}\n"
    file.write_text(original.replace(future, planted, 1) if future in original else f"{original}\n{line}\n")
    try:
        done = lint(tree, contract_id)
    finally:
        file.write_text(original)
    assert done.returncode != 0, done.stdout
    assert "0 kept, 1 broken" in done.stdout


@pytest.mark.parametrize(
    "line", ["import torch", "import ray", "import transformers", "import phasemesh.engine.engine"]
)
def test_services_import_nothing_that_computes(tree: Path, line: str) -> None:
    assert_broken(tree, "services-free-of-compute", "services/phasemesh/encoder/admission.py", line)


def test_every_contract_has_a_violation_here() -> None:
    assert set(VIOLATIONS) == contracts()


def test_all_are_kept(tree: Path) -> None:
    done = lint(tree)
    assert done.returncode == 0, done.stdout
    assert f"{len(VIOLATIONS)} kept, 0 broken" in done.stdout


@pytest.mark.parametrize("contract_id", VIOLATIONS)
def test_a_planted_violation_breaks_it(tree: Path, contract_id: str) -> None:
    assert_broken(tree, contract_id, *VIOLATIONS[contract_id])


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("phasemesh.gateway.serve", {"torch", "ray", "transformers", "tokenizers", "safetensors"}),
        ("phasemesh.encoder.service", {"torch", "ray", "transformers"}),
        ("phasemesh.scorer.service", {"torch", "ray", "transformers", "tokenizers", "fastapi"}),
        ("phasemesh.retrieval.service", {"torch", "ray", "transformers", "tokenizers", "fastapi"}),
        ("phasemesh.index.store", {"torch", "ray", "transformers", "grpc"}),
        ("phasemesh.recipe.load", {"torch", "ray", "transformers", "grpc"}),
        ("phasemesh.cli.main", {"torch", "ray", "transformers", "fastapi"}),
    ],
)
def test_importing_a_role_leaves_out_what_its_image_lacks(module: str, absent: set[str]) -> None:
    program = f"import sys, {module}; print(sorted({absent!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
