"""What one connection may cost a web process. docs/reference/service-limits.md says what happens at each bound."""

from __future__ import annotations

MOST_CONNECTIONS = 2000  # open at once, sockets included; more are answered 503
REQUESTS_AT_ONCE = 64  # answered by a process, a thread each; more wait for their turn, held ones and sockets do not
DATABASE_CONNECTIONS = 24  # to PostgreSQL, which takes 100 by default; shared by all requests and processes
FEWEST_CONNECTIONS = 4  # of a process, however many there are
DATABASE_WAIT_S = 5.0  # for one of them to be free
HEAD_BYTES = 64 * 2**10  # request line and headers
HEAD_S = 10.0  # from the first byte due to the last header
BODY_BYTES = 2**20
BODY_S = 30.0  # from the headers to the last byte of the body
LINGER_BYTES = 16 * 2**20  # read and thrown away behind a refusal, so that its sender gets to see it
LINGER_S = 2.0
SEND_S = 60.0  # for a peer to take the next part of an answer
KEEP_ALIVE_S = 75  # longer than nginx keeps one (60 s): who closes first must not be whom a request is on its way to
SILENT_PROCESS_S = 30  # until one of several processes is held for dead, and another takes its place
SOCKET_FRAME_BYTES = 1024  # from a browser, which sends none
SOCKET_BYTES_S = 4096  # of all frames in a second, pings included; who sends more is cut off
