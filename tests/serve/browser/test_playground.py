"""The playground in Chromium: every view, links, errors, keyboards, right-to-left scripts, and what axe finds."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from PIL import Image

import thalweg
from contracts.small_runs import log_epoch
from thalweg.tasks import SearchConfig

View = Callable[[str], Any]
ARABIC_WORD = "كلم"
DRAWN = "00cgg500000005g000000b40000bgc0000000bg000000040050005g000cggg50"
PLACES = {
    "try": ("try?words=bead", ".tree svg"),
    "memory": ("memory", ".film"),
    "chain": ("chain?force=1:0", ".lattice button"),
    "images": (f"images?pixels={DRAWN}", "article .answers"),
    "evaluate": ("evaluate?model=backwards", ".drop"),
    "training": ("training?run=backwards", ".plot canvas"),
}
PHONE = {"width": 390, "height": 844}
PATIENCE = 120  # seconds, as those of the fixtures
SIDEWAYS = "document.documentElement.scrollWidth - innerWidth"  # pixels by which a page is wider than its window
RESTORED = {  # links, and what must be there once they are opened
    "try?words=fed&models=backwards&search=beam&width=3&pick=1": ".answers li:nth-child(2) button[aria-pressed=true]",
    "try?words=Hannah+paid&models=english&part=1": ".said li:nth-child(2) button[aria-pressed=true]",
    f"memory?pixels={DRAWN}&beta=8&separation=entmax15&step=1&count=20": ".recall :text('Step 1 of')",
    "chain?force=1%3A0%2C2%3A2&seed=4": ".lattice button[aria-label^='like: prep'][aria-pressed=true]",
    f"images?pixels={DRAWN}&map=none": "input[value=none]:checked",
    "evaluate?model=arabic&search=greedy": "input[value=greedy]:checked",
    "training?run=backwards": ":text('all epochs are done')",
}


def texts(page: Any, model: str = "backwards") -> list[str]:
    """The answers as they stand on the page."""
    return page.locator(f"article[aria-label={model}] .answers .text > span:first-child").all_inner_texts()


def settled(page: Any, place: str = "article[aria-label=backwards]") -> None:
    """Wait until what is shown answers what is asked: a view is busy from the moment that it asks something else."""
    page.locator(f"{place} [aria-busy=false]").wait_for()


def until(page: Any, true: str) -> None:
    """Wait until an expression is true. Playwright looks again by ``eval``, which the policy of the page forbids."""
    end = time.monotonic() + PATIENCE
    while not page.evaluate(true):
        assert time.monotonic() < end, f"never came: {true}"
        page.wait_for_timeout(20)


def expected(served: Any, word: str, model: str = "backwards", k: int = 5, **how: Any) -> list[str]:
    found = thalweg.load(served.runs / model, device="cpu").predict([word], k=k, how=SearchConfig(**how))
    return [answer.text for answer in next(iter(found)).answers]


def test_answers_come_as_one_types(at: View, served: Any) -> None:
    page = at("try?models=backwards")
    page.get_by_label("Type a word").fill("")
    page.get_by_text("Answers appear here as you type").wait_for()
    page.get_by_label("Type a word").press_sequentially("bead", delay=30)
    page.locator(".attention thead th").nth(3).wait_for()
    settled(page)
    assert texts(page) == expected(served, "bead", search="beam", width=5)
    assert page.locator(".attention thead th").all_inner_texts() == ["b", "e", "a", "d"]
    assert "words=bead" in page.url


def test_late_answers_to_old_words_are_dropped(at: View, served: Any) -> None:
    from playwright.sync_api import Error

    page = at("try?models=backwards&words=ab")
    held: list[Any] = []

    def hold(route: Any) -> None:
        if json.loads(route.request.post_data)["inputs"] == ["abc"]:
            held.append(route)
        else:
            route.continue_()

    page.route("**/v1/predict", hold)
    with page.expect_request(lambda request: '"abc"' in (request.post_data or "") and "predict" in request.url):
        page.get_by_label("Type a word").fill("abc")
    page.get_by_label("Type a word").fill("fed")
    page.locator(".attention thead th", has_text="f").wait_for()
    settled(page)
    assert held
    for route in held:
        with contextlib.suppress(Error):  # the page has given the request up
            route.continue_()
    page.wait_for_timeout(300)
    assert texts(page) == expected(served, "fed", search="beam", width=5)


def test_a_list_is_answered_line_by_line(at: View, served: Any) -> None:
    page = at(f"try?models=backwards&words={quote('abc' + chr(10) + 'fed' + chr(10) + 'bad')}")
    page.locator(".lines li", has_text="bad").get_by_role("button").click()
    page.locator(".attention thead th", has_text="b").wait_for()
    settled(page)
    assert texts(page) == expected(served, "bad", search="beam", width=5)
    page.locator(".lines .text").nth(1).get_by_text(expected(served, "fed", search="beam")[0], exact=True).wait_for()
    assert "at=2" in page.url
    page.get_by_text("Exact", exact=True).click()
    with page.expect_response(lambda answer: (answer.request.post_data or "").count('"ab"') > 1) as all_lines:
        page.get_by_label("Type a word").fill("ab\n" * 100)
    assert all_lines.value.status == 200
    page.get_by_text("The first 80 lines are answered here").wait_for()


def test_a_sentence_has_a_beam_for_each_of_its_words(at: View) -> None:
    page = at(f"try?models=english&words={quote('Hannah paid 42.')}")
    page.get_by_role("region", name="Beam of english: hannah").wait_for()
    words = page.locator(".said button")
    assert [word.split()[0] for word in words.all_inner_texts()] == ["hannah", "paid", "forty", "two"]
    words.nth(3).click()
    page.get_by_role("region", name="Beam of english: two").wait_for()
    assert page.url.endswith("part=3")
    page.get_by_text("Looked up in the dictionary").wait_for()
    page.get_by_label("Type a word").fill("42 thalwegs?")
    page.get_by_role("region", name="Beam of english: forty").wait_for()
    assert "part" not in page.url
    words.nth(2).click()  # which the model answers, and so has looked at
    page.locator(".attention thead th").nth(7).wait_for()
    assert page.locator(".attention thead th").all_inner_texts() == list("thalwegs")
    page.get_by_label("Type a word").fill("?!")  # nothing to say, and no beam of it
    page.get_by_text("No answer.").wait_for()
    page.locator(".tree").wait_for(state="detached")


def test_models_stand_side_by_side_and_can_be_left_out(at: View) -> None:
    page = at("try")
    assert page.get_by_label("Type a word").input_value() == "Hannah"  # of the first model that has something to try
    page.get_by_label("Type a word").fill("abc")
    page.locator("article[aria-label=arabic] .answers").wait_for()
    page.locator("article[aria-label=backwards] .answers").wait_for()
    page.get_by_role("checkbox", name="arabic").uncheck()
    page.locator("article[aria-label=arabic]").wait_for(state="detached")
    assert "models=backwards" in page.url


def test_searches_show_what_they_change(at: View, served: Any) -> None:
    page = at("try?models=backwards&words=fadecab")
    settled(page)
    page.get_by_text("Greedy", exact=True).click()
    page.locator(".change", has_text="beam 5").wait_for()
    settled(page)
    assert texts(page) == expected(served, "fadecab", search="greedy")
    page.get_by_text("Exact", exact=True).click()
    page.locator(".mark.proved").wait_for()
    page.get_by_text("Sampling", exact=True).click()
    page.get_by_label("Nucleus p").fill("0.5")
    page.get_by_label("Temperature").fill("2")
    page.get_by_role("button", name="Draw again").click()
    until(page, "location.hash.includes('seed=1')")
    assert {"search=nucleus", "p=0.5", "heat=2"} <= set(page.url.partition("?")[2].split("&"))
    page.get_by_text("Beam", exact=True).first.click()
    page.get_by_label("Width").fill("2")
    settled(page)
    assert texts(page) == expected(served, "fadecab", k=2, search="beam", width=2)


def test_the_beam_is_drawn_with_what_it_dropped(at: View) -> None:
    page = at("try?models=backwards&words=bead&width=3")
    tree = page.locator(".tree svg")
    tree.wait_for()
    assert tree.locator(".node.best").count() >= 2
    assert tree.locator(".node.dropped").count() > 0
    page.get_by_text("most probable answer").wait_for()
    before = tree.locator(".node").count()
    page.get_by_label("Step").fill("1")
    until(page, f"document.querySelectorAll('.tree svg .node').length < {before}")


def test_a_wide_page_has_answers_and_beam_side_by_side(at: View) -> None:
    page = at("try?models=backwards&words=bead")
    page.locator(".tree svg").wait_for()
    answers, tree = (page.locator(f".inside > {place}").bounding_box() for place in (":has(.answers)", ":has(.tree)"))
    assert answers["x"] + answers["width"] <= tree["x"]
    page.set_viewport_size(PHONE)
    assert page.locator(".inside > :has(.tree)").bounding_box()["x"] == pytest.approx(
        page.locator(".inside > :has(.answers)").bounding_box()["x"]
    )


def test_letters_and_cells_are_linked(at: View) -> None:
    page = at("try?models=backwards&words=bead")
    page.locator(".attention thead th").nth(1).hover()
    page.locator(".readout", has_text="e is looked at most by").wait_for()
    page.locator(".attention [data-r='0'][data-c='0']").focus()
    page.keyboard.press("ArrowRight")
    page.locator(".readout", has_text="looks at e").wait_for()
    assert page.locator(".attention thead th.lit").inner_text() == "e"


def test_right_to_left_runs_from_the_right(at: View, served: Any) -> None:
    page = at(f"try?models=arabic&words={quote(ARABIC_WORD)}")
    letters = page.locator("article[aria-label=arabic] .attention thead th")
    letters.nth(2).wait_for()
    assert letters.all_inner_texts() == list(ARABIC_WORD)
    first, last = letters.nth(0).bounding_box(), letters.nth(2).bounding_box()
    assert first["x"] > last["x"]
    direction = page.get_by_label("Type a word").evaluate("field => getComputedStyle(field).direction")
    assert direction == "rtl"
    assert texts(page, "arabic") == expected(served, ARABIC_WORD, "arabic", search="beam", width=5)
    page.locator(".attention [data-r='0'][data-c='0']").focus()
    page.keyboard.press("ArrowLeft")
    page.locator(".readout", has_text=f"looks at {ARABIC_WORD[1]}").wait_for()


@pytest.mark.parametrize("search", ["beam&width=3&k=2", "exact", "nucleus&p=0.8&heat=1.2&seed=3"])
def test_the_python_lines_give_the_same(at: View, served: Any, search: str, monkeypatch: pytest.MonkeyPatch) -> None:
    page = at(f"try?models=backwards&words=cafe&search={search}")
    settled(page)
    page.get_by_role("button", name="Python").click()
    monkeypatch.chdir(served.runs)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(page.locator("dialog code").inner_text(), "page", "exec"), {})
    found = dict.fromkeys(line.split("\t")[2] for line in said.getvalue().splitlines())
    assert [text or "nothing" for text in found] == texts(page)


def test_the_json_is_what_the_server_said(at: View, served: Any) -> None:
    page = at("try?models=backwards&words=cafe")
    settled(page)
    page.get_by_role("button", name="JSON", exact=True).click()
    [asked] = json.loads(page.locator("dialog code").inner_text())
    answers = asked[0]["answered"]["records"][0]["answers"]
    assert [answer["text"] for answer in answers] == expected(served, "cafe", search="beam", width=5)
    page.keyboard.press("Escape")
    page.locator("dialog").wait_for(state="detached")


def test_a_symbol_that_cannot_be_seen_is_named(at: View) -> None:
    page = at(f"try?models=backwards&words={quote('be ad' + chr(0x200B) + 'x')}")
    page.locator(".note", has_text="Never seen in training: ␣ U+200B x").wait_for()


def forget_refusals(seen: Any) -> None:
    """The browser notes every answer of status 4xx in its console; that there was one is what was wanted."""
    assert seen.complaints
    assert all("status of 4" in complaint for complaint in seen.complaints), seen.complaints
    seen.complaints.clear()


def lines(page: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the Python lines of a view print."""
    page.get_by_role("button", name="Python").click()
    code = page.locator("dialog code").inner_text()
    page.get_by_role("button", name="Close").click()
    monkeypatch.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(code, "page", "exec"), {})
    return said.getvalue()


