"""reviews"""


def page() -> None:
    pass
