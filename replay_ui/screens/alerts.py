"""alerts"""


def page() -> None:
    pass
