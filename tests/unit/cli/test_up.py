"""`phasemesh up` before anything runs: order, ports, arguments of roles, locks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from phasemesh.cli.banner import banner
from phasemesh.cli.report import RoleReport, write_report
from phasemesh.cli.scorer_role import cache_folder, scanner_of
from phasemesh.cli.up import (
    data_lock,
    drain_order,
    needed_by,
    role_arguments,
    run_up,
    runtime_lock,
    server_of,
)
from phasemesh.config.settings import Settings, SettingsError, load_settings
from phasemesh.index.scanner import CPU
from phasemesh.v1 import encoder_pb2 as pb

NAMES = ("gateway", "retrieval", "encoder", "scorer-0", "scorer-1")


def settings_of(tmp_path: Path, **flags: object) -> Settings:
    given = {"runtime_dir": str(tmp_path / "run"), "data_dir": str(tmp_path / "data")}
    return load_settings(flags={**given, **{name.replace("__", "."): value for name, value in flags.items()}})


def report_all(settings: Settings) -> dict[str, RoleReport]:
    settings.runtime_dir.mkdir()
    reports = {name: RoleReport(name, 1, 4000 + index, 5000 + index) for index, name in enumerate(NAMES)}
    for report in reports.values():
        write_report(settings.runtime_dir, report)
    return reports


def values_of(arguments: list[str]) -> dict[str, object]:
    pairs = [argument.split("=", 1) for argument in arguments if "=" in argument]
    return {key: yaml.safe_load(value) for key, value in pairs}


def test_drain_goes_inwards_and_start_waits_for_what_is_needed(tmp_path: Path) -> None:
    assert drain_order(settings_of(tmp_path), 2) == NAMES
    assert needed_by("gateway", NAMES) == ["retrieval", "encoder"]
    assert needed_by("retrieval", NAMES) == ["encoder", "scorer-0", "scorer-1"]
    assert needed_by("encoder", NAMES) == needed_by("scorer-1", NAMES) == []
    for name in NAMES:  # whoever is needed drains later
        assert all(NAMES.index(other) > NAMES.index(name) for other in needed_by(name, NAMES))


def test_without_collections_there_are_two_roles(tmp_path: Path) -> None:
    assert drain_order(settings_of(tmp_path, gateway__retrieval=None), 2) == ("gateway", "encoder")


def test_scorers_listen_side_by_side(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    ports = [(server_of(settings, name).port, server_of(settings, name).admin_port) for name in NAMES]
    assert ports == [(8080, 8081), (50061, 50062), (50051, 50052), (50071, 50072), (50073, 50074)]
    free = settings_of(tmp_path, scorer__port=0, scorer__admin_port=0)
    assert (server_of(free, "scorer-5").port, server_of(free, "scorer-5").admin_port) == (0, 0)
    with pytest.raises(SettingsError, match=r"scorer\.port"):
        server_of(settings_of(tmp_path, scorer__port=65535), "scorer-1")


def test_roles_learn_where_the_others_are(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    report_all(settings)
    assert values_of(role_arguments(settings, "gateway", NAMES)) == {
        "gateway.port": 4000,
        "gateway.admin_port": 5000,
        "gateway.encoders": ["127.0.0.1:4002"],
        "gateway.retrieval": "127.0.0.1:4001",
    }
    assert values_of(role_arguments(settings, "retrieval", NAMES)) == {
        "retrieval.port": 4001,
        "retrieval.admin_port": 5001,
        "retrieval.encoders": ["127.0.0.1:4002"],
        "retrieval.scorers": ["127.0.0.1:4003", "127.0.0.1:4004"],
    }


def test_a_scorer_started_again_keeps_name_and_ports(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, scorer__port=0)
    first = role_arguments(settings, "scorer-1", NAMES)
    assert first[:2] == ["--name", "scorer-1"]
    assert values_of(first) == {"scorer.port": 0, "scorer.admin_port": 50074}
    report_all(settings)
    again = values_of(role_arguments(settings, "scorer-1", NAMES))
    assert again == {"scorer.port": 4004, "scorer.admin_port": 5004}


def test_each_scorer_has_its_own_cache_folder(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    assert cache_folder(settings, "scorer-1") == tmp_path / "data" / "cache" / "scorer-1"
    shared = settings_of(tmp_path, scorer__cache_dir=str(tmp_path / "c"))
    assert cache_folder(shared, "scorer") == tmp_path / "c"
    with pytest.raises(SettingsError, match=r"scorer\.cache_dir"):
        run_up(shared, Console(), scorers=2)


def test_two_meshes_on_one_folder_are_refused(tmp_path: Path) -> None:
    used = pytest.raises(SettingsError, match=r"data_dir: .* is in use by another .*--data-dir")
    with data_lock(tmp_path), used:
        data_lock(tmp_path).__enter__()
    used = pytest.raises(SettingsError, match=r"runtime_dir: .*--runtime-dir")
    with data_lock(tmp_path), runtime_lock(tmp_path), used:  # free again, and the two don't clash
        runtime_lock(tmp_path).__enter__()


def test_the_lock_names_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"data_dir: .*file/data"):
        data_lock(tmp_path / "file" / "data").__enter__()


@pytest.mark.parametrize(
    ("kinds", "body"),
    [
        ([pb.VECTOR_KIND_DENSE], {"name": "given", "token_dimension": 2}),
        ([pb.VECTOR_KIND_DENSE, pb.VECTOR_KIND_TOKEN], {"name": "notes", "model": "m"}),
    ],
)
def test_the_banner_shows_a_collection_that_can_be_made(
    tmp_path: Path, kinds: list[pb.VectorKind.ValueType], body: dict[str, object]
) -> None:
    settings = settings_of(tmp_path)
    text = banner(settings, report_all(settings), [pb.ModelInfo(name="m", vector_kinds=kinds)], 1.0)
    assert "127.0.0.1:4001  phasemesh.v1.RetrievalService" in text
    assert "127.0.0.1:4004  phasemesh.v1.ScorerService (scorer-1)" in text
    assert "scorer-1 http://127.0.0.1:5004" in text
    create = text[text.index("/v1/collections -H") :].split("-d '", 1)[1].split("'", 1)[0]
    assert json.loads(create) == body


def test_a_scorers_device_is_one_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert scanner_of(settings_of(tmp_path).scorer) is CPU
    asked = settings_of(tmp_path, scorer__device="cuda:7").scorer
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SettingsError, match=r"^scorer\.device: 'cuda:7' isn't available to this torch"):
        scanner_of(asked)
    monkeypatch.setitem(sys.modules, "phasemesh.engine.device_scan", None)
    with pytest.raises(SettingsError, match=r"^scorer\.device: cuda:7 needs torch .* scorer-cuda"):
        scanner_of(asked)
    with pytest.raises(SettingsError, match=r"scorer\.device"):
        settings_of(tmp_path, scorer__device="tpu")
