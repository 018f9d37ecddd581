"""advisor"""


def page() -> None:
    pass
