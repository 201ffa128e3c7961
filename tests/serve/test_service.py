"""The contract: what each address answers, and that the records are those of direct calls."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import thalweg
from thalweg.serve.streaming import STREAMS
from thalweg.tasks import SearchConfig
from thalweg.tasks.registry import task_named


def events(body: bytes) -> list[tuple[str, Any]]:
    found = []
    for block in body.decode().strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        if lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found


def same(one: Any, other: Any) -> None:
    """Equal, but for rounding: a batch adds in another order."""
    if isinstance(one, float):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    else:
        assert one == other


def test_health_models_and_schema(served: Any) -> None:
    assert served.get("/health").json() == {"status": "ok", "version": thalweg.__version__, "models": ["tiny"]}
    (model,) = served.get("/v1/models").json()["models"]
    assert (model["name"], model["task"], model["view"]) == ("tiny", "transduce", "strings")
    assert model["default"] == {"k": 5, "search": "beam", "width": 5}
    assert model["attention"] is True
    assert model["direction"] == {"source": "ltr", "target": "ltr"}
    assert {"k", "width", "seed"} <= set(model["takes"])
    assert "lexicon" not in model["takes"]  # a file of this machine
    schema = served.get("/openapi.json").json()
    assert schema["openapi"].startswith("3.")
    body = schema["paths"]["/v1/predict"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["examples"]
    assert body["additionalProperties"] is False


def alike(one: Any, other: Any) -> None:
    """The same fields, but for those of nothing, which no schema shows, and values of the same kinds."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        one, other = ({name: value for name, value in each.items() if value is not None} for each in (one, other))
        assert one.keys() == other.keys()
        for name in one:
            alike(one[name], other[name])
    elif isinstance(one, list) and one and other:
        alike(one[0], other[0])


def test_examples_in_the_schema_look_like_answers(served: Any) -> None:
    paths = served.get("/openapi.json").json()["paths"]
    asked = {
        "/v1/predict": {"inputs": ["abc"], "k": 1},
        "/v1/tree": {"input": "abc", "exact": True},
        "/v1/chain": paths["/v1/chain"]["post"]["requestBody"]["content"]["application/json"]["schema"]["examples"][0],
    }
    for path, body in asked.items():
        told = paths[path]["post"]["responses"]["200"]["content"]["application/json"]["example"]
        alike(told, served.post(path, body).json())
    operation = paths["/v1/evaluate"]["post"]
    (body,) = operation["requestBody"]["content"].values()
    (kind, told), *others = operation["responses"]["200"]["content"].items()
    answer = served.post("/v1/evaluate", body["example"].encode(), media="text/tab-separated-values")
    assert answer.headers["content-type"].startswith(kind)
    said = dict(events(told["example"].encode()))
    assert list(said) == [name for name, _ in events(answer.body)]
    assert said["records"][0].keys() == dict(events(answer.body))["records"][0].keys()
    assert not others


def test_the_form_of_errors_is_in_the_schema(served: Any) -> None:
    answer = served.post("/v1/predict", {"inputs": ["abc"], "k": 99})
    for operations in served.get("/openapi.json").json()["paths"].values():
        for operation in operations.values():
            assert operation["responses"].keys() == {"200", "4XX"}
            told = operation["responses"]["4XX"]["content"]["application/json"]["example"]
            assert (answer.status, answer.json()) == (422, told)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"k": 3, "width": 4},
        {"search": "greedy", "k": 1},
        {"search": "exact", "k": 1},
        {"search": "nucleus", "k": 3, "seed": 5, "top_p": 0.8},
        {"search": "mbr", "k": 2, "samples": 8, "seed": 1},
        {"attention": True, "k": 2},
        {"unknown": "copy"},
        {"search": "diverse", "width": 4, "groups": 2},
        {"prefix": "a"},
    ],
)
def test_records_are_those_of_the_task(served: Any, run: Path, options: dict[str, Any]) -> None:
    words = ["abc", "fed", "a", "", "ab!c"]
    answer = served.post("/v1/predict", {"inputs": words, **options})
    assert answer.status == 200, answer.body
    direct = task_named("transduce").predict(run, (), device="cpu", text=words, **{"k": 5, **options})
    same(answer.json()["records"], [record.to_json() for record in direct])


