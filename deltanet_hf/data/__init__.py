"""The public-domain text shipped with the package (text/SOURCES.md says what and whence)."""

from pathlib import Path


def shipped_texts() -> list[Path]:
    """Paths of the shipped text files, in a fixed order."""
    return sorted((Path(__file__).parent / "text").glob("*.txt"))
