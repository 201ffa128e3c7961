"""Callers that mean no good, or know no better: every answer is one JSON form, nothing is leaked, nothing breaks."""

from __future__ import annotations

import asyncio
import json
import math
import random
import socket
import string
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from thalweg.serve import guard
from thalweg.serve.refusals import JSONBytes
from thalweg.serve.requests import CHARACTERS, INPUTS

LEAKS = ("Traceback", 'File "', "site-packages", "/src/", "/tmp/", ".py")


def check_refusal(answer: Any, *statuses: int) -> dict[str, Any]:
    assert answer.status in (statuses or range(400, 500)), (answer.status, answer.body[:300])
    error = answer.json()["error"]
    assert set(error) == {"code", "message", "field"}
    assert "\n" not in error["message"]
    assert 0 < len(error["message"]) <= 320
    assert not any(leak in answer.body.decode() for leak in LEAKS)
    return error


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "bad_json"),
        (b"{", 400, "bad_json"),
        (b"\xff\xfe", 400, "bad_json"),
        (b"null", 422, "invalid"),
        (b"[]", 422, "invalid"),
        (b"{}", 422, "missing"),
        (b'{"inputs": []}', 422, "invalid"),
        (b'{"inputs": "abc"}', 422, "invalid"),
        (b'{"inputs": [1]}', 422, "invalid"),
        (b'{"inputs": [null]}', 422, "invalid"),
        (b'{"inputs": [["a"]]}', 422, "invalid"),
        (b'{"inputs": ["a"], "k": 0}', 422, "invalid"),
        (b'{"inputs": ["a"], "k": true}', 422, "invalid"),
        (b'{"inputs": ["a"], "k": "3"}', 422, "invalid"),
        (b'{"inputs": ["a"], "k": 1e99}', 422, "invalid"),
        (b'{"inputs": ["a"], "k": ' + b"9" * 5000 + b"}", 400, "bad_json"),
        (b'{"inputs": ["a"], "temperature": NaN}', 422, "invalid"),
        (b'{"inputs": ["a"], "temperature": Infinity}', 422, "invalid"),
        (b'{"inputs": ["a"], "search": "magic"}', 422, "invalid"),
        (b'{"inputs": ["a"], "lexicon": "/etc/passwd"}', 422, "unknown_field"),
        (b'{"inputs": ["a"], "__class__": 1}', 422, "unknown_field"),
        (b'{"inputs": ["a"], "model": "../../etc/passwd"}', 404, "not_found"),
        (b'{"inputs": ["\\ud800"]}', 400, "bad_json"),
        (b'{"inputs": ["a\\tb"]}', 422, "refused"),
        (b'{"inputs": ["a"], "features": ["V"]}', 422, "refused"),
        (b'{"inputs": ["a"], "groups": 3, "search": "diverse"}', 422, "refused"),
        (b'{"inputs": ["a"], "prefix": "%"}', 422, "refused"),
        (b'{"inputs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "bad_json"),
        (b"[" * 500_000, 400, "bad_json"),
        (b'{"inputs": ["' + b"a" * (CHARACTERS + 1) + b'"]}', 422, "too_long"),
        (b'{"inputs": ["' + b"a" * 2**20 + b'"]}', 422, "too_long"),
        (b'{"inputs": [' + b",".join([b'"a"'] * (INPUTS + 1)) + b"]}", 422, "too_long"),
    ],
)
def test_bodies_that_are_refused(served: Any, body: bytes, status: int, code: str) -> None:
    assert check_refusal(served.post("/v1/predict", body), status)["code"] == code


@pytest.mark.parametrize(
    "text",
    [
        "\x00",
        "\x01\x02\x7f",
        "\u202e\u2066abc",
        "\ufeff",
        "\U0010ffff",
        "e" + "\u0301" * 200,
        "<script>",
        "\u2028",
        "%00",
        " ",
    ],
)
def test_texts_that_are_odd_are_answered(served: Any, text: str) -> None:
    answer = served.post("/v1/predict", {"inputs": [text]})
    assert answer.status == 200, answer.body
    assert len(answer.json()["records"]) == 1


