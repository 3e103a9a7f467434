"""The settings tree of every role: one file serves all.

Order of precedence: flags, then environment (`PHASEMESH_ENCODER__PORT=50051`), then the YAML file, then the
defaults below. Unknown keys are refused wherever they stand, because a misspelt limit is a missing limit.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings import (
    SettingsError as SourceError,
)

ENV_PREFIX = "PHASEMESH_"
#: Variables of that prefix that client commands read by themselves.
CLIENT_VARIABLES = frozenset({"PHASEMESH_KEY"})


class SettingsError(ValueError):
    """The configuration is wrong; the message names each key and what is wrong with it."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _default_runtime_dir() -> Path:
    # Short on purpose: Ray puts sockets below it, and AF_UNIX paths end at 107 bytes.
    return Path(tempfile.gettempdir()) / f"phasemesh-{os.getuid()}"


def _default_data_dir() -> Path:
    home = os.environ.get("XDG_DATA_HOME")
    return (Path(home) if home else Path.home() / ".local" / "share") / "phasemesh"


class LogSettings(_Section):
    """Logs."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level that is logged."
    )
    format: Literal["auto", "json", "text"] = Field(
        "auto", description="`auto` is text on a terminal and JSON elsewhere."
    )


class TracingConfig(_Section):
    """Traces."""

    exporter: Literal["otlp", "console", "none"] = Field("none", description="Where spans go.")
    endpoint: str | None = Field(
        None,
        description="Base URL of an OTLP/HTTP collector; default: the standard OTEL_EXPORTER_OTLP_* ones.",
    )
    sample_ratio: float = Field(1.0, ge=0, le=1, description="Share of traces begun here that are recorded.")
    schedule_delay_ms: int = Field(2000, ge=1, description="Longest wait of a finished span, milliseconds.")


class RpcSettings(_Section):
    """gRPC, for every server and client."""

    max_message_bytes: int = Field(64 * 2**20, ge=4096, description="Largest message, either way.")
    reflection: bool = Field(True, description="Serve reflection, for grpcurl; turn off outside development.")
    channelz: bool = Field(False, description="Serve channelz on the public port.")
    default_deadline_s: float = Field(
        60.0, gt=0, description="Deadline of calls that come without one, seconds."
    )
    max_deadline_s: float = Field(600.0, gt=0, description="Longest deadline that is honoured, seconds.")
    connection_age_s: float = Field(
        60.0,
        gt=0,
        description="Age at which clients are asked to reconnect, so that they find new replicas, seconds.",
    )
    keepalive_s: float = Field(30.0, gt=0, description="Interval of keepalive pings, seconds.")
    drain_s: float = Field(30.0, ge=0, description="Longest wait for calls in flight at shutdown, seconds.")
    drain_delay_s: float = Field(
        0.0,
        ge=0,
        description="Time to go on serving after NOT_SERVING at shutdown, for load balancers, seconds.",
    )


class KeySettings(_Section):
    """One API key."""

    name: str = Field(description="Who uses it; appears in logs.", pattern=r"^[!-~]{1,64}$")
    key: SecretStr = Field(description="The key itself.", min_length=8)
    role: Literal["caller", "mesh"] = Field(
        "caller", description="`mesh` keys are for Phasemesh's own processes, which may speak for a tenant."
    )
    tenant: str = Field(
        "default", description="Owner of what this key creates.", pattern=r"^[A-Za-z0-9._-]{1,64}$"
    )


class AccessSettings(_Section):
    """Who may call. Without keys, everybody."""

    keys: tuple[KeySettings, ...] = Field(
        (), description="Keys; every route of a public port needs one if any is set."
    )

    @model_validator(mode="after")
    def _needs_a_mesh_key(self) -> Self:
        values = [key.key.get_secret_value() for key in self.keys]
        for position, key in enumerate(self.keys):
            if values.index(values[position]) != position:
                raise ValueError(
                    f"keys: {key.name} has the same key as {self.keys[values.index(values[position])].name}"
                )
        if self.keys and not any(key.role == "mesh" for key in self.keys):
            raise ValueError("keys needs one with role: mesh, for the gateway's own calls")
        return self

    def mesh_key(self) -> str | None:
        """The key that our own processes call each other with."""
        return next((key.key.get_secret_value() for key in self.keys if key.role == "mesh"), None)


class ServerSettings(_Section):
    """Where a process listens."""

    host: str = Field("127.0.0.1", description="Address of the public port.")
    port: int = Field(ge=0, le=65535, description="Public port; 0 takes a free one.")
    admin_host: str = Field("127.0.0.1", description="Address of the admin port.")
    admin_port: int = Field(
        ge=0, le=65535, description="Port of /livez, /readyz and /metrics; 0 takes a free one."
    )


class GatewaySettings(ServerSettings):
    """REST in front of the mesh."""

    port: int = Field(8080, ge=0, le=65535, description="HTTP port; 0 takes a free one.")
    admin_port: int = Field(8081, ge=0, le=65535, description="Port of /livez, /readyz and /metrics.")
    encoders: tuple[str, ...] = Field(
        ("127.0.0.1:50051",), min_length=1, description="gRPC targets of encoder services."
    )
    directory_refresh_s: float = Field(
        2.0, gt=0, description="Interval at which encoders' models are polled, seconds."
    )
    retrieval: str | None = Field(
        "127.0.0.1:50061", description="gRPC target of the retrieval service; null serves no collections."
    )
    max_body_bytes: int = Field(16 * 2**20, ge=1024, description="Largest request body.")
    max_inputs: int = Field(2048, ge=1, description="Most inputs in one request.")
    request_timeout_s: float = Field(60.0, gt=0, description="Longest time for one request, seconds.")


class ModelSettings(_Section):
    """One model to serve."""

    name: str = Field(description="Name that callers use.", pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]{0,255}$")
    source: str = Field(description="Local directory, or Hugging Face repository id.", min_length=1)
    revision: str | None = Field(None, description="Commit, branch or tag of the repository.")
    aliases: tuple[str, ...] = Field((), description="Other names for it.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="`auto`: bfloat16 where the hardware is faster with it, else float32."
    )
    max_tokens: int | None = Field(None, ge=2, description="Lowers the model's own limit.")
    matryoshka_dims: tuple[int, ...] | None = Field(
        None, description="Sizes that vectors may be cut to, where the checkpoint's files don't say."
    )


class EncoderSettings(ServerSettings):
    """The encoder service and its workers."""

    port: int = Field(50051, ge=0, le=65535, description="gRPC port; 0 takes a free one.")
    admin_port: int = Field(50052, ge=0, le=65535, description="Port of /livez, /readyz and /metrics.")
    models: tuple[ModelSettings, ...] = Field((), description="Models to serve.")
    ray: bool = Field(True, description="Run workers as Ray actors; off runs one in this process.")
    ray_address: str | None = Field(
        None, description="Ray cluster to join; default: a private one on this machine."
    )
    replicas: int = Field(1, ge=1, description="Workers; each holds every model.")
    device: Literal["auto", "cuda", "xpu", "mps", "cpu"] = Field(
        "auto", description="What workers compute on."
    )
    cpus_per_replica: int | None = Field(
        None, ge=1, description="CPUs that each worker declares; default: the machine's, shared out."
    )
    threads: int | None = Field(None, ge=1, description="torch threads of each worker; default: its CPUs.")
    max_batch_tokens: int | None = Field(
        None,
        ge=16,
        description="Token budget of a batch, padding included; default: 16384 on CUDA, 2048 on CPU.",
    )
    max_batch_items: int = Field(512, ge=1, le=4096, description="Most inputs in a batch.")
    max_queued_tokens: int = Field(
        1_000_000, ge=16, description="Tokens that may wait for a batch before requests are refused."
    )
    max_queue_wait_s: float = Field(
        30.0, gt=0, description="Longest estimated wait before requests are refused."
    )
    max_inputs: int = Field(2048, ge=1, le=65536, description="Most inputs in one request.")
    max_input_bytes: int = Field(4 * 2**20, ge=1024, description="Largest single text, UTF-8 bytes.")
    tokenizer_threads: int | None = Field(
        None, ge=1, description="Tokenizer threads; default: the machine's CPUs."
    )
    start_timeout_s: float = Field(600.0, gt=0, description="Longest time for workers to load, seconds.")

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        seen: set[str] = set()
        for model in self.models:
            for name in (model.name, *model.aliases):
                if name in seen:
                    raise ValueError(f"models: the name or alias {name!r} is given twice")
                seen.add(name)
        return self


class RetrievalSettings(ServerSettings):
    """Collections, search planning and merging."""

    port: int = Field(50061, ge=0, le=65535, description="gRPC port; 0 takes a free one.")
    admin_port: int = Field(50062, ge=0, le=65535, description="Port of /livez, /readyz and /metrics.")
    encoders: tuple[str, ...] = Field(
        ("127.0.0.1:50051",), description="gRPC targets of encoder services, for texts; may be empty."
    )
    scorers: tuple[str, ...] = Field(
        ("127.0.0.1:50071",),
        min_length=1,
        description="gRPC targets of scorers; each one's name is its target.",
    )
    scorer_replicas: int = Field(1, ge=1, description="Scorers that each fragment is placed on.")
    durability: Literal["process", "disk"] = Field(
        "disk", description="`disk`: a commit is acknowledged after its files are synced."
    )
    refresh_ms: int = Field(500, ge=0, description="Age up to which other processes' commits may be unseen.")
    fragment_tokens: int = Field(
        2_000_000,
        ge=1,
        description="Tokens at which a fragment is cut. Set lower, an upsert of more is several commits.",
    )
    delete_grace_s: float = Field(
        3600.0, ge=0, description="Age at which a deleted collection's data goes, seconds."
    )
    compact_fragments: int = Field(
        16, ge=0, description="Small fragments of a collection that aren't merged; 0 never merges by itself."
    )
    cleanup_interval_s: float = Field(
        600.0, gt=0, description="Interval at which old versions are removed, seconds."
    )
    max_documents: int = Field(1000, ge=1, description="Most documents in one request.")
    max_k: int = Field(1000, ge=1, description="Most hits of one search.")
    encode_batch: int = Field(64, ge=1, description="Texts per call to an encoder.")
    directory_refresh_s: float = Field(
        2.0, gt=0, description="Interval at which encoders' models are polled, seconds."
    )


class ScorerSettings(ServerSettings):
    """A late-interaction worker."""

    port: int = Field(50071, ge=0, le=65535, description="gRPC port; 0 takes a free one.")
    admin_port: int = Field(50072, ge=0, le=65535, description="Port of /livez, /readyz and /metrics.")
    cache_dir: Path | None = Field(
        None, description="Segments on disk, for this scorer alone; default: in data_dir."
    )
    capacity_bytes: int = Field(4 * 2**30, ge=2**20, description="Most bytes of segments kept resident.")
    threads: int | None = Field(None, ge=1, description="Scoring threads; default: the machine's CPUs.")
    device: str = Field(
        "cpu",
        pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$",
        description="What scans vectors: cpu, cuda or cuda:N, which needs the extra scorer-cuda.",
    )
    device_bytes: int | None = Field(
        None,
        ge=2**20,
        description="Most bytes of vectors on the device; default: 80 % of what is free at the start.",
    )
    max_queued_scan_work: int = Field(
        2_000_000_000,
        ge=1,
        description="Tokens x ceil(query tokens / 32) that may wait before searches are refused.",
    )


class _CheckedEnv(EnvSettingsSource):
    """The environment, with misspelt top-level names refused as nested ones are."""

    def __call__(self) -> dict[str, Any]:
        known = set(self.settings_cls.model_fields)
        for name in set(os.environ) - CLIENT_VARIABLES:
            if name.startswith(ENV_PREFIX) and name[len(ENV_PREFIX) :].split("__")[0].lower() not in known:
                raise SettingsError(
                    f"environment: {name} names no setting; the sections are {', '.join(sorted(known))}"
                )
        return super().__call__()


class Settings(BaseSettings):
    """Everything that can be set."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True
    )

    runtime_dir: Path = Field(
        default_factory=_default_runtime_dir,
        description="Sockets, tokens and locks of this start; keep it short.",
    )
    data_dir: Path = Field(default_factory=_default_data_dir, description="Root of all collections.")
    log: LogSettings = LogSettings()
    tracing: TracingConfig = TracingConfig()
    rpc: RpcSettings = RpcSettings()
    access: AccessSettings = AccessSettings()
    gateway: GatewaySettings = GatewaySettings()
    encoder: EncoderSettings = EncoderSettings()
    retrieval: RetrievalSettings = RetrievalSettings()
    scorer: ScorerSettings = ScorerSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags before environment before file; the file's content is the last init argument."""
        flags: dict[str, Any] = dict(getattr(init_settings, "init_kwargs", {}))
        file = flags.pop("file_", {})
        return (
            InitSettingsSource(settings_cls, flags),
            _CheckedEnv(settings_cls),
            InitSettingsSource(settings_cls, file),
        )


