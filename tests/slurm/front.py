"""Serve a board over HTTPS on the network of the cluster, with simulated outages."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

from webapp.runner import find_free_port

CHUNK = 64 * 2**10


class Front:
    """Forward bytes to the board's loopback port."""

    def __init__(self, folder: Path, address: str, target: int) -> None:
        self.certificate, self._key = folder / "front.pem", folder / "front.key"
        self.port = find_free_port()
        self.url = f"https://{address}:{self.port}"
        self._address, self._target = address, target
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        _certificate(self.certificate, self._key, address)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.start()

    def start(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self._key)
        serving = asyncio.start_server(self._serve, self._address, self.port, ssl=context)
        self._server = self._run(serving)

    def stop(self) -> None:
        """Stop answering, and close every connection."""
        self._run(self._stop())

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._open):
            writer.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._target)
            both = (_pass_on(reader, inner_writer), _pass_on(inner_reader, writer))
            self._open |= {writer, inner_writer}
            await asyncio.gather(*both)
            self._open -= {writer, inner_writer}


async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, ssl.SSLError):
        while data := await source.read(CHUNK):
            target.write(data)
            await target.drain()
    target.close()


def _certificate(certificate: Path, key: Path, address: str) -> None:
    subject = ["-subj", "/CN=board", "-addext", f"subjectAltName=IP:{address}"]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    argv = ["openssl", "req", "-x509", *kind, "-keyout", str(key), "-out", str(certificate), *subject]
    subprocess.run(argv, check=True, capture_output=True)


@contextlib.contextmanager
def front(folder: Path, address: str, target: int) -> Iterator[Front]:
    made = Front(folder, address, target)
    try:
        yield made
    finally:
        made.close()