def test_callers_together_get_what_each_gets_alone(served: Any, run: Path) -> None:
    words = ["abc", "fed", "a", "cab", "dad", "bead"] * 4
    options = [{"k": 2}, {"k": 3, "width": 7}, {"search": "nucleus", "seed": 3}]

    async def all_at_once() -> Any:
        async def one(n: int, word: str) -> Any:
            body = json.dumps({"inputs": [word], **options[n % 3]}).encode()
            return await served.ask("POST", "/v1/predict", body, {"content-type": "application/json"})

        return await asyncio.gather(*(one(n, word) for n, word in enumerate(words)))

    for n, (word, answer) in enumerate(zip(words, asyncio.run(all_at_once()), strict=True)):
        alone = task_named("transduce").predict(run, (), device="cpu", text=[word], **{"k": 5, **options[n % 3]})
        same(answer.json()["records"], [record.to_json() for record in alone])


def test_attention_comes_with_the_symbols_that_it_is_of(served: Any) -> None:
    found = served.post("/v1/predict", {"inputs": ["fed", "a"], "k": 2, "attention": True}).json()
    assert [symbols["source"] for symbols in found["symbols"]] == [["f", "e", "d"], ["a"]]
    for record, symbols in zip(found["records"], found["symbols"], strict=True):
        for answer, each in zip(record["answers"], symbols["answers"], strict=True):
            assert len(answer["attention"]) == len(each) + answer["finished"]
            assert {len(row) for row in answer["attention"]} == {len(symbols["source"])}
    assert "symbols" not in served.post("/v1/predict", {"inputs": ["fed"]}).json()


def test_tree(served: Any, run: Path) -> None:
    found = served.post("/v1/tree", {"input": "fed", "width": 3, "exact": True}).json()
    assert found["source_symbols"] == ["f", "e", "d"]
    nodes = found["nodes"]
    assert [node["id"] for node in nodes] == list(range(len(nodes)))
    assert {node["fate"] for node in nodes} <= {"kept", "dropped", "finished"}
    assert all(nodes[node["parent"]]["step"] == node["step"] - 1 for node in nodes[1:])
    (record,) = thalweg.load(run, device="cpu").predict(["fed"], k=1, how=SearchConfig(search="beam", width=3))
    best = [nodes[n]["symbol"] for n in found["best"]][1:]
    assert "".join(best).removesuffix(best[-1] if record.answers[0].finished else "") == record.answers[0].text
    assert found["exact"]["log_prob"] >= record.answers[0].log_prob - 1e-5
    assert served.post("/v1/tree", {"input": ""}).json()["nodes"] == []
    assert served.post("/v1/tree", {"input": "fed", "search": "greedy"}).status == 422


def test_evaluation_streams_what_evaluate_measures(served: Any, run: Path, tmp_path: Path) -> None:
    text = "".join(f"{word}\t{word[::-1]}\n" for word in ["abc", "fed", "cab", "dad"] * 40)
    (tmp_path / "test.tsv").write_text(text, encoding="utf-8")
    answer = served.post("/v1/evaluate?k=3", text.encode(), media="text/tab-separated-values")
    assert answer.headers["content-type"].startswith("text/event-stream")
    said = events(answer.body)
    assert said[-1] == ("done", {"items": 160})
    assert [data for name, data in said if name == "progress"][-1] == {"done": 160, "of": 160}
    records = [record for name, data in said if name == "records" for record in data]
    assert all(record["correct"] == (record["edits"] == 0) for record in records)
    scores = [data for name, data in said if name == "scores"]
    assert len(scores) > 1  # they run
    direct = thalweg.evaluate(run, str(tmp_path / "test.tsv"), k=3, device="cpu")
    same(scores[-1]["scores"], {key: score.to_json() for key, score in direct.scores.items()})


@pytest.mark.parametrize(
    ("body", "code"),
    [(b"", "refused"), (b"one column\n", "refused"), (b"a\tb\n\xff\tc\n", "bad_encoding"), (b"a\t\n", "refused")],
)
def test_a_file_that_is_none_is_refused_before_the_stream(served: Any, body: bytes, code: str) -> None:
    answer = served.post("/v1/evaluate", body, media="text/tab-separated-values")
    assert 400 <= answer.status < 500
    assert answer.json()["error"]["code"] == code


