"""live"""


def page() -> None:
    pass
