"""[alerts], [[alerts.rules]] and [[alerts.receivers]] of the config file, checked when they are read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta
from standardwebhooks import Webhook

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
Seconds = Annotated[float, Meta(gt=0.0, le=31_536_000.0)]
Series = Annotated[str, Meta(pattern=r"^[A-Za-z_:][A-Za-z0-9_:]*$")]

_SECRET = re.compile(r"(whsec_)?[A-Za-z0-9+/]+={0,2}")

PAGERDUTY_URL = "https://events.pagerduty.com/v2/enqueue"


class RuleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[[alerts.rules]]: one condition that is looked at every `interval_s`."""

    name: Annotated[Name, Meta(description="the alert's name")]
    kind: Annotated[
        Literal["threshold", "absence", "burn", "drift"],
        Meta(
            description="`threshold`: a metric over a window; `absence`: a metric that is missing or stands "
            "still; `burn`: an error budget spent too fast; `drift`: evidence of drift"
        ),
    ]
    metric: Annotated[
        Series | None,
        Meta(
            description="served metric, such as `tokentape:num_requests_waiting`; for `burn` the bad events"
        ),
    ] = None
    labels: Annotated[
        dict[str, str], Meta(description="labels the metric's series must have; all that match are added up")
    ] = {}
    total: Annotated[Series | None, Meta(description="`burn`: the metric that counts all events")] = None
    function: Annotated[
        Literal["last", "mean", "min", "max", "increase", "rate"],
        Meta(description="`threshold`: what is taken of the window (`rate` is per second)"),
    ] = "last"
    op: Annotated[Literal[">", ">=", "<", "<="], Meta(description="`threshold`: how it compares")] = ">"
    value: Annotated[
        float | None,
        Meta(description="`threshold`: the limit; `drift`: the evidence that suffices (default 1000)"),
    ] = None
    window_s: Annotated[Seconds, Meta(description="window of `threshold` and `absence`")] = 60.0
    objective: Annotated[
        Annotated[float, Meta(gt=0.0, lt=1.0)] | None,
        Meta(description="`burn`: share of events that must be good, such as 0.999"),
    ] = None
    factor: Annotated[
        Annotated[float, Meta(gt=0.0)],
        Meta(description="`burn`: how many times faster than allowed both windows must spend"),
    ] = 14.4
    fast_window_s: Annotated[Seconds, Meta(description="`burn`: the window that ends the alert soon")] = 300.0
    slow_window_s: Annotated[Seconds, Meta(description="`burn`: the window that keeps spikes out")] = 3600.0
    for_s: Annotated[
        Annotated[float, Meta(ge=0.0)], Meta(description="how long the condition must hold before it fires")
    ] = 0.0
    severity: Annotated[Literal["info", "warning", "critical"], Meta(description="label of the alert")] = (
        "warning"
    )
    summary: Annotated[str | None, Meta(description="first line of the notification")] = None
    inhibited_by: Annotated[
        list[str], Meta(description="names of alerts that keep this one quiet while they fire")
    ] = []

    def __post_init__(self) -> None:
        needs = {
            "threshold": ("metric", "value"),
            "absence": ("metric",),
            "burn": ("metric", "total", "objective"),
            "drift": (),
        }[self.kind]
        for key in needs:
            if getattr(self, key) is None:
                raise ValueError(f"{key}: a rule of kind `{self.kind}` needs it ({self.name})")
        if self.fast_window_s >= self.slow_window_s:
            raise ValueError(f"fast_window_s: must be shorter than slow_window_s ({self.name})")


class ReceiverConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[[alerts.receivers]]: where notifications go."""

    name: Annotated[Name, Meta(description="shown in deliveries")]
    kind: Annotated[
        Literal["webhook", "slack", "pagerduty"],
        Meta(description="`webhook`: Alertmanager's body, signed by Standard Webhooks"),
    ]
    url: Annotated[
        str | None, Meta(description="http or https; `pagerduty` knows its own (Events API v2)")
    ] = None
    secret_env: Annotated[
        str | None,
        Meta(description="environment variable with the `whsec_` secret (`webhook`) or routing key"),
    ] = None
    allow_private: Annotated[
        bool, Meta(description="whether the URL may lead to a private or loopback address")
    ] = False
    send_resolved: Annotated[bool, Meta(description="whether it also hears when an alert is over")] = True
    events: Annotated[
        bool, Meta(description="`webhook`: send every rollout event as well, in Flagger's shape")
    ] = False

    def __post_init__(self) -> None:
        if self.url is None and self.kind != "pagerduty":
            raise ValueError(f"url: a receiver of kind `{self.kind}` needs it ({self.name})")
        parts = urlsplit(self.address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url: must be an http or https URL ({self.name})")
        if parts.username is not None or parts.password is not None:
            raise ValueError(f"url: must not hold a user or password ({self.name})")
        if self.kind == "pagerduty" and self.secret_env is None:
            raise ValueError(f"secret_env: a receiver of kind `pagerduty` needs it ({self.name})")
        if self.events and self.kind != "webhook":
            raise ValueError(f"events: only receivers of kind `webhook` take them ({self.name})")

    @property
    def address(self) -> str:
        """The URL that is called."""
        return self.url if self.url is not None else PAGERDUTY_URL


class AlertsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[alerts]: canaries, drift, rules and receivers."""

    interval_s: Annotated[Seconds, Meta(description="how often rules and rollouts are judged")] = 1.0
    repeat_s: Annotated[Seconds, Meta(description="a firing alert is sent again after this")] = 14_400.0
    timeout_s: Annotated[
        Annotated[float, Meta(gt=0.0, le=120.0)], Meta(description="longest wait for a receiver")
    ] = 10.0
    give_up_s: Annotated[
        Seconds, Meta(description="age at which an undelivered notification is given up")
    ] = 86_400.0
    window_s: Annotated[
        Seconds,
        Meta(description="a user (sticky key) gives one observation to the evidence in so many seconds"),
    ] = 3600.0
    no_data_s: Annotated[
        Seconds, Meta(description="silence of the canary after which the verdict is `no_data`")
    ] = 600.0
    max_units: Annotated[
        Annotated[int, Meta(ge=1)],
        Meta(description="canary units on the last step after which an unproven canary is `inconclusive`"),
    ] = 2000
    max_step_s: Annotated[
        Seconds, Meta(description="time on one step after which the canary is `inconclusive`")
    ] = 604_800.0
    gate: Annotated[
        str | None,
        Meta(
            description="receiver (kind `webhook`) that is asked before a promotion; anything but 2xx vetoes"
        ),
    ] = None
    base_url: Annotated[
        str | None, Meta(description="start of the links in notifications; by default the gateway's own URL")
    ] = None
    rules: Annotated[list[RuleConfig], Meta(description="own rules, beside the built-in alerts")] = []
    receivers: Annotated[list[ReceiverConfig], Meta(description="where notifications go")] = []

    def __post_init__(self) -> None:
        for kind, names in (
            ("rules", [rule.name for rule in self.rules]),
            ("receivers", [receiver.name for receiver in self.receivers]),
        ):
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise ValueError(f"{kind}: {twice!r} is there twice")
        if self.gate is not None:
            gate = next((r for r in self.receivers if r.name == self.gate), None)
            if gate is None or gate.kind != "webhook":
                raise ValueError(f"gate: there is no receiver of kind `webhook` named {self.gate!r}")


class MissingSecret(ValueError):
    """A receiver's secret is not in the environment, or cannot be used; the message names the key."""


def read_secrets(config: AlertsConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """The secret of each receiver that has one, by receiver name; raises MissingSecret."""
    secrets: dict[str, str] = {}
    for i, receiver in enumerate(config.receivers):
        if receiver.secret_env is None:
            continue
        where = f"alerts.receivers[{i}].secret_env"
        secret = environ.get(receiver.secret_env, "")
        if not secret:
            raise MissingSecret(f"{where}: the environment variable {receiver.secret_env} is not set")
        if receiver.kind == "webhook":
            try:
                usable = _SECRET.fullmatch(secret) is not None and Webhook(secret) is not None
            except Exception:
                # The cause may quote the secret: it is not told.
                usable = False
            if not usable:
                raise MissingSecret(f"{where}: {receiver.secret_env} is not a base64 `whsec_` secret")
        secrets[receiver.name] = secret
    return secrets