def load_settings(file: Path | None = None, flags: Mapping[str, Any] | None = None) -> Settings:
    """Read the settings.

    Args:
        file: YAML file; None for none.
        flags: dotted names to values, e.g. {"encoder.port": 0}; values may be YAML text.

    Raises:
        SettingsError: the file can't be read, or a key is unknown or has a wrong value; every fault is named.
    """
    sources: dict[str, Any] = {**_nest(flags or {}), "file_": _read(file) if file else {}}
    try:
        return Settings(**sources)
    except SourceError as error:
        raise SettingsError(f"environment: {error}; lists and sections have to be JSON") from None
    except ValidationError as error:
        faults = [
            f"{'.'.join(str(part) for part in fault['loc']) or 'settings'}: {_words(fault)}"
            for fault in error.errors(include_input=False, include_url=False)
        ]
        raise SettingsError("\n".join(faults)) from None


def _words(fault: Any) -> str:
    if fault["type"] == "extra_forbidden":
        return "there is no such setting"
    message: str = fault["msg"]
    return message.removeprefix("Value error, ")


def _read(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text())
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{file}: not UTF-8 text") from None
    except yaml.YAMLError as error:
        # Never str(error): it quotes the line, and keys stand in such lines.
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise SettingsError(
            f"{file}: not YAML: {getattr(error, 'problem', None) or 'broken'}{where}"
        ) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"{file}: has to be a mapping of sections, not a {type(content).__name__}")
    return content


