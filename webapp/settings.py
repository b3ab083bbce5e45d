"""Django settings. Values of a machine come from MESHBOARD_ variables (docs/howto/deploy.md)."""

from __future__ import annotations

from datetime import timedelta
from ipaddress import ip_network

from csp.constants import NONE, SELF, UNSAFE_EVAL, UNSAFE_INLINE
from django.core.exceptions import ImproperlyConfigured

from webapp import installation
from webapp.admin_theme import build_unfold_settings
from webapp.checks import find_unsafe_settings
from webapp.environment import SettingError, WebSettings, read_settings
from webapp.logs import build_logging_settings
from webapp.setting_types import parse_pairs

try:
    _environment = read_settings(WebSettings)
except SettingError as error:
    raise ImproperlyConfigured(str(error)) from None

STATE_DIR = _environment.state_dir
DEBUG = _environment.debug
HTTPS = _environment.https
SECRET_KEY = _environment.secret_key.get_secret_value()
SECRET_KEY_FALLBACKS = [key.get_secret_value() for key in _environment.secret_key_fallbacks or []]
REDIS_URL = _environment.redis_url.get_secret_value()
REDIS_FOR_HOSTS = _environment.redis_for_hosts.get_secret_value() if _environment.redis_for_hosts else ""
REDIS_ACCESS = _environment.redis_access
LEASE_S = float(_environment.lease_s)
SAVE_S = float(_environment.save_s)
ALLOWED_HOSTS = _environment.allowed_hosts
SLURM = _environment.get_slurm_settings()
BOARD_URL = (_environment.board_url or "").rstrip("/")
EMAIL_HOST, EMAIL_PORT = _environment.email_host or "", _environment.email_port
EMAIL_USE_TLS, EMAIL_USE_SSL = _environment.email_security == "starttls", _environment.email_security == "tls"
EMAIL_HOST_USER = _environment.email_user or ""
EMAIL_HOST_PASSWORD = _environment.email_password.get_secret_value() if _environment.email_password else ""
DEFAULT_FROM_EMAIL = SERVER_EMAIL = _environment.email_from
METRICS_TOKEN = _environment.metrics_token.get_secret_value() if _environment.metrics_token else ""
OTLP_ENDPOINT, OTLP_EVERY_S = (_environment.otlp_endpoint or "").rstrip("/"), _environment.otlp_every_s
OTLP_HEADERS = parse_pairs(_environment.otlp_headers.get_secret_value()) if _environment.otlp_headers else {}
WEBHOOK_PORTS = _environment.webhook_ports or []
WEBHOOK_NETWORKS = [ip_network(network) for network in _environment.webhook_networks or []]
HISTORY_DIR = _environment.history_dir or STATE_DIR / "history"
HISTORY_BYTES = _environment.history_bytes
HISTORY_ATTEMPT_BYTES = _environment.history_attempt_bytes
HISTORY_RAW_BYTES = _environment.history_raw_bytes
HISTORY_DAYS = _environment.history_days
if problems := find_unsafe_settings(
    secret_key=SECRET_KEY, allowed_hosts=ALLOWED_HOSTS, debug=DEBUG, redis_url=REDIS_URL
):
    raise ImproperlyConfigured("\n".join(problems))
DATABASES = {"default": _environment.get_database()}

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
    "webapp.middleware.HealthMiddleware",
    "webapp.serving.limits.release_connection",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "webapp.middleware.private_response_middleware",
    "webapp.middleware.escape_bidi_controls",
    "csp.middleware.CSPMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "webapp.login.session_middleware",
    # For pages. Views of the REST API check the login themselves.
    "django.contrib.auth.middleware.LoginRequiredMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "jobs.core.audit.AuditRequestMiddleware",
    "allauth.account.middleware.AccountMiddleware",
    "axes.middleware.AxesMiddleware",
    "webapp.middleware.AdminMiddleware",
]

ROOT_URLCONF = "webapp.urls"
ASGI_APPLICATION = "webapp.asgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [installation.get_templates_dir()],
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
ACCOUNT_REAUTHENTICATION_REQUIRED = True  # to connect or remove a sign-on
ACCOUNT_SIGNUP_FIELDS = ["username*", "password1*"]
ACCOUNT_DEFAULT_HTTP_PROTOCOL = "https" if HTTPS else "http"
MFA_ADAPTER = "jobs.people.sign_on.SecondFactorAdapter"
MFA_SUPPORTED_TYPES = ["totp", "recovery_codes"]
MFA_ALLOW_UNVERIFIED_EMAIL = True  # the board verifies no address
MFA_TOTP_ISSUER = "Meshboard"
SOCIALACCOUNT_ADAPTER = "jobs.people.sign_on.SignOnAdapter"
SOCIALACCOUNT_LOGIN_ON_GET = True  # the content security policy forbids a form to another site
SOCIALACCOUNT_PROVIDERS = {"openid_connect": {"APPS": _environment.get_oidc_apps(), "OAUTH_PKCE_ENABLED": True}}
OIDC_NAME = _environment.oidc_name if _environment.oidc_url else ""
OIDC_NEW_PEOPLE = _environment.oidc_new_people
INVITED_PEOPLE = _environment.invited_people
CSRF_FAILURE_VIEW = "webapp.views.csrf_failure"
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "job-list"
LOGOUT_REDIRECT_URL = "login"
SESAME_MAX_AGE = 15 * 60
SESAME_ONE_TIME = True
AXES_FAILURE_LIMIT = 10
AXES_COOLOFF_TIME = 0.25  # hours
AXES_LOCKOUT_PARAMETERS = [["username", "ip_address"]]
AXES_RESET_ON_SUCCESS = True
AXES_RESET_COOL_OFF_ON_FAILURE_DURING_LOCKOUT = False  # else an attacker could lock out the owner
AXES_LOCKOUT_CALLABLE = "webapp.login.login_locked"
# The address of the connection, which `webapp.serve` takes from a proxy's header only if the proxy is a trusted one.
AXES_CLIENT_IP_CALLABLE = "jobs.api.access.get_client_network"
AGEING_PER_HOUR = _environment.ageing_per_hour
SHARE_POINTS = _environment.share_points
SHARE_HALF_LIFE_H = _environment.share_half_life_h
LOGINS_PER_MINUTE = _environment.logins_per_minute
SUBMITS_PER_MINUTE = _environment.submits_per_minute
WEB_PROCESSES = _environment.web_processes
REQUESTS_PER_MINUTE = _environment.requests_per_minute
TRUSTED_PROXIES = _environment.trusted_proxies or []

