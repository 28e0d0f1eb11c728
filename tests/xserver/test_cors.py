"""Pages of other origins: preflights, the headers of every answer, and a browser that obeys them."""

import asyncio
import contextlib
import json
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("fastapi")

from tests.exegpt.cli.conftest import run_command
from tests.xserver.conftest import serving
from tests.xserver.http.test_event_stream import Documents
from xcore.errors import InputError
from xserver.admission.gate import ApiKeys, check_origins, guarded
from xserver.admission.measured import RequestTiming
from xserver.engines.engine_link import EngineLink
from xserver.http.api import KINDS, make_api
from xserver.http.api_error import RATE_LIMIT, ApiError
from xserver.http.event_stream import EventStream
from xserver.http.frontend import Frontend
from xserver.http.frontends import Frontends
from xserver.http.served_model import ServedModel

PAGE = "https://page.example"
ASKED = "authorization,content-type,idempotency-key,x-stainless-os,x-stainless-retry-count"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Full:
    """An admission that refuses everything."""

    def refuse_early(self, extent, arrived_s, tokenizing):
        pass

    def admit(self, prompts, arrived_s, cached=()):
        raise ApiError(429, "Too late.", "latency_bound", None, RATE_LIMIT, {"Retry-After": "7"})


@pytest.fixture
def send(model):
    """Send a request to the application in this process: (status, headers, body)."""
    frontend = Frontend(ServedModel.read(model, None), EngineLink(), "fp", None, 1.0, 8, Full())
    api = make_api(Frontends([frontend]))

    @api.get("/broken")
    async def broken():
        raise RuntimeError("broken")

    @api.get("/stream")
    async def stream():
        async def documents():
            yield {"a": 1}

        return EventStream(Documents(documents()), lambda: None, 9.0)

    def send(method, path, body=b"", keys=("sesame",), origins=(PAGE,), **headers):
        app = guarded(RequestTiming(api, frontend.monitor, KINDS), ApiKeys(keys), (), origins)
        named = {"host": "localhost", "content-type": "application/json"} | headers
        raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in named.items() if value]
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path}
        scope |= {"raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http", "headers": raw}
        sent, read = [], []

        async def receive():
            if read:
                await asyncio.sleep(60)
            read.append(True)
            return {"type": "http.request", "body": body, "more_body": False}

        async def take(message):
            sent.append(message)

        async def run():
            with contextlib.suppress(RuntimeError):  # of /broken, which is raised again for the server's log
                await app(scope | {"client": ("127.0.0.1", 1), "server": ("localhost", 80)}, receive, take)

        asyncio.run(run())
        first, *rest = sent
        headers = {name.decode().lower(): value.decode() for name, value in first["headers"]}
        return first["status"], headers, b"".join(message["body"] for message in rest)

    return send


def words(text: str) -> set[str]:
    return {word.strip().lower() for word in text.split(",")}


def preflight(send, origin=PAGE, path="/v1/chat/completions", method="POST", asked=ASKED, **options):
    wanted = {"access-control-request-method": method, "access-control-request-headers": asked}
    return send("OPTIONS", path, origin=origin, **wanted, **options)


def test_a_preflight_needs_no_key(send):
    status, headers, _ = preflight(send)
    assert status == 200 and headers["access-control-allow-origin"] == PAGE
    assert words(headers["access-control-allow-headers"]) >= words("Authorization, Content-Type, Idempotency-Key")
    assert words(headers["access-control-allow-methods"]) == {"get", "head", "post"}
    assert "origin" in words(headers["vary"]) and "access-control-allow-credentials" not in headers
    for path in ("/v1/completions", "/v1/models", "/metrics", "/nothing"):
        assert preflight(send, path=path, method="GET")[0] == 200
    assert preflight(send, keys=())[0] == 200


@pytest.mark.parametrize(
    "asked", [{"origin": "https://other.example"}, {"method": "DELETE"}, {"asked": "authorization,x-admin-token"}]
)
def test_a_preflight_for_something_else_is_refused(send, asked):
    status, headers, _ = preflight(send, **asked)
    assert status == 400
    assert headers.get("access-control-allow-origin") == (None if "origin" in asked else PAGE)


def test_without_origins_there_are_no_headers(send):
    assert preflight(send, origins=())[0] == 405
    _, headers, _ = send("GET", "/v1/models", origins=(), origin=PAGE, authorization="Bearer sesame")
    assert not [name for name in headers if name.startswith("access-control")]


KEY = {"authorization": "Bearer sesame"}


@pytest.mark.parametrize(
    ("status", "method", "path", "body", "more"),
    [
        (200, "GET", "/v1/models", b"", KEY),
        (200, "GET", "/stream", b"", KEY),
        (200, "GET", "/health", b"", {}),
        (400, "POST", "/v1/completions", b"{", KEY),
        (401, "GET", "/v1/models", b"", {}),
        (401, "POST", "/v1/chat/completions", b"{}", {"authorization": "Bearer other"}),
        (403, "GET", "/v1/models", b"", {"keys": (), "host": "evil.example"}),
        (404, "GET", "/nothing", b"", KEY),
        (405, "GET", "/v1/completions", b"", KEY),
        (413, "POST", "/v1/completions", b"x" * (17 * 2**20), KEY),
        (415, "POST", "/v1/completions", b"a=b", KEY | {"content-type": "application/x-www-form-urlencoded"}),
        (429, "POST", "/v1/completions", b'{"prompt": [5]}', KEY),
        (500, "GET", "/broken", b"", KEY),
    ],
)
def test_pages_may_read_every_answer(send, status, method, path, body, more):
    got, headers, data = send(method, path, body, origin=PAGE, **more)
    assert got == status and headers["access-control-allow-origin"] == PAGE
    assert words(headers["access-control-expose-headers"]) == {"retry-after", "x-request-id"}
    assert "origin" in words(headers["vary"]) and len(headers["x-request-id"]) == 24
    assert ("retry-after" in headers) == (status == 429)
    if status >= 400:
        assert set(json.loads(data)["error"]) == {"message", "type", "param", "code"}


