"""Objects by name on a disk and on a server of S3; what to type where a store cannot be reached."""

import builtins
import urllib.request
import uuid
from pathlib import Path

import pytest

from jtrain.io import object_store
from jtrain.io.object_store import ObjectStore, ObjectStoreError

pytest.importorskip("obstore", reason="pip install 'jtrain[s3]'")
SECRET = "abcdEFGH1234abcdEFGH1234abcdEFGH1234abcd"


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.thorough)])
def address(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if request.param == "file":
        yield f"file://{tmp_path}/bucket/a b"
        return
    server = pytest.importorskip("moto.server", reason="pip install 'moto[server]'")
    served = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    served.start()
    _, port = served.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    bucket = f"b{uuid.uuid4().hex[:8]}"
    put = urllib.request.Request(f"http://127.0.0.1:{port}/{bucket}", method="PUT")
    urllib.request.urlopen(put).close()
    yield f"s3://{bucket}/a b"
    served.stop()


def test_objects_are_written_listed_read_and_removed_by_name(address: str, tmp_path: Path):
    objects = ObjectStore(f"{address}/")
    assert objects.sizes() == {}
    assert objects.read("one.txt") is None
    names = ["one.txt", "two.bin", "in/three.txt", "in/more/ü #1%.txt"]
    for size, name in enumerate(names):
        objects.write(name, b"x" * size)
    assert objects.sizes() == dict(sorted(zip(names, range(4), strict=True)))
    assert objects.sizes("in") == {"in/more/ü #1%.txt": 3, "in/three.txt": 2}
    assert objects.read("in/three.txt", most=1) == b"x"
    (tmp_path / "sent").write_bytes(sent := bytes(range(256)) * 50_000)  # in several parts
    version = objects.version("one.txt")
    objects.send(tmp_path / "sent", "one.txt")
    assert objects.version("one.txt") != version
    objects.fetch("one.txt", tmp_path / "new" / "folder" / "fetched")
    assert (tmp_path / "new" / "folder" / "fetched").read_bytes() == sent
    objects.remove(["none", "one.txt", "in/three.txt"])
    assert [objects.exists(name) for name in ("one.txt", "two.bin", "in")] == [False, True, False]
    for pattern, found in {
        "*.bin": ["two.bin"],
        "*": ["two.bin"],
        "i[mn]/*/*.t?t": ["in/more/ü #1%.txt"],
        "**/*.[!b]*": ["in/more/ü #1%.txt"],
    }.items():
        assert objects.matches(pattern) == found, pattern


def failure(address: str) -> str:
    with pytest.raises(ObjectStoreError) as caught:
        ObjectStore(address).write("name", b"")
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)
    return str(caught.value)


def test_an_error_says_what_to_type(monkeypatch: pytest.MonkeyPatch):
    assert "begins with s3://, gs:// or az://" in failure("other://bucket")
    monkeypatch.setattr(object_store, "RETRIES", 0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://user:{SECRET}@127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    assert "Check the network and AWS_ENDPOINT_URL" in failure("s3://bucket/runs")
    real = builtins.__import__

    def without(name: str, *rest):
        if name == "obstore":
            raise ImportError
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    for address, extra in {"s3://b": "s3", "gs://b": "gcs", "az://b": "azure"}.items():
        assert f"pip install 'jtrain[{extra}]'" in failure(address)


@pytest.mark.thorough
@pytest.mark.parametrize("address", ["s3"], indirect=True)
def test_a_bucket_that_does_not_exist_is_an_error(address: str):
    assert "Create the bucket" in failure("s3://another-bucket/runs")
    with pytest.raises(ObjectStoreError, match="Create the bucket"):
        ObjectStore("s3://another-bucket/runs").read("run.json")


def test_keys_and_region_come_from_the_profile_where_no_variable_has_them(tmp_path, monkeypatch):
    (tmp_path / "config").write_text("[profile me]\nregion = eu-west-1\n[default]\nregion = x\n")
    (tmp_path / "credentials").write_text(
        "[me]\naws_access_key_id = AK\naws_secret_access_key = a%b=\n"
    )
    for name in ("ACCESS_KEY_ID", "REGION", "DEFAULT_REGION", "ENDPOINT_URL"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "me")
    found = ObjectStore("s3://bucket")._store.config
    assert (found["access_key_id"], found["secret_access_key"]) == ("AK", "a%b=")
    assert found["region"] == "eu-west-1"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "other")
    monkeypatch.setenv("AWS_REGION", "us-east-2")
    assert object_store._aws_profile() == {}
