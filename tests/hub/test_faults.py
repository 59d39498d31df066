"""What goes wrong on the way to the Hub and back, on a loopback Hub: nothing half-published, no corrupt cache.

Each case of the tables is a fault, and what the user sees. After every failed push the branch is as it was; after every
failed pull no file under its final name in the cache is another one than the Hub's, and no target folder is there.
Once the fault is gone, the same call succeeds.
"""

import hashlib
import re

import pytest
import timm
import torch
from huggingface_hub.utils.sha import git_hash
from local_hub import READ_TOKEN
from safetensors.torch import load_file, save_file

from affdiv_zoo.hf import save_pretrained
from affdiv_zoo.hub import FolderError, HubError, pull, push

ALWAYS = 10**6


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    """One bit of the last byte is another one: of the last weight, in a safetensors file."""
    return data[:-1] + bytes([data[-1] ^ 1])


def longer(data: bytes) -> bytes:
    return data + b"more"


def assert_cache_is_sound(cache) -> None:
    """Every blob that is not marked as incomplete has the content that its name is the hash of."""
    for blob in cache.glob("models--*/blobs/*"):
        if not blob.name.endswith(".incomplete"):
            data = blob.read_bytes()
            assert blob.name in (hashlib.sha256(data).hexdigest(), git_hash(data)), blob.name
    for link in cache.glob("models--*/snapshots/*/*"):
        assert link.exists(), f"{link} leads nowhere"


# -- Pushing -----------------------------------------------------------------------------------------------------------

# Over before the client gives up: the push succeeds as if nothing had happened.
PUSH_PASSING = {
    "500 once, repository": ("GET", r"/api/models/user/net$", dict(status=500)),
    "500 once, creation": ("POST", "/api/repos/create", dict(status=500)),
    "500 once, preupload": ("POST", "/preupload/", dict(status=500)),
    "500 once, LFS batch": ("POST", "objects/batch", dict(status=500)),
    "503 twice, upload": ("PUT", "/_lfs/", dict(status=503, times=2)),
    "500 once, verification": ("POST", "/verify$", dict(status=500)),
    "500 once, commit": ("POST", "/commit/", dict(status=500)),
    "cut in the middle of the upload": ("PUT", "/_lfs/", dict(cut_request=100_000)),
    "cut before the answer to the upload": ("PUT", "/_lfs/", dict(cut_answer=0)),
    "cut in the middle of the commit": ("POST", "/commit/", dict(cut_request=100)),
    "cut before the answer to the commit": ("POST", "/commit/", dict(cut_answer=0)),
    "cut in the middle of the answer to the commit": ("POST", "/commit/", dict(cut_answer=10)),
}


@pytest.mark.parametrize("method, pattern, fault", PUSH_PASSING.values(), ids=PUSH_PASSING)
def test_a_push_outlasts_a_passing_fault(hub, client, run, method, pattern, fault):
    met = hub.fault(method, pattern, **fault)
    report = push(run, "user/net")
    assert met.met == met.times
    repo = hub.model("user/net")
    assert repo.history() == ["Add model", "initial commit"]
    assert report.commit == repo.refs["branch"]["main"]
    assert hub.read("user/net", "model.safetensors") == (run / "model.safetensors").read_bytes()


# Stays, and the user is told what to do.
PUSH_LASTING = {
    "401": ("GET", "/api/models/", dict(status=401), "log in again"),
    "403": ("POST", "/preupload/", dict(status=403), "make one with write access"),
    "404": ("POST", "/preupload/", dict(status=404, code="RepoNotFound"), "check the name"),
    "409": ("POST", "/commit/", dict(status=409), "somebody else changed user/net"),
    "429": ("POST", "/commit/", dict(status=429), "wait some minutes"),
    "500, repository": ("GET", "/api/models/", dict(status=500), "run this again later"),
    "500, upload": ("PUT", "/_lfs/", dict(status=500), "run this again later"),
    "500, commit": ("POST", "/commit/", dict(status=500), "run this again later"),
    "cut in the middle of every upload": ("PUT", "/_lfs/", dict(cut_request=100_000), "failed or was cut"),
    "cut in the middle of every commit": ("POST", "/commit/", dict(cut_request=100), "failed or was cut"),
    "wrong hash": ("PUT", "/_lfs/", dict(alter=flipped), "a proxy may change what is sent"),
    "wrong size": ("PUT", "/_lfs/", dict(alter=truncated), "a proxy may change what is sent"),
    "too long": ("PUT", "/_lfs/", dict(alter=longer), "a proxy may change what is sent"),
}


