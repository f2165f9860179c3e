"""Keeps what is read of a model folder inside it: names in its files and links may not lead elsewhere.

Someone else's folder could otherwise have any file of this machine copied into the result, which is then published.
"""

import os
from pathlib import Path

from deltanet_hf.errors import UserError, one_line

# What is read of a folder, or copied with it.
READ = (
    "*.json",
    "*.jinja",
    "*.model",
    "*.txt",
    "*.md",
    "LICENSE*",
    "NOTICE*",
    "*.safetensors",
    "additional_chat_templates",
)
MARKER = ".huggingface-shared-blobs"  # in the folder with the files that several repositories of a hub cache share


def inside(folder: Path, name: str, source: Path, what: str = "shard") -> Path:
    """The path of the file `name` of a folder; UserError if it leads out of it (absolute, '..' or a link).

    Args:
        source: the file that names it, with which the message begins.
        what: noun for the file in the message.
    """
    shown = f"{what} {name[:200]!r}"  # a name may hold anything
    remedy = "a model's files must lie in its own folder: copy the file there and correct the entry"
    if os.path.isabs(name) or ".." in Path(name).parts or "\\" in name or "\0" in name:
        raise UserError(f"{source}: {shown} leaves the folder; {remedy}")
    path = folder / name
    try:
        resolved = path.resolve(strict=path.is_symlink())
    except (OSError, RuntimeError, ValueError) as error:  # too long, not a name, or a link to nothing or to itself
        raise UserError(
            f"{source}: {shown} cannot be opened ({one_line(error, 100)}); download or copy it again"
        ) from error
    if not any(resolved.is_relative_to(root) for root in _roots(folder.resolve())):
        raise UserError(f"{source}: {shown} is a link that leaves the folder; {remedy}")
    return path


def check_links(folder: Path) -> None:
    """Raises UserError if a file of the folder that is read is a link that leaves it."""
    for pattern in READ:
        for path in sorted(folder.glob(pattern)):
            inside(folder, path.name, folder, "file")
            if path.is_dir():
                for file in sorted(path.iterdir()):
                    inside(folder, f"{path.name}/{file.name}", folder, "file")


def _roots(folder: Path) -> list[Path]:
    """The folders that the files of `folder` may lie in: itself, and those to which a hub cache links its snapshots."""
    repository = folder.parent.parent
    if folder.parent.name != "snapshots" or "--" not in repository.name:
        return [folder]
    shared = repository.parent / "blobs"
    return [folder, repository / "blobs", *([shared] if (shared / MARKER).is_file() else [])]
