"""Going to an OpenID Connect provider and back, as a browser does, and one that answers whatever it is told to."""

from __future__ import annotations

import html
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import httpx
import jwt
from django.test import Client

from tests.support.processes import scale_timeout


def logged_in(client: Client) -> bool:
    return client.get("/account/").status_code == 200


def signed_on(client: Client, provider: str, who: str, query: str = "") -> Any:
    """To the provider, which asks who it is, and back."""
    away = client.get(f"/login/oidc/board/login/{query}")
    assert away.headers["Location"].startswith(provider)
    back = httpx.post(away.headers["Location"], data={"sub": who}, follow_redirects=False, timeout=scale_timeout(10))
    address = urlsplit(back.headers["Location"])
    assert address.path == "/login/oidc/board/login/callback/"
    return client.get(f"{address.path}?{address.query}")


def proof(client: Client) -> str:
    """Of the link on one's own page, as it stands in it."""
    found = re.search(r"proof=([^\"]+)\"", client.get("/account/").content.decode())
    assert found is not None
    return html.unescape(found[1])


def connect(client: Client, provider: str, who: str, link: str = "") -> Any:
    return signed_on(client, provider, who, f"?process=connect{link or f'&proof={proof(client)}'}")


class Answers:
    """What a provider says: of itself, with a token, of a person; each a value or a text that is none."""

    def __init__(self, url: str) -> None:
        self.url, self.asked = url, 0
        self.discovery: Any = {
            "issuer": url,
            **{name: f"{url}/{name}" for name in ("authorization_endpoint", "token_endpoint", "userinfo_endpoint")},
            "jwks_uri": f"{url}/keys",
        }
        self.signed: dict[str, Any] = {"sub": "42"}
        self.token: Any = {"access_token": "a", "token_type": "Bearer"}
        self.userinfo: Any = {"sub": "42"}

    def of(self, path: str) -> Any:
        if path.startswith("/.well-known/"):
            self.asked += 1
            return self.discovery
        if path == "/token_endpoint":
            now = int(time.time())
            claims = {"iss": self.url, "aud": "meshboard", "iat": now, "exp": now + 60, **self.signed}
            key = "only-for-this-test-0123456789-0123456789"
            return self.token if isinstance(self.token, str) else {"id_token": jwt.encode(claims, key), **self.token}
        return self.userinfo


@contextmanager
def answering() -> Iterator[Answers]:
    """A provider of one's own."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.tell()

        def do_POST(self) -> None:
            self.tell()

        def tell(self) -> None:
            told = answers.of(urlsplit(self.path).path)
            body = (told if isinstance(told, str) else json.dumps(told)).encode("utf-8", "surrogatepass")
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Nobody reads it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        answers = Answers(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield answers
        server.shutdown()
        thread.join()


def comes_back(client: Client) -> Any:
    """From a provider that asks nobody anything."""
    away = client.get("/login/oidc/board/login/")
    if away.status_code != 302:
        return away
    state = re.search(r"state=([^&]+)", away.headers["Location"])
    assert state is not None
    return client.get(f"/login/oidc/board/login/callback/?code=c&state={quote(unquote(state[1]))}")