@pytest.mark.parametrize("method, pattern, fault, message", PUSH_LASTING.values(), ids=PUSH_LASTING)
def test_a_push_that_fails_publishes_nothing(hub, client, run, method, pattern, fault, message):
    push(run, "user/net")
    before = hub.model("user/net").tree(), hub.model("user/net").history()
    old = dict(hub.blobs)
    weights = load_file(run / "model.safetensors")
    save_file({key: value + 1 for key, value in weights.items()}, run / "model.safetensors")

    hub.fault(method, pattern, **fault, times=ALWAYS)
    with pytest.raises(HubError, match=message) as caught:
        push(run, "user/net")
    assert "nothing was published" in str(caught.value)
    assert caught.value.__cause__ is not None
    assert (hub.model("user/net").tree(), hub.model("user/net").history()) == before
    assert all(hub.blobs[oid] == data for oid, data in old.items())

    hub.faults.clear()
    push(run, "user/net")
    assert hub.read("user/net", "model.safetensors") == (run / "model.safetensors").read_bytes()


@pytest.mark.parametrize("part", [1, 2, 5])
def test_a_large_file_goes_up_in_parts_and_a_cut_part_goes_again(hub, client, tmp_path, part):
    model = timm.create_model("mlp_cifar_affine", num_classes=3, width=360, depth=2)
    save_pretrained(model, tmp_path / "large")
    cut = hub.fault("PUT", rf"/_lfs/\w+/{part}$", cut_request=50_000)
    push(tmp_path / "large", "user/large")
    assert cut.met == 1
    assert hub.asked("PUT", r"/_lfs/\w+/\d+$") >= 6
    assert hub.read("user/large", "model.safetensors") == (tmp_path / "large/model.safetensors").read_bytes()


def test_without_a_token_or_with_a_wrong_one_or_one_for_reading(hub, client, run, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubError, match="wants to know who you are.*hf auth login"):
        push(run, "user/net")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(HubError, match="does not accept the token.*hf auth login"):
        push(run, "user/net")
    monkeypatch.setenv("HF_TOKEN", READ_TOKEN)
    with pytest.raises(HubError, match="make one with write access"):
        push(run, "user/net")
    assert hub.repos == {}


def test_a_repository_of_somebody_else(hub, client, run):
    with pytest.raises(HubError, match="name a repository of yours"):
        push(run, "somebody/net")
    assert hub.repos == {}


def test_a_commit_of_somebody_else_meanwhile_is_not_overwritten(hub, client, run):
    push(run, "user/net")
    repo = hub.model("user/net")
    (run / "README.md").write_text(hub.read("user/net", "README.md").decode() + "\nMine.\n")

    original, start = repo.resolve, len(hub.log)

    def resolve(revision):
        """Somebody commits while our files are under way."""
        if any(method == "POST" and "/preupload/" in path for method, path, _ in hub.log[start:]):
            repo.resolve = original
            tree = {**repo.tree(), "theirs.txt": hub.store(b"theirs")}
            repo.refs["branch"]["main"] = repo.commit(tree, "Theirs", parent=repo.refs["branch"]["main"])
        return original(revision)

    repo.resolve = resolve
    with pytest.raises(HubError, match="somebody else changed user/net meanwhile"):
        push(run, "user/net")
    assert repo.history() == ["Theirs", "Add model", "initial commit"]
    push(run, "user/net")
    assert repo.history()[0] == "Add model" and hub.read("user/net", "theirs.txt") == b"theirs"


def test_a_pull_request_is_not_opened_twice(hub, client, run):
    push(run, "user/net", revision="start")  # main has nothing
    hub.fault("POST", "/commit/", cut_answer=0)
    with pytest.raises(HubError, match="failed or was cut"):
        push(run, "user/net", create_pr=True)
    assert len(hub.model("user/net").refs["pr"]) == 1


def test_no_hub_at_all(hub, client, run):
    hub.stop()
    with pytest.raises(HubError, match="the connection to the Hub failed"):
        push(run, "user/net")
    with pytest.raises(HubError, match="the connection to the Hub failed"):
        pull("user/net")


# -- Pulling -----------------------------------------------------------------------------------------------------------

PULL_PASSING = {
    "500 once, repository": ("GET", r"/api/models/user/net", dict(status=500)),
    "500 once, listing": ("GET", "/tree/", dict(status=500)),
    "500 once, metadata": ("HEAD", "/resolve/", dict(status=500)),
    "500 once, file": ("GET", "/_cdn/", dict(status=500)),
    "cut in the middle of the weights": ("GET", "/_cdn/", dict(cut_answer=100_000)),
    "cut before the weights": ("GET", "/_cdn/", dict(cut_answer=0)),
    "cut in the middle of the config": ("GET", "/resolve/.*/config.json", dict(cut_answer=20)),
    "too short once": ("GET", "/_cdn/", dict(alter=truncated)),
}


