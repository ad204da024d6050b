"""A stand-in for the Hugging Face hub, which speaks its protocol on a local port."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from huggingface_hub import constants

REPO = "ada/tuned"
#: The commit of the repositories of ``serve_hub``.
COMMIT = "0123456789abcdef0123456789abcdef01234567"

#: Status, body and headers of an answer.
Answer = tuple[int, Any, dict[str, str]]


class StoringHub:
    """A stand-in that stores what is pushed to it, and serves it to downloads.

    Some repositories have faults. ``me/asked`` lists its files, but its terms must be accepted
    before a file is downloaded; ``me/gated`` does not even list them. The connection breaks within
    the weights of ``me/broken``. ``me/outside`` lists a file outside of the repository, and
    ``me/garbled`` lists its files in something that is not JSON.

    Attributes:
        url: its address.
        branches: files by branch, by repository.
        private: whether each repository is private.
        commits: repository, branch, and operation by file, of each commit.
        failing: status and body of failing requests, by the end of their address.
        tokens: values of the Authorization header in all requests.
        downloaded: names of the downloaded files.
    """

    def __init__(self, url: str = "") -> None:
        self.url = url
        self.branches: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: dict[str, bool] = {}
        self.commits: list[tuple[str, str, dict[str, str]]] = []
        self.failing: dict[str, tuple[int, str]] = {}
        self.tokens: set[str | None] = set()
        self.downloaded: list[str] = []
        self._snapshots: dict[str, dict[str, bytes]] = {}

    def files(self, repo: str = REPO, branch: str = "main") -> dict[str, bytes]:
        return self.branches[repo][branch]

    def add(self, repo: str, files: Any, commit: str) -> None:
        """Add a repository with one commit."""
        self.branches[repo], self.private[repo] = {"main": files}, False
        self._snapshots[commit] = files

    def answer(self, method: str, path: str, body: bytes) -> Answer:
        """Answer a request, whose path is still quoted."""
        for end, (status, text) in self.failing.items():
            if unquote(path).endswith(end):
                return status, text, {}
        # A slash in the name of a branch is escaped.
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if parts == ["api", "repos", "create"]:
            return self._create(json.loads(body))
        if parts == ["api", "validate-yaml"]:
            assert json.loads(body)["content"].startswith("---\n")
            return 200, {"errors": [], "warnings": []}, {}
        return self._answer_repo(method, parts, body)

    def _answer_repo(self, method: str, parts: list[str], body: bytes) -> Answer:
        is_file = parts[:2] != ["api", "models"]
        repo, rest = "/".join(parts[:2] if is_file else parts[2:4]), parts[2 if is_file else 4 :]
        if repo == "me/gated" or (repo == "me/asked" and is_file):
            return 401 if repo == "me/gated" else 403, "", {"X-Error-Code": "GatedRepo"}
        if repo not in self.branches:
            return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        if is_file:
            return self._read(repo, rest[1], "/".join(rest[2:]))
        return self._answer_api(method, repo, rest, body)

    def _create(self, settings: dict[str, Any]) -> Answer:
        repo = f"{settings['organization']}/{settings['name']}"
        url = {"url": f"{self.url}/{repo}", "name": repo}
        if repo in self.branches:
            return 409, {**url, "error": "You already created this model repo"}, {}
        self.branches[repo] = {"main": {".gitattributes": b""}}
        private = settings.get("visibility") == "private" or settings.get("private")
        self.private[repo] = bool(private)
        return 200, url, {}

    def _answer_api(self, method: str, repo: str, rest: list[str], body: bytes) -> Answer:
        info = {"id": repo, "private": self.private[repo], "sha": self._head(), "siblings": []}
        if not rest:
            return 200, info, {}
        kind, branch = rest
        branches = self.branches[repo]
        if kind in ("revision", "tree"):
            return self._describe(repo, kind, branch, info)
        if kind == "branch":
            exists = branch in branches
            branches.setdefault(branch, dict(branches["main"]))
            return (409, {"error": "exists"}, {}) if exists else (200, {}, {})
        files = branches[branch]
        if kind == "preupload":
            names = [file["path"] for file in json.loads(body)["files"]]
            return 200, {"files": [_describe_upload(name, files.get(name)) for name in names]}, {}
        assert (method, kind) == ("POST", "commit")
        return self._commit(repo, branch, body)

    def _describe(self, repo: str, kind: str, revision: str, info: dict[str, Any]) -> Answer:
        """Answer with the commit of a revision, or with its files."""
        files = self._read_revision(repo, revision)
        if files is None:
            return 404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"}
        if kind == "revision":
            is_commit = revision in self._snapshots
            commit = revision if is_commit else self._snap(repo, revision)
            return 200, {**info, "sha": commit}, {}
        if repo == "me/garbled":
            return 200, "<html>", {"Content-Type": "application/json"}
        if repo == "me/outside":
            files = {"config.json": b"{}", "../../../x/config.json": b"{}"}
        entries = [
            {"type": "file", "path": name, "oid": _oid(content), "size": len(content)}
            for name, content in files.items()
        ]
        return 200, entries, {}

    def _commit(self, repo: str, branch: str, body: bytes) -> Answer:
        header, *operations = (json.loads(line) for line in body.splitlines())
        assert header["key"] == "header"
        operations_by_file = {}
        for operation in operations:
            value = operation["value"]
            operations_by_file[value["path"]] = operation["key"]
            if operation["key"] == "deletedFile":
                del self.files(repo, branch)[value["path"]]
            else:
                assert (operation["key"], value["encoding"]) == ("file", "base64")
                self.files(repo, branch)[value["path"]] = base64.b64decode(value["content"])
        self.commits.append((repo, branch, operations_by_file))
        self._snapshots[self._head()] = dict(self.files(repo, branch))
        url = f"{self.url}/{repo}/commit/{self._head()}"
        return 200, {"commitUrl": url, "commitOid": self._head(), "success": True}, {}

    def _snap(self, repo: str, branch: str) -> str:
        """Keep the files of a branch under the commit that a download of the branch gets."""
        files = dict(self.files(repo, branch))
        matches = [commit for commit, snapshot in self._snapshots.items() if snapshot == files]
        # A test has changed the files without a commit.
        changed = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        commit = matches[-1] if matches else changed
        self._snapshots.setdefault(commit, files)
        return commit

    def _read_revision(self, repo: str, revision: str) -> dict[str, bytes] | None:
        return self._snapshots.get(revision) or self.branches[repo].get(revision)

    def _read(self, repo: str, revision: str, file: str) -> Answer:
        files = self._read_revision(repo, revision)
        if files is None:
            return 404, "", {"X-Error-Code": "RevisionNotFound"}
        if revision not in self._snapshots:
            revision = self._snap(repo, revision)
        if file not in files:
            return 404, "", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": revision}
        content = files[file]
        headers = {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": revision}
        if repo == "me/broken" and file.endswith(".safetensors"):
            headers["Content-Length"] = str(len(content))
            content = content[:100]
        return 200, content, headers

    def _head(self) -> str:
        return f"{len(self.commits):040x}"

    def download(self, folder: Path, repo: str = REPO, branch: str = "main") -> Path:
        for name, content in self.files(repo, branch).items():
            path = folder / name
            assert path.resolve().is_relative_to(folder.resolve())
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return folder


def _describe_upload(name: str, content: bytes | None) -> dict[str, Any]:
    object_id = None if content is None else _oid(content)
    return {"path": name, "uploadMode": "regular", "shouldIgnore": False, "oid": object_id}


def _oid(content: bytes) -> str:
    """Return git's object id of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def serve_storing_hub() -> Iterator[StoringHub]:
    """Serve a ``StoringHub``."""
    state = StoringHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = urlsplit(self.path).path
            if path.startswith(("/api/repos/", "/api/models/")):
                state.tokens.add(self.headers.get("Authorization"))
            status, value, headers = state.answer(self.command, path, body)
            if isinstance(value, bytes):
                content = value
                if self.command == "GET" and status == 200:
                    state.downloaded.append(unquote(path).split("/", 5)[5])
            else:
                content = (value if isinstance(value, str) else json.dumps(value)).encode()
            self.send_response(status)
            for name, text in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, text)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)
                self.close_connection = int(headers.get("Content-Length", 0)) > len(content)

        do_GET = do_POST = do_HEAD = answer  # noqa: N815

        def log_message(self, *arguments: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    state.url = f"http://127.0.0.1:{http.server_port}"
    threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
    yield state
    http.shutdown()
    http.server_close()


@contextmanager
def serve_hub(folder: Path) -> Iterator[StoringHub]:
    """Serve the files of a folder as ``me/tiny``, and with the faults of ``StoringHub``.

    ``me/hollow`` has no weights.
    """
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    with serve_storing_hub() as hub:
        for name in ("tiny", "asked", "broken", "outside", "garbled"):
            hub.add(f"me/{name}", files, COMMIT)
        settings = {name: files[name] for name in files if not name.endswith(".safetensors")}
        hub.add("me/hollow", settings, COMMIT[::-1])
        yield hub


def use_hub(monkeypatch, url, home):
    """Make a hub the endpoint of this process's client, with a token and an empty cache."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "no-token"))
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
