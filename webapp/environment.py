"""Every MESHBOARD_ variable of web, controller and `make up`: type, default and meaning, in one table.

docs/deploy.md shows the same table, and a test holds it against this one. A host worker reads its own
(workers/host/settings.py): it must start without Django and without what only a web host has installed.
"""

from __future__ import annotations

import os
import sys
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

import dj_database_url
from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from webapp import places

PREFIX = "MESHBOARD_"
DATABASE_FORM = (
    "it is postgres://user:password@host:port/name (with ?sslmode=require, say), or sqlite:////path; "
    "percent-encode what is special in a password"
)


def parse_database(url: SecretStr) -> dict[str, Any]:
    """Django's settings for a URL, what follows its `?` as the driver's options."""
    text = url.get_secret_value()
    try:
        known = text.startswith(("postgres://", "postgresql://", "sqlite:///"))
        found: dict[str, Any] = dict(dj_database_url.parse(text, conn_health_checks=True)) if known else {}
    except ValueError:
        found = {}
    if not found.get("NAME"):
        raise ValueError(DATABASE_FORM)  # not the parser's own words: they can hold a piece of the password
    if found["ENGINE"] == "django.db.backends.sqlite3":
        # IMMEDIATE takes the write lock at once, so two writers queue instead of failing half way.
        found["OPTIONS"] = {
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
        }
    return found


def _parsed(url: SecretStr) -> SecretStr:
    parse_database(url)
    return url


def _networks(text: str) -> list[str]:
    """'*' is none: then anybody could say that he is anybody."""
    given = [part.strip() for part in text.split(",") if part.strip()]
    for part in given:
        ip_network(part)
    return given


def _redis(url: SecretStr) -> SecretStr:
    """What hosts can be sent to."""
    parts = urlsplit(url.get_secret_value())
    if parts.scheme not in ("redis", "rediss") or not parts.hostname:
        raise ValueError("it is redis://host:port/0, or rediss:// with TLS")
    return url


def _not_a_file(folder: Path) -> Path:
    if os.path.exists(folder) and not os.path.isdir(folder):  # Path's own raise where we may not look
        raise ValueError("there is something there that is no folder")
    return folder


LOGIN = r"^([A-Za-z0-9_][A-Za-z0-9_.-]{0,63}@)?[A-Za-z0-9_][A-Za-z0-9_.:-]{0,252}$"  # no option of ssh
DatabaseUrl = Annotated[SecretStr, AfterValidator(_parsed)]
Names = Annotated[list[str], NoDecode, BeforeValidator(lambda text: [name.strip() for name in text.split(",")])]
SecretNames = Annotated[
    list[SecretStr], NoDecode, BeforeValidator(lambda text: [SecretStr(key) for key in text.split(",") if key])
]
Networks = Annotated[list[str], NoDecode, BeforeValidator(_networks)]
Place = Annotated[Path, AfterValidator(Path.resolve)]
Folder = Annotated[Place, AfterValidator(_not_a_file)]
HostsRedis = Annotated[SecretStr, AfterValidator(_redis)]


CONFIG = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, validate_default=False, frozen=True)


class SettingError(RuntimeError):
    """A MESHBOARD_ variable is missing or senseless; one line for each."""


class SecretFiles(PydanticBaseSettingsSource):
    """`MESHBOARD_SECRET_KEY_FILE` names the file that holds a secret: no `docker inspect` or `ps e` shows that."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Raises SettingError."""
        name = f"{PREFIX}{field_name.upper()}"
        path = os.environ.get(f"{name}_FILE", "")
        if not path or not _is_secret(field):
            return None, field_name, False
        if os.environ.get(name):
            raise SettingError(f"{name} and {name}_FILE are both set; take one of them away")
        try:
            text = Path(path).read_text("utf-8").strip()
        except (OSError, ValueError) as error:
            raise SettingError(
                f"{name}_FILE: {path!r} cannot be read: {getattr(error, 'strerror', 'no text')}"
            ) from None
        if not text:
            raise SettingError(f"{name}_FILE: {path!r} is empty")
        return text, field_name, False

    def __call__(self) -> dict[str, Any]:
        found = {name: self.get_field_value(field, name)[0] for name, field in self.settings_cls.model_fields.items()}
        return {name: text for name, text in found.items() if text is not None}


class RunnerSettings(BaseSettings):
    """What only `make up` reads."""

    model_config = CONFIG

    state_dir: Folder = Field(places.state(), description="database, static files, secrets")
    port: int | None = Field(None, ge=1, le=65535, description="where the web listens; 8000 or a free one if not set")
    redis_maxmemory: str = Field(
        "1gb",
        pattern=r"(?i)^[1-9][0-9]*(b|kb?|mb?|gb?)?$",
        description="bytes that the embedded Redis may hold, as Redis writes them; full, it refuses to be written to",
    )