def test_costly_requests_are_refused(served: Any) -> None:
    asked = {"inputs": ["abc"] * 256, "search": "exact"}
    assert check_refusal(served.post("/v1/predict", asked))["code"] == "too_costly"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chain", {"emissions": [[0.0, 1.0], [0.0]], "transitions": [[0.0, 0.0], [0.0, 0.0]]}),
        ("/v1/chain", {"emissions": [[0.0, 1.0]], "transitions": [[0.0, 0.0]]}),
        ("/v1/chain", {"emissions": [[0.0]], "transitions": [[0.0]], "force": {"7": 0}}),
        ("/v1/chain", {"emissions": [[0.0]], "transitions": [[0.0]], "force": {"-1": 0}}),
        ("/v1/chain", {"emissions": [[0.0]], "transitions": [[0.0]], "start": [0.0, 0.0]}),
        ("/v1/chain", {"emissions": [[1e300]], "transitions": [[0.0]]}),
        ("/v1/memory", {"query": [0.0] * 63}),
        ("/v1/memory", {"query": [0.0] * 64, "beta": -1}),
        ("/v1/memory", {"query": [0.0] * 64, "separation": 0.5}),
        ("/v1/memory", {"query": [0.0] * 64, "separation": "hardmax"}),
        ("/v1/memory", {"query": [0.0] * 64, "separation": True}),
        ("/v1/memory", {"query": [0.0] * 64, "steps": 10**9}),
        ("/v1/tree", {"input": "a", "width": 10**6}),
    ],
)
def test_other_addresses_refuse_too(served: Any, path: str, body: Any) -> None:
    check_refusal(served.post(path, body), 422)


def test_a_grey_query_is_retrieved_without_numbers_that_are_none(served: Any) -> None:
    answer = served.post("/v1/memory", {"query": [0.0] * 64, "count": 1, "beta": 1e4})
    assert answer.status == 200
    assert b"NaN" not in answer.body
    assert b"null" not in answer.body


@pytest.mark.parametrize(
    "value",
    ["é\u2028\x00\x7f</script>\U0010ffff", "half \ud800", [1e-300, 5e-324, -0.0, 1e22, 0.1 + 0.2, 2**70], {"": None}],
)
def test_what_is_written_is_what_is_read(value: Any) -> None:
    assert json.loads(JSONBytes(value).body) == value


def test_what_is_no_number_is_null() -> None:
    assert JSONBytes([math.nan, math.inf]).body == b"[null,null]"


@pytest.mark.parametrize(
    "path", ["/nothing", "/v1/", "/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py"]
)
def test_what_is_not_there(served: Any, path: str) -> None:
    check_refusal(served.get(path), 404)


def test_what_no_address_takes_is_refused_in_queries_too(served: Any) -> None:
    for answer in (
        served.get("/v1/models?bogus=1"),
        served.get("/v1/memory?count=3&bogus=1"),
        served.post("/v1/predict?bogus=3", {"inputs": ["a"]}),
        served.post("/v1/image?bogus=1", b"", media="image/png"),
        served.post("/v1/evaluate?k=1&bogus=%0A", b"a\tb\n", media="text/tab-separated-values"),
    ):
        error = check_refusal(answer, 422)
        assert (error["code"], error["field"]) == ("unknown_field", "bogus")
    assert served.get("/?from=elsewhere").status == 200
    assert served.get("/metrics?name[]=up").status == 200


def test_wrong_methods_and_media(served: Any) -> None:
    check_refusal(served.get("/v1/predict"), 405)
    check_refusal(served.post("/health", {}), 405)
    check_refusal(served.post("/v1/predict", {"inputs": ["a"]}, media="text/plain"), 415)
    check_refusal(served.post("/v1/evaluate", b"a\tb\n", media="text/plain"), 415)


def test_bodies_are_bounded(served: Any) -> None:
    check_refusal(served.post("/v1/chain", b" " * (guard.BODY + 1)), 413)
    headers = {"content-type": "application/json", "content-length": str(10**15)}
    check_refusal(asyncio.run(served.ask("POST", "/v1/predict", b"{}", headers)), 413)


def test_a_body_that_never_comes_is_given_up(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "PATIENCE", 0.05)
    sent: list[Any] = []

    async def main() -> None:
        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/predict", "headers": [(b"host", b"localhost")]}
        await asyncio.wait_for(served.app(scope, receive, send), 60)

    asyncio.run(main())
    assert sent[0]["status"] == 408


def test_a_beta_whose_energies_are_no_numbers_is_refused(served: Any) -> None:
    check_refusal(served.post("/v1/memory", {"query": [0.0] * 64, "beta": 1e-300}), 422)
    assert served.post("/v1/memory", {"query": [1000.0] * 64, "beta": 1e-6}).status == 200


def test_every_answer_has_the_headers(served: Any) -> None:
    for path in ("/", "/health", "/nothing", "/v1/models"):
        headers = served.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "localhost.evil", "8.8.8.8"]
)
def test_other_names_are_refused(served: Any, host: str) -> None:
    check_refusal(served.get("/v1/models", host=host), 403)


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000", "LOCALHOST"])
def test_own_names_are_answered(served: Any, host: str) -> None:
    assert served.get("/v1/models", host=host).status == 200


