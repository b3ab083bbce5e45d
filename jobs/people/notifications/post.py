"""Sends one webhook message: to an address that was checked, within a time in all, and reads no more than the head."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx

from jobs.people.notifications.addresses import Address, Network, RefusedAddressError, is_inside, name_of, resolve
from jobs.people.notifications.signing import signature

PATIENCE_S = 10.0  # from looking up the name to the head of the answer
MOST_ADDRESSES = 3  # of a name, tried one after another where nobody listens
LONGEST_WORDS = 300


@dataclass(frozen=True)
class Letter:
    """A message as it leaves."""

    key: str
    event: str
    body: bytes


@dataclass(frozen=True)
class Sent:
    """How it went. `status`: HTTP's, None where no answer came."""

    delivered: bool
    seconds: float
    status: int | None
    words: str


async def post(
    letter: Letter,
    url: str,
    secrets: list[str],
    *,
    allowed: list[Network],
    trust: ssl.SSLContext,
    resolvers: ThreadPoolExecutor,
) -> Sent:
    """Never raises: whatever happens on the way is how it went."""
    began = time.monotonic()
    status = None
    try:
        async with asyncio.timeout(PATIENCE_S):
            status = await _answer(letter, httpx.URL(url), secrets, allowed, trust, resolvers)
        words = f"answered {status}"
        if 300 <= status < 400:
            words += ", redirects are not followed"
    except TimeoutError:
        words = f"the receiver did not answer within {PATIENCE_S:g} s"
    except RefusedAddressError as error:
        words = str(error)
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
    delivered = status is not None and 200 <= status < 300
    return Sent(delivered, round(time.monotonic() - began, 3), status, words[:LONGEST_WORDS])


async def _answer(
    letter: Letter,
    url: httpx.URL,
    secrets: list[str],
    allowed: list[Network],
    trust: ssl.SSLContext,
    resolvers: ThreadPoolExecutor,
) -> int:
    """The status of what was answered."""
    port = url.port or (443 if url.scheme == "https" else 80)
    found = await asyncio.get_running_loop().run_in_executor(resolvers, resolve, name_of(url), port, allowed)
    if url.scheme != "https" and not all(is_inside(address, allowed) for address in found):
        raise RefusedAddressError("unencrypted http:// is allowed only for addresses in MESHBOARD_WEBHOOK_NETWORKS")
    seconds = int(time.time())
    headers = {
        "Host": url.netloc.decode("ascii"),
        "Content-Type": "application/json",
        "User-Agent": "Meshboard",
        "Meshboard-Delivery": letter.key,
        "Meshboard-Event": letter.event,
        "Meshboard-Signature": signature(secrets, seconds, letter.body),
    }
    # No proxy of the environment's: it would resolve the name once more.
    async with httpx.AsyncClient(verify=trust, trust_env=False, timeout=PATIENCE_S, follow_redirects=False) as client:
        *others, last = found[:MOST_ADDRESSES]
        for address in others:
            with contextlib.suppress(httpx.ConnectError):
                return await _head(client, url, address, headers, letter.body)
        return await _head(client, url, last, headers, letter.body)


async def _head(
    client: httpx.AsyncClient, url: httpx.URL, address: Address, headers: dict[str, str], body: bytes
) -> int:
    """To this address; the certificate, and the Host, are those of the name."""
    pinned = url.copy_with(host=str(address))
    extensions = {"sni_hostname": name_of(url)}
    async with client.stream("POST", pinned, headers=headers, content=body, extensions=extensions) as answer:
        return answer.status_code
