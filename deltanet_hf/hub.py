"""Models of the Hugging Face Hub as local folders; every failure is one line that says what to do about it.

The files go to the cache of `huggingface_hub` (`HF_HOME`, `HF_HUB_CACHE`), which gives a file its name only when it is
complete. The next call fetches what is missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from deltanet_hf.errors import UserError, one_line
from deltanet_hf.inside import check_links
from deltanet_hf.safe_write import DENIED, FULL

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Config, index, tokenizer, chat templates, licence and card. They come first: a repository without usable weights is
# refused before anything large is fetched.
SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*", "README.md"]
OTHER_INDEX = "choose another revision, or report it to the owner of the model"
OTHER_FORMATS = ["original/*", "consolidated*", "*/*.safetensors", "onnx/*"]


def model_folder(name: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The folder of a model that is given as a local folder or as a hub id, which is downloaded.

    Args:
        revision: branch, tag or commit on the hub; None for the main branch.
        weights: whether to download the weights, too.

    Raises:
        UserError: there is no such folder and no such model, or it cannot be downloaded.
    """
    try:
        path = Path(name).expanduser()
        found = name != "" and path.exists()
    except (OSError, RuntimeError):  # too long for a file name, or the home of an unknown user
        found = False
    if found:
        if revision is not None:
            raise UserError(f"--revision: {name} is on this machine, and only hub ids have revisions; leave it out")
        return path
    if not HUB_ID.fullmatch(name):
        raise UserError(f"{name}: no such folder, and not a hub id of the form owner/name; check the path")
    return download_model(name, revision) if weights else small_files(name, revision)


def loadable_folder(name: str, revision: str | None = None) -> Path:
    """The same for a folder that transformers will load, which follows links and the names in an index anywhere.

    Raises:
        UserError: also if a file or a name leads out of the folder, the config names code on the hub, or there is none.
    """
    folder = model_folder(name, revision)
    if folder.is_file():
        raise UserError(f"{name}: is a file, not a model's folder (docs/evaluating.md makes one of a .gguf file)")
    if not (folder / "config.json").exists():
        raise UserError(f"{name}/config.json: missing; give what `deltanet-hf convert` wrote, or the `final` of a run")
    check_links(folder)
    _weight_files(str(folder), folder)
    _check_kernels(folder / "config.json")
    return folder


def _check_kernels(config: Path) -> None:
    """Raises UserError if the config names an attention kernel on the hub, whose code transformers would run."""
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return  # transformers says what is wrong with it
    for key in ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"):
        if isinstance(values, dict) and "/" in json.dumps(values.get(key)):
            raise UserError(f"{config}: key '{key}' names code on the hub, which is not run; remove the key")


def small_files(repo: str, revision: str | None = None) -> Path:
    """The folder in the cache with everything of a model but its weights; UserError if it cannot be downloaded."""
    return _fetch(repo, revision, SMALL_FILES)


def download_model(repo: str, revision: str | None = None) -> Path:
    """Downloads a model with safetensors weights and returns its folder in the cache, whose name is the commit.

    Raises:
        UserError: the repository or its revision does not exist or may not be read, its index names files that it does
            not have, it has no safetensors weights, or the transfer or a write failed.
    """
    folder = small_files(repo, revision)
    weights = _weight_files(repo, folder)
    # The name of the folder is the commit, so that both calls get the same one.
    _fetch(repo, folder.name, weights)
    missing = [name for name in weights if not (folder / name).is_file()]
    if missing == [SINGLE_FILE]:
        raise UserError(
            f"{repo}: the hub has neither {SINGLE_FILE} nor {INDEX_FILE} of it; pickled weights are refused: convert "
            "them with save_pretrained where you trust them"
        )
    if missing:
        raise UserError(f"{repo}: {INDEX_FILE} names '{missing[0]}', which the repository does not have; {OTHER_INDEX}")
    return folder


def _fetch(repo: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            repo, revision=revision, allow_patterns=patterns, ignore_patterns=OTHER_FORMATS, library_name="deltanet-hf"
        )
    except Exception as error:  # of the hub, the HTTP library, the transfer library or the operating system
        raise UserError(_problem(repo, revision, error)) from error
    return Path(found)


def _weight_files(repo: str, folder: Path) -> list[str]:
    """The names of the weight files by the index, or the name of the only one."""
    index = folder / INDEX_FILE
    if not index.exists():
        return [SINGLE_FILE]
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{repo}: {INDEX_FILE} does not say where the tensors are ({one_line(error, 100)}); {OTHER_INDEX}"
        ) from error
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,200}\.safetensors", name):
            raise UserError(
                f"{repo}: {INDEX_FILE} names {str(name)[:100]!r}, which is no .safetensors file beside it; "
                f"{OTHER_INDEX}"
            )
    return names


def _problem(repo: str, revision: str | None, error: Exception) -> str:
    """One line about a failed download: the cause and the remedy."""
    from huggingface_hub import constants, errors, is_offline_mode

    chain = list(_causes(error))
    asked = f"{repo} (revision '{revision}')" if revision else repo
    cache = constants.HF_HUB_CACHE
    failed = [cause for cause in chain if isinstance(cause, OSError)]
    if any(cause.errno in FULL for cause in failed) or any("no space left" in str(cause).lower() for cause in chain):
        return (
            f"{repo}: cannot be downloaded: the disk of {cache} is full, or a quota or size limit is reached; free "
            "some space, or set HF_HOME to a folder on another disk, and run the same command again: complete files "
            "are kept"
        )
    if any(cause.errno in DENIED and cause.filename for cause in failed):  # those of sockets have no file name
        return f"{repo}: cannot be downloaded: {cache} cannot be written; set HF_HOME to a folder that you may write to"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{repo}: is gated: accept its terms at {constants.ENDPOINT}/{repo}, then log in with `hf auth login` or "
            "set HF_TOKEN"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{asked}: the hub has the model but not this revision; give one of its branches, tags or commits"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{repo}: no such folder here, and no such model on the hub that you may read; check the name, or log in "
            "with `hf auth login` if it is private"
        )
    status = next((cause.response.status_code for cause in chain if isinstance(cause, errors.HfHubHTTPError)), None)
    if status in (401, 403):
        return (
            f"{repo}: the hub refuses access ({status}: {_server_message(chain)}); log in with `hf auth login`, or set "
            "HF_TOKEN to a valid token"
        )
    if is_offline_mode():
        return (
            f"{asked}: no such folder here, and it cannot be downloaded: HF_HUB_OFFLINE is set, and {cache} does not "
            "hold all of its files; unset it for the first download, or give a local folder"
        )
    reason = f"{type(chain[-1]).__name__}: {one_line(chain[-1], 200)}"
    return (
        f"{asked}: no such folder here, and it cannot be downloaded ({reason}); check the path, or check the network "
        "and HF_ENDPOINT and run the same command again: complete files are kept"
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The exception and what it was raised from, the last being the origin."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def _server_message(chain: list[BaseException]) -> str:
    messages = (getattr(cause, "server_message", None) for cause in chain)
    return next((" ".join(message.split())[:100] for message in messages if message), "no reason given")
