"""Take pictures of pages with a thousand of everything, and of empty pages, into var/sizes, and check them.

    python -m tests.screens.sizes [--only WORD] [--windows WORD]

The board has no controller and no hosts. Its data is synthetic.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.screens.__main__ import look_at, report
from tests.screens.pages import Shown, World
from tests.support.processes import ROOT, run_redis
from tests.support.web import Site, run_site

ROOM = Path("var/sizes")
LOGIN = ("staff", "staff-password")
ALWAYS = {
    "list": "/",
    "overview": "/overview/",
    "hosts": "/hosts/",
    "queue": "/queue/",
    "audit": "/queue/audit/",
    "compare": "/compare/",
    "imports": "/import/",
    "projects": "/projects/",
    "notifications": "/notifications/",
    "account": "/account/",
    "new-job": "/jobs/new/",
    "collectives": "/collectives/",
    "collective": "/collectives/all-reduce/",
}


def main() -> int:
    requests = argparse.ArgumentParser(prog="python -m tests.screens.sizes", description=__doc__.partition("\n")[0])
    requests.add_argument("--only", default="", help="pages with this in their name")
    requests.add_argument("--windows", default="", help="sizes and themes with this in their name")
    shown = requests.parse_args()
    ROOM.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="meshboard-sizes-") as name, run_redis(Path(name) / "redis") as redis:
        folder = Path(name)
        argument = {"MESHBOARD_STATIC_ROOT": str(folder / "static")}
        collect = [sys.executable, "manage.py", "collectstatic", "--no-input", "--verbosity", "0"]
        environment = {**os.environ, **argument, "DJANGO_SETTINGS_MODULE": "tests.settings"}
        subprocess.run(collect, cwd=ROOT, env=environment, check=True)
        with run_site(f"sqlite:///{folder}/none.sqlite3", redis, folder / "none", **argument) as board:
            none = [Shown(f"none-{name}", path) for name, path in ALWAYS.items()]
            seen = look_at(board.url, LOGIN, [one for one in none if shown.only in one.name], shown.windows, ROOM)
        with run_site(f"sqlite:///{folder}/many.sqlite3", redis, folder / "many", **argument) as board:
            world = filled(board)
            many = [one for one in pages(world) if shown.only in one.name]
            seen |= look_at(board.url, LOGIN, many, shown.windows, ROOM)
    return report(seen, ROOM)


def filled(board: Site) -> World:
    """Connect Django to the filled board for this process."""
    os.environ.update({k: v for k, v in board.environment.items() if k.startswith(("DJANGO_", "MESHBOARD_"))})
    import django

    django.setup()
    from django.conf import settings

    from tests.screens.crowd import fill

    return fill(board.redis.client(), settings.HISTORY_DIR)


def pages(world: World) -> list[Shown]:
    jobs, both = world.jobs, f"{world.jobs['trained']},{world.jobs['running']}"
    found = {
        **ALWAYS,
        "list-last": "/?page=999",
        "queue-last": "/queue/?page=999",
        "project": f"/projects/{world.project}/",
        "webhooks": f"/projects/{world.project}/webhooks/",
        "host": f"/hosts/{world.host}/",
        "job-running": f"/jobs/{jobs['running']}/",
        "job-ended": f"/jobs/{jobs['trained']}/",
        "job-earlier": f"/jobs/{jobs['earlier']}/",
        "timeline": f"/jobs/{jobs['trained']}/timeline/",
        "compare": f"/compare/?jobs={both}",
    }
    return [Shown(f"many-{name}", path) for name, path in found.items()]


if __name__ == "__main__":
    sys.exit(main())
