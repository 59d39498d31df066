"""A small Hugging Face Hub on the loopback interface: the part of its HTTP API that pushing and pulling models needs.

    with serve() as hub:  # hub.url is for HF_ENDPOINT; hub.repos, hub.log and hub.faults are there to look at
        hub.fault("PUT", "/_lfs/", cut_request=1000)

Everything is kept in memory. Files of a model go up as Git LFS does it (preupload, batch, PUT, verify, commit) and come
down through a redirect to another origin, as from the Hub's CDN, which must never see the token.
"""

import base64
import contextlib
import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

WRITE_TOKEN, READ_TOKEN = "hf_write", "hf_read"
USER = "user"

LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".onnx", ".h5")
LFS_SIZE = 10 * 2**20  # larger files are LFS files whatever they are called
PART_SIZE, MULTIPART_SIZE = 2**20, 4 * 2**20  # far below the Hub's, so that a small file goes up in parts


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_sha1(data: bytes) -> str:
    """The name that git gives a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def lfs_pointer(oid: str, size: int) -> bytes:
    """The text that git holds in an LFS file's place."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {size}\n".encode()


class HubError(Exception):
    """An answer other than 2xx; ``code`` is what huggingface_hub chooses its exception by."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        body: dict[str, Any] | None = None,
        commit: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = body or {"error": message}
        self.headers = {"X-Error-Message": message, "X-Error-Code": code, "X-Repo-Commit": commit}


@dataclass
class Fault:
    """Something that goes wrong with the requests of a method whose path a pattern is found in.

    Attributes:
        method: Of the request.
        pattern: A regular expression, searched for in the path.
        times: How many requests it meets; the next are answered properly.
        status: Answer with this status instead.
        code: With ``status``: the error code, such as ``"RepoNotFound"``.
        cut_request: Read so many bytes of the request's body, then cut the connection.
        cut_answer: Do what was asked, send so many bytes of the answer's body, then cut the connection.
        alter: Changes a file's bytes on their way, up or down; sizes and hashes stay those of the true file.
        met: How many requests it has met so far.
    """

    method: str
    pattern: str
    times: int = 1
    status: int | None = None
    code: str | None = None
    cut_request: int | None = None
    cut_answer: int | None = None
    alter: Callable[[bytes], bytes] = lambda data: data
    met: int = 0


@dataclass
class File:
    """An entry of a commit's tree."""

    sha256: str
    size: int
    oid: str  # git's name: of the content, or of the pointer to it
    lfs: bool


@dataclass
class Commit:
    tree: dict[str, File]
    title: str
    message: str
    parent: str | None
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime()))


class Repo:
    """A repository: its commits by id, and its branches, tags and pull requests, each a name and a commit."""

    def __init__(self, kind: str, repo_id: str, private: bool) -> None:
        self.kind, self.id, self.private = kind, repo_id, private
        self.commits: dict[str, Commit] = {}
        self.refs: dict[str, dict[str, str]] = {"branch": {}, "tag": {}, "pr": {}}

    def resolve(self, revision: str) -> str:
        """The commit that a branch, tag, pull request or commit id names."""
        for refs in self.refs.values():
            if revision in refs:
                return refs[revision]
        if revision in self.commits:
            return revision
        raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def tree(self, revision: str = "main") -> dict[str, File]:
        return self.commits[self.resolve(revision)].tree

    def commit(self, tree: dict[str, File], title: str, message: str = "", parent: str | None = None) -> str:
        text = repr((parent, title, message, time.time_ns(), sorted((p, f.oid) for p, f in tree.items())))
        oid = hashlib.sha1(text.encode()).hexdigest()
        self.commits[oid] = Commit(tree, title, message, parent)
        return oid

    def history(self, revision: str = "main") -> list[str]:
        """The titles of the commits that led to a revision, the newest first."""
        titles, oid = [], self.resolve(revision)
        while oid:
            titles.append(self.commits[oid].title)
            oid = self.commits[oid].parent
        return titles


