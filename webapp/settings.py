"""Django settings. Everything that differs between machines comes from MESHBOARD_ variables (docs/howto/deploy.md)."""

from __future__ import annotations

from datetime import timedelta
from ipaddress import ip_network

from csp.constants import NONE, SELF
from django.core.exceptions import ImproperlyConfigured

from webapp import places
from webapp.admin.theme import unfold
from webapp.environment import SettingError, WebSettings, read
from webapp.logs import logging_settings
from webapp.safety import unsafe
from webapp.values import names_and_values

try:
    _given = read(WebSettings)
except SettingError as error:
    raise ImproperlyConfigured(str(error)) from None

STATE_DIR = _given.state_dir
DEBUG = _given.debug
HTTPS = _given.https
SECRET_KEY = _given.secret_key.get_secret_value()
SECRET_KEY_FALLBACKS = [key.get_secret_value() for key in _given.secret_key_fallbacks or []]
REDIS_URL = _given.redis_url.get_secret_value()
REDIS_FOR_HOSTS = _given.redis_for_hosts.get_secret_value() if _given.redis_for_hosts else ""
REDIS_ACCESS = _given.redis_access
LEASE_S = float(_given.lease_s)
SAVE_S = float(_given.save_s)
ALLOWED_HOSTS = _given.allowed_hosts
SLURM = _given.slurm()
BOARD_URL = (_given.board_url or "").rstrip("/")
EMAIL_HOST, EMAIL_PORT = _given.email_host or "", _given.email_port
EMAIL_USE_TLS, EMAIL_USE_SSL = _given.email_security == "starttls", _given.email_security == "tls"
EMAIL_HOST_USER = _given.email_user or ""
EMAIL_HOST_PASSWORD = _given.email_password.get_secret_value() if _given.email_password else ""
DEFAULT_FROM_EMAIL = SERVER_EMAIL = _given.email_from
METRICS_TOKEN = _given.metrics_token.get_secret_value() if _given.metrics_token else ""
OTLP_ENDPOINT, OTLP_EVERY_S = (_given.otlp_endpoint or "").rstrip("/"), _given.otlp_every_s
OTLP_HEADERS = names_and_values(_given.otlp_headers.get_secret_value()) if _given.otlp_headers else {}
WEBHOOK_NETWORKS = [ip_network(network) for network in _given.webhook_networks or []]
HISTORY_DIR = _given.history_dir or STATE_DIR / "history"
HISTORY_BYTES = _given.history_bytes
HISTORY_ATTEMPT_BYTES = _given.history_attempt_bytes
HISTORY_RAW_BYTES = _given.history_raw_bytes
HISTORY_DAYS = _given.history_days
if refused := unsafe(secret_key=SECRET_KEY, allowed_hosts=ALLOWED_HOSTS, debug=DEBUG, redis_url=REDIS_URL):
    raise ImproperlyConfigured("\n".join(refused))
DATABASES = {"default": _given.database()}

INSTALLED_APPS = [
    "unfold",
    "unfold.contrib.filters",
    "allauth",
    "allauth.account",
    "allauth.mfa",
    "allauth.socialaccount",
    "allauth.socialaccount.providers.openid_connect",
    "allauth.usersessions",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "channels",
    "axes",
    "csp",
    "django_filters",
    "drf_spectacular",
    "knox",
    "rest_framework",
    "jobs",
]

MIDDLEWARE = [
    "webapp.health.HealthMiddleware",
    "webapp.serving.pool.hand_back",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "jobs.people.private_answers.private_answers",
    "webapp.upright.upright_pages",
    "csp.middleware.CSPMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    # Pages; REST's views are exempt, and ask for a login themselves.
    "django.contrib.auth.middleware.LoginRequiredMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "jobs.core.audit.AddressMiddleware",
    "allauth.account.middleware.AccountMiddleware",
    "axes.middleware.AxesMiddleware",
    "webapp.admin.unreadable.UnreadableMiddleware",
]

ROOT_URLCONF = "webapp.urls"
ASGI_APPLICATION = "webapp.asgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [places.templates()],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    }
]