def test_training_is_told_from_the_start_and_as_it_grows(make: Callable[..., Any], run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "fresh"
    folder.mkdir()
    app = make(run, folder)
    states = {each["name"]: each for each in app.get("/v1/training").json()["runs"]}
    assert states["tiny"]["state"] == "finished"
    waiting = {"state": "waiting", "model": False, "epoch": 0, "epochs": 0}
    assert states["fresh"] == {"name": "fresh", "run": "fresh", **waiting}  # not where on the disk it is
    assert app.get("/health").json()["models"] == ["tiny"]
    assert app.post("/v1/predict", {"model": "fresh", "inputs": ["a"]}).status == 404
    told = events(app.get("/v1/training/tiny").body)
    assert [name for name, _ in told] == ["run", "start", "epoch", "end", "done"]
    assert str(run.parent) not in json.dumps(told)  # no folder of this machine

    async def live() -> bytes:
        asked = asyncio.ensure_future(app.ask("GET", "/v1/training/fresh"))
        log = folder / "log.jsonl"
        await asyncio.sleep(0.1)
        log.write_bytes(b'{"event": "start", "epochs": 2}\n{"event": "ep')
        await asyncio.sleep(0.7)
        with log.open("ab") as file:
            file.write(b'och", "epoch": 1}\n{"event": "end"}\n')
        return (await asked).body

    assert [name for name, _ in events(asyncio.run(live()))] == ["run", "start", "epoch", "end", "done"]
    assert app.get("/v1/training/absent").status == 404


def test_a_log_begun_anew_is_told(tmp_path: Path) -> None:
    from thalweg.serve.training import LogReader

    log = tmp_path / "log.jsonl"
    log.write_text('{"event": "start"}\n{"event": "epoch"}\n')
    reader = LogReader(log)
    assert len(reader.read()) == 2
    log.write_text('{"event": "start"}\n')
    assert [entry["event"] for entry in reader.read()] == ["restart", "start"]


def test_the_end_of_the_service_ends_a_stream(make: Callable[..., Any], run: Path, tmp_path: Path) -> None:
    (tmp_path / "fresh").mkdir()
    app = make(run, tmp_path / "fresh")

    async def main() -> Any:
        asked = asyncio.ensure_future(app.ask("GET", "/v1/training/fresh"))
        await asyncio.sleep(0.05)
        app.service.ending.come()
        return await asyncio.wait_for(asked, 60)

    assert asyncio.run(main()).status == 200


def test_streams_of_callers_who_go_away_leave_room(make: Callable[..., Any], run: Path, tmp_path: Path) -> None:
    (tmp_path / "fresh").mkdir()
    app = make(run, tmp_path / "fresh")

    async def main() -> Any:
        gone = asyncio.Event()
        gone.set()
        asked = [await app.ask("GET", "/v1/training/fresh", gone=gone) for _ in range(STREAMS + 1)]
        stays = [asyncio.ensure_future(app.ask("GET", "/v1/training/fresh")) for _ in range(STREAMS + 1)]
        refused = await next(asyncio.as_completed(stays))  # all others go on
        app.service.ending.come()
        return [answer.status for answer in asked], refused, [(await each).status for each in stays]

    asked, refused, stays = asyncio.run(main())
    assert 429 not in asked
    assert refused.status == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert sorted(stays) == [200] * STREAMS + [429]


def test_memory(served: Any) -> None:
    digits = served.get("/v1/memory?count=10").json()
    assert digits["labels"] == list(range(10))
    spoilt = [value if n < 40 else 0.0 for n, value in enumerate(digits["patterns"][7])]
    for separation in ("softmax", 1, 1.3, "entmax15", "sparsemax"):
        found = served.post("/v1/memory", {"query": spoilt, "beta": 40, "separation": separation}).json()
        assert found["converged"]
        assert len(found["states"]) == len(found["energies"]) == len(found["weights"]) == found["steps"] + 1
        assert all(b <= a + 1e-5 for a, b in zip(found["energies"], found["energies"][1:], strict=False))
        assert max(range(10), key=found["weights"][-1].__getitem__) == 7
    assert np.abs(np.array(found["states"][-1]) - digits["patterns"][7]).max() < 4


def test_chain(served: Any) -> None:
    emissions, transitions = [[1.0, 0.0], [0.2, 0.4], [0.0, 1.5]], [[0.5, -0.5], [-0.5, 0.5]]
    asked = {"emissions": emissions, "transitions": transitions, "force": {"1": 0}, "k": 9, "samples": 4}
    found = served.post("/v1/chain", asked).json()
    paths = {}
    for a in (0, 1):
        for c in (0, 1):
            score = emissions[0][a] + emissions[1][0] + emissions[2][c] + transitions[a][0] + transitions[0][c]
            paths[a, 0, c] = score
    log_z = math.log(sum(math.exp(score) for score in paths.values()))
    assert found["log_partition"] == pytest.approx(log_z)
    assert [tuple(each["labels"]) for each in found["best"]] == sorted(paths, key=lambda path: -paths[path])
    assert sum(each["probability"] for each in found["best"]) == pytest.approx(1)
    assert found["marginals"][1] == [1.0, 0.0]
    first = sum(math.exp(score - log_z) for path, score in paths.items() if path[0] == 0)
    assert found["marginals"][0][0] == pytest.approx(first)
    assert all(sample[1] == 0 for sample in found["samples"])
    assert len(found["samples"]) == 4


def png(pixels: np.ndarray) -> bytes:
    from PIL import Image

    Image.fromarray(pixels).save(file := io.BytesIO(), "png")
    return file.getvalue()


def test_images(make: Callable[..., Any], tmp_path: Path) -> None:
    thalweg.train(
        {"task": "classify", "data": {"path": "digits"}, "training": {"epochs": 1, "device": "cpu"}}, tmp_path / "run"
    )
    app = make(tmp_path / "run")
    (model,) = app.get("/v1/models").json()["models"]
    assert model["view"] == "images"
    image = png(np.arange(64, dtype=np.uint8).reshape(8, 8))
    (tmp_path / "image.png").write_bytes(image)
    (direct,) = task_named("classify").predict(tmp_path / "run", [str(tmp_path / "image.png")], k=3, device="cpu")
    found = app.post("/v1/image?k=3", image, media="image/png").json()
    same(found["records"][0]["answers"], direct.to_json()["answers"])
    heat = np.array(found["saliency"]["values"])
    assert heat.shape == tuple(model["size"])
    assert heat.min() >= 0
    assert heat.max() <= 1
    both = app.post("/v1/predict", {"inputs": [base64.b64encode(image).decode()] * 2, "k": 3}).json()
    same(both["records"][1]["answers"], direct.to_json()["answers"])
    for body, media in ((b"no image", "image/png"), (b"", "image/png"), (image, "multipart/form-data")):
        assert 400 <= app.post("/v1/image", body, media=media).status < 500
    assert app.post("/v1/predict", {"inputs": ["????"]}).status == 422


def test_rows_of_numbers(make: Callable[..., Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    table = tmp_path / "rows.csv"
    table.write_text("".join(f"{a:.4f},{b:.4f}\n" for a, b in torch.randn(200, 2).tolist()))
    settings = {"task": "density", "data": {"path": str(table)}, "model": {"components": 2}}
    thalweg.train({**settings, "model": "mixture"}, tmp_path / "run")
    app = make(tmp_path / "run")
    answer = app.post("/v1/predict", {"inputs": [[0.0, 0.0], [9.0, None]], "k": 2})
    assert answer.status == 200, answer.body
    (tmp_path / "new.csv").write_text("0.0,0.0\n9.0,\n")
    direct = list(task_named("density").predict(tmp_path / "run", [str(tmp_path / "new.csv")], k=2, device="cpu"))
    for record, expected in zip(answer.json()["records"], direct, strict=True):
        same({**record, "source": ""}, {**expected.to_json(), "source": ""})
    assert app.post("/v1/predict", {"inputs": [[1.0]]}).status == 422
    assert app.post("/v1/predict", {"inputs": ["a"]}).status == 422


def test_metrics_count_requests(make: Callable[..., Any], run: Path) -> None:
    app = make(run)
    for _ in range(3):
        app.post("/v1/predict", {"inputs": ["abc", "d"]})
    text = app.get("/metrics").body.decode()
    assert 'thalweg_requests_total{model="tiny"} 3.0' in text
    assert 'thalweg_inputs_total{model="tiny"} 6.0' in text
    assert 'thalweg_batch_inputs_count{model="tiny"} 3.0' in text
    assert 'thalweg_waiting_inputs{model="tiny"} 0.0' in text


def test_the_folder_of_a_recipe_stands_for_its_seeds(make: Callable[..., Any], run: Path, tmp_path: Path) -> None:
    for seed in (10, 9):
        shutil.copytree(run, tmp_path / "demo" / f"seed-{seed}")
    (tmp_path / "demo" / "seed-of-doubt").mkdir()
    demo = make(tmp_path / "demo").service.library
    assert {name: Path(shelf.run).name for name, shelf in demo.ready.items()} == {"demo": "seed-9", "demo-2": "seed-10"}
    assert list(make(tmp_path / "demo" / "seed-10").service.library.ready) == ["demo"]
    shutil.copy(run / "config.yaml", tmp_path / "demo")  # a run of its own, which has yet to train
    assert list(make(tmp_path / "demo").service.library.shelves) == ["demo"]


def test_several_models_must_be_named(make: Callable[..., Any], run: Path, other_run: Path) -> None:
    app = make(run, other_run)
    assert app.get("/health").json()["models"] == ["tiny", "tiny-2"]
    assert app.post("/v1/predict", {"inputs": ["a"]}).json()["error"]["code"] == "missing"
    assert app.post("/v1/predict", {"inputs": ["a"], "model": "tinny"}).json()["error"]["code"] == "not_found"
    answers = [app.post("/v1/predict", {"inputs": ["abc"], "model": name}).json() for name in ("tiny", "tiny-2")]
    assert answers[0]["records"] != answers[1]["records"]
