"""Browser steps of a login with OpenID Connect, and a provider with configurable responses."""

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
from cryptography.hazmat.primitives.asymmetric import rsa
from django.test import Client
from jwt.algorithms import RSAAlgorithm

from tests.support.processes import scale_timeout

SIGNING_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)


def is_logged_in(client: Client) -> bool:
    return client.get("/account/").status_code == 200


def sign_on(client: Client, provider: str, who: str, query: str = "") -> Any:
    """Log in at a provider that asks for the user name, and return to the board."""
    away = client.get(f"/login/oidc/board/login/{query}")
    assert away.headers["Location"].startswith(provider)
    back = httpx.post(away.headers["Location"], data={"sub": who}, follow_redirects=False, timeout=scale_timeout(10))
    address = urlsplit(back.headers["Location"])
    assert address.path == "/login/oidc/board/login/callback/"
    return client.get(f"{address.path}?{address.query}")


def get_connect_proof(client: Client) -> str:
    """Return the proof in the link of the account page that connects a sign-on."""
    found = re.search(r"proof=([^\"]+)\"", client.get("/account/").content.decode())
    assert found is not None
    return html.unescape(found[1])


def connect_sign_on(client: Client, provider: str, who: str, link: str = "") -> Any:
    return sign_on(client, provider, who, f"?process=connect{link or f'&proof={get_connect_proof(client)}'}")


class FakeProvider:
    """OpenID Connect provider whose responses are values that are sent as JSON, or text that is sent unchanged."""

    def __init__(self, url: str) -> None:
        self.url, self.discovery_requests = url, 0
        self.discovery: Any = {
            "issuer": url,
            **{name: f"{url}/{name}" for name in ("authorization_endpoint", "token_endpoint", "userinfo_endpoint")},
            "jwks_uri": f"{url}/keys",
        }
        self.id_claims: dict[str, Any] = {"sub": "42"}
        self.token: Any = {"access_token": "a", "token_type": "Bearer"}
        self.userinfo: Any = {"sub": "42"}
        self.signing_key: Any = SIGNING_KEY
        self.algorithm, self.key_id = "RS256", "key-1"

    def get_response(self, path: str) -> Any:
        if path.startswith("/.well-known/"):
            self.discovery_requests += 1
            return self.discovery
        if path == "/token_endpoint":
            now = int(time.time())
            claims = {"iss": self.url, "aud": "meshboard", "iat": now, "exp": now + 60, **self.id_claims}
            id_token = jwt.encode(claims, self.signing_key, self.algorithm, {"kid": self.key_id})
            return self.token if isinstance(self.token, str) else {"id_token": id_token, **self.token}
        if path == "/keys":
            return {"keys": [{**RSAAlgorithm.to_jwk(SIGNING_KEY.public_key(), as_dict=True), "kid": "key-1"}]}
        return self.userinfo


@contextmanager
def run_fake_provider() -> Iterator[FakeProvider]:
    """Run a provider with configurable responses in a thread."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_json()

        def do_POST(self) -> None:
            self.send_json()

        def send_json(self) -> None:
            response = answers.get_response(urlsplit(self.path).path)
            body = (response if isinstance(response, str) else json.dumps(response)).encode("utf-8", "surrogatepass")
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Write no log."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        answers = FakeProvider(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield answers
        server.shutdown()
        thread.join()


def log_in_with_provider(client: Client) -> Any:
    """Log in with a provider that asks for nothing."""
    away = client.get("/login/oidc/board/login/")
    if away.status_code != 302:
        return away
    state = re.search(r"state=([^&]+)", away.headers["Location"])
    assert state is not None
    return client.get(f"/login/oidc/board/login/callback/?code=c&state={quote(unquote(state[1]))}")