AUTHENTICATION_BACKENDS = [
    "axes.backends.AxesStandaloneBackend",
    "django.contrib.auth.backends.ModelBackend",
    "sesame.backends.ModelBackend",
]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator"},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
ACCOUNT_EMAIL_VERIFICATION = "none"
ACCOUNT_REAUTHENTICATION_REQUIRED = True  # a sign-on is connected and removed by who knows the password
ACCOUNT_SIGNUP_FIELDS = ["username*", "password1*"]
ACCOUNT_DEFAULT_HTTP_PROTOCOL = "https" if HTTPS else "http"
MFA_ADAPTER = "jobs.people.signing_on.SecondFactors"
MFA_SUPPORTED_TYPES = ["totp", "recovery_codes"]
MFA_ALLOW_UNVERIFIED_EMAIL = True  # this board verifies none
MFA_TOTP_ISSUER = "Meshboard"
SOCIALACCOUNT_ADAPTER = "jobs.people.signing_on.SignOn"
SOCIALACCOUNT_LOGIN_ON_GET = True  # a form that leads elsewhere is what the content security policy forbids
SOCIALACCOUNT_PROVIDERS = {"openid_connect": {"APPS": _given.oidc(), "OAUTH_PKCE_ENABLED": True}}
OIDC_NAME = _given.oidc_name if _given.oidc_url else ""
OIDC_NEW_PEOPLE = _given.oidc_new_people
INVITED_PEOPLE = _given.invited_people
CSRF_FAILURE_VIEW = "webapp.errors.forged"
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "job-list"
LOGOUT_REDIRECT_URL = "login"
SESAME_MAX_AGE = 15 * 60
SESAME_ONE_TIME = True
AXES_FAILURE_LIMIT = 10
AXES_COOLOFF_TIME = 0.25  # hours
AXES_LOCKOUT_PARAMETERS = [["username", "ip_address"]]
AXES_RESET_ON_SUCCESS = True
AXES_RESET_COOL_OFF_ON_FAILURE_DURING_LOCKOUT = False  # whoever knocks on must not keep the owner out
AXES_LOCKOUT_CALLABLE = "webapp.login.locked_out"
# The address of the connection, which `webapp.serve` takes from a proxy's header only if the proxy is a trusted one.
AXES_CLIENT_IP_CALLABLE = "jobs.api.http.origin.origin"
AGEING_PER_HOUR = _given.ageing_per_hour
SHARE_POINTS = _given.share_points
SHARE_HALF_LIFE_H = _given.share_half_life_h
LOGINS_PER_MINUTE = _given.logins_per_minute
SUBMITS_PER_MINUTE = _given.submits_per_minute
WEB_PROCESSES = _given.web_processes
REQUESTS_PER_MINUTE = _given.requests_per_minute
TRUSTED_PROXIES = _given.trusted_proxies or []

CACHES = {
    "default": {
        "BACKEND": "webapp.cached.JsonCache",
        "LOCATION": REDIS_URL,
        # Whoever submits waits for this; without the count the job is queued all the same.
        "OPTIONS": {"socket_timeout": 1, "socket_connect_timeout": 1},
    }
}
CHANNEL_LAYERS = {
    "default": {
        "BACKEND": "jobs.runs.live.layer.Layer",
        # The 5 s default socket timeout of redis-py would end every idle websocket.
        "CONFIG": {
            "hosts": [
                {
                    "address": REDIS_URL,
                    "socket_timeout": 30,
                    "socket_connect_timeout": 2,
                    "max_connections": 1000,
                    # Each socket has a connection, and each would read redis-py's version from its files.
                    "lib_name": None,
                    "lib_version": None,
                }
            ]
        },
    }
}

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "jobs.api.http.authentication.AsciiTokenAuthentication",
        "rest_framework.authentication.SessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAuthenticated"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["jobs.api.http.parsers.StrictJSONParser"],
    "URL_FORMAT_OVERRIDE": None,
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "DEFAULT_PAGINATION_CLASS": "rest_framework.pagination.PageNumberPagination",
    "PAGE_SIZE": 50,
    "DEFAULT_THROTTLE_CLASSES": ["jobs.api.http.throttling.RequestThrottle"],
    "EXCEPTION_HANDLER": "jobs.api.http.errors.handle",
}
TOKEN_DAYS = _given.token_days
KNOX_TOKEN_MODEL = "knox.AuthToken"  # noqa: S105 - a model; its own default, which migrations ask for by name
REST_KNOX = {"TOKEN_TTL": timedelta(days=_given.token_days), "AUTH_HEADER_PREFIX": "Token"}
SPECTACULAR_SETTINGS = {
    "TITLE": "Meshboard",
    "DESCRIPTION": "Submit parallel training runs, and read what every rank sends.",
    "VERSION": "1",
    "OAS_VERSION": "3.1.0",
    "SERVE_PERMISSIONS": ["rest_framework.permissions.IsAuthenticated"],
    "POSTPROCESSING_HOOKS": ["jobs.api.document.schema.with_models", "jobs.api.document.links.with_links"],
}
DATA_UPLOAD_MAX_MEMORY_SIZE = 2**20

LANGUAGE_CODE = "en-gb"
TIME_ZONE = "UTC"
USE_TZ = True
FORMAT_MODULE_PATH = ["webapp.formats"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

STATIC_URL = "static/"
STATIC_ROOT = _given.static_root or STATE_DIR / "static"
STATICFILES_DIRS = [places.PACKAGE / "static"]
DOCS_ROOT = places.documentation()
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "whitenoise.storage.CompressedStaticFilesStorage"},
}

CONTENT_SECURITY_POLICY = {
    "EXCLUDE_URL_PREFIXES": ["/admin/"],  # unfold's Alpine evaluates expressions; staff only
    "DIRECTIVES": {
        "default-src": [NONE],
        "script-src": [SELF],
        "style-src": [SELF],
        "img-src": [SELF, "data:"],
        "font-src": [SELF],
        "connect-src": [SELF],
        "form-action": [SELF],
        "base-uri": [NONE],
        "frame-ancestors": [NONE],
    },
}
SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = HTTPS
SECURE_SSL_REDIRECT = False  # the proxy in front terminates TLS and redirects
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if HTTPS else None
SECURE_HSTS_SECONDS = 31_536_000 if HTTPS else 0
SECURE_HSTS_INCLUDE_SUBDOMAINS = SECURE_HSTS_PRELOAD = HTTPS
SILENCED_SYSTEM_CHECKS = ["security.W008"]

UNFOLD = unfold()

LOGGING = logging_settings(_given.log_format)
