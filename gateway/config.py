"""One frozen Config: read from a TOML file, overlaid by environment variables, checked key by key.

A plain table's key can be set as TOKENTAPE_<TABLE>_<KEY>. An unknown or ill-typed key is a ConfigError
that names it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta
from platformdirs import user_data_path

from alerts.config import AlertsConfig
from gateway.core import MIDDLES
from gateway.policy import Policy
from gateway.router_file import load_router
from gateway.routing import LevelKeys, PolicyConflict, PolicyTable, overlay

DEFAULT_PRESET = "qwen-coder"
ENV_PREFIX = "TOKENTAPE_"

Positive = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(gt=0.0)]


class ConfigError(ValueError):
    """A setting that cannot be used; the message is one line and names the key. exit_code: the command's."""

    exit_code = 2


class ModelsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[models]: the pair that serves, or more than two."""

    preset: Annotated[
        str | None, Meta(description="a ready pair: `qwen-coder` (where no models are named) or `tiny`")
    ] = None
    small: Annotated[
        str | None, Meta(description="hub id, local Hugging Face folder or GGUF file of the small model")
    ] = None
    large: Annotated[str | None, Meta(description="the same for the large model")] = None
    middle: Annotated[
        Annotated[list[str], Meta(max_length=len(MIDDLES))],
        Meta(
            description="models between the two, weakest first, at most three; each judges the drafts of the "
            'one before it (`tiny` has one of its own: `["middle"]`)'
        ),
    ] = []
    device: Annotated[Literal["cpu", "cuda"], Meta(description="where the models run")] = "cpu"
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        Meta(description="number format of the weights; by default float32 for `tiny`, else bfloat16"),
    ] = None

    small_quantize: Annotated[
        Literal["none", "int8", "int4"] | None,
        Meta(
            description="small model: `none`, `int8` or `int4`; on a CPU by default int8, "
            "none for `tiny`, int4 for `qwen-coder`"
        ),
    ] = None
    middle_quantize: Annotated[
        Literal["none", "int8", "int4"] | None,
        Meta(description="the same for the models between; by default int8"),
    ] = None
    large_quantize: Annotated[
        Literal["none", "int8", "int4"] | None,
        Meta(description="the same for the large model; by default int8"),
    ] = None

    def __post_init__(self) -> None:
        if self.large is not None and self.small is None:
            raise ValueError("models.small: both small and large must be named")
        if self.preset is not None and self.small is not None:
            raise ValueError("models.preset: name a preset or a small and a large model, not both")

    @property
    def served_name(self) -> str:
        """The name clients call the pair by: the preset's, the large model's hub id, or its folder's name."""
        named = self.large or self.small
        if named is None:
            return self.preset or DEFAULT_PRESET
        path = Path(named)
        return path.stem if path.suffix == ".gguf" else path.name if path.exists() else named


class RemoteConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[remote]: the large model on an engine elsewhere."""

    engine: Annotated[
        Literal["vllm", "sglang", "openai"] | None,
        Meta(
            description="what serves the large model instead of this process: `vllm`, `sglang`, or `openai` "
            "(any server whose completions take token ids and return logprobs); `[models]` then names the "
            "small model only, or a preset"
        ),
    ] = None
    base_url: Annotated[str, Meta(description="where the engine listens, without `/v1`")] = (
        "http://127.0.0.1:8001"
    )
    model: Annotated[
        str | None, Meta(description="the name it serves the model by; by default the first that it lists")
    ] = None
    api_key_env: Annotated[
        str | None, Meta(description="name of the environment variable that holds its API key")
    ] = None
    top_logprobs: Annotated[
        Annotated[int, Meta(ge=2, le=20)],
        Meta(description="top logprobs asked for at every position (more where a request wants more)"),
    ] = 5
    max_in_flight: Annotated[Positive, Meta(description="most calls under way; further ones wait")] = 64
    timeout_s: Annotated[Seconds, Meta(description="longest wait for one try of a call")] = 30.0
    failures: Annotated[
        Positive, Meta(description="failed tries in a row after which the engine counts as unavailable")
    ] = 5
    pause_s: Annotated[
        Seconds, Meta(description="time until an unavailable engine is tried again; doubles up to a minute")
    ] = 2.0
    check_s: Annotated[
        Seconds, Meta(description="how often the model is checked to be the one it was at the start")
    ] = 86_400.0
    draft_ahead: Annotated[
        bool, Meta(description="whether the small model drafts on while a call is under way")
    ] = True
    affinity_header: Annotated[
        str,
        Meta(description="header that is the same on all calls of a request, for a load balancer to hash"),
    ] = "x-session-id"
    on_large_failure: Annotated[
        Literal["fail", "degrade"],
        Meta(
            description="what becomes of a request when the large model cannot be had: `fail` (503), or "
            "`degrade`: the small model writes on, flagged (`routing.mode` `routed` only)"
        ),
    ] = "fail"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[engine]: how many rows, how much memory, how long to wait."""

    max_model_len: Annotated[Positive, Meta(description="longest prompt plus answer, in tokens")] = 4096
    kv_memory_gib: Annotated[
        Annotated[float, Meta(gt=0.0)],
        Meta(description="memory budget for both models' key/value caches; the slots come from it"),
    ] = 4.0
    max_rows: Annotated[Positive, Meta(description="most rows decoded at a time")] = 64
    prefill_chunk: Annotated[
        Positive, Meta(description="most prompt tokens of one row in one pass, so that others keep moving")
    ] = 256
    large_wait_ms: Annotated[
        Annotated[float, Meta(ge=0.0)],
        Meta(description="longest wait to gather rows for one pass of the large model, while that pays"),
    ] = 50.0
    adapt: Annotated[
        bool | None,
        Meta(
            description="cap drafts, down to none, while they would be slower than the large model alone; by "
            "default on, except for `tiny`, whose two models cost the same"
        ),
    ] = None
    ride_along: Annotated[
        bool | None,
        Meta(
            description="the large model also reads the token at which the small one deferred: where it "
            "would have written that itself, the same pass gives one token more of its own; faster, and "
            "more of the tokens are the large model's; by default while that pays by the measured costs, so "
            "not without `adapt`"
        ),
    ] = None
    prefix_slots: Annotated[
        Annotated[int, Meta(ge=0)],
        Meta(description="finished rows whose keys and values are kept for prompts that begin alike"),
    ] = 16
    lookup_history_tokens: Annotated[
        Annotated[int, Meta(ge=0)],
        Meta(
            description="earlier answers remembered for lookup drafts, in tokens; 0: only the row's own text"
        ),
    ] = 200_000
    lookup_corpus: Annotated[
        str | None, Meta(description="text file whose phrases lookup may draft from")
    ] = None
    max_queue: Annotated[
        Positive, Meta(description="most choices waiting for a slot; beyond it the answer is 429")
    ] = 256


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[server]: the sockets and the limits at the door."""

    host: Annotated[str, Meta(description="address the gateway binds")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="port of the gateway")] = 8000
    ui: Annotated[bool, Meta(description="whether the replay UI is started beside the gateway")] = True
    ui_port: Annotated[Port, Meta(description="port of the replay UI (loopback only)")] = 8501
    shadow_rate: Annotated[
        Annotated[float, Meta(ge=0.0, le=1.0)],
        Meta(
            description="share of requests without `routing` of their own that the large model alone answers "
            "(mode `shadow`), so that there are labels without risk"
        ),
    ] = 0.0
    max_body_mib: Annotated[
        Annotated[float, Meta(gt=0.0)], Meta(description="largest request body; beyond it the answer is 413")
    ] = 8.0
    max_header_kib: Annotated[
        Annotated[float, Meta(gt=0.0)],
        Meta(description="largest request headers; beyond it the answer is 431"),
    ] = 32.0
    max_wait_s: Annotated[
        Seconds, Meta(description="a request that would wait longer for a slot gets 429 at once")
    ] = 120.0
    cors_origins: Annotated[
        list[str], Meta(description="web origins that browsers may call from; none by default")
    ] = []
    max_choices: Annotated[Positive, Meta(description="most choices of one request: prompts times `n`")] = 128
    keepalive_s: Annotated[
        Seconds, Meta(description="an SSE comment is sent when a stream was silent for so long")
    ] = 15.0
    send_timeout_s: Annotated[
        Seconds, Meta(description="a client that reads nothing for so long is disconnected")
    ] = 60.0
    request_timeout_s: Annotated[
        Seconds, Meta(description="longest life of a request; beyond it the answer is 504")
    ] = 600.0
    drain_s: Annotated[Seconds, Meta(description="how long SIGTERM lets running requests go on")] = 30.0


class AuthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[auth]: who may call, and how much one key may ask for."""

    keys_file: Annotated[
        str | None,
        Meta(description="API keys, a line each: name, scopes, sha256; `tokentape keys new` makes one"),
    ] = None
    max_concurrent: Annotated[Positive | None, Meta(description="most requests of one key at a time")] = None
    tokens_per_minute: Annotated[
        Positive | None, Meta(description="prompt and output tokens one key may use, on average")
    ] = None


class LogsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[logs]: the tape and the gateway's own log."""

    data_dir: Annotated[
        str | None, Meta(description="folder of the tape; by default the user's data folder for tokentape")
    ] = None
    queue_rows: Annotated[Positive, Meta(description="most rows waiting for the writer thread")] = 100_000
    flush_rows: Annotated[Positive, Meta(description="rows after which the writer commits")] = 1000
    flush_s: Annotated[Seconds, Meta(description="time after which the writer commits")] = 0.5
    capture: Annotated[
        Literal["full", "no_prompt", "signals"],
        Meta(
            description="`full`; `no_prompt`: nothing of the prompt; `signals`: no text and no token ids, "
            "only numbers and decisions, which still replay"
        ),
    ] = "full"
    redact: Annotated[
        str | None,
        Meta(description="`package.module.function`, called as redact(table, row) before a row is written"),
    ] = None
    segment_mb: Annotated[
        Positive,
        Meta(description="size of the live tables in MiB above which the running hour is closed too"),
    ] = 256
    retention_days: Annotated[
        Annotated[float, Meta(gt=0.0)] | None, Meta(description="closed segments older than this are dropped")
    ] = None
    retention_gb: Annotated[
        Annotated[float, Meta(gt=0.0)] | None,
        Meta(description="total size of closed segments, GiB, beyond which the oldest are dropped"),
    ] = None
    level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least severe line that is logged")
    ] = "info"


class FleetConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[fleet]: several gateways as one."""

    name: Annotated[
        Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None,
        Meta(description="this gateway's name, one of its own in the fleet"),
    ] = None
    share: Annotated[
        str | None,
        Meta(description="path or URL (`s3://bucket/prefix`) where the gateways' closed segments meet"),
    ] = None
    close_s: Annotated[
        Annotated[float, Meta(ge=1.0, le=86_400.0)],
        Meta(description="how often finished traces are closed, sent to the share, and others' taken in"),
    ] = 300.0
    control: Annotated[
        str | None,
        Meta(description="URL of the gateway that rules rollouts; left out on that gateway itself"),
    ] = None
    silent_s: Annotated[
        Annotated[float, Meta(ge=3.0)],
        Meta(description="silence of the control after which every request here is on stable"),
    ] = 60.0
    key_env: Annotated[
        str, Meta(description="environment variable with the control's API key (scope `read`)")
    ] = "TOKENTAPE_CONTROL_KEY"

    def __post_init__(self) -> None:
        for key in ("share", "control"):
            if getattr(self, key) is not None and self.name is None:
                raise ValueError(f"fleet.name: needed with {key}")
        parts = urlsplit(self.control or "http://none")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise ValueError("fleet.control: must be http://HOST:PORT or https://HOST:PORT")
        if parts.username is not None or parts.password is not None:
            raise ValueError("fleet.control: must not hold a user or password; the key is in fleet.key_env")


class OtelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[otel]: traces and metrics by OpenTelemetry; needs the extra `otel`."""

    endpoint: Annotated[
        str | None,
        Meta(
            description="OTLP/HTTP receiver, such as `http://localhost:4318`; off without it. Headers for it "
            "come from the environment: `OTEL_EXPORTER_OTLP_HEADERS`"
        ),
    ] = None
    service_name: Annotated[str, Meta(description="`service.name` of what is sent")] = "tokentape"
    sample: Annotated[
        Annotated[float, Meta(ge=0.0, le=1.0)],
        Meta(description="share of requests traced where the client's `traceparent` does not decide"),
    ] = 1.0
    max_events: Annotated[
        Positive, Meta(description="passes kept of one request, the latest; an answer has hundreds")
    ] = 512
    metrics_interval_s: Annotated[Seconds, Meta(description="how often metrics are sent")] = 60.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.endpoint or "http://none")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("otel.endpoint: must be an http or https URL")


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[calibration.<policy name>]: what `tokentape calibrate` has shown, and of which models."""

    small_hash: Annotated[str, Meta(description="sha256 of the small model it was run with")]
    large_hash: Annotated[str, Meta(description="the same of the large model; other models are refused")]
    policy_hash: Annotated[str, Meta(description="the policy it holds for; after a change it holds no more")]
    numerics: Annotated[str, Meta(description="device, number format and quantization it was run with")]
    max_disagreement: Annotated[
        Annotated[float, Meta(gt=0.0, lt=1.0)],
        Meta(description="bound on the mean share of output tokens that the large model would not write"),
    ]
    confidence: Annotated[
        Annotated[float, Meta(gt=0.0, lt=1.0)], Meta(description="confidence with which it holds")
    ]
    observed: Annotated[float, Meta(description="mean disagreement seen on the held-out prompts")]
    prompts: Annotated[Positive, Meta(description="held-out prompts the policy was really run on")]
    prompts_sha256: Annotated[str, Meta(description="sha256 of the file of prompts")]
    date: Annotated[str, Meta(description="day of the calibration, YYYY-MM-DD")]


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of one gateway."""

    models: ModelsConfig = ModelsConfig()
    remote: RemoteConfig = RemoteConfig()
    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()
    auth: AuthConfig = AuthConfig()
    logs: LogsConfig = LogsConfig()
    alerts: AlertsConfig = AlertsConfig()
    fleet: FleetConfig = FleetConfig()
    otel: OtelConfig = OtelConfig()
    policy: dict[str, PolicyTable] = {}
    calibration: dict[str, Calibration] = {}

    def __post_init__(self) -> None:
        models = self.models
        if self.remote.engine is None and models.small is not None and models.large is None:
            raise ValueError("models.large: both small and large must be named, or a [remote] engine")
        if self.remote.engine is not None and models.large is not None:
            raise ValueError("models.large: the large model is on the [remote] engine")
        if self.remote.engine is not None and models.middle:
            raise ValueError("models.middle: not with a large model on a [remote] engine")

    @property
    def served_name(self) -> str:
        """The name clients call the pair by: the large model's."""
        return self.remote.model or self.models.served_name

    @property
    def policies(self) -> dict[str, Policy]:
        """Every named policy, `stable` (the one in force) always among them."""
        stable = overlay(Policy(), self.policy.get("stable", PolicyTable()))
        others = {name: overlay(Policy(), table) for name, table in self.policy.items() if name != "stable"}
        return {"stable": stable, **others}

    @property
    def data_dir(self) -> Path:
        """The folder of the tape."""
        return Path(self.logs.data_dir) if self.logs.data_dir else user_data_path("tokentape")


