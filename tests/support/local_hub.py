"""A server on this machine that speaks the part of the Hugging Face Hub's interface that downloads and uploads use."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

Files = dict[str, bytes]
API = re.compile(
    r"/api/models/(?P<repo>[^/]+/[^/]+?)(/(?P<what>revision|tree|branch|preupload|commit)/(?P<rev>[^/]+).*)?$"
)
FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<path>.+)$")


@dataclass
class Repository:
    """Commits by their hash, branches and tags, and what goes wrong with it."""

    commits: dict[str, Files] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    refused: tuple[int, str, str] | None = None  # status, error code and message for every file
    breaks: dict[str, int] = field(default_factory=dict)  # the connection ends after so many bytes of this file
    failures: int = 10**6  # number of transfers that break

    def commit(self, files: Files, ref: str = "main") -> str:
        digest = hashlib.sha1(repr((sorted(files.items()), len(self.commits))).encode()).hexdigest()
        self.commits[digest] = files
        self.refs[ref] = digest
        return digest


@dataclass
class LocalHub:
    """The repositories of the server and the requests for files that it got, as (path, Range header)."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    fetched: list[tuple[str, str | None]] = field(default_factory=list)
    down: tuple[int, str] | None = None  # status and body of every answer
    endpoint: str = ""

    def add(self, repo: str, files: Files | Path) -> Repository:
        """Makes a repository with one commit of these files, or of the files of a folder."""
        if isinstance(files, Path):
            files = {str(file.relative_to(files)): file.read_bytes() for file in files.rglob("*") if file.is_file()}
        made = self.repositories.setdefault(repo, Repository())
        made.commit(files)
        return made

    def files(self, repo: str) -> Files:
        """The files of a repository's main branch."""
        found = self.repositories[repo]
        return found.commits[found.refs["main"]]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LocalHub

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""

    def do_HEAD(self) -> None:
        self._get()

    def do_GET(self) -> None:
        self._get()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(self.path).path)
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}"
            if repo not in self.hub.repositories:
                self.hub.add(repo, {})
            self._json({"url": f"{self.hub.endpoint}/{repo}"})
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif (match := API.match(path)) and match["what"] == "preupload":
            files = [file["path"] for file in json.loads(body)["files"]]
            self._json({"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in files]})
        elif match and match["what"] == "branch":
            refs = self.hub.repositories[match["repo"]].refs
            refs.setdefault(match["rev"], refs["main"])
            self._json({})
        elif match and match["what"] == "commit":
            lines = [json.loads(line) for line in body.splitlines()]
            new = [line["value"] for line in lines if line["key"] == "file"]
            repository = self.hub.repositories[match["repo"]]
            files = repository.commits[repository.refs[match["rev"]]]
            files = {**files, **{file["path"]: base64.b64decode(file["content"]) for file in new}}
            oid = repository.commit(files, match["rev"])
            page = f"{self.hub.endpoint}/{match['repo']}/commit/{oid}"
            self._json({"success": True, "commitOid": oid, "commitUrl": page})
        else:
            self._error(404, "RepoNotFound", "no such page")

    def _get(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if self.hub.down is not None:
            self._send(self.hub.down[0], self.hub.down[1].encode(), {})
            return
        match = FILE.match(path) or API.match(path)
        repository = self.hub.repositories.get(match["repo"]) if match else None
        if match is None or repository is None:
            self._error(404, "RepoNotFound", "Repository not found")
            return
        revision = match["rev"] or "main"
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        files = repository.commits[commit]
        if match.re is FILE:
            self._file(repository, commit, files, match["path"])
        elif match["what"] == "tree":
            listed = [{"type": "file", "path": p, "size": len(b), "oid": _oid(b)} for p, b in files.items()]
            self._json(listed)
        else:
            self._json({"id": match["repo"], "sha": commit, "siblings": [{"rfilename": path} for path in files]})

    def _file(self, repository: Repository, commit: str, files: Files, path: str) -> None:
        if repository.refused is not None:
            self._error(*repository.refused)
            return
        if path not in files:
            self._error(404, "EntryNotFound", "Entry not found")
            return
        data, asked = files[path], self.headers.get("Range")
        headers = {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        status, part = 200, data
        if asked:
            begin = int(asked.removeprefix("bytes=").split("-")[0])
            status, part = 206, data[begin:]
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        if self.command == "GET":
            self.hub.fetched.append((path, asked))
            if path in repository.breaks and repository.failures > 0:
                repository.failures -= 1
                self._send(status, part[: repository.breaks[path]], headers, length=len(part))
                self.close_connection = True
                return
        self._send(status, part, headers)

    def _error(self, status: int, code: str, message: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": message})

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str], length: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def serving() -> Iterator[LocalHub]:
    """Runs a hub on a free port."""
    hub = LocalHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def local_hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[LocalHub]:
    """Runs a hub that this process takes for the Hugging Face Hub, with an empty cache and without waiting to retry."""
    import huggingface_hub
    import transformers
    import transformers.dynamic_module_utils as remote_code
    from huggingface_hub import constants

    with serving() as hub:
        for name, value in environment(hub, cache).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        url = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)  # it keeps an address
        monkeypatch.setattr(remote_code, "HF_MODULES_CACHE", str(cache / "modules"))
        monkeypatch.setattr(huggingface_hub.file_download.time, "sleep", lambda seconds: None)
        yield hub


def environment(hub: LocalHub, cache: Path) -> dict[str, str]:
    """The variables by which a new process takes this hub for the Hugging Face Hub."""
    return {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(cache),
        "HF_TOKEN": "",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_ETAG_TIMEOUT": "10",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
