"""MESHBOARD_ variables of web, controller and `make up`: type, default, and description.

docs/reference/settings.md is generated from these tables. A host worker has its own table, because it starts without
Django (workers/host/settings.py).
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from contracts.logs import LogLevel
from contracts.security import SecretError, read_secret_file
from webapp import installation
from webapp.setting_types import (
    SSH_LOGIN,
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
    Ports,
    RedisUrl,
    SecretNames,
    Url,
    check_pattern,
    parse_database,
)

PREFIX = "MESHBOARD_"
# Settings that need other settings.
REQUIRED_TOGETHER = {
    "oidc_url": ("oidc_client_id",),
    "oidc_client_id": ("oidc_url",),
    "oidc_client_secret": ("oidc_url",),
    "email_host": ("board_url",),
    "email_user": ("email_host", "email_password"),
    "email_password": ("email_host", "email_user"),
    "otlp_headers": ("otlp_endpoint",),
}


MAX_DURATION_S = 10**9  # 31 years, so that the sum with a date is a date
CONFIG = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, validate_default=False, frozen=True)


class SettingError(RuntimeError):
    """MESHBOARD_ variables are missing or invalid, one line each."""


class SecretFileSource(PydanticBaseSettingsSource):
    """Reads secrets from files, such as MESHBOARD_SECRET_KEY_FILE, which `docker inspect` does not show."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Raises SettingError."""
        name = _variable(field_name)
        if not is_secret(field):
            return None, field_name, False
        try:
            return read_secret_file(name), field_name, False
        except SecretError as error:
            raise SettingError(str(error)) from None

    def __call__(self) -> dict[str, Any]:
        found = {name: self.get_field_value(field, name)[0] for name, field in self.settings_cls.model_fields.items()}
        return {name: text for name, text in found.items() if text is not None}


class RunnerSettings(BaseSettings):
    """Settings of `make up`."""

    model_config = CONFIG

    state_dir: Folder = Field(
        installation.get_default_state_dir(),
        description="State folder, which contains the database, static files, and secrets.",
    )
    port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="Port of the web server. Default: 8000, or another free port if 8000 is in use.",
    )
    redis_maxmemory: Annotated[
        str,
        check_pattern(r"(?i)[1-9][0-9]*(b|kb?|mb?|gb?)?", "expected a number of bytes, or a size such as 512mb or 2gb"),
    ] = Field(
        "1gb",
        description="Maximum memory of the Redis server that `make up` starts. Redis rejects writes above this limit.",
    )


