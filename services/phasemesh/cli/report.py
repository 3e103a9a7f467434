"""What a running role tells its supervisor and its clients: a small JSON file in the runtime folder.

`<runtime_dir>/<role>.json` appears when the role listens and is replaced atomically, so a reader sees the
old report or the new one, never half of one.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RoleReport:
    """Where a role listens.

    Attributes:
        role: "gateway", "retrieval", "encoder" or "scorer"; "scorer-0" and so on under `phasemesh up`.
        pid: its process.
        port: its public port.
        admin_port: its admin port.
    """

    role: str
    pid: int
    port: int
    admin_port: int


def report_path(runtime_dir: Path, role: str) -> Path:
    """Where `role` reports."""
    return runtime_dir / f"{role}.json"


def write_report(runtime_dir: Path, report: RoleReport) -> None:
    """Publish `report`."""
    path = report_path(runtime_dir, report.role)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(asdict(report)))
    draft.replace(path)


def read_report(runtime_dir: Path, role: str) -> RoleReport | None:
    """The newest report of `role`; None if there is none."""
    try:
        return RoleReport(**json.loads(report_path(runtime_dir, role).read_text()))
    except FileNotFoundError:
        return None