CACHES = {
    "default": {
        "BACKEND": "webapp.json_cache.JsonCache",
        "LOCATION": REDIS_URL,
        # A submit waits for the cache, but does not need it.
        "OPTIONS": {"socket_timeout": 1, "socket_connect_timeout": 1},
    }
}
CHANNEL_LAYERS = {
    "default": {
        "BACKEND": "jobs.runs.live.consumers.CancellableChannelLayer",
        # The 5 s default socket timeout of redis-py would end every idle websocket.
        "CONFIG": {
            "hosts": [
                {
                    "address": REDIS_URL,
                    "socket_timeout": 30,
                    "socket_connect_timeout": 2,
                    "max_connections": 1000,
                    # Else each connection reads the version of redis-py from files.
                    "lib_name": None,
                    "lib_version": None,
                }
            ]
        },
    }
}

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "jobs.api.access.AsciiTokenAuthentication",
        "rest_framework.authentication.SessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAuthenticated"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["jobs.api.parsers.StrictJSONParser"],
    "URL_FORMAT_OVERRIDE": None,
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "DEFAULT_PAGINATION_CLASS": "rest_framework.pagination.PageNumberPagination",
    "PAGE_SIZE": 50,
    "DEFAULT_THROTTLE_CLASSES": ["jobs.api.access.RequestThrottle"],
    "EXCEPTION_HANDLER": "jobs.api.errors.handle_exception",
}
TOKEN_DAYS = _environment.token_days
KNOX_TOKEN_MODEL = "knox.AuthToken"  # noqa: S105  # a model. Migrations need the default
REST_KNOX = {"TOKEN_TTL": timedelta(days=_environment.token_days), "AUTH_HEADER_PREFIX": "Token"}
SPECTACULAR_SETTINGS = {
    "TITLE": "Meshboard",
    "DESCRIPTION": "Submit parallel training runs, and read what every rank sends.",
    "VERSION": "1",
    "OAS_VERSION": "3.1.0",
    "SERVE_PERMISSIONS": ["rest_framework.permissions.IsAuthenticated"],
    "ENABLE_DJANGO_DEPLOY_CHECK": False,  # it generates the document, which takes a fifth of the start of a web process
    "POSTPROCESSING_HOOKS": ["jobs.api.openapi.add_models", "jobs.api.openapi.add_links"],
}
DATA_UPLOAD_MAX_MEMORY_SIZE = 2**20

LANGUAGE_CODE = "en-gb"
TIME_ZONE = "UTC"
USE_TZ = True
FORMAT_MODULE_PATH = ["webapp.formats"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

STATIC_URL = "static/"
STATIC_ROOT = _environment.static_root or STATE_DIR / "static"
STATICFILES_DIRS = [installation.PACKAGE / "static"]
DOCS_ROOT = installation.get_documentation_dir()
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "whitenoise.storage.CompressedStaticFilesStorage"},
}

CONTENT_SECURITY_POLICY = {
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
# Alpine in the admin pages of unfold evaluates expressions and sets styles.
ADMIN_CONTENT_SECURITY_POLICY = {"script-src": [SELF, UNSAFE_EVAL], "style-src": [SELF, UNSAFE_INLINE]}
SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = HTTPS
# Browsers accept these names only from the host itself, over HTTPS.
SESSION_COOKIE_NAME, CSRF_COOKIE_NAME = (f"{'__Host-' if HTTPS else ''}{name}" for name in ("sessionid", "csrftoken"))
SESSION_COOKIE_AGE = _environment.session_hours * 3600
SESSION_IDLE_S = _environment.session_idle_hours * 3600
STAFF_SECOND_FACTOR = _environment.staff_second_factor
SECURE_SSL_REDIRECT = False  # the proxy in front terminates TLS and redirects
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if HTTPS else None
SECURE_HSTS_SECONDS = 31_536_000 if HTTPS else 0
SECURE_HSTS_INCLUDE_SUBDOMAINS = SECURE_HSTS_PRELOAD = HTTPS
SILENCED_SYSTEM_CHECKS = ["security.W008"]

UNFOLD = build_unfold_settings()

LOGGING = build_logging_settings(_environment.log_format, _environment.log_level)