class WebSettings(BaseSettings):
    """Settings of web, controller, and recorder."""

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
        """Read the environment, and secrets from files."""
        return env_settings, SecretFileSource(settings_cls)

    state_dir: Folder = Field(
        installation.get_default_state_dir(),
        description="State folder, which contains the database, static files, and secrets.",
    )
    static_root: Folder | None = Field(
        None, description="Folder of the static files that the web server sends. Default: `STATE_DIR/static`."
    )
    secret_key: SecretStr = Field(description="Secret key that signs login sessions and tokens.")
    secret_key_fallbacks: SecretNames | None = Field(
        None,
        description="Earlier secret keys, separated by commas. Sessions and hosts that use an earlier key stay valid.",
    )
    debug: bool = Field(
        False, description="Show the debug pages of Django. Keep debug pages off if other people can open the board."
    )
    allowed_hosts: Hosts = Field(
        ["127.0.0.1", "localhost"],
        description=(
            "Host names of the board, separated by commas. "
            "A web page can open a WebSocket to the board only if the host name of the page is in this list."
        ),
    )
    https: bool = Field(
        True, description="Use secure cookies and HSTS. `make up` sets the value 0, because it serves HTTP on loopback."
    )
    database_url: DatabaseUrl | None = Field(
        None,
        description=(
            "Address of the database, such as `postgres://user:password@host:port/name?sslmode=require`. "
            "Default: an SQLite database in `STATE_DIR`."
        ),
    )
    redis_url: RedisUrl = Field(description="Address of the Redis server for messages to hosts, events, and telemetry.")
    redis_for_hosts: HostsRedis | None = Field(
        None,
        description=(
            "Redis address that hosts use, as `redis://name:port/0`. Default: the value of `MESHBOARD_REDIS_URL`."
        ),
    )
    redis_access: Literal["hosts", "shared"] = Field(
        "hosts",
        description=(
            "With `hosts`, each host has its own Redis user. With `shared`, all hosts use the board's Redis user."
        ),
    )
    oidc_url: HttpsUrl | None = Field(
        None,
        description="Address of the OpenID Connect provider for single sign-on. The address starts with `https://`.",
    )
    oidc_client_id: str | None = Field(None, description="Client ID of the board at the single sign-on provider.")
    oidc_client_secret: SecretStr | None = Field(
        None, description="Client secret of the board at the single sign-on provider."
    )
    oidc_name: str = Field(
        "your organization", description="Name that the login page shows for the single sign-on provider."
    )
    oidc_new_people: bool = Field(
        True, description="Create an account when a person first logs in with the single sign-on provider."
    )
    session_hours: int = Field(
        336, ge=1, le=8760, description="Hours after a login at which the session ends, also if it is in use."
    )
    session_idle_hours: int = Field(
        72, ge=1, le=8760, description="Hours without a request after which a session ends."
    )
    staff_second_factor: bool = Field(
        False, description="Require a second factor of staff. Staff without a second factor can only turn it on."
    )
    invited_people: bool = Field(True, description="Allow invited people to create an account.")
    submits_per_minute: int = Field(
        60,
        ge=1,
        description="Maximum number of REST requests per user and minute that create an object, such as a job.",
    )
    web_processes: int = Field(
        1, ge=1, le=64, description="Number of web processes. Each web process uses at most one CPU core."
    )
    requests_per_minute: int = Field(
        6000,
        ge=1,
        description=(
            "Maximum number of REST requests per minute for each token or logged-in user. "
            "Requests that create an object have a separate limit."
        ),
    )

    ageing_per_hour: float = Field(
        0.1, ge=0, le=1000, description="Scheduling points that a queued job gains for each hour of waiting."
    )
    share_points: float = Field(
        1.0,
        ge=0,
        le=1000,
        description=(
            "Scheduling points that a job gets if its project recently used no slots. "
            "A job gets half of these points if its project uses its fair share."
        ),
    )
    share_half_life_h: float = Field(
        24.0,
        gt=0,
        le=8760,
        description="Half-life of a project's recorded slot use, in hours. Older use counts less for scheduling.",
    )
    log_format: Literal["text", "json"] = Field(
        "text",
        description=(
            "With `json`, each log line is a JSON object. Each HTTP request gets a log line with its request ID."
        ),
    )
    log_level: LogLevel = Field(
        "info", description="Lowest level of log lines: `debug`, `info`, `warning`, or `error`."
    )
    logins_per_minute: int = Field(
        30, ge=1, description="Maximum number of login attempts per minute from one network address."
    )
    lease_s: int = Field(
        3600,
        ge=10,
        le=MAX_DURATION_S,
        description="Seconds after which ranks of a multi-host job end if their host has no contact with the board.",
    )
    save_s: int = Field(
        300,
        ge=0,
        le=MAX_DURATION_S,
        description=(
            "Seconds that a preempted training job has to save a checkpoint. "
            "On Slurm, this setting is the time from the warning signal to the end of the job."
        ),
    )
    token_days: int = Field(90, ge=1, le=36500, description="Maximum lifetime of a REST token, in days.")
    trusted_proxies: Networks | None = Field(
        None,
        description="Addresses or networks of proxies whose `X-Forwarded-For` header is trusted, separated by commas.",
    )
    board_url: Url | None = Field(
        None, description="Public address of the board. Links in mails and webhooks start with this address."
    )
    email_host: MailServer | None = Field(
        None, description="Host name of the mail server. Without a mail server, the board sends no mail."
    )
    email_port: int = Field(587, ge=1, le=65535, description="Port of the mail server.")
    email_security: Literal["starttls", "tls", "none"] = Field(
        "starttls",
        description="Encryption of the connection to the mail server: `starttls`, `tls` (as on port 465), or `none`.",
    )
    email_user: str | None = Field(
        None, description="User name for the mail server. By default, the board does not log in to the mail server."
    )
    email_password: SecretStr | None = Field(
        None, description="Password of the mail server user `MESHBOARD_EMAIL_USER`."
    )
    email_from: MailAddress = Field("meshboard@localhost", description="Sender address of mails from the board.")
    metrics_token: MetricsToken | None = Field(
        None, description="Bearer token for the address `/metrics`. Without a metrics token, `/metrics` is off."
    )
    otlp_endpoint: Collector | None = Field(
        None,
        description="Address of an OTLP collector for metrics, such as `http://collector:4318`. Default: no export.",
    )
    otlp_headers: Headers | None = Field(
        None, description="HTTP headers for the OTLP collector, as `name=value`, separated by commas."
    )
    otlp_every_s: int = Field(
        30, ge=1, le=3600, description="Seconds between two exports of metrics to the OTLP collector."
    )
    webhook_networks: Networks | None = Field(
        None,
        description="Private networks to which the board can send webhook events. Default: only public IP addresses.",
    )
    webhook_ports: Ports | None = Field(
        None,
        description="Ports to which the board can send webhook events, in addition to 80 and 443. Default: none.",
    )
    slurm_folder: (
        Annotated[str, check_pattern(r"/[^\x00-\x1f\x7f%]*", "expected an absolute path without %")] | None
    ) = Field(
        None,
        description="Folder that all nodes of the Slurm cluster share. If this folder is set, jobs can run on Slurm.",
    )
    slurm_python: Annotated[str, check_pattern(r"/[^\x00-\x1f\x7f]*", "expected an absolute path")] | None = Field(
        None,
        description=(
            "Path of a Python interpreter with Meshboard on each Slurm node. Default: the server's interpreter."
        ),
    )
    slurm_board: Url = Field(
        "https://localhost", description="HTTPS address at which Slurm nodes connect to the board."
    )
    slurm_ca_file: Place | None = Field(
        None,
        description=(
            "File of CA certificates with which Slurm nodes verify the board. Default: CA certificates of the node."
        ),
    )
    slurm_ssh: Annotated[str, check_pattern(SSH_LOGIN, "expected user@host")] | None = Field(
        None, description="Slurm login node with `sbatch`, as `user@host`. Default: the machine that runs the board."
    )
    slurm_ssh_config: Place | None = Field(
        None,
        description=(
            "`ssh` configuration file for the Slurm login node. Default: the server user's `ssh` configuration."
        ),
    )

    history_dir: Folder | None = Field(
        None, description="Folder that stores job histories. Default: `STATE_DIR/history`."
    )
    history_bytes: int = Field(
        20 * 2**30,
        ge=2**20,
        description="Maximum size of all job histories, in bytes. Above this size, Meshboard deletes the oldest "
        "histories.",
    )
    history_attempt_bytes: int = Field(
        2**28,
        ge=2**20,
        description="Maximum size of the time bins in the history of a job attempt, in bytes. "
        "Above this size, Meshboard merges the oldest time bins.",
    )
    history_raw_bytes: int = Field(
        2**28,
        ge=2**20,
        description=(
            "Maximum size of the traced steps in the history of a job attempt, in bytes. "
            "Above this size, Meshboard deletes every second one of the older traced steps."
        ),
    )
    history_days: int = Field(
        90,
        ge=1,
        le=36500,
        description="Number of days for which Meshboard keeps a job history after the attempt ended.",
    )

    @model_validator(mode="after")
    def _check_required_together(self) -> Self:
        lacking = [
            (one, other) for one, others in REQUIRED_TOGETHER.items() for other in others if self._lacks(one, other)
        ]
        if lacking:
            raise ValueError(
                "\n".join(
                    f"{_variable(one)} is set, but {_variable(other)} is not. Set both." for one, other in lacking
                )
            )
        return self

    def _lacks(self, one: str, other: str) -> bool:
        return getattr(self, one) is not None and getattr(self, other) is None

    def get_oidc_apps(self) -> list[dict[str, Any]]:
        """Return the provider for django-allauth, or [] without a provider."""
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

    def get_slurm_settings(self) -> dict[str, str] | None:
        """Return the settings of Slurm, or None without Slurm."""
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

    def get_database(self) -> dict[str, Any]:
        """Return Django's settings of the database."""
        return parse_database(self.database_url or SecretStr(f"sqlite:///{self.state_dir}/db.sqlite3"))


Settings = TypeVar("Settings", bound=BaseSettings)


def read_settings(table: type[Settings]) -> Settings:
    """Return the settings in the environment.

    Raises:
        SettingError: Variables are missing or invalid. The message shows no secret.
    """
    try:
        return table()
    except ValidationError as errors:
        lines = [_describe_error(table, error) for error in errors.errors()]
    raise SettingError("\n".join(lines))


def _describe_error(table: type[BaseSettings], error: Any) -> str:
    message = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:  # several settings, which the message names
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