def test_pages_of_other_origins_are_refused(served: Any) -> None:
    check_refusal(served.get("/v1/models", origin="https://evil.example"), 403)
    check_refusal(served.get("/v1/models", origin="null"), 403)
    assert served.get("/v1/models", origin="http://localhost").status == 200
    asked = served.app, asyncio.run(served.ask("OPTIONS", "/v1/predict", headers={"origin": "http://evil.example"}))
    assert asked[1].status == 403


def test_a_token_is_asked_for(make: Callable[..., Any], run: Path) -> None:
    app = make(run, token="s3cret", local=False)
    for shown in ("", "Bearer", "Bearer s3cre", "Bearer s3cret2", "s3cret", "Bearer \xff", "bearer s3cret"):
        headers = {"authorization": shown} if shown else {}
        check_refusal(app.get("/v1/models", host="example.org", **headers), 401)
        check_refusal(app.get("/metrics", **headers), 401)
        check_refusal(app.post("/v1/predict", {"inputs": ["a"]}, **headers), 401)
    assert app.get("/v1/models", host="example.org", authorization="Bearer s3cret").status == 200
    assert app.get("/health").status == 200
    assert app.get("/").status == 200


def mutated(rng: random.Random) -> bytes:
    """A request with something wrong, or only odd, about it."""
    odd = [None, True, -1, 0, 1.5, 10**30, "", "a", "\x00", [], {}, [[]], {"a": {}}, "x" * 3000, [1, "a", None]]
    body: Any = {"inputs": ["abc"], "k": 2, "search": "beam", "width": 3, "seed": 1, "attention": False}
    for _ in range(rng.randint(1, 3)):
        body[rng.choice([*body, "model", "features", "prefix", "top_p", rng.choice(string.ascii_letters)])] = (
            rng.choice(odd)
        )
    data = bytearray(json.dumps(body).encode())
    for _ in range(rng.choice([0, 0, 1, 5])):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data[: rng.randint(0, len(data))] if rng.random() < 0.2 else data)


def test_fuzz(served: Any) -> None:
    rng = random.Random(0)
    paths = ["/v1/predict", "/v1/tree", "/v1/chain", "/v1/memory"]
    bodies = [(rng.choice(paths), mutated(rng)) for _ in range(300)]

    async def all_of_them() -> Any:
        media = {"content-type": "application/json"}
        return [await served.ask("POST", path, body, media) for path, body in bodies]

    for (_, body), answer in zip(bodies, asyncio.run(all_of_them()), strict=True):
        assert answer.status < 500, body
        if answer.status >= 400:
            check_refusal(answer)


def test_bytes_that_are_no_http(start: Callable[..., Any], run: Path) -> None:
    address = urlsplit(start(run).address)
    for data in (
        b"\x00" * 100,
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"\x16\x03\x01\x02\x00" * 9,
    ):
        with socket.create_connection((address.hostname, address.port), timeout=60) as caller:
            caller.sendall(data)
            caller.shutdown(socket.SHUT_WR)
            assert b" 500 " not in caller.recv(10_000)
    # A caller that begins and goes away, and one that does not finish: others are answered.
    with socket.create_connection((address.hostname, address.port), timeout=60) as slow:
        slow.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        from thalweg.serve.client import Client

        with Client(f"http://{address.netloc}") as client:
            assert client.predict("abc", k=1)[0]["source"] == "abc"


def schema_of(app: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import schemathesis

        return schemathesis.openapi.from_asgi("/openapi.json", app)


def try_schema(app: Any, examples: int) -> int:
    """Requests made of the schema, and of what it forbids: none is a defect, and each answer is JSON or a stream."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import schemathesis
        from hypothesis import HealthCheck, Phase, given, settings
        from hypothesis.errors import Unsatisfiable

        tried = 0
        for operation in schema_of(app).get_all_operations():
            api = operation.ok()
            if api.path == "/v1/training/{name}":
                continue  # never ends while a run trains
            for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):

                def call(case: Any) -> None:
                    nonlocal tried
                    tried += 1
                    answer = case.call(headers={"host": "localhost", **(case.headers or {})})
                    assert answer.status_code < 500, (case.as_curl_command(), answer.content[:300])

                try:
                    strategy = api.as_strategy(generation_mode=mode)
                    bounds = settings(
                        max_examples=examples,
                        deadline=None,
                        database=None,
                        derandomize=True,
                        phases=[Phase.explicit, Phase.generate],
                        suppress_health_check=list(HealthCheck),
                    )
                    bounds(given(case=strategy)(call))()
                except (schemathesis.errors.InvalidSchema, Unsatisfiable):  # nothing there that could be wrong
                    continue
        return tried


def test_schemathesis(make: Callable[..., Any], run: Path) -> None:
    assert try_schema(make(run, local=False).app, 4) > 20


@pytest.mark.slow
def test_schemathesis_at_length(make: Callable[..., Any], run: Path) -> None:
    assert try_schema(make(run, local=False).app, 200) > 1000
