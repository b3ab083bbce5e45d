"""Every MESHBOARD_ variable of web, controller and `make up`: type, default and meaning, in one table.

The docs page reference/settings.md is generated from these tables. A host worker reads its own
(workers/host/settings.py): it must start without Django and without what only a web host has installed.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from contracts.secret import SecretError, in_file
from webapp import places
from webapp.values import (
    LOGIN,
    Collector,
    DatabaseUrl,
    Folder,
    Headers,
    Hosts,
    HostsRedis,
    HttpsUrl,
    MailAddress,
    MailServer,
    MetricsToken,
    Networks,
    Place,
    RedisUrl,
    SecretNames,
    Url,
    formed,
    parse_database,
)

PREFIX = "MESHBOARD_"
# What means nothing without another; what stands alone would be ignored without a word.
NEEDS = {
    "oidc_url": ("oidc_client_id",),
    "oidc_client_id": ("oidc_url",),
    "oidc_client_secret": ("oidc_url",),
    "email_host": ("board_url",),
    "email_user": ("email_host", "email_password"),
    "email_password": ("email_host", "email_user"),
    "otlp_headers": ("otlp_endpoint",),
}


LONGEST_S = 10**9  # 31 years; a date that much later is one still
CONFIG = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, validate_default=False, frozen=True)


class SettingError(RuntimeError):
    """A MESHBOARD_ variable is missing or senseless; one line for each."""


class SecretFiles(PydanticBaseSettingsSource):
    """`MESHBOARD_SECRET_KEY_FILE` names the file that holds a secret: no `docker inspect` or `ps e` shows that."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Raises SettingError."""
        name = _variable(field_name)
        if not is_secret(field):
            return None, field_name, False
        try:
            return in_file(name), field_name, False
        except SecretError as error:
            raise SettingError(str(error)) from None

    def __call__(self) -> dict[str, Any]:
        found = {name: self.get_field_value(field, name)[0] for name, field in self.settings_cls.model_fields.items()}
        return {name: text for name, text in found.items() if text is not None}