class Hub(ThreadingHTTPServer):
    """The server; ``repos`` maps (``"models"``, id) to a :class:`Repo`, ``log`` has (method, path, status)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.cdn = f"http://localhost:{self.server_port}"
        self.repos: dict[tuple[str, str], Repo] = {}
        self.blobs: dict[str, bytes] = {}  # by SHA-256
        self.parts: dict[tuple[str, int], bytes] = {}
        self.faults: list[Fault] = []
        self.log: list[tuple[str, str, int]] = []
        self.lock = threading.RLock()
        self._connections: set[socket.socket] = set()

    def fault(self, method: str, pattern: str, **kwargs: Any) -> Fault:
        """Adds a :class:`Fault`, and returns it."""
        self.faults.append(Fault(method, pattern, **kwargs))
        return self.faults[-1]

    def model(self, repo_id: str) -> Repo:
        return self.repos["models", repo_id]

    def read(self, repo_id: str, path: str, revision: str = "main") -> bytes:
        """The content of a model's file."""
        return self.blobs[self.model(repo_id).tree(revision)[path].sha256]

    def asked(self, method: str, pattern: str) -> int:
        """How many requests of a method had a path that a pattern is found in."""
        return sum(m == method and re.search(pattern, path) is not None for m, path, _ in self.log)

    def store(self, data: bytes) -> File:
        self.blobs[sha256(data)] = data
        return File(sha256(data), len(data), git_sha1(data), lfs=False)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def stop(self) -> None:
        """Stops serving, kept-alive connections too: a client's pool would go on being answered."""
        self.shutdown()
        self.server_close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class Handler(BaseHTTPRequestHandler):
    """One connection. The methods below are the endpoints; ``ROUTES`` says which path leads to which."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else an answer in two writes waits for the client's delayed acknowledgement
    server: Hub

    def log_message(self, *args: Any) -> None:
        pass

    # -- What every request goes through ------------------------------------------------------------------------------

    def dispatch(self) -> None:
        url = urlsplit(self.path)
        self.query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        self.fault = self.find_fault(url.path)
        self.raw = b""
        try:
            if self.fault and self.fault.cut_request is not None:
                self.rfile.read(self.fault.cut_request)
                raise ConnectionAbortedError
            self.raw = self.read_body()
            if self.fault and self.fault.status:
                raise HubError(self.fault.status, "a fault of the test's", self.fault.code)
            self.route(url.path)
        except HubError as error:
            self.send(error.body, error.headers, error.status)
        except ConnectionError:
            self.close_connection = True
            self.server.log.append((self.command, self.path, 0))

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = dispatch

    def find_fault(self, path: str) -> Fault | None:
        with self.server.lock:
            for fault in self.server.faults:
                if fault.met < fault.times and fault.method == self.command and re.search(fault.pattern, path):
                    fault.met += 1
                    return fault
        return None

    def route(self, path: str) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.user = USER if token in (WRITE_TOKEN, READ_TOKEN) else None
        if token and not self.user:
            raise HubError(401, "Invalid credentials in Authorization header")
        for methods, pattern, endpoint in ROUTES:
            match = re.fullmatch(pattern, path)  # the path stays quoted: "feat%2Fx" is one segment
            if match is None or self.command not in methods:
                continue
            if self.command not in ("GET", "HEAD") and endpoint not in PUBLIC:
                if not self.user:
                    raise HubError(401, "Invalid username or password.")
                if token == READ_TOKEN:
                    raise HubError(403, "You don't have the rights to write with this token")
            found = {key: value and unquote(value) for key, value in match.groupdict().items()}
            if "id" in found:
                found["repo"] = self.find_repo((found.pop("kind") or "models").strip("/"), found.pop("id"))
            return endpoint(self, **found)
        raise HubError(404, f"no route for {self.command} {path}")

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    def send(self, body: Any = b"", headers: dict[str, Any] | None = None, status: int = 200) -> None:
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        cut = self.fault.cut_answer if self.fault else None
        if cut == 0:
            raise ConnectionAbortedError  # not even a status
        if cut is None:  # before the answer: whoever has read that may look here at once
            self.server.log.append((self.command, self.path, status))
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", **(headers or {}), "Content-Length": len(body)}.items():
            if value is not None:
                self.send_header(key, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])
        if cut is not None:
            raise ConnectionAbortedError

    def alter(self, data: bytes) -> bytes:
        return self.fault.alter(data) if self.fault else data

    def find_repo(self, kind: str, repo_id: str) -> Repo:
        repo = self.server.repos.get((kind, repo_id))
        if repo is None or (repo.private and not self.user):
            raise HubError(404 if self.user else 401, "Repository not found", "RepoNotFound")
        return repo

    def page(self, repo: Repo) -> str:
        return f"{self.server.url}/{'' if repo.kind == 'models' else repo.kind + '/'}{repo.id}"

    # -- Accounts and repositories ------------------------------------------------------------------------------------

    def whoami(self) -> None:
        if not self.user:
            raise HubError(401, "Invalid username or password.")
        token = {"displayName": "test", "role": "write"}
        auth = {"type": "access_token", "accessToken": token}
        self.send({"type": "user", "name": self.user, "fullname": self.user, "orgs": [], "auth": auth})

    def validate_yaml(self) -> None:
        self.send({"errors": [], "warnings": []})

    def create_repo(self) -> None:
        asked, repos = self.json, self.server.repos
        owner = asked.get("organization") or self.user
        if owner != self.user:
            raise HubError(403, f"You don't have the rights to create a model under the namespace {owner}")
        key = ((asked.get("type") or "model") + "s", f"{owner}/{asked['name']}")
        if key in repos:  # the client reads "url" where it accepts an existing repository
            body = {"error": "exists", "url": self.page(repos[key])}
            raise HubError(409, "You already created this repo", body=body)
        repo = repos[key] = Repo(*key, private=asked.get("visibility") == "private" or bool(asked.get("private")))
        attributes = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES)
        tree = {".gitattributes": self.server.store(attributes.encode())}
        repo.refs["branch"]["main"] = repo.commit(tree, "initial commit")
        self.send({"url": self.page(repo), "name": repo.id})

    def delete_repo(self) -> None:
        asked = self.json
        owner = asked.get("organization") or self.user
        repo = self.find_repo((asked.get("type") or "model") + "s", f"{owner}/{asked['name']}")
        del self.server.repos[repo.kind, repo.id]
        self.send(b"OK")

    def info(self, repo: Repo, revision: str | None) -> None:
        oid = repo.resolve(revision or "main")
        commit = repo.commits[oid]
        siblings = [{"rfilename": path, "size": f.size, "blobId": f.oid} for path, f in sorted(commit.tree.items())]
        state = {"private": repo.private, "gated": False, "tags": [], "lastModified": commit.date}
        self.send({"id": repo.id, "sha": oid, "siblings": siblings, **state})

    def tree(self, repo: Repo, revision: str, path: str | None) -> None:
        prefix, deep, out = f"{path}/" if path else "", self.query.get("recursive") == "true", {}
        for name, file in sorted(repo.tree(revision).items()):
            if not name.startswith(prefix):
                continue
            parts = name[len(prefix) :].split("/")
            for i in range(1, len(parts) if deep else min(2, len(parts))):
                folder = prefix + "/".join(parts[:i])
                out[folder] = {"type": "directory", "oid": git_sha1(folder.encode()), "size": 0, "path": folder}
            if deep or len(parts) == 1:
                out[name] = {"type": "file", "oid": file.oid, "size": file.size, "path": name}
                if file.lfs:
                    pointer = lfs_pointer(file.sha256, file.size)
                    out[name]["lfs"] = {"oid": file.sha256, "size": file.size, "pointerSize": len(pointer)}
        if path and not out:
            raise HubError(404, f"{path} does not exist on {revision}", "EntryNotFound")
        self.send(list(out.values()))

    def commits(self, repo: Repo, revision: str) -> None:
        out, oid = [], repo.resolve(revision)
        while oid:
            c = repo.commits[oid]
            out.append({"id": oid, "authors": [{"user": USER}], "title": c.title, "message": c.message, "date": c.date})
            oid = c.parent
        self.send(out)

    def list_refs(self, repo: Repo) -> None:
        def items(what: str, prefix: str) -> list[dict[str, str]]:
            return [{"name": n, "ref": prefix + n, "targetCommit": c} for n, c in repo.refs[what].items()]

        branches, tags, pulls = items("branch", "refs/heads/"), items("tag", "refs/tags/"), items("pr", "")
        self.send({"branches": branches, "tags": tags, "pullRequests": pulls, "converts": []})

    def ref(self, repo: Repo, what: str, ref: str) -> None:
        """POST branch/NEW {startingPoint}, POST tag/REVISION {tag}, DELETE branch/NAME or tag/NAME."""
        refs = repo.refs[what]
        if self.command == "DELETE":
            if not refs.pop(ref, None):
                raise HubError(404, "no such ref", "RevisionNotFound")
            return self.send(b"OK")
        name, start = (ref, self.json.get("startingPoint", "main")) if what == "branch" else (self.json["tag"], ref)
        if name in refs:
            raise HubError(409, f"Reference already exists: {name}")
        refs[name] = repo.resolve(start)
        self.send({"success": True})

    # -- Pushing ------------------------------------------------------------------------------------------------------

    def preupload(self, repo: Repo, revision: str) -> None:
        tree, files = repo.tree(revision), []
        for asked in self.json["files"]:
            lfs = asked["path"].endswith(LFS_SUFFIXES) or asked["size"] > LFS_SIZE
            old = tree.get(asked["path"])
            # A file whose name on the Hub equals the client's is left out of the commit.
            oid = old and (old.sha256 if old.lfs else old.oid)
            mode = "lfs" if lfs else "regular"
            files.append({"path": asked["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.send({"files": files})

    def lfs_batch(self, repo: Repo) -> None:
        objects = []
        for asked in self.json["objects"]:
            oid, size, href = asked["oid"], asked["size"], f"{self.server.url}/_lfs/{asked['oid']}"
            answer = {"oid": oid, "size": size}
            if oid not in self.server.blobs:  # without actions, the client knows that it is there
                upload: dict[str, Any] = {"href": href}
                if size > MULTIPART_SIZE:
                    urls = {str(i): f"{href}/{i}" for i in range(1, -(-size // PART_SIZE) + 1)}
                    upload = {"href": f"{href}/complete", "header": {"chunk_size": str(PART_SIZE), **urls}}
                answer["actions"] = {"upload": upload, "verify": {"href": f"{href}/verify"}}
            objects.append(answer)
        self.send({"transfer": "basic", "objects": objects})

    def lfs(self, oid: str, what: str | None) -> None:
        """PUT of a whole file or of a part of it; POST complete and verify."""
        if self.command == "PUT" and what:
            self.server.parts[oid, int(what)] = self.alter(self.raw)
        elif self.command == "PUT":
            self.store_lfs(oid, self.alter(self.raw))
        elif what == "complete":
            self.store_lfs(oid, b"".join(self.server.parts.pop((oid, p["partNumber"])) for p in self.json["parts"]))
        elif len(self.server.blobs[oid]) != self.json["size"]:
            raise HubError(400, "size mismatch")
        self.send({"success": True}, {"ETag": f'"{sha256(self.raw)[:32]}"'})

    def store_lfs(self, oid: str, data: bytes) -> None:
        if sha256(data) != oid:
            raise HubError(400, "The SHA256 you specified does not match the calculated checksum")
        self.server.store(data)

    def commit(self, repo: Repo, revision: str) -> None:
        lines = [json.loads(line) for line in self.raw.splitlines()]
        head = lines[0]["value"]
        with self.server.lock:
            parent = repo.resolve(revision)
            if not parent.startswith(head.get("parentCommit") or ""):
                raise HubError(412, "A commit has happened since. Please refresh and try again.")
            tree = dict(repo.tree(parent))
            for line in lines[1:]:
                self.apply(tree, line["key"], line["value"])
            oid = repo.commit(tree, head["summary"], head.get("description", ""), parent)
            extra = {}
            if self.query.get("create_pr"):
                number = len(repo.refs["pr"]) + 1
                repo.refs["pr"][f"refs/pr/{number}"] = oid
                extra = {"pullRequestUrl": f"{self.page(repo)}/discussions/{number}"}
            else:
                repo.refs["pr" if revision.startswith("refs/pr/") else "branch"][revision] = oid
        self.send({"success": True, "commitOid": oid, "commitUrl": f"{self.page(repo)}/commit/{oid}", **extra})

    def apply(self, tree: dict[str, File], key: str, value: dict[str, Any]) -> None:
        """One line of a commit, on the tree."""
        path = value["path"]
        if key == "file":
            tree[path] = self.server.store(base64.b64decode(value["content"]))
        elif key == "lfsFile":
            data = self.server.blobs.get(value["oid"])
            if data is None:
                raise HubError(400, f"LFS object of {path} was not uploaded")
            tree[path] = File(value["oid"], len(data), git_sha1(lfs_pointer(value["oid"], len(data))), lfs=True)
        else:  # deletedFile, deletedFolder
            folder = path.rstrip("/") + "/"
            gone = [p for p in tree if p == path or (key == "deletedFolder" and p.startswith(folder))]
            if not gone:
                raise HubError(404, "A file with this name doesn't exist", "EntryNotFound")
            for p in gone:
                del tree[p]

    # -- Pulling ------------------------------------------------------------------------------------------------------

    def resolve(self, repo: Repo, revision: str, path: str) -> None:
        commit = repo.resolve(revision)
        file = repo.tree(commit).get(path)
        if file is None:
            raise HubError(404, "Entry not found", "EntryNotFound", commit=commit)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{file.oid}"'}
        if not file.lfs:
            return self.send_file(file.sha256, headers)
        headers |= {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": file.size}
        self.send(headers={**headers, "Location": f"{self.server.cdn}/_cdn/{file.sha256}"}, status=302)

    def cdn(self, oid: str) -> None:
        if self.user:
            raise HubError(400, "the token was sent to the CDN")
        self.send_file(oid, {"ETag": f'"{oid}"'})

    def send_file(self, oid: str, headers: dict[str, Any]) -> None:
        data, status = self.alter(self.server.blobs[oid]), 200
        headers |= {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, total = int(match[1]), len(data)
            data, status = data[start : int(match[2] or total) + 1], 206
            headers["Content-Range"] = f"bytes {start}-{start + len(data) - 1}/{total}"
        self.send(data, headers, status)


_API = r"/api/(?P<kind>models|datasets|spaces)/(?P<id>[^/]+/[^/]+)"
_WEB = r"/(?P<kind>datasets/|spaces/)?(?P<id>[^/]+/[^/]+?)"
_REVISION = r"/(?P<revision>[^/]+)"
PUBLIC = (Handler.validate_yaml, Handler.lfs)  # an LFS address stands for a signed one: no token goes with a PUT
ROUTES = [
    (("GET",), r"/api/whoami-v2", Handler.whoami),
    (("POST",), r"/api/validate-yaml", Handler.validate_yaml),
    (("POST",), r"/api/repos/create", Handler.create_repo),
    (("DELETE",), r"/api/repos/delete", Handler.delete_repo),
    (("GET",), rf"{_API}(?:/revision{_REVISION})?", Handler.info),
    (("GET",), rf"{_API}/tree{_REVISION}(?:/(?P<path>.+))?", Handler.tree),
    (("GET",), rf"{_API}/commits{_REVISION}", Handler.commits),
    (("GET",), rf"{_API}/refs", Handler.list_refs),
    (("POST", "DELETE"), rf"{_API}/(?P<what>branch|tag)/(?P<ref>[^/]+)", Handler.ref),
    (("POST",), rf"{_API}/preupload{_REVISION}", Handler.preupload),
    (("POST",), rf"{_API}/commit{_REVISION}", Handler.commit),
    (("POST",), rf"{_WEB}\.git/info/lfs/objects/batch", Handler.lfs_batch),
    (("PUT", "POST"), r"/_lfs/(?P<oid>[0-9a-f]{64})(?:/(?P<what>\w+))?", Handler.lfs),
    (("GET", "HEAD"), rf"{_WEB}/resolve{_REVISION}/(?P<path>.+)", Handler.resolve),
    (("GET", "HEAD"), r"/_cdn/(?P<oid>[0-9a-f]{64})", Handler.cdn),
]


@contextlib.contextmanager
def serve() -> Iterator[Hub]:
    """A Hub that runs in a thread while the block does, on a port that was free."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.stop()
        thread.join()
