"""A stand-in for the Hugging Face hub, from which tests download files."""

import hashlib
import json
import re
import threading
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """The part of the hub that downloads need, with its errors.

    ``me/tiny`` can be downloaded. ``me/asked`` lists its files, but its terms must be accepted
    before a file is downloaded; ``me/gated`` does not even list them. ``me/hollow`` has no
    weights, and the connection breaks within the weights of ``me/broken``.
    """

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
        elif repo not in ("me/tiny", "me/asked", "me/hollow", "me/broken"):
            self.answer(b"", {"X-Error-Code": "RepoNotFound"}, 404)
        elif rest in ("", "/revision/main"):
            self.answer_json({"id": repo, "sha": COMMIT, "siblings": []})
        elif rest.startswith(f"/tree/{COMMIT}"):
            files = [path for path in self.folder.rglob("*") if path.is_file()]
            hidden = "*.safetensors" if repo == "me/hollow" else ""
            self.answer_json([self.entry(path) for path in files if not path.match(hidden or "-")])
        elif name != rest and not (self.folder / name).is_file():
            self.answer(b"", {"X-Error-Code": "EntryNotFound"}, 404)
        elif name != rest:
            body, cut = (self.folder / name).read_bytes(), name.endswith(".safetensors")
            self.answer(body, {"ETag": f'"{self.etag(name)}"'}, cut=cut and repo == "me/broken")
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