class RunnerSettings(BaseSettings):
    """What only `make up` reads."""

    model_config = CONFIG

    state_dir: Folder = Field(places.state(), description="database, static files, secrets")
    port: int | None = Field(None, ge=1, le=65535, description="where the web listens; 8000 or a free one if not set")
    redis_maxmemory: Annotated[str, formed(r"(?i)[1-9][0-9]*(b|kb?|mb?|gb?)?", "it is bytes, or 512mb, 2gb")] = Field(
        "1gb",
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
    allowed_hosts: Hosts = Field(
        ["127.0.0.1", "localhost"], description="host names served, and socket origins accepted, with commas between"
    )
    https: bool = Field(True, description="secure cookies and HSTS; `make up` sets 0 on loopback")
    database_url: DatabaseUrl | None = Field(
        None,
        description="`postgres://user:password@host:port/name?sslmode=require`; SQLite in `STATE_DIR` if not set",
    )
    redis_url: RedisUrl = Field(description="broker, events and telemetry")
    redis_for_hosts: HostsRedis | None = Field(
        None, description="the same Redis as hosts reach it, `redis://name:port/0`; `MESHBOARD_REDIS_URL` if not set"
    )
    redis_access: Literal["hosts", "shared"] = Field(
        "hosts", description="`hosts`: each has a Redis user of its own; `shared`: all use the board's own credentials"
    )
    oidc_url: HttpsUrl | None = Field(
        None,
        description="an OpenID Connect provider that people sign on with; `https://`, for only that shows who it is",
    )
    oidc_client_id: str | None = Field(None, description="what the provider calls this board")
    oidc_client_secret: SecretStr | None = Field(None, description="what the board shows the provider")
    oidc_name: str = Field("your organisation", description="the provider, as the login page names it")
    oidc_new_people: bool = Field(True, description="whether who signs on for the first time gets an account")
    invited_people: bool = Field(True, description="whether who follows an invitation and has no account gets one")
    submits_per_minute: int = Field(
        60,
        ge=1,
        description="requests of a user in a minute over REST that make something: jobs, copies and resumes, runs, "
        "searches, tokens, projects, invitations",
    )
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
        le=LONGEST_S,
        description="seconds without a word of the board until the ranks of a job on several hosts end themselves",
    )
    save_s: int = Field(
        300,
        ge=0,
        le=LONGEST_S,
        description=(
            "seconds that a training job which gives way has to save a checkpoint before it is ended; "
            "on Slurm, how long before its end it is warned"
        ),
    )
    token_days: int = Field(90, ge=1, le=36500, description="how long a REST token is good for")
    trusted_proxies: Networks | None = Field(
        None, description="addresses and networks of proxies whose `X-Forwarded-For` is believed, with commas between"
    )
    board_url: Url | None = Field(
        None, description="where people reach the board: links in mails and webhooks begin with it"
    )
    email_host: MailServer | None = Field(None, description="the mail server that mails go out by; none are if not set")
    email_port: int = Field(587, ge=1, le=65535, description="where it listens")
    email_security: Literal["starttls", "tls", "none"] = Field(
        "starttls", description="`starttls`; `tls` from the first byte, as on port 465; `none`: in the clear"
    )
    email_user: str | None = Field(None, description="who logs in to it; nobody if not set")
    email_password: SecretStr | None = Field(None, description="and that user's password")
    email_from: MailAddress = Field("meshboard@localhost", description="whom mails come from")
    metrics_token: MetricsToken | None = Field(
        None, description="what `/metrics` is read with, as a Bearer token; there is none if not set"
    )
    otlp_endpoint: Collector | None = Field(
        None,
        description=(
            "where the controller sends the same metrics by OTLP over HTTP, `http://collector:4318`; nowhere if not set"
        ),
    )
    otlp_headers: Headers | None = Field(
        None, description="headers of that, `name=value` with commas between: a collector's own token"
    )
    otlp_every_s: int = Field(30, ge=1, le=3600, description="seconds between two of these")
    webhook_networks: Networks | None = Field(
        None,
        description="networks inside that webhooks may reach, also over plain HTTP; the public internet if not set",
    )
    slurm_folder: Annotated[str, formed(r"/[^\x00-\x1f\x7f%]*", "it is a path from /, without %")] | None = Field(
        None,
        description="a folder that all nodes of a Slurm cluster share; jobs may run there",
    )
    slurm_python: Annotated[str, formed(r"/[^\x00-\x1f\x7f]*", "it is a path from /")] | None = Field(
        None,
        description="a Python on those nodes that has Meshboard; the board's own if not set",
    )
    slurm_board: Url = Field("https://localhost", description="where those nodes reach the board, over HTTPS")
    slurm_ca_file: Place | None = Field(
        None, description="certificates that those nodes trust the board by; their own machine's if not set"
    )
    slurm_ssh: Annotated[str, formed(LOGIN, "it is user@host")] | None = Field(
        None, description="`user@host` of a login node that has `sbatch`; this machine has it if not set"
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

    @model_validator(mode="after")
    def _together(self) -> Self:
        lacking = [(one, other) for one, others in NEEDS.items() for other in others if self._lacks(one, other)]
        if lacking:
            raise ValueError(
                "\n".join(f"{_variable(other)} is not set, and {_variable(one)} is" for one, other in lacking)
            )
        return self

    def _lacks(self, one: str, other: str) -> bool:
        return getattr(self, one) is not None and getattr(self, other) is None

    def oidc(self) -> list[dict[str, Any]]:
        """The provider as django-allauth has it; none where none is set."""
        if self.oidc_url is None:
            return []
        secret = self.oidc_client_secret.get_secret_value() if self.oidc_client_secret else ""
        return [
            {
                "provider_id": "board",
                "name": self.oidc_name,
                "client_id": self.oidc_client_id,
                "secret": secret,
                "settings": {"server_url": self.oidc_url.rstrip("/")},
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
    message = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:  # of several, which it names
        return str(message)
    name = str(error["loc"][0])
    if error["type"] == "missing":
        return f"{_variable(name)} is not set"
    message = message[0].lower() + message[1:]
    shown = "" if is_secret(table.model_fields[name]) else f", got {error['input']!r}"
    return f"{_variable(name)}: {message}{shown}"


def _variable(name: str) -> str:
    return f"{PREFIX}{name.upper()}"


def is_secret(field: FieldInfo) -> bool:
    return "Secret" in str(field.annotation)
