"""Limits of a web process. docs/reference/service-limits.md describes the behavior at each limit."""

from __future__ import annotations

MAX_CONNECTIONS = 2000  # open, with sockets. Further connections get 503
MAX_REQUEST_THREADS = 64  # per process. Further requests wait, except waiting requests and sockets
MAX_DATABASE_CONNECTIONS = 24  # to PostgreSQL, for all processes. PostgreSQL allows 100 by default
MIN_PROCESS_CONNECTIONS = 4  # per process
DATABASE_TIMEOUT_S = 5.0  # to get a connection
MAX_HEAD_BYTES = 64 * 2**10  # request line and headers
HEAD_TIMEOUT_S = 10.0  # from the first byte due to the last header
MAX_BODY_BYTES = 2**20
BODY_TIMEOUT_S = 30.0  # from the headers to the last byte of the body
MAX_LINGER_BYTES = 16 * 2**20  # discarded after a rejection, so that the client reads the response
LINGER_TIMEOUT_S = 2.0
SEND_TIMEOUT_S = 60.0  # for a client to read the next part of a response
KEEP_ALIVE_TIMEOUT_S = 75  # longer than in nginx (60 s), so that no request meets a closed connection
PROCESS_TIMEOUT_S = 30  # until another process replaces a silent process
MAX_SOCKET_FRAME_BYTES = 1024  # browsers send none
MAX_SOCKET_BYTES_PER_S = 4096  # of all frames, with pings. More closes the connection