def test_other_pages_are_answered_without_leave(send):
    """With keys the browser is what refuses; without keys the server does, too."""
    other = "https://other.example"
    status, headers, _ = send("GET", "/v1/models", origin=other, **KEY)
    assert status == 200 and "access-control-allow-origin" not in headers
    status, headers, _ = send("GET", "/v1/models", origin=other, keys=())
    assert status == 403 and "access-control-allow-origin" not in headers
    assert send("GET", "/v1/models", origin=PAGE, keys=())[0] == 200


def test_all_pages_may_use_a_server_with_keys(send):
    status, headers, _ = send("GET", "/v1/models", origins=("*",), origin="https://other.example", **KEY)
    assert status == 200 and headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in headers
    assert preflight(send, origins=("*",))[0] == 200


def test_origins_that_no_browser_sends_are_refused():
    check_origins(["https://a.example", "http://localhost:3000", "http://[::1]:8080", "app://obsidian.md"], False)
    check_origins(["*"], True)
    for origin in (
        "example.com",
        "https://a.example/",
        "https://A.example",
        "https://a.example:443",
        "null",
        "",
        "http://a:x",
        "https://a b",
        "https://user@a.example",
        "https://münchen.example",
    ):
        with pytest.raises(InputError, match="is not an origin"):
            check_origins([origin], True)
    with pytest.raises(InputError, match=r"--cors \* lets every page use this server"):
        check_origins(["*"], False)


SCRIPT = """<script>
(async () => {
  const url = "URL/v1/completions", key = {"Authorization": "Bearer sesame", "Content-Type": "application/json"};
  const ask = async (headers, body) => {
    try {
      const answer = await fetch(url, {method: "POST", headers, body: JSON.stringify(body)});
      return {status: answer.status, id: answer.headers.get("X-Request-Id"), text: await answer.text()};
    } catch (error) { return {failed: String(error)}; }
  };
  const body = {prompt: [5], max_tokens: 2, temperature: 0, ignore_eos: true};
  const found = {
    whole: await ask({...key, "Idempotency-Key": "k", "X-Stainless-OS": "Linux"}, body),
    stream: await ask(key, {...body, stream: true}),
    unknown: await ask({"Content-Type": "application/json", "Authorization": "Bearer other"}, body),
    wrong: await ask(key, {...body, max_tokens: -1}),
    admin: await ask({...key, "X-Admin-Token": "t"}, body),
  };
  await fetch("/found", {method: "POST", body: JSON.stringify(found)});
})();
</script>"""


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
@pytest.mark.parametrize("named", [True, False])
def test_a_page_of_another_origin_in_chromium(model, schedule, tmp_path, named):
    """Only the origin that --cors names may use the server, with its key and the allowed headers."""
    found, arrived = {}, threading.Event()

    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(SCRIPT.replace("URL", server.url).encode())

        def do_POST(self):
            found.update(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()
            arrived.set()

        def log_message(self, *_):
            pass

    pages = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=pages.serve_forever, daemon=True).start()
    origin, keys = f"http://127.0.0.1:{pages.server_address[1]}", tmp_path / "keys"
    keys.write_text("sesame\n")
    options = ["--api-key-file", str(keys), "--cors", origin if named else "http://127.0.0.1:1"]
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync"
    command = [str(CHROMIUM), *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", f"{origin}/"]
    with serving(model, schedule, tmp_path, *options) as server:
        browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            assert arrived.wait(60), "the page has not run"
        finally:
            browser.terminate()
            browser.wait(20)
            pages.shutdown()
    if not named:
        assert all("failed" in answer for answer in found.values()) and len(found) == 5
        return
    assert [found[name].get("status") for name in ("whole", "stream", "unknown", "wrong")] == [200, 200, 401, 400]
    assert all(len(found[name]["id"]) == 24 for name in ("whole", "stream", "unknown", "wrong"))
    assert json.loads(found["whole"]["text"])["usage"]["completion_tokens"] == 2
    assert found["stream"]["text"].endswith("data: [DONE]\n\n") and "failed" in found["admin"]
    assert json.loads(found["wrong"]["text"])["error"]["code"] == "invalid_value"


@pytest.mark.parametrize("options", [("--cors", "example.com"), ("--cors", "*")])
def test_a_server_does_not_start_with_such_origins(model, schedule, options, monkeypatch):
    monkeypatch.delenv("EXEGPT_API_KEY", raising=False)
    done = run_command("serve", "-m", model, "-s", schedule, *options)
    assert done.code == 2 and done.err.startswith("exegpt: --cors") and len(done.err.strip().splitlines()) == 1
