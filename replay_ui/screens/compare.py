"""compare"""


def page() -> None:
    pass
