"""Stand-ins for the Hugging Face hub, which speak its protocol on a local port."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from huggingface_hub import constants

REPO = "ada/tuned"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """The part of the hub that downloads need, with its errors.

    ``me/tiny`` can be downloaded. ``me/asked`` lists its files, but its terms must be accepted
    before a file is downloaded; ``me/gated`` does not even list them. ``me/hollow`` has no
    weights, and the connection breaks within the weights of ``me/broken``. Hostile ones:
    ``me/short`` announces files of another size, ``me/outside`` lists a file outside of the
    repository, and ``me/garbled`` lists its files in something that is not JSON.
    """

    REPOS = tuple(f"me/{name}" for name in "tiny asked hollow broken short outside garbled".split())

    def __init__(self, folder, *arguments):
        self.folder = folder
        super().__init__(*arguments)

    def do_GET(self):
        path = unquote(self.path.split("?")[0])
        match = re.fullmatch(r"(?:/api/models)?/(me/\w+)(/.*)?", path)
        repo, rest = (match[1], match[2] or "") if match else ("", path)
        name = re.sub(f"^/resolve/({COMMIT}|main)/", "", rest)
        if repo == "me/gated" or (repo == "me/asked" and name != rest):
            self.answer(b"", {"X-Error-Code": "GatedRepo"}, 401 if repo == "me/gated" else 403)
        elif repo not in self.REPOS:
            self.answer(b"", {"X-Error-Code": "RepoNotFound"}, 404)
        elif rest in ("", "/revision/main"):
            self.answer_json({"id": repo, "sha": COMMIT, "siblings": []})
        elif rest.startswith(f"/tree/{COMMIT}") and repo == "me/garbled":
            self.answer(b"<html>", {"Content-Type": "application/json"})
        elif rest.startswith(f"/tree/{COMMIT}") and repo == "me/outside":
            oid = self.etag("x")
            names = ["config.json", "../../../x/config.json"]
            self.answer_json(
                [{"type": "file", "path": path, "size": 9, "oid": oid} for path in names]
            )
        elif rest.startswith(f"/tree/{COMMIT}"):
            files = [path for path in self.folder.rglob("*") if path.is_file()]
            hidden = "*.safetensors" if repo == "me/hollow" else ""
            self.answer_json([self.entry(path) for path in files if not path.match(hidden or "-")])
        elif name != rest and not (self.folder / name).is_file():
            self.answer(b"", {"X-Error-Code": "EntryNotFound"}, 404)
        elif name != rest:
            body, cut = (self.folder / name).read_bytes(), name.endswith(".safetensors")
            headers = {"ETag": f'"{self.etag(name)}"'}
            if repo == "me/short":
                headers["X-Linked-Size"] = str(len(body) + 7)
            self.answer(body, headers, cut=cut and repo == "me/broken")
        else:
            self.answer(b"", {"X-Error-Code": "RevisionNotFound"}, 404)

    do_HEAD = do_GET  # noqa: N815

    def entry(self, path):
        name = path.relative_to(self.folder).as_posix()
        return {
            "type": "file",
            "path": name,
            "size": path.stat().st_size,
            "oid": self.etag(name),
        }

    def etag(self, name):
        return hashlib.sha1(name.encode()).hexdigest()

    def answer_json(self, value):
        self.answer(json.dumps(value).encode(), {"Content-Type": "application/json"})

    def answer(self, body, headers, status=200, cut=False):
        self.send_response(status)
        for name, value in {**headers, "X-Repo-Commit": COMMIT}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:100] if cut else body)
        self.close_connection = cut

    def log_message(self, *arguments):
        pass


@contextmanager
def serve_hub(folder):
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


class StoringHub:
    """A stand-in that stores what is pushed to it, and serves it to downloads.

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

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, object]:
        for end, (status, text) in self.failing.items():
            if path.endswith(end):
                return status, text
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if parts == ["api", "repos", "create"]:
            return self._create(json.loads(body))
        if parts == ["api", "validate-yaml"]:
            assert json.loads(body)["content"].startswith("---\n")
            return 200, {"errors": [], "warnings": []}
        if parts[:2] != ["api", "models"] or len(parts) < 4:
            return 404, {"error": "no such thing"}
        repo, rest = "/".join(parts[2:4]), parts[4:]
        if repo not in self.branches:
            return 404, {"error": "Repository not found"}
        return self._answer_repo(method, repo, rest, body)

    def _create(self, settings: dict) -> tuple[int, object]:
        repo = f"{settings['organization']}/{settings['name']}"
        url = {"url": f"{self.url}/{repo}", "name": repo}
        if repo in self.branches:
            return 409, {**url, "error": "You already created this model repo"}
        self.branches[repo] = {"main": {".gitattributes": b""}}
        self.private[repo] = settings.get("visibility") == "private" or bool(
            settings.get("private")
        )
        return 200, url

    def _answer_repo(
        self, method: str, repo: str, rest: list[str], body: bytes
    ) -> tuple[int, object]:
        info = {"id": repo, "private": self.private[repo], "sha": self._head(), "siblings": []}
        if not rest:
            return 200, info
        kind, branch = rest
        branches = self.branches[repo]
        if kind in ("revision", "tree"):
            return self._describe(repo, kind, branch, info)
        if kind == "branch":
            exists = branch in branches
            branches.setdefault(branch, dict(branches["main"]))
            return (409, {"error": "exists"}) if exists else (200, {})
        files = branches[branch]
        if kind == "preupload":
            return 200, {
                "files": [
                    {
                        "path": file["path"],
                        "uploadMode": "regular",
                        "shouldIgnore": False,
                        "oid": oid(files[file["path"]]) if file["path"] in files else None,
                    }
                    for file in json.loads(body)["files"]
                ]
            }
        assert (method, kind) == ("POST", "commit")
        return self._commit(repo, branch, body)

    def _describe(self, repo: str, kind: str, revision: str, info: dict) -> tuple[int, object]:
        """Answer with the commit of a revision, or with its files."""
        files = self._read_revision(repo, revision)
        if files is None:
            return 404, {"error": "Invalid rev id"}
        if kind == "revision":
            is_commit = revision in self._snapshots
            return 200, {**info, "sha": revision if is_commit else self._snap(repo, revision)}
        return 200, [
            {"type": "file", "path": name, "oid": oid(content), "size": len(content)}
            for name, content in files.items()
        ]

    def _commit(self, repo: str, branch: str, body: bytes) -> tuple[int, object]:
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
        return 200, {"commitUrl": url, "commitOid": self._head(), "success": True}

    def _snap(self, repo: str, branch: str) -> str:
        """Keep the files of a branch under the commit that a download of the branch gets."""
        files = dict(self.files(repo, branch))
        matches = [commit for commit, snapshot in self._snapshots.items() if snapshot == files]
        # A test has changed the files without a commit.
        changed = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        commit = matches[-1] if matches else changed
        self._snapshots[commit] = files
        return commit

    def _read_revision(self, repo: str, revision: str) -> dict[str, bytes] | None:
        return self._snapshots.get(revision) or self.branches[repo].get(revision)

    def read(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        """Return status, body and headers of a request for a file, OWNER/NAME/resolve/REV/FILE."""
        # A slash in the name of a branch is escaped.
        owner, name, _, revision, file = map(unquote, path.strip("/").split("/", 4))
        repo = f"{owner}/{name}"
        if repo not in self.branches:
            return 404, b"", {"X-Error-Code": "RepoNotFound"}
        files = self._read_revision(repo, revision)
        if files is None:
            return 404, b"", {"X-Error-Code": "RevisionNotFound"}
        if revision not in self._snapshots:
            revision = self._snap(repo, revision)
        if file not in files:
            return 404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": revision}
        content = files[file]
        return 200, content, {"ETag": f'"{oid(content)}"', "X-Repo-Commit": revision}

    def _head(self) -> str:
        return f"{len(self.commits):040x}"

    def download(self, folder: Path, repo: str = REPO, branch: str = "main") -> Path:
        for name, content in self.files(repo, branch).items():
            path = folder / name
            assert path.resolve().is_relative_to(folder.resolve())
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return folder


def oid(content: bytes) -> str:
    """Return git's object id of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def serve_storing_hub():
    """Serve a ``StoringHub``."""
    state = StoringHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path, headers = unquote(urlsplit(self.path).path), {}
            if path.startswith(("/api/repos/", "/api/models/")):
                state.tokens.add(self.headers.get("Authorization"))
            if "/resolve/" in path:
                status, content, headers = state.read(urlsplit(self.path).path)
                if self.command == "GET" and status == 200:
                    state.downloaded.append(path.split("/", 5)[5])
            else:
                status, value = state.answer(self.command, urlsplit(self.path).path, body)
                content = (value if isinstance(value, str) else json.dumps(value)).encode()
                if status == 404 and isinstance(value, dict):
                    codes = {"Repository not found": "RepoNotFound"}
                    headers["X-Error-Code"] = codes.get(value["error"], "RevisionNotFound")
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_POST = do_HEAD = answer  # noqa: N815

        def log_message(self, *arguments):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    state.url = f"http://127.0.0.1:{http.server_port}"
    threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
    yield state
    http.shutdown()
    http.server_close()


def use_hub(monkeypatch, hub, home):
    """Make a hub the endpoint of this process's client, with a token and an empty cache."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "no-token"))
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
