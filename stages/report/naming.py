"""Names of methods as they are written in prose."""

from __future__ import annotations

_METHODS = {
    "wanda": "Wanda",
    "sparsegpt": "SparseGPT",
    "pals": "PALS",
    "owl": "OWL",
    "dlp": "DLP",
    "alphapruning": "AlphaPruning",
    "streamline": "Streamline",
    "shortgpt": "ShortGPT",
    "list": "an explicit list",
}


def method(name: str) -> str:
    """A method's name as it is written in prose."""
    return _METHODS.get(name, name.replace("_", " "))
