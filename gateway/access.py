"""API keys and what each may do. Keys are kept as sha256 hashes and compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from gateway.config import ConfigError

KEY_VARIABLE = "TOKENTAPE_API_KEY"
"""Holds one key with every scope; the command line sends it too."""
KEY_BYTES = 32
"""Random bytes of a key: so many that its plain hash tells nothing."""


class Scope(StrEnum):
    """What a key may do: ask the models; read traces, which hold users' text; change the gateway."""

    INFER = "infer"
    READ = "read"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Key:
    """One API key: a name for the log, its sha256 in hex, its scopes."""

    name: str
    digest: str
    scopes: frozenset[Scope]


class Keyring:
    """The keys of a gateway; without any, everybody may do everything (and only loopback is bound)."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._keys = tuple(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, secret: str) -> Key | None:
        """The key of this secret; every key is compared, so that time tells nothing."""
        digest = digest_of(secret)
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


def digest_of(secret: str) -> str:
    """sha256 of a key, hex."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def new_key(name: str, scopes: Iterable[Scope]) -> tuple[str, str]:
    """A fresh secret, and the line of the keys file that admits it."""
    secret = f"tt-{secrets.token_urlsafe(KEY_BYTES)}"
    return secret, f"{name} {','.join(sorted(scopes))} {digest_of(secret)}"


def load_keys(file: str | None, environ: Mapping[str, str]) -> Keyring:
    """The keys of the file (lines of name, scopes, sha256) and of the environment; raises ConfigError."""
    keys = _read(Path(file)) if file is not None else []
    if secret := environ.get(KEY_VARIABLE):
        keys.append(Key("environment", digest_of(secret), frozenset(Scope)))
    return Keyring(keys)


def check_bind(host: str, keys: Keyring) -> None:
    """Without a key only loopback may be bound; raises ConfigError."""
    if keys or is_loopback(host):
        return
    raise ConfigError(
        f"server.host: {host} is reachable from outside, so an API key is needed: "
        f"set {KEY_VARIABLE} or auth.keys_file"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read(path: Path) -> list[Key]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"auth.keys_file: {path}: {error}") from None
    keys = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        where = f"auth.keys_file: {path} line {number}"
        parts = line.split()
        if len(parts) != 3:
            raise ConfigError(f"{where}: expected `name scopes sha256`")
        name, scopes, digest = parts
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise ConfigError(f"{where}: not a sha256 in lower-case hex")
        try:
            keys.append(Key(name, digest, frozenset(Scope(scope) for scope in scopes.split(","))))
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
    return keys
