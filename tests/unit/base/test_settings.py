"""Settings: precedence, refusals that name the key, and secrets that stay secret."""

from pathlib import Path

import pytest
import yaml

from phasemesh.config.settings import Settings, SettingsError, describe, dump, load_settings, summarize


def test_flags_win_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("encoder: {replicas: 2, threads: 2, port: 2}")
    monkeypatch.setenv("PHASEMESH_ENCODER__THREADS", "3")
    monkeypatch.setenv("PHASEMESH_ENCODER__PORT", "3")
    settings = load_settings(file, {"encoder.port": "4"})
    assert (settings.encoder.replicas, settings.encoder.threads, settings.encoder.port) == (2, 3, 4)
    assert settings.encoder.admin_port == Settings().encoder.admin_port


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"encoder.prt": 1}, "encoder.prt: there is no such setting"),
        ({"encodr": {}}, "encodr: there is no such setting"),
        ({"encoder.port": 70000}, "encoder.port"),
        ({"encoder.port": "many"}, "encoder.port"),
        ({"encoder.replicas": 0}, "encoder.replicas"),
        ({"gateway.encoders": []}, "gateway.encoders"),
        ({"tracing.sample_ratio": 1.5}, "tracing.sample_ratio"),
        (
            {
                "encoder.models": [
                    {"name": "a", "source": "x"},
                    {"name": "b", "source": "y", "aliases": ["a"]},
                ]
            },
            "'a'",
        ),
        ({"encoder.models": [{"name": "a"}]}, "encoder.models.0.source"),
        ({"access.keys": [{"name": "n", "key": "12345678"}]}, "role: mesh"),
    ],
)
def test_wrong_flag_is_named(flags: dict[str, object], named: str) -> None:
    with pytest.raises(SettingsError, match=r".+") as caught:
        load_settings(None, flags)
    assert named in str(caught.value)


def test_every_fault_is_named_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(None, {"encoder.port": -1, "gateway.port": -1})
    assert {line.split(":")[0] for line in str(caught.value).splitlines()} == {"encoder.port", "gateway.port"}


def test_a_text_that_is_no_list_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"gateway\.encoders: '\['"):
        load_settings(None, {"gateway.encoders": "["})
    with pytest.raises(SettingsError, match=r"encoder\.port: encoder was given as a whole"):
        load_settings(None, {"encoder": "2", "encoder.port": "1"})
    monkeypatch.setenv("PHASEMESH_GATEWAY__ENCODERS", "host:1")
    with pytest.raises(SettingsError, match=r"environment: .*encoders|environment: .*gateway"):
        load_settings()


@pytest.mark.parametrize("name", ["PHASEMESH_ENCODR__PORT", "PHASEMESH_ENCODER__PRT"])
def test_misspelt_environment_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(SettingsError, match=r"no setting|no such setting"):
        load_settings()


@pytest.mark.parametrize(
    ("content", "named"), [("[1, 2]", "mapping"), ("a: [", "not YAML"), ("encoder: {prt: 1}", "encoder.prt")]
)
def test_wrong_file_is_named(tmp_path: Path, content: str, named: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(content)
    with pytest.raises(SettingsError, match=named):
        load_settings(file)


def test_a_broken_file_does_not_show_its_lines(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text('access: {keys: [{name: a, key: "hush-hush-hush", role: mesh]}')
    with pytest.raises(SettingsError, match=r"not YAML: .*line 1, column") as caught:
        load_settings(file)
    assert "hush" not in str(caught.value)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="not UTF-8"):
        load_settings(file)


def test_one_key_under_two_names_is_refused() -> None:
    same = [
        {"name": "mesh", "key": "long-secret-1", "role": "mesh"},
        {"name": "team", "key": "long-secret-1"},
    ]
    with pytest.raises(SettingsError, match="team has the same key as mesh") as caught:
        load_settings(None, {"access.keys": same})
    assert "long-secret" not in str(caught.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.yaml: No such file"):
        load_settings(tmp_path / "nowhere.yaml")


def test_secrets_are_not_described_but_survive_a_dump(tmp_path: Path) -> None:
    keys = [{"name": "mesh", "key": "hush-hush-hush", "role": "mesh"}]
    settings = load_settings(None, {"access.keys": keys, "encoder.port": 0, "runtime_dir": str(tmp_path)})
    assert "hush-hush-hush" not in describe(settings) + summarize(settings) + repr(settings)
    assert len(summarize(settings).splitlines()) == len(Settings.model_fields)
    assert yaml.safe_load(summarize(settings)) == yaml.safe_load(describe(settings))
    assert yaml.safe_load(describe(settings))["encoder"]["port"] == 0
    file = tmp_path / "dump.yaml"
    file.write_text(dump(settings))
    assert load_settings(file) == settings
    assert load_settings(file).access.mesh_key() == "hush-hush-hush"