@pytest.mark.parametrize("method, pattern, fault", PULL_PASSING.values(), ids=PULL_PASSING)
def test_a_pull_outlasts_a_passing_fault(hub, client, run, tmp_path, method, pattern, fault):
    push(run, "user/net")
    met = hub.fault(method, pattern, **fault)
    folder = pull("user/net", tmp_path / "here")
    assert met.met == met.times
    for name in ("model.safetensors", "config.json", "README.md", "modeling_affdiv.py"):
        assert (folder / name).read_bytes() == hub.read("user/net", name)
    assert_cache_is_sound(client)


def test_a_cut_download_goes_on_where_it_was_cut(hub, client, run):
    push(run, "user/net")
    hub.fault("GET", "/_cdn/", cut_answer=100_000)
    pull("user/net")
    answers = [status for method, path, status in hub.log if method == "GET" and "/_cdn/" in path]
    assert answers == [0, 206]  # cut, then the rest of it


PULL_LASTING = {
    "401": ("GET", "/api/models/", dict(status=401), "log in again"),
    "403": ("GET", "/api/models/", dict(status=403), "the token may not do that"),
    "404, repository": ("GET", "/api/models/", dict(status=404, code="RepoNotFound"), "check the name"),
    "404, revision": ("GET", "/api/models/", dict(status=404, code="RevisionNotFound"), "has no branch, tag or commit"),
    "404, file": ("GET", "/_cdn/", dict(status=404), "does not find that"),
    "500, repository": ("GET", "/api/models/", dict(status=500), "run this again later"),
    "500, file": ("GET", "/_cdn/", dict(status=500), "run this again later"),
    "cut before every file": ("GET", "/_cdn/", dict(cut_answer=0), "failed or was cut"),
    "wrong hash": ("GET", "/_cdn/", dict(alter=flipped), "another hash than the Hub states"),
    "wrong hash, not LFS": ("GET", "/resolve/.*/config.json", dict(alter=flipped), "another hash than the Hub states"),
    "too short": ("GET", "/_cdn/", dict(alter=truncated), "should be of size"),
    "too long": ("GET", "/_cdn/", dict(alter=longer), "should be of size"),
}


@pytest.mark.parametrize("method, pattern, fault, message", PULL_LASTING.values(), ids=PULL_LASTING)
def test_a_pull_that_fails_leaves_nothing_damaged(hub, client, run, tmp_path, method, pattern, fault, message):
    push(run, "user/net")
    hub.fault(method, pattern, **fault, times=ALWAYS)
    with pytest.raises(HubError, match=message):
        pull("user/net", tmp_path / "here")
    assert not (tmp_path / "here").exists()
    assert_cache_is_sound(client)

    hub.faults.clear()
    folder = pull("user/net", tmp_path / "here")
    assert (folder / "model.safetensors").read_bytes() == hub.read("user/net", "model.safetensors")
    assert_cache_is_sound(client)


def test_an_old_snapshot_is_no_answer_to_a_failure(hub, client, run):
    push(run, "user/net")
    pull("user/net")
    hub.fault("GET", r"/api/models/user/net(/revision/\w+)?$", status=500, times=ALWAYS)
    with pytest.raises(HubError, match="run this again later"):
        pull("user/net")


def test_a_pull_mends_a_cache_that_something_else_damaged(hub, client, run):
    push(run, "user/net")
    snapshot = pull("user/net")
    blob = (snapshot / "model.safetensors").resolve()
    blob.write_bytes(flipped(blob.read_bytes()))
    with pytest.raises(HubError, match="another hash than the Hub states: deleted from the cache"):
        pull("user/net")
    assert_cache_is_sound(client)
    assert (pull("user/net") / "model.safetensors").read_bytes() == hub.read("user/net", "model.safetensors")


def test_a_model_on_the_hub_whose_files_disagree_is_not_copied(hub, client, run, tmp_path):
    push(run, "user/net")
    tree = hub.model("user/net").tree()
    config = hub.read("user/net", "config.json")
    tree["config.json"] = hub.store(re.sub(rb'"width": 16', b'"width": 8', config))
    with pytest.raises(FolderError, match=r"(?s)user/net is no complete.*the model of config.json has \[8, 3072\]"):
        pull("user/net", tmp_path / "here")
    assert not (tmp_path / "here").exists()


def test_timm_by_itself_never_keeps_a_part(hub, client, run):
    push(run, "user/net")
    hub.fault("GET", "/_cdn/", cut_answer=100_000)
    hub.fault("GET", "/_cdn/", cut_answer=0, times=ALWAYS)
    with pytest.raises(Exception, match="(?i)closed connection|disconnected"):
        timm.create_model("hf-hub:user/net", pretrained=True)
    assert_cache_is_sound(client)
    hub.faults.clear()
    model = timm.create_model("hf-hub:user/net", pretrained=True)
    expected = load_file(run / "model.safetensors")
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())
    assert_cache_is_sound(client)