class WebSettings(BaseSettings):
    """What web and controller read."""

    model_config = CONFIG

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment, and files for what is secret."""
        return env_settings, SecretFiles(settings_cls)

    state_dir: Folder = Field(places.state(), description="database, static files, secrets")
    static_root: Folder | None = Field(None, description="static files as served; `STATE_DIR/static` if not set")
    secret_key: SecretStr = Field(description="signs sessions and tokens")
    secret_key_fallbacks: SecretNames | None = Field(
        None, description="earlier secret keys, with commas between: sessions and hosts of theirs hold until renewed"
    )
    debug: bool = Field(False, description="Django's debug pages; never on a reachable host")
    allowed_hosts: Names = Field(
        ["127.0.0.1", "localhost"], description="host names served, and socket origins accepted, with commas between"
    )
    https: bool = Field(True, description="secure cookies and HSTS; `make up` sets 0 on loopback")
    database_url: DatabaseUrl | None = Field(
        None,
        description="`postgres://user:password@host:port/name?sslmode=require`; SQLite in `STATE_DIR` if not set",
    )
    redis_url: SecretStr = Field(description="broker, events and telemetry")
    redis_for_hosts: HostsRedis | None = Field(
        None, description="the same Redis as hosts reach it, `redis://name:port/0`; `MESHBOARD_REDIS_URL` if not set"
    )
    redis_access: Literal["hosts", "shared"] = Field(
        "hosts", description="`hosts`: each has a Redis user of its own; `shared`: all use the board's own credentials"
    )
    oidc_url: str | None = Field(
        None,
        pattern=r"^(https://|http://(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?(/|$))[^\s?#@]*$",
        description="an OpenID Connect provider that people sign on with; `https://`, for only that shows who it is",
    )
    oidc_client_id: str | None = Field(None, description="what the provider calls this board")
    oidc_client_secret: SecretStr | None = Field(None, description="what the board shows the provider")
    oidc_name: str = Field("your organisation", description="the provider, as the login page names it")
    oidc_new_people: bool = Field(True, description="whether who signs on for the first time gets an account")
    invited_people: bool = Field(True, description="whether who follows an invitation and has no account gets one")
    submits_per_minute: int = Field(60, ge=1, description="jobs that a user may submit in a minute over REST")
    web_processes: int = Field(1, ge=1, le=64, description="processes that answer requests, each at most a core")
    requests_per_minute: int = Field(6000, ge=1, description="other requests of a token, or session's user, over REST")

    ageing_per_hour: float = Field(0.1, ge=0, le=1000, description="points that a queued job gains in an hour")
    share_points: float = Field(
        1.0, ge=0, le=1000, description="points of a job whose project used nothing; half at its fair share"
    )
    share_half_life_h: float = Field(
        24.0, gt=0, le=8760, description="hours in which half of a project's use is forgotten"
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="`json`: one object a line, with the id of the request, and a line for each request"
    )
    logins_per_minute: int = Field(30, ge=1, description="logins that may be tried in a minute from one address")
    lease_s: int = Field(
        3600,
        ge=10,
        description="seconds without a word of the board until the ranks of a job on several hosts end themselves",
    )
    save_s: int = Field(
        300,
        ge=0,
        description=(
            "seconds that a training job which gives way has to save a checkpoint before it is ended; "
            "on Slurm, how long before its end it is warned"
        ),
    )
    token_days: int = Field(90, ge=1, le=36500, description="how long a REST token is good for")
    trusted_proxies: Networks | None = Field(
        None, description="addresses and networks of proxies whose `X-Forwarded-For` is believed, with commas between"
    )
    board_url: str | None = Field(
        None,
        pattern=r"^https?://[^\s?#@]+$",
        description="where people reach the board: links in mails and webhooks begin with it",
    )
    email_host: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9.:-]{1,253}$",
        description="the mail server that mails go out by; none are if not set",
    )
    email_port: int = Field(587, ge=1, le=65535, description="where it listens")
    email_security: Literal["starttls", "tls", "none"] = Field(
        "starttls", description="`starttls`; `tls` from the first byte, as on port 465; `none`: in the clear"
    )
    email_user: str | None = Field(None, description="who logs in to it; nobody if not set")
    email_password: SecretStr | None = Field(None, description="and that user's password")
    email_from: str = Field(
        "meshboard@localhost", pattern=r"^[^\s<>@,;:]+@[A-Za-z0-9.-]+$", description="whom mails come from"
    )
    metrics_token: SecretStr | None = Field(
        None, min_length=16, description="what `/metrics` is read with, as a Bearer token; there is none if not set"
    )
    otlp_endpoint: str | None = Field(
        None,
        pattern=r"^https?://[^\s?#]+$",
        description=(
            "where the controller sends the same metrics by OTLP over HTTP, `http://collector:4318`; nowhere if not set"
        ),
    )
    otlp_headers: SecretStr | None = Field(
        None, description="headers of that, `name=value` with commas between: a collector's own token"
    )
    otlp_every_s: int = Field(30, ge=1, le=3600, description="seconds between two of these")
    webhook_networks: Networks | None = Field(
        None,
        description="networks inside that webhooks may reach, also over plain HTTP; the public internet if not set",
    )
    slurm_folder: str | None = Field(
        None,
        pattern=r"^/[^\x00-\x1f\x7f%]*$",
        description="a folder that all nodes of a Slurm cluster share; jobs may run there",
    )
    slurm_python: str | None = Field(
        None,
        pattern=r"^/[^\x00-\x1f\x7f]*$",
        description="a Python on those nodes that has Meshboard; the board's own if not set",
    )
    slurm_board: str = Field(
        "https://localhost",
        pattern=r"^https?://[^\s?#@]+$",
        description="where those nodes reach the board, over HTTPS",
    )
    slurm_ca_file: Place | None = Field(
        None, description="certificates that those nodes trust the board by; their own machine's if not set"
    )
    slurm_ssh: str | None = Field(
        None, pattern=LOGIN, description="`user@host` of a login node that has `sbatch`; this machine has it if not set"
    )
    slurm_ssh_config: Place | None = Field(
        None, description="how `ssh` gets there: key, known hosts, jumps; the user's own file if not set"
    )

    history_dir: Folder | None = Field(
        None, description="what attempts sent, kept in columnar files; `STATE_DIR/history` if not set"
    )
    history_bytes: int = Field(
        20 * 2**30, ge=2**20, description="bytes that all histories may take together; beyond it the oldest go"
    )
    history_attempt_bytes: int = Field(
        2**28, ge=2**20, description="bytes of an attempt's roll-ups; beyond it the oldest are merged"
    )
    history_raw_bytes: int = Field(
        2**28, ge=2**20, description="bytes of an attempt's steps event by event; beyond it every second old one goes"
    )
    history_days: int = Field(90, ge=1, le=36500, description="days that a history is kept after its attempt ended")

    def oidc(self) -> list[dict[str, Any]]:
        """The provider as django-allauth has it; none where none is set."""
        if self.oidc_url is None:
            return []
        secret = self.oidc_client_secret.get_secret_value() if self.oidc_client_secret else ""
        return [
            {
                "provider_id": "board",
                "name": self.oidc_name,
                "client_id": self.oidc_client_id or "meshboard",
                "secret": secret,
                "settings": {"server_url": self.oidc_url},
            }
        ]

    def slurm(self) -> dict[str, str] | None:
        """Where Slurm runs jobs, None where the board has none."""
        if self.slurm_folder is None:
            return None
        return {
            "folder": self.slurm_folder,
            "python": self.slurm_python or sys.executable,
            "board": self.slurm_board,
            "login": self.slurm_ssh or "",
            "ssh_config": str(self.slurm_ssh_config or ""),
            "ca_file": str(self.slurm_ca_file or ""),
        }

    def database(self) -> dict[str, Any]:
        """Django's settings of the database."""
        return parse_database(self.database_url or SecretStr(f"sqlite:///{self.state_dir}/db.sqlite3"))


Settings = TypeVar("Settings", bound=BaseSettings)


def read(table: type[Settings]) -> Settings:
    """The environment's values.

    Raises:
        SettingError: naming every variable that is missing or senseless, secrets not shown.
    """
    try:
        return table()
    except ValidationError as errors:
        told = [_told(table, error) for error in errors.errors()]
    raise SettingError("\n".join(told))


def _told(table: type[BaseSettings], error: Any) -> str:
    name = str(error["loc"][0])
    if error["type"] == "missing":
        return f"{PREFIX}{name.upper()} is not set"
    message = error["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    shown = "" if _is_secret(table.model_fields[name]) else f", got {error['input']!r}"
    return f"{PREFIX}{name.upper()}: {message}{shown}"


def _is_secret(field: FieldInfo) -> bool:
    return "Secret" in str(field.annotation)
