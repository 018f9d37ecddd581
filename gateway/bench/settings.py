"""The ways to serve that the table compares."""

from __future__ import annotations

from dataclasses import replace

from gateway.bench.runs import Setting
from gateway.core import Accept, Mode
from gateway.policy import Policy

LARGE_ONLY = Setting("large-only", Policy(mode=Mode.LARGE_ONLY))


def standard() -> list[Setting]:
    """Each accept rule without lookup, lookup alone, and everything together."""
    rules = [Setting(f"routed {rule}", Policy(accept=rule, lookup=False)) for rule in Accept]
    # A threshold that no score reaches leaves every token to lookup or to the large model.
    alone = Policy(bias=-1.0, lookup=True)
    return [
        Setting("small-only", Policy(mode=Mode.SMALL_ONLY)),
        *rules,
        Setting("lookup only", alone),
        everything(),
        Setting("all: token_v3 + lookup", Policy(accept=Accept.TOKEN_V3)),
    ]


def everything() -> Setting:
    """Routing as the gateway does it by default: with large-only, what it chooses between."""
    return Setting("all: exact + lookup", Policy(accept=Accept.EXACT))


def taped(setting: Setting) -> Setting:
    """The same with every step recorded."""
    return replace(setting, name=f"{setting.name} + tape", tape=True)


def seed_table() -> list[Setting]:
    """The seed method's table: conservative, medium, aggressive, and aggressive with verified drafts."""
    trust = Accept.TRUST
    return [
        Setting("conservative", Policy(accept=trust, threshold=0.9, lookup=False), adapt=False),
        Setting("medium", Policy(accept=trust, threshold=0.7, lookup=False), adapt=False),
        Setting("aggressive", Policy(accept=trust, threshold=0.5, lookup=False), adapt=False),
        Setting(
            "aggressive + draft",
            Policy(accept=Accept.THRESHOLD, threshold=0.5, lookup=False),
            adapt=False,
        ),
    ]
