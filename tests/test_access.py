from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from serving import FakeGateway, fake_gateway

from gateway.access import Key, Keyring, Scope, check_bind, digest_of, load_keys, new_key
from gateway.api.http import HANDLERS
from gateway.api.route import ROUTE
from gateway.cli import main
from gateway.config import ConfigError

SECRETS = {"asker": "ask-me", "reader": "read-me", "boss": "all-of-it"}
KEYS = Keyring(
    [
        Key("asker", digest_of("ask-me"), frozenset({Scope.INFER})),
        Key("reader", digest_of("read-me"), frozenset({Scope.READ})),
        Key("boss", digest_of("all-of-it"), frozenset(Scope)),
    ]
)
COMPLETION = {"model": "tiny", "prompt": "x"}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGateway]:
    with fake_gateway(data_dir=tmp_path_factory.mktemp("tape"), keys=KEYS) as gateway:
        yield gateway


def bearer(who: str) -> dict[str, str]:
    return {"authorization": f"Bearer {SECRETS[who]}"}


@pytest.mark.parametrize(
    "authorization", [None, "Bearer", "Bearer wrong", "Basic ask-me", "ask-me", "Bearer \xff"]
)
def test_without_a_valid_key_401(gateway: FakeGateway, authorization: str | None) -> None:
    headers = {} if authorization is None else {"authorization": authorization.encode("latin-1")}
    response = gateway.http.post("/v1/completions", json=COMPLETION, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    assert gateway.worker.jobs == {}


@pytest.mark.parametrize(
    ("who", "infer", "read"), [("asker", 200, 403), ("reader", 403, 200), ("boss", 200, 200)]
)
def test_scopes(gateway: FakeGateway, who: str, infer: int, read: int) -> None:
    headers = bearer(who)
    assert infer == gateway.http.post("/v1/completions", json=COMPLETION, headers=headers).status_code
    assert infer == gateway.http.get("/v1/models", headers=headers).status_code
    assert read == gateway.http.get("/v1/traces", headers=headers).status_code
    assert read == gateway.http.get("/v1/replay", headers=headers).status_code


def test_probes_and_metrics_need_no_key(gateway: FakeGateway) -> None:
    assert {gateway.http.get(path).status_code for path in ("/health", "/ready", "/metrics")} == {200}


def test_every_route_says_its_scope() -> None:
    assert [handler.fn.__name__ for handler in HANDLERS if ROUTE not in handler.opt] == []


def test_the_openai_client_sends_the_key(gateway: FakeGateway) -> None:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="ask-me", max_retries=0) as client:
        assert client.completions.create(model="tiny", prompt="x").choices
    with (
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="nope", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.completions.create(model="tiny", prompt="x")


def test_prompts_are_shared_within_one_key_only(gateway: FakeGateway) -> None:
    for who in ("asker", "boss"):
        gateway.http.post("/v1/completions", json=COMPLETION, headers=bearer(who))
    assert [request.scope for request in gateway.worker.seen[-2:]] == ["asker", "boss"]


def test_cors_is_off(gateway: FakeGateway) -> None:
    response = gateway.http.get("/health", headers={"origin": "https://evil.example"})
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_the_keys_file_and_the_environment(tmp_path: Path) -> None:
    secret, line = new_key("ci", [Scope.INFER, Scope.READ])
    file = tmp_path / "keys"
    file.write_text(f"# who may call\n\n{line}\n")
    assert secret not in file.read_text()
    keys = load_keys(str(file), {"TOKENTAPE_API_KEY": "from-env"})
    found = keys.find(secret)
    assert found is not None
    assert (found.name, found.scopes) == ("ci", {Scope.INFER, Scope.READ})
    boss = keys.find("from-env")
    assert boss is not None
    assert boss.scopes == set(Scope)
    assert keys.find("other") is None


@pytest.mark.parametrize(
    "line", ["name infer", "name infer abc", f"name steal {'0' * 64}", f"name infer {'G' * 64}", "a b c d"]
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# fine\n{line}\n")
    with pytest.raises(ConfigError, match=r"auth\.keys_file: .* line 2"):
        load_keys(str(file), {})


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"auth\.keys_file"):
        load_keys(str(tmp_path / "none"), {})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "gateway.example"])
def test_without_keys_only_loopback_is_bound(host: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.host"):
        check_bind(host, Keyring())
    check_bind(host, KEYS)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    check_bind(host, Keyring())


def test_serve_refuses_an_open_bind_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "TOKENTAPE_API_KEY" not in os.environ
    assert main(["serve", "--preset", "tiny", "--host", "0.0.0.0"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "server.host" in err


def test_keys_new(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", "ci", "--scopes", "infer,read"]) == 0
    told = capsys.readouterr()
    secret = told.err.split()[-1]
    assert told.out == f"ci infer,read {digest_of(secret)}\n"
    assert main(["keys", "new", "a b"]) == 2
    assert main(["keys", "new", "ci", "--scopes", "steal"]) == 2
