"""A local hub with one repository that records its requests."""

import hashlib
import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

COMMIT = "c" * 40


@contextmanager
def serve(name, files, *, token=None, error=None):
    """Serve a repository's files.

    Args:
        name: repository id, org/name.
        files: content by path.
        token: token that a request must have; None accepts every request.
        error: the hub's error code for all requests; None serves the files.

    Yields:
        The address, and a list of (path, token) that grows with each request.
    """
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.wfile.write(self._start())

        def do_HEAD(self):
            self._start()

        def log_message(self, *_):
            pass

        def _start(self):
            given = (self.headers["Authorization"] or "").removeprefix("Bearer ")
            asked.append((self.path, given))
            if error or (token and given != token):
                status, headers, body = 401, {"X-Error-Code": error or "RepoNotFound"}, b"{}"
            else:
                status, headers, body = _found(name, files, self.path.partition("?")[0])
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            return body

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _found(name, files, path):
    """Status, headers and body of a response."""
    if path == f"/api/models/{name}/revision/main":
        siblings = [{"rfilename": file} for file in files]
        info = {"id": name, "sha": COMMIT, "siblings": siblings, "tags": []}
        return 200, {}, json.dumps(info).encode()
    if path.startswith(f"/api/models/{name}/tree/{COMMIT}"):
        tree = [
            {"type": "file", "path": file, "size": len(data), "oid": _etag(data)}
            for file, data in files.items()
        ]
        return 200, {}, json.dumps(tree).encode()
    if path.startswith("/api/models/"):
        code = "RevisionNotFound" if f"/{name}/" in path else "RepoNotFound"
        return 404, {"X-Error-Code": code}, b"{}"
    data = files[path.removeprefix(f"/{name}/resolve/{COMMIT}/")]
    return 200, {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": COMMIT}, data


def _etag(data):
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