def _nest(flags: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in flags.items():
        *sections, leaf = name.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise SettingsError(f"{name}: {section} was given as a whole as well; give one or the other")
        try:
            node[leaf] = yaml.safe_load(value) if isinstance(value, str) else value
        except yaml.YAMLError:
            raise SettingsError(f"{name}: {value!r} isn't YAML; quote it, e.g. '[a, b]'") from None
    return tree


def dump(settings: Settings) -> str:
    """The settings in force as YAML *with* secrets, for another process's file; keep it to its owner."""

    def reveal(value: Any) -> Any:
        match value:
            case BaseModel():
                return {name: reveal(getattr(value, name)) for name in type(value).model_fields}
            case tuple() | list():
                return [reveal(element) for element in value]
            case SecretStr():
                return value.get_secret_value()
            case Path():
                return str(value)
            case _:
                return value

    return yaml.safe_dump(reveal(settings), sort_keys=False)


def summarize(settings: Settings) -> str:
    """The settings in force, a line per section, for the start of a process; secrets are asterisks."""
    lines = []
    for name, value in settings.model_dump(mode="json").items():
        text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, sort_keys=False)
        lines.append(f"{name}: {text.splitlines()[0]}")
    return "\n".join(lines)


def describe(settings: Settings) -> str:
    """The settings in force as YAML; secrets are shown as asterisks."""
    return yaml.safe_dump(
        settings.model_dump(mode="json"), sort_keys=False, default_flow_style=False
    ).rstrip()
