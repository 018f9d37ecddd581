"""rollouts"""


def page() -> None:
    pass
