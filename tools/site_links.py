"""A hook of mkdocs: links of pages to files outside docs/ lead to the repository."""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"\]\(([^)\s:#]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """The text of a page with such links replaced."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def link(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[1]))
        inside = path.startswith("docs/")
        return match[0] if inside else f"]({config.repo_url.rstrip('/')}/blob/main/{path}{match[2] or ''})"

    return LINK.sub(link, markdown)
