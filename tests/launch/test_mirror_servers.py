"""--mirror_to with an S3 server over HTTP (moto) on this machine."""

import shutil
from types import SimpleNamespace

import pytest
import vector_task
from launchers import as_words, free_port, python, run
from refusals import problems_of

from samerun import mirror
from samerun.tools.soak import differences

pytestmark = pytest.mark.slow

SECRET = "neither shown nor written"
INSTALL = "(examples/requirements-mirror.txt)"


@pytest.fixture
def s3(monkeypatch):
    """A server with the bucket "mine"."""
    moto = pytest.importorskip("moto.server", reason=f"moto is not installed {INSTALL}")
    pytest.importorskip("s3fs", reason=f"s3fs is not installed {INSTALL}")
    boto3 = pytest.importorskip("boto3")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=free_port(), verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {"ACCESS_KEY_ID": "me", "SECRET_ACCESS_KEY": SECRET, "DEFAULT_REGION": "us-east-1"}
    for name, value in {**variables, "ENDPOINT_URL": f"http://{host}:{port}"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="mine")
    stopped = []
    yield SimpleNamespace(
        url="s3://mine/runs/a",
        address=f"http://{host}:{port}",
        buckets=lambda: [bucket["Name"] for bucket in client.list_buckets()["Buckets"]],
        stop=lambda: stopped.append(server.stop()),
    )
    if not stopped:
        server.stop()


@pytest.fixture
def train(home, tmp_path):
    """A function that trains vectors in `folder` for `steps` steps."""

    def begin(url, folder="run", steps=6, *more):
        words = as_words(
            **vector_task.JOB | {"max_steps": steps}, output_dir=tmp_path / folder, mirror_to=url
        )
        command = [*python(), vector_task.__file__, "--do_train", "--do_predict", *words, *more]
        return run(command, home)

    return begin


RESUME = ("--resume_from_checkpoint", "auto")


def test_a_run_moves_by_s3(s3, train, tmp_path):
    """It loses the disk and goes on from the mirror, to the bytes of a run that went on from its disk."""
    first = train(s3.url).check()
    assert first.out.endswith(f"{s3.url} has step 6\n")
    shutil.copytree(tmp_path / "run", tmp_path / "stayed")
    shutil.rmtree(tmp_path / "run")
    second = train(s3.url, "run", 9, *RESUME).check()
    assert f"step 6 was fetched from the mirror {s3.url}\n" in second.out
    train(None, "stayed", 9, *RESUME).check()
    assert differences(tmp_path / "stayed", tmp_path / "run") == []
    shutil.rmtree(tmp_path / "run")
    third = train(s3.url, "run", 9, *RESUME).check()
    assert "training       is complete (9 steps)" in third.out
    assert differences(tmp_path / "stayed", tmp_path / "run") == []
    assert SECRET not in "".join(ended.out + ended.err for ended in (first, second, third))
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert s3.buckets() == ["mine"]
    assert len(mirror.Mirror(s3.url)._names()) == mirror.KEPT


def refusal(url):
    (problem,) = problems_of(mirror.Mirror, url)
    assert SECRET not in problem
    return problem


def test_what_s3_refuses_is_said_at_once(s3, monkeypatch):
    requests = pytest.importorskip("requests")
    assert "The specified bucket does not exist" in refusal("s3://yours/runs/a")
    assert s3.buckets() == ["mine"]
    requests.post(f"{s3.address}/moto-api/reset-auth", data=b"0")  # from now on keys are checked
    assert "The AWS Access Key Id you provided does not exist" in refusal(s3.url)
    requests.post(f"{s3.address}/moto-api/reset-auth", data=b"inf")
    with monkeypatch.context() as patch:
        patch.delenv("AWS_SECRET_ACCESS_KEY")
        patch.delenv("AWS_ACCESS_KEY_ID")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        assert "Unable to locate credentials" in refusal(s3.url)
    s3.stop()
    assert 'Could not connect to the endpoint URL: "http://127.0.0.1:' in refusal(s3.url)