def load_config(
    path: Path | None, environ: Mapping[str, str], overrides: Mapping[str, Any] | None = None
) -> Config:
    """The file, then the environment, then overrides ("server.port": 9000); raises ConfigError."""
    tables = _read(path) if path is not None else {}
    for table, key, value in _from_environment(environ):
        _table(tables, table)[key] = value
    for name, value in (overrides or {}).items():
        table, _, key = name.partition(".")
        _table(tables, table)[key] = value
    folder = path.parent if path is not None else Path()
    policies = {name: _policy(name, table, folder) for name, table in _table(tables, "policy").items()}
    try:
        config = msgspec.convert({**tables, "policy": policies}, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_one_line(str(error))) from None
    for name, policy in policies.items():
        try:
            read = overlay(Policy(), policy)
        except PolicyConflict as error:
            raise ConfigError(f"policy.{name}.{error}") from None
        if read.reads_hidden and config.logs.capture != "full":
            # The text can be guessed from hidden states, and without them no decision replays.
            raise ConfigError(
                f'policy.{name}.router: it reads hidden states, which only logs.capture = "full" records'
            )
        for tier in MIDDLES[len(config.models.middle) :]:
            if getattr(policy, tier) is not None:
                raise ConfigError(f"policy.{name}.{tier}: models.middle names no such model")
    for name in config.calibration:
        if name not in policies:
            raise ConfigError(f"calibration.{name}: there is no [policy.{name}]")
    return config


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _table(tables: dict[str, Any], name: str) -> dict[str, Any]:
    table = tables.setdefault(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{name}: expected a table")
    return table


def _policy(name: str, table: object, folder: Path) -> PolicyTable:
    if isinstance(table, dict) and isinstance(table.get("router"), str):
        try:
            table = {**table, "router": load_router(folder / table["router"])}
        except ValueError as error:
            raise ConfigError(f"policy.{name}.router: {error}") from None
    try:
        return msgspec.convert(table, PolicyTable)
    except msgspec.ValidationError as error:
        raise ConfigError(f"policy.{name}.{_one_line(str(error))}") from None


def _plain_tables() -> dict[str, type[msgspec.Struct]]:
    return {
        name: kind for name, kind in get_type_hints(Config).items() if name not in ("policy", "calibration")
    }


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, str, Any]]:
    for table, kind in _plain_tables().items():
        hints = get_type_hints(kind)
        prefix = f"{ENV_PREFIX}{table.upper()}_"
        for variable in sorted(environ):
            if not variable.startswith(prefix):
                continue
            key = variable.removeprefix(prefix).lower()
            if key not in hints:
                raise ConfigError(f"{variable}: no such key in [{table}]")
            try:
                value = msgspec.convert(environ[variable], hints[key], strict=False)
            except msgspec.ValidationError as error:
                raise ConfigError(f"{variable}: {error}") from None
            yield table, key, value


_PATH = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<at>.*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<key>.*)`$")


def _one_line(message: str) -> str:
    match = _PATH.match(message)
    assert match is not None
    what, at = match["what"], match["at"] or ""
    if unknown := _UNKNOWN.match(what):
        return f"{f'{at}.' if at else ''}{unknown['key']}: unknown key"
    return f"{at}: {what}" if at and not what.startswith(at) else what


def markdown() -> str:
    """Every key with its default and meaning, as the tables of the README."""
    lines: list[str] = []
    tables: dict[str, type[msgspec.Struct]] = {
        **_plain_tables(),
        "policy.<name>": PolicyTable,
        "policy.<name>.middle": LevelKeys,
        "calibration.<name>": Calibration,
    }
    for table, kind in tables.items():
        lines += [f"| `[{table}]` | default | meaning |", "| --- | --- | --- |"]
        defaults: object = Policy() if kind is PolicyTable else None if kind is Calibration else kind()
        hints = get_type_hints(kind, include_extras=True)
        for key in kind.__struct_fields__:
            value = getattr(defaults, key, None)
            shown = "" if value is None else f"`{_toml(value)}`"
            lines.append(f"| `{key}` | {shown} | {_description(hints[key])} |")
        lines.append("")
    return "\n".join(lines)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _description(hint: object) -> str:
    return next(meta.description or "" for meta in reversed(get_args(hint)) if isinstance(meta, Meta))
