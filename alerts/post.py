"""One HTTP POST to an address a config named, without going where it must not.

The host is resolved once; every address found is checked; the connection goes to a checked address, with the
Host header and TLS name of the URL. So a second look-up can change nothing (DNS rebinding). Redirects are
not followed, proxies and .netrc of the environment are ignored.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import httpx

Resolve = Callable[[str, int], list[str]]
"""Host and port to addresses; raises OSError."""

_MOST_ANSWER = 2048


class Refused(Exception):
    """The URL leads to an address that must not be called; the message says which."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: HTTP status, Retry-After as sent, and the start of the body for the log."""

    status: int
    retry_after: str | None
    text: str


def resolve(host: str, port: int) -> list[str]:
    """The addresses of a host, by the system's resolver."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def check_address(text: str, allow_private: bool) -> None:
    """Raise Refused unless the address is global, or allow_private is set.

    Link-local addresses (cloud metadata lives there), multicast and unspecified ones are refused even
    then; an IPv6 address that carries an IPv4 one is judged by both.
    """
    address = ipaddress.ip_address(text.split("%", 1)[0])
    carried: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = [address]
    if isinstance(address, ipaddress.IPv6Address):
        teredo = address.teredo[1] if address.teredo is not None else None
        nat64 = (
            ipaddress.IPv4Address(address.packed[-4:])
            if address in ipaddress.IPv6Network("64:ff9b::/96")
            else None
        )
        if address.ipv4_mapped is not None:
            # The mapped form is only another way to write the IPv4 address.
            carried = [address.ipv4_mapped]
        carried += [inner for inner in (address.sixtofour, teredo, nat64) if inner is not None]
    for one in carried:
        never = one.is_link_local or one.is_multicast or one.is_unspecified
        if never or not (one.is_global or allow_private):
            raise Refused(f"{text} is not an address that may be called")


def post(
    url: str,
    content: bytes,
    headers: Mapping[str, str],
    *,
    allow_private: bool,
    timeout_s: float,
    resolver: Resolve = resolve,
) -> Answer:
    """POST the content as JSON. Raises Refused, OSError (no such host) or httpx.HTTPError."""
    target = httpx.URL(url)
    host = target.raw_host.decode("ascii").strip("[]")
    port = target.port or (443 if target.scheme == "https" else 80)
    addresses = [host] if _is_address(host) else resolver(host, port)
    if not addresses:
        raise OSError(f"{host} has no address")
    for address in addresses:
        check_address(address, allow_private)
    all_headers = {
        "content-type": "application/json",
        "user-agent": "tokentape",
        **headers,
        "host": target.netloc.decode("ascii"),
    }
    for address in addresses[:-1]:
        with contextlib.suppress(httpx.ConnectError):
            return _post(target.copy_with(host=address), host, content, all_headers, timeout_s)
    return _post(target.copy_with(host=addresses[-1]), host, content, all_headers, timeout_s)


def _post(
    pinned: httpx.URL, host: str, content: bytes, headers: Mapping[str, str], timeout_s: float
) -> Answer:
    """POST to a URL whose host is an address; host: the name that TLS must prove."""
    deadline = time.monotonic() + timeout_s
    with (
        httpx.Client(trust_env=False, follow_redirects=False, timeout=timeout_s) as client,
        client.stream(
            "POST", pinned, content=content, headers=headers, extensions={"sni_hostname": host}
        ) as response,
    ):
        text = b""
        for chunk in response.iter_raw(1024):
            text += chunk
            if len(text) >= _MOST_ANSWER or time.monotonic() > deadline:
                break
        return Answer(
            response.status_code,
            response.headers.get("retry-after"),
            text[:_MOST_ANSWER].decode("utf-8", "replace"),
        )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
