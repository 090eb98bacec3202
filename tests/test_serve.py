"""The server as users start it."""

import json
import signal
import subprocess
import urllib.parse
import urllib.request

import pytest
import serve
from launchers import REPOSITORY, environment, free_port, python

from samerun.errors import InputError

pytest.importorskip("aiohttp")


@pytest.fixture
def server(bert_folder, tmp_path):
    """(the process, its address)"""
    port = free_port()
    command = [*python(), str(REPOSITORY / "app" / "serve.py"), str(bert_folder), "--port", str(port)]
    process = subprocess.Popen(
        command, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    yield process, f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


@pytest.mark.slow
def test_a_text_gets_its_labels_and_a_signal_ends_the_server(server):
    process, address = server
    assert process.stdout.readline().strip().endswith(f"at {address}")
    body = json.dumps({"text": "return the values"}).encode()
    with urllib.request.urlopen(f"{address}/predict", body) as answer:
        (line,) = json.load(answer)["predictions"]
    assert set(line["probabilities"]) == {"LABEL_0", "LABEL_1"}
    with urllib.request.urlopen(address) as answer:
        assert "<html" in answer.read().decode()
        assert answer.headers["X-Frame-Options"] == "DENY"
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert process.stdout.read().startswith("stopped")


@pytest.mark.parametrize("wrong", ["models.example:80", "https://a.example", "a b", ""])
def test_hosts_are_names_alone(wrong, monkeypatch):
    monkeypatch.setattr("sys.argv", ["serve.py", "best", "--allowed_hosts", "a.example, b.example"])
    assert serve.parse_options()[0].allowed_hosts == ("a.example", "b.example")
    monkeypatch.setattr("sys.argv", ["serve.py", "best", f"--allowed_hosts=a.example,{wrong}"])
    with pytest.raises(InputError, match="expected a name alone, without scheme and port"):
        serve.parse_options()


def test_an_address_that_is_taken_or_no_port_is_refused():
    taken = serve.bind_socket("127.0.0.1", 0)
    taken.listen()
    with pytest.raises(InputError, match="cannot be listened to"):
        serve.bind_socket("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(InputError, match="port must be 0-65535"):
        serve.bind_socket("127.0.0.1", 99999)
    taken.close()
