"""Django settings of tests and type checks: a temporary database, and no Redis until a test starts one."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from pydantic import SecretStr

_FOLDER = Path(tempfile.mkdtemp(prefix="meshboard-tests-"))
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
# What a killed child cannot remove goes with the tests' own; a job's user passes through, and reads nothing.
_FOLDER.chmod(0o711)
os.environ["TMPDIR"] = str(_FOLDER)
os.environ.setdefault("MESHBOARD_SECRET_KEY", "only-for-tests-and-type-checks-0123456789-0123456789")
os.environ.setdefault("MESHBOARD_REDIS_URL", "redis://127.0.0.1:1/0")
os.environ.setdefault("MESHBOARD_STATE_DIR", str(_FOLDER))
os.environ.setdefault("MESHBOARD_HTTPS", "0")

from webapp.serving.limits import PREPARED_STATEMENTS  # noqa: E402
from webapp.setting_types import parse_database  # noqa: E402
from webapp.settings import *  # noqa: E402, F403
from webapp.settings import DATABASES  # noqa: E402

POSTGRES = "TEST_POSTGRES_URL"  # of a server for the tests' databases: `python -m tests.on_postgres`
if _url := os.environ.get(POSTGRES):
    DATABASES["default"] = {**parse_database(SecretStr(_url)), "OPTIONS": {**PREPARED_STATEMENTS}}
else:
    # A file, not memory: servers and threads of a test must see the same rows.
    DATABASES["default"]["TEST"] = {"NAME": str(_FOLDER / "test.sqlite3")}
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
CHANNEL_LAYERS = {"default": {"BACKEND": "channels.layers.InMemoryChannelLayer"}}