def answered(page: Any) -> Any:
    """What the server answered, as the JSON button tells it."""
    page.get_by_role("button", name="JSON", exact=True).click()
    found = json.loads(page.locator("dialog code").inner_text())
    page.get_by_role("button", name="Close").click()
    return found


def test_a_spoilt_digit_is_retrieved(at: View, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = at("memory")
    page.get_by_role("button", name="Digit 7").click()
    page.get_by_role("button", name="Hide lower half").click()
    settled(page, ".memory")
    page.locator(".recall", has_text="Most like a stored 7").wait_for()
    [asked] = answered(page)
    energies = asked["answered"]["energies"]
    assert all(after <= before + 1e-4 for before, after in pairwise(energies))
    said = lines(page, tmp_path, monkeypatch)
    found = json.loads(said.partition("energies ")[2].partition("\n")[0])
    assert found == pytest.approx(energies, rel=1e-4, abs=1e-4)
    page.get_by_role("button", name="Step 0").click()
    page.get_by_text("Step 0 of").wait_for()
    page.get_by_label("Separation").fill("2")
    until(page, "location.hash.includes('separation=sparsemax')")
    page.get_by_label("Separation").fill("1.3")
    settled(page, ".memory")
    [asked] = answered(page)
    assert asked["asked"]["body"]["separation"] == 1.3
    said = lines(page, tmp_path, monkeypatch)
    found = json.loads(said.partition("energies ")[2].partition("\n")[0])
    assert found == pytest.approx(asked["answered"]["energies"], rel=1e-4, abs=1e-4)


def test_the_pad_is_drawn_on_by_keyboard_mouse_and_finger(visit: Callable[..., Any]) -> None:
    page = visit(has_touch=True).see(f"memory?pixels={'0' * 64}")
    cell = page.locator(".pad [role=gridcell]")
    cell.first.focus()
    for key in ("ArrowRight", "ArrowDown", " "):
        page.keyboard.press(key)
    until(page, "/pixels=0{9}g0{54}/.test(location.hash)")
    box = cell.nth(32).bounding_box()
    page.mouse.move(box["x"] + 5, box["y"] + 5)
    page.mouse.down()
    page.mouse.move(box["x"] + 5 + 2 * box["width"], box["y"] + 5, steps=5)
    page.mouse.up()
    cell.nth(60).tap()
    drawn = "new URLSearchParams(location.hash.split('?')[1]).get('pixels')"
    until(page, f"{drawn}[60] === 'g'")
    assert [page.evaluate(drawn)[n] for n in (9, 32, 33, 34)] == ["g"] * 4


def test_forcing_a_label_changes_a_chain(at: View, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = at("chain")
    page.get_by_role("button", name="flies: verb").click()
    page.get_by_role("button", name="flies: verb, 100 %, forced").wait_for()
    page.get_by_label("Score of noun at time").fill("-3")
    until(page, "location.hash.includes('-3')")
    settled(page, ".chain")
    [asked] = answered(page)
    assert asked["asked"]["body"]["force"] == {"1": 1}
    said = lines(page, tmp_path, monkeypatch)
    assert float(said.split()[2]) == pytest.approx(asked["answered"]["log_partition"], rel=1e-4)
    page.get_by_role("button", name="Add a label").click()
    page.get_by_role("button", name="time: label 4").wait_for()
    page.get_by_role("button", name="Draw again").click()
    page.get_by_role("button", name="Start over").click()
    until(page, "!location.hash.includes('chain=')")


def test_a_picture_is_classified(
    visit: Callable[..., Any], tmp_path: Path, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = Image.new("L", (40, 40))
    picture.paste(255, (17, 4, 23, 36))
    picture.save(tmp_path / "one.png")
    seen = visit()
    page = seen.see("images")
    page.locator("input[type=file]").set_input_files(tmp_path / "one.png")
    page.locator("article .answers li").nth(4).wait_for()
    first = page.locator("article .answers .text").first.inner_text()
    [asked] = answered(page)
    assert asked["answered"]["records"][0]["answers"][0]["text"] == first
    (served.runs / "one.png").write_bytes((tmp_path / "one.png").read_bytes())
    assert lines(page, served.runs, monkeypatch).split("\t")[2] == first
    page.get_by_text("Off", exact=True).click()
    until(page, "location.hash.includes('map=none')")
    page.locator("input[type=file]").set_input_files(served.runs / "arabic.tsv")
    page.get_by_role("alert").get_by_text("image file").wait_for()
    forget_refusals(seen)


def test_a_file_is_measured(at: View, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    page = at("evaluate?model=backwards")
    page.locator("input[type=file]").set_input_files(served.runs / "backwards.tsv")
    page.get_by_text("done").wait_for()
    found = answered(page)
    said = lines(page, served.runs, monkeypatch)
    assert f"{found['scores']['cer']['value']:.3f}" in said or f"{found['scores']['cer']['value']:.4f}" in said, said
    assert len(found["records"]) == len((served.runs / "backwards.tsv").read_text().splitlines())
    page.get_by_text("All", exact=True).click()
    page.get_by_label("Filter").fill("fed")
    until(page, "[...document.querySelectorAll('.records tbody tr')].every(row => /fed/.test(row.innerText))")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download TSV").click()
    assert "source\tright answer" in Path(download.value.path()).read_text(encoding="utf-8")
    one = {"name": "one.tsv", "mimeType": "text/plain", "buffer": b"abcdef\tZ\n"}
    page.locator("input[type=file]").set_input_files(one)
    page.get_by_text("1 of 1 pair, done").wait_for()
    rows = dict(row.split(maxsplit=1) for row in page.locator(".scores-table tbody tr").all_inner_texts())
    assert "%" in rows["PER"]
    assert "%" not in rows["BLEU"]  # which runs to 100, however low it is


def test_curves_grow_while_a_run_trains(at: View, served: Any) -> None:
    page = at("training?run=live")
    page.get_by_text("Training now").wait_for()
    page.get_by_text("of 5 epochs").wait_for()
    before = page.locator(".plot").first.get_attribute("aria-label")
    log_epoch(served.runs / "live", 2)
    page.get_by_text("2 of 5 epochs").wait_for()
    assert page.locator(".plot").first.get_attribute("aria-label") != before
    with open(served.runs / "live" / "log.jsonl", "a", encoding="utf-8") as log:
        log.write(json.dumps({"event": "interrupted", "epoch": 2, "step": 20}) + "\n")
    page.get_by_text("Stopped; it can be resumed.").wait_for()
    page.get_by_role("combobox", name="Run").select_option("backwards")
    page.get_by_text("all epochs are done").wait_for()


@pytest.mark.parametrize("place", RESTORED, ids=lambda place: place.partition("?")[0])
def test_a_link_restores_a_view(at: View, place: str) -> None:
    page = at(place)
    page.locator(RESTORED[place]).wait_for(state="attached")
    assert page.url.partition("#")[2] == place


def test_an_address_that_the_browser_refuses_is_written_later(visit: Callable[..., Any]) -> None:
    seen = visit()
    seen.page.add_init_script(
        "const write = history.replaceState; let refused = 0;"
        "history.replaceState = function (...given) {"
        "  if (++refused < 3) throw new DOMException('too many', 'SecurityError'); write.apply(this, given); }"
    )
    page = seen.see("memory")
    page.get_by_label("Digits stored").fill("30")
    page.get_by_text("This memory has stored 30").wait_for()
    assert "count" not in page.url
    until(page, "location.hash.includes('count=30')")


def carried(page: Any) -> str:
    """The place that the copied link of a view names."""
    page.evaluate("navigator.clipboard.writeText('nothing yet')")
    page.get_by_role("button", name="Copy link").click()
    until(page, "navigator.clipboard.readText().then(text => text.includes('#'))")
    return page.evaluate("navigator.clipboard.readText()").partition("#")[2]


def test_a_link_carries_pairs_and_pictures(visit: Callable[..., Any], served: Any, tmp_path: Path) -> None:
    first, second = visit(permissions=["clipboard-read", "clipboard-write"]), visit()
    page = first.see("evaluate?model=backwards")
    page.locator("input[type=file]").set_input_files(served.runs / "backwards.tsv")
    page.get_by_text("done").wait_for()
    again = second.see(carried(page))
    again.get_by_text("done").wait_for()
    assert again.locator(".scores-table").inner_text() == page.locator(".scores-table").inner_text()
    Image.linear_gradient("L").resize((30, 50)).save(tmp_path / "slope.png")
    page = first.see("images")
    page.locator("input[type=file]").set_input_files(tmp_path / "slope.png")
    page.locator("article .answers li").first.wait_for()
    again = second.see(carried(page))
    again.locator("article .answers li").first.wait_for()
    assert again.locator("article .answers").inner_text() == page.locator("article .answers").inner_text()


def shown(page: Any, name: str, served: Any) -> None:
    """Wait until a view has something to show."""
    page.locator(PLACES[name][1]).first.wait_for()
    if name == "evaluate":
        page.locator("input[type=file]").set_input_files(served.runs / "backwards.tsv")
        page.get_by_text("done").wait_for()
    elif name == "training":  # its log has been read to the end: nothing is drawn any more
        page.get_by_text("Finished:").wait_for()


@pytest.mark.parametrize("name", PLACES)
def test_axe_finds_nothing_and_a_phone_scrolls_down_alone(visit: Callable[..., Any], served: Any, name: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = visit().see(PLACES[name][0])
    shown(page, name, served)
    for colours in ("light", "dark"):
        page.emulate_media(color_scheme=colours)
        found = axe.run(page)
        assert found.violations_count == 0, f"{colours}: {found.generate_report()}"
    page.set_viewport_size(PHONE)
    assert page.evaluate(SIDEWAYS) <= 0


@pytest.mark.parametrize("name", PLACES)
def test_a_phone_scrolls_down_alone_before_anything_is_drawn_anew(
    visit: Callable[..., Any], served: Any, name: str
) -> None:
    """A curve is redrawn a moment after its place has shrunk: here that moment never comes."""
    seen = visit(viewport={"width": 780, "height": 900})  # one column
    seen.page.add_init_script("globalThis.ResizeObserver = class { observe() {} disconnect() {} }")
    page = seen.see(PLACES[name][0])
    shown(page, name, served)
    page.set_viewport_size(PHONE)
    if name in ("memory", "training"):
        page.locator(".plot canvas").first.wait_for()
        # As they were for the wider page, whenever each of them was drawn.
        page.locator(".plot .uplot, .plot canvas").evaluate_all("all => all.forEach(x => (x.style.width = '700px'))")
    assert page.evaluate(SIDEWAYS) <= 0


def test_a_word_that_is_too_long_is_told_to_a_person(visit: Callable[..., Any]) -> None:
    seen = visit()
    page = seen.see("try?models=backwards")
    page.get_by_label("Type a word").fill("abc" * 2000)
    page.get_by_role("alert").first.wait_for()
    assert page.get_by_role("alert").first.inner_text().startswith("At most 1,024 characters")
    assert page.locator(".answers").count() == 0  # no answers to an older word beside it
    page.get_by_label("Type a word").fill("abc")
    page.get_by_role("alert").first.wait_for(state="detached")
    page.locator(".answers li").first.wait_for()
    forget_refusals(seen)


def test_a_server_that_is_gone_is_told_to_a_person(visit: Callable[..., Any]) -> None:
    seen = visit()
    page = seen.see("chain")
    page.locator(".lattice button").first.wait_for()
    page.route("**/v1/**", lambda route: route.abort())
    page.get_by_role("button", name="Draw again").click()
    page.get_by_role("alert").get_by_text("The server does not answer").wait_for()
    page.unroute("**/v1/**")
    page.get_by_role("button", name="Try again").click()
    page.get_by_role("alert").wait_for(state="detached")
    seen.complaints.clear()


def test_a_token_is_asked_for(visit: Callable[..., Any]) -> None:
    seen = visit()

    def guard(route: Any) -> None:
        if route.request.headers.get("authorization") == "Bearer open sesame":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": {"code": "unauthorised", "message": "no token"}})

    seen.page.route("**/v1/**", guard)
    seen.page.goto(f"{seen.url}#chain")
    seen.page.get_by_label("Token").fill("open sesame")
    seen.page.keyboard.press("Enter")
    seen.page.locator(".lattice button").first.wait_for()
    forget_refusals(seen)


def test_a_link_that_makes_no_sense_opens_the_first_view(at: View) -> None:
    page = at("nowhere?words=%00%ff&width=many")
    assert page.get_by_role("tab", selected=True).inner_text() == "Try"
    page = at("chain?chain=%7B%22words%22%3A1%7D&force=9:9,x")
    page.get_by_role("button", name="flies: verb").wait_for()


def test_tabs_go_by_arrow_keys(at: View) -> None:
    page = at("try")
    page.get_by_role("tab", name="Try").focus()
    page.keyboard.press("ArrowRight")
    assert page.get_by_role("tab", name="Memory").evaluate("tab => tab === document.activeElement")
    page.keyboard.press("End")
    until(page, "location.hash.startsWith('#training')")
    page.keyboard.press("ArrowRight")
    assert page.get_by_role("tab", selected=True).inner_text() == "Try"
    page.go_back()
    page.get_by_role("tab", name="Training", selected=True).wait_for()


def test_the_content_is_reached_without_the_tabs(at: View) -> None:
    page = at("chain?seed=2")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    assert page.url.endswith("chain?seed=2")


def test_a_theme_is_kept(at: View) -> None:
    page = at("chain")
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Use dark colours").click()
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    assert page.evaluate(ground) == dark


def test_words_of_a_view_are_kept_while_another_is_seen(at: View) -> None:
    page = at("try?words=fed&models=backwards")
    page.get_by_role("tab", name="Chain").click()
    page.get_by_role("tab", name="Try").click()
    assert page.get_by_label("Type a word").input_value() == "fed"
