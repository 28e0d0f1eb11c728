"""API keys that change while the server runs."""

import signal
import time

import pytest

from exegpt.cli.key_files import ADMIN_TOKEN, API_KEY, NODE_TOKEN
from exegpt.cli.key_files import keys as _keys
from tests.xserver.conftest import serving
from xcore.errors import InputError


def until_status(server, status, key):
    """Ask with a key until the answer has this status: a signal takes effect a little later."""
    for _ in range(200):
        if server.get("/v1/models", Authorization=f"Bearer {key}")[0] == status:
            return True
        time.sleep(0.05)
    return False


def test_keys_are_read_again_on_sighup(bounded):
    keys, server = bounded.log.parent / "keys", bounded

    def read_again(text):
        keys.write_text(text)
        server.process.send_signal(signal.SIGHUP)

    assert until_status(server, 200, "sesame")
    try:
        read_again("new\n")
        assert until_status(server, 200, "new") and until_status(server, 401, "sesame")
        read_again("\n")  # no key would open the server to everyone
        for _ in range(200):
            if "previous keys stay valid" in server.log.read_text():
                break
            time.sleep(0.05)
        assert "has no key" in server.log.read_text()
        assert until_status(server, 200, "new") and until_status(server, 401, "sesame")
    finally:
        read_again("sesame\n")  # test_monitoring.py has this server, too
    assert until_status(server, 200, "sesame")


@pytest.mark.slow
def test_the_administrators_token_is_read_again_on_sighup(model, schedule, tmp_path):
    token = tmp_path / "token"
    token.write_text("old\n")

    def status(server, given):
        """Whether a token is taken: a body that is no schedule is refused after it."""
        return server.post("/schedule", {}, X_Admin_Token=given)[0]

    with serving(model, schedule, tmp_path, "--admin-token-file", str(token)) as server:
        assert (status(server, "old"), status(server, "new")) == (400, 401)
        token.write_text("new\n")
        server.process.send_signal(signal.SIGHUP)
        for _ in range(200):
            if status(server, "new") == 400:
                break
            time.sleep(0.05)
        assert (status(server, "old"), status(server, "new")) == (401, 400)


def test_a_key_file_names_its_wrong_line_and_warns_of_readers(tmp_path, capsys):
    keys = tmp_path / "keys"
    keys.write_text("good-1\n\nnot a key\n")
    with pytest.raises(InputError, match=r"Line 3 of '.*keys' is no API key") as refused:
        _keys(keys, API_KEY)
    assert "not a key" not in str(refused.value), "a key is a secret"
    keys.write_text("good-1\ngood-2\n")
    keys.chmod(0o644)
    assert _keys(keys, API_KEY) == ("good-1", "good-2") and "chmod 600" in capsys.readouterr().err
    keys.chmod(0o600)
    assert _keys(keys, API_KEY) == ("good-1", "good-2") and not capsys.readouterr().err


@pytest.mark.parametrize("key", ["\udcff\udcfe0123456789abcdefghi", "two words of 16 letters", "schlüssel-0123456789"])
@pytest.mark.parametrize("variable", [API_KEY, ADMIN_TOKEN, NODE_TOKEN])
def test_a_key_of_the_environment_is_checked_like_those_of_a_file(monkeypatch, tmp_path, variable, key):
    """Also bytes that are no text; in a file, a token is called a token."""
    monkeypatch.setenv(variable, key)
    name = "API key" if variable == API_KEY else "token"
    with pytest.raises(InputError, match=f"^The environment's {variable} is no {name}: use letters") as refused:
        _keys(None, variable)
    assert key not in str(refused.value)
    path = tmp_path / "keys"
    path.write_text("two words of 16 letters\n")
    with pytest.raises(InputError, match=f"^Line 1 of '.*keys' is no {name}: use letters"):
        _keys(path, variable)
