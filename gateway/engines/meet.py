"""From [remote] of the config to an engine that answers."""

from __future__ import annotations

import os

from gateway.config import Config, ConfigError
from gateway.engines.client import Client, Reach
from gateway.engines.connect import Meeting, Vocabulary
from gateway.engines.elsewhere import Elsewhere
from gateway.engines.query import EngineFault


def meet(config: Config, vocabulary: Vocabulary) -> tuple[Elsewhere, Meeting]:
    """The engine that [remote] names, connected, and what was learnt of it; raises ConfigError."""
    remote = config.remote
    assert remote.engine is not None
    key = None
    if remote.api_key_env is not None:
        key = os.environ.get(remote.api_key_env)
        if not key:
            raise ConfigError(f"remote.api_key_env: the variable {remote.api_key_env} is not set")
    meeting = Meeting(remote.engine, vocabulary, remote.top_logprobs, remote.model or "")
    reach = Reach(
        remote.base_url.rstrip("/").removesuffix("/v1"),
        key,
        remote.timeout_s,
        remote.max_in_flight,
        remote.failures,
        remote.pause_s,
        remote.check_s,
        remote.affinity_header,
    )
    client = Client(reach, meeting)
    try:
        client.connect()
    except EngineFault as fault:
        client.close()
        raise ConfigError(f"remote.base_url: {reach.base_url}: {fault}") from None
    life_s = config.server.request_timeout_s
    return Elsewhere(client, vocabulary.vocab_size, life_s, remote.top_logprobs), meeting
