"""`python -m workers.host.supervisor RUN_DIR JOB ATTEMPT`: supervise one attempt on this host, without torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sys
import time
from pathlib import Path

from contracts.control import AttemptReport, LaunchOrder, get_node_index
from contracts.traces import log_launch_order
from workers.disk import format_start_failure, write_json
from workers.host.attempts import (
    SOCKET_FOLDER_PREFIX,
    AttemptDir,
    build_host_exit_report,
    get_attempt_dir,
    get_socket_root,
)
from workers.host.processes import get_process_id, get_start_id
from workers.host.settings import (
    TEXT_LOG_FORMAT,
    HostSettings,
    get_log_format,
    get_log_level,
    read_host_settings,
    set_up_json_logs,
)
from workers.host.supervisor.publisher import TransportError
from workers.host.supervisor.redis_transport import RedisTransport
from workers.host.supervisor.supervisor import FAREWELL_TIMEOUT_S, Supervisor
from workers.host.supervisor.telemetry_session import POLL_INTERVAL_S

log = logging.getLogger(__name__)


def main() -> int:
    attempt = get_attempt_dir(Path(sys.argv[1]).resolve(), sys.argv[2], int(sys.argv[3]))
    identity = get_process_id(os.getpid())
    assert identity is not None
    try:
        # Stored before the folder exists. After a crash, the host worker can then remove it.
        folder = get_socket_root() / f"{SOCKET_FOLDER_PREFIX}{secrets.token_hex(6)}"
        write_json(attempt.pid_file, {**identity._asdict(), "folder": str(folder), "start": get_start_id()})
    except OSError as error:
        asyncio.run(_report_not_started(attempt, read_host_settings(), error))
        return 1
    if attempt.exit_file.exists():  # too late: the host worker has reported this attempt as lost
        return 1
    order = attempt.read_order()
    _set_up_logs(order)
    log_launch_order(log, "supervised", order)
    asyncio.run(_supervise(attempt, read_host_settings(), folder))
    return 0


def _set_up_logs(order: LaunchOrder) -> None:
    """Write the log of this supervisor in the format of the host worker. In JSON, each line has the trace ID."""
    if get_log_format() == "json":
        fields = {"job": order["job"], "attempt": order["attempt"], "trace_id": order.get("trace", "")}
        set_up_json_logs(fields=fields)
    else:
        logging.basicConfig(level=get_log_level(), format=TEXT_LOG_FORMAT)


async def _supervise(attempt: AttemptDir, settings: HostSettings, folder: Path) -> None:
    transport = RedisTransport(attempt, settings, get_node_index(attempt.read_order()))
    await Supervisor(attempt, settings, folder, transport).run()


async def _report_not_started(attempt: AttemptDir, settings: HostSettings, error: OSError) -> None:
    """Report the error from memory. The host worker would only find that there is no supervisor."""
    order = attempt.read_order()
    exit_report = build_host_exit_report(
        attempt, "failed", format_start_failure(settings.name, error, attempt.host_dir), host_fault="launch"
    )
    report = AttemptReport(
        job=attempt.job, attempt=attempt.attempt, state="exited", slots=order["slots"], exit=exit_report
    )
    transport = RedisTransport(attempt, settings, get_node_index(order))
    deadline = time.monotonic() + FAREWELL_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(TransportError):
            await transport.send_report(report)
            break
        await asyncio.sleep(POLL_INTERVAL_S)
    await transport.close()


if __name__ == "__main__":
    sys.exit(main())
