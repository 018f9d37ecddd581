"""tokentape's gateway: token-level routed decoding behind an OpenAI-compatible API."""

from importlib.metadata import version

__version__ = version("tokentape")
