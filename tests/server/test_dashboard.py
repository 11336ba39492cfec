"""The dashboard in a real browser against a real server: what it shows, and that it complains of nothing."""

import math
import re
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

import paclm
from curator.deployments import ScriptedEngine, set_mechanism
from paclm import Workspace
from paclm.ledger.dp_log import DpLog
from paclm.privacy.accounting import units_up
from paclm.server import corpus_terms
from paclm.server.student import CLAIMED
from paclm.worlds.layout import dp_log_path
from server.browser import HOW_TO_GET_ONE, Visit, find_chromium, open_browser
from server.live import serve
from server.stepped import SteppedEngine, wait_until

pytestmark = pytest.mark.skipif(find_chromium() is None, reason=HOW_TO_GET_ONE)

PER_TOKEN, TOTAL = 2.0**-24, 2.0**-12
STATIC = Path(paclm.__file__).parent / "server" / "static"


@pytest.fixture(scope="module")
def serve_with(tmp_path_factory, template, small_tokenizer):
    """Start a server with these settings in [mechanism]; all end with the module."""
    with ExitStack() as servers:

        def serve_with(tokenizer=small_tokenizer, engine=None, **mechanism):
            folder = tmp_path_factory.mktemp("served") / "clinic"
            shutil.copytree(template, folder)
            set_mechanism(folder, **{"per_token": PER_TOKEN, "total": TOTAL, "support_size": 40, **mechanism})
            return servers.enter_context(serve(Workspace.open(folder), engine or ScriptedEngine(), tokenizer))

        yield serve_with


@pytest.fixture(scope="module")
def shared_engine():
    engine = SteppedEngine()
    yield engine
    engine.run_free()


@pytest.fixture(scope="module")
def deployment(serve_with, shared_engine):
    shared_engine.run_free()
    return serve_with(engine=shared_engine)


@pytest.fixture
def engine(deployment, shared_engine):
    """The deployment's engine, standing still: a stream can be watched, and stopped, in its middle."""
    wait_until(lambda: deployment.service.is_idle)
    shared_engine.stand_still()
    yield shared_engine
    shared_engine.run_free()


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@pytest.fixture
def visit(browser, deployment):
    """A fresh profile; at the end no visit may have complained or asked anybody else."""
    visits = []

    def visit(to=deployment, **context):
        visits.append(Visit(browser, to.url, **context))
        return visits[-1]

    yield visit
    for one in visits:
        one.close()
    wait_until(lambda: deployment.service.is_idle)  # the next test counts tokens from where this one left them
    assert [one.complaints for one in visits if one.complaints] == []
    assert [one.foreign for one in visits if one.foreign] == []


def number(page, selector):
    return int(page.locator(selector).inner_text().replace(",", ""))


def wait_for_number(page, selector, is_right):
    for _ in range(600):
        if is_right(found := number(page, selector)):
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"{selector} stayed at {found}")


def step_when_asked(page, live, engine, is_done):
    """Figures are told, and streams cancelled, between two steps: one is taken whenever somebody waits for that."""
    for _ in range(1200):
        if is_done():
            return
        if live.num_calls and engine.stands:
            engine.let(1)
        page.wait_for_timeout(50)
    raise AssertionError("waited in vain")


def test_the_guarantee_is_the_bound_at_the_committed_total_and_spending_moves_the_account_alone(visit, deployment):
    visited = visit()
    page = visited.open_panel(deployment.admin)
    per_cent = math.ceil(paclm.success_bound(TOTAL, 0.5) * 1000) / 10  # rounded up
    promised, before = page.locator(".guarantee").inner_text(), number(page, "#left")
    assert f"succeeds more than {per_cent:.1f} % of the time" in re.sub(r"\s+", " ", promised)
    assert visited.refused == []
    deployment.complete(max_tokens=30)
    wait_for_number(page, "#left", lambda left: left == before - 30)
    assert page.locator(".guarantee").inner_text() == promised
    note = page.locator("#budget-note").inner_text()
    assert "%" not in note
    assert "not a bound" in note
    page.locator("#pace", has_text="at the current pace of").wait_for()


def test_figures_keys_charts_settings_and_labels_are_there(visit, deployment):
    deployment.complete(max_tokens=20)
    page = visit().open_panel(deployment.admin)
    row = page.locator("#keys tbody tr", has_text="ward")
    assert int(row.locator("td[data-label=Tokens]").inner_text().replace(",", "")) >= 20
    assert "admin" in page.locator("#keys tbody tr", has_text=re.compile(r"^\s*admin")).inner_text()
    assert re.fullmatch(r"\d+(\.\d)? %", page.locator("#dissent").inner_text())
    assert "estimate" in page.locator(".tile", has_text="Leak").inner_text()
    digits = re.sub(r"[^\d.]", "", page.locator("#leak").inner_text().split("×")[0]).replace(".", "").lstrip("0")
    assert len(digits) <= 3
    assert page.locator("#spending canvas, #tokens canvas").count() == 2
    assert "spent so far" in page.locator("#spending-text").inner_text()
    page.locator("[data-window=hours]").click()
    assert page.locator("#tokens-text").inner_text().startswith("Per hour.")
    assert "every-token" in page.locator("#settings").inner_text()
    assert re.search(r"model_id\s+clinic", page.locator("#settings").inner_text())  # what clients must say
    assert "Content." in page.locator(".promises.only-half").inner_text()
    assert page.evaluate("[...document.querySelectorAll('input, textarea')].filter(e => !e.labels.length).length") == 0
    nameless = "[...document.querySelectorAll('button')].filter(e => !e.textContent.trim()).length"
    assert page.evaluate(nameless) == 0


def test_the_plan_says_what_fits_and_costs_nothing(visit, deployment):
    page = visit().open_panel(deployment.admin)
    before = number(page, "#left")
    page.locator("#plan-tokens").fill("32")
    page.locator("#plan-form button").click()
    page.locator("#plan-answer strong", has_text="such requests at least").wait_for()
    assert "2⁻¹⁹ nats" in page.locator("#plan-answer").inner_text()  # 32 tokens of 2^-24
    page.locator("#plan-tokens").fill("100000")
    page.locator("#plan-form button").click()
    page.locator("#plan-answer .field-error").wait_for()
    assert number(page, "#left") == before


def test_the_playground_marks_every_token_and_the_figures_follow(visit, deployment, engine):
    page = visit().open_panel(deployment.admin)
    before = number(page, "#left")
    page.locator("#max-tokens").fill("40")
    page.locator("#prompt").press("Control+Enter")
    engine.let(20)
    page.locator("#answer[aria-busy=true]").wait_for()
    page.locator("#answer .mark").nth(3).wait_for(state="attached")  # a token may be a mere accent
    assert page.locator("#stop").is_enabled()
    step_when_asked(page, deployment, engine, lambda: before - 40 < number(page, "#left") <= before - 20)
    engine.run_free()
    page.locator("#answer[aria-busy=false]").wait_for()
    note = page.locator("#answer-note").inner_text()
    counts = {mark: int(amount) for amount, mark in re.findall(r"(\d+) (agreed|disputed|public)", note)}
    assert counts.keys() == {"agreed", "disputed"}
    assert sum(counts.values()) == 40
    assert "Charged" in note
    assert page.locator("#answer .mark.disputed").count() > 0
    wait_for_number(page, "#left", lambda left: left == before - 40)


def test_a_model_with_a_chat_template_can_be_sent_a_message(visit, serve_with, deployment, chat_tokenizer):
    assert visit().open_panel(deployment.admin).locator("#as-chat").is_hidden()
    talking = serve_with(tokenizer=chat_tokenizer)
    page = visit(talking).open_panel(talking.admin)
    page.locator("#prompt").fill("The")
    page.locator("#max-tokens").fill("6")
    page.locator("#as-chat").check()
    with page.expect_request("**/v1/chat/completions") as asked:
        page.locator("#go").click()
    assert asked.value.post_data_json["messages"] == [{"role": "user", "content": "The"}]
    page.locator("#answer-note", has_text="Charged").wait_for()
    assert page.locator("#answer .mark").count() > 0


def test_a_stopped_stream_charges_what_was_released_and_no_more(visit, deployment, engine):
    page = visit().open_panel(deployment.admin)
    before = number(page, "#left")
    page.locator("#max-tokens").fill("50")
    page.locator("#go").click()
    engine.let(20)
    engine.wait_until_it_stands()
    page.locator("#answer .mark").nth(2).wait_for(state="attached")
    page.locator("#stop").click()
    page.locator("#answer-note", has_text="Stopped.").wait_for()
    step_when_asked(page, deployment, engine, lambda: deployment.service.is_idle)
    left = deployment.curator.account.remaining_units // units_up(PER_TOKEN)
    assert before - 50 < left <= before - 20
    wait_for_number(page, "#left", lambda shown: shown == left)
    assert page.locator("#go").is_enabled()


def test_text_from_the_model_and_names_never_become_markup(visit, deployment):
    page = visit().open_panel(deployment.admin)
    page.locator("#prompt").fill("<img src=x onerror=document.title=1><b>bold</b>")
    page.locator("#max-tokens").fill("4")
    page.locator("#go").click()
    page.locator("#answer .mark").first.wait_for(state="attached")
    assert page.locator("#answer img, #answer b").count() == 0
    assert "<b>bold</b>" in page.locator("#answer").inner_text()


@pytest.mark.parametrize("on_exhausted", ["public", "refuse"])
def test_a_budget_that_is_gone_is_said_and_the_playground_says_what_happens(visit, serve_with, on_exhausted):
    gone = serve_with(total=PER_TOKEN * 8, on_exhausted=on_exhausted)
    page = visit(gone).open_panel(gone.admin)
    promised = page.locator("#mia").inner_text()
    gone.complete(max_tokens=8)
    page.locator("#budget-title", has_text="The budget is spent").wait_for()
    assert number(page, "#left") == 0
    assert page.locator("#mia").inner_text() == promised
    page.locator("#max-tokens").fill("6")
    page.locator("#go").click()
    if on_exhausted == "public":
        page.locator("#answer-note", has_text="6 tokens: 6 public. Charged 0 nats.").wait_for()
        assert page.locator("#answer .mark.public").count() > 0
    else:
        page.locator("#answer-error:not(:empty)").wait_for()
        assert "status 429" in page.locator("#budget-note").inner_text()


@pytest.mark.parametrize(("key", "status"), [("paclm-of-somebody-else", 401), ("ward", 403)])
def test_a_wrong_key_or_one_for_completions_is_refused_in_words_and_forgotten(visit, deployment, key, status):
    visited = visit()
    page = visited.log_in(deployment.ward if key == "ward" else key)
    page.locator("#login-error:not(:empty)").wait_for()
    assert page.locator("#panel").is_hidden()
    assert page.evaluate("sessionStorage.length") == 0
    assert page.evaluate("document.activeElement.id") == "key"
    assert set(visited.refused) == {status}


def test_a_revoked_key_closes_the_page_at_the_next_refresh(visit, deployment):
    visited = visit()
    page = visited.open_panel(deployment.keys.add("leaver", admin=True))
    deployment.keys.revoke("leaver")
    page.locator("#login-error", has_text="no longer takes this key").wait_for()
    assert page.locator("#panel").is_hidden()
    assert page.evaluate("sessionStorage.length") == 0


def test_the_key_stays_in_the_tab_and_log_out_forgets_it(visit, deployment):
    page = visit().open_panel(deployment.admin)
    assert page.evaluate("JSON.stringify(localStorage) + document.cookie") == "{}"
    page.reload()
    page.locator("#panel").wait_for(state="visible")  # sessionStorage outlives a reload
    page.locator("#go").click()
    page.locator("#answer .mark").first.wait_for(state="attached")
    page.locator("#leave").click()
    page.locator("#key").wait_for(state="visible")
    assert page.evaluate("sessionStorage.length") == 0
    assert deployment.admin not in page.content()
    assert page.locator("#answer").text_content() == ""


def test_a_lost_connection_is_said_and_mends_itself(visit, deployment):
    page = visit().open_panel(deployment.admin)
    page.route("**/v1/**", lambda route: route.abort())
    page.locator("#status-text", has_text="Connection lost").wait_for()
    assert "The figures are those of" in page.locator("#toast").inner_text()
    page.unroute("**/v1/**")
    page.locator("#toast-retry").click()
    page.locator("#status-text", has_text="Live").wait_for()
    assert page.locator("#toast").is_hidden()


def test_a_phone_shows_everything_without_scrolling_sideways(visit, deployment):
    deployment.complete(max_tokens=5)
    page = visit(viewport={"width": 360, "height": 740}).open_panel(deployment.admin)
    page.locator("#go").click()
    page.locator("#answer .mark").first.wait_for(state="attached")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    too_wide = "[...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > 360.5).length"
    assert page.evaluate(too_wide) == 0


def test_colours_follow_the_system_and_the_button_overrides_them(visit, deployment):
    def lightness(page):
        shade = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        return sum(int(part) for part in re.findall(r"\d+", shade)[:3]) / 3

    assert lightness(visit().open_panel(deployment.admin)) > 200
    page = visit(color_scheme="dark").open_panel(deployment.admin)
    assert lightness(page) < 50
    page.locator("#theme").click()
    assert lightness(page) > 200
    page.reload()
    assert lightness(page) > 200


def test_the_keyboard_alone_is_enough(visit, deployment):
    page = visit().page
    page.goto(deployment.url)
    page.locator("#key:focus").wait_for()  # the form is ready to type in
    page.keyboard.type(deployment.admin)
    page.keyboard.press("Enter")
    page.locator("#panel").wait_for(state="visible")
    reached = []
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.dataset.window"))
        has_ring = page.evaluate("getComputedStyle(document.activeElement).outlineStyle !== 'none'")
        assert has_ring or reached[-1] in ("", None), reached[-1]
    wanted = ["recent", "hours", "prompt", "max-tokens", "temperature", "go", "answer", "plan-tokens", "plan-requests"]
    assert [name for name in reached if name in wanted][: len(wanted)] == wanted


def test_refreshing_shifts_nothing(visit, deployment):
    deployment.complete(max_tokens=5)  # there is a pace to speak of
    page = visit().open_panel(deployment.admin)
    page.locator("#plan-answer strong").wait_for()
    page.locator("#pace", has_text="at the current pace of").wait_for()
    left = number(page, "#left")
    before = page.evaluate("[...document.querySelectorAll('.card')].map(e => e.getBoundingClientRect().top)")
    deployment.complete(max_tokens=25)
    wait_for_number(page, "#left", lambda now: now == left - 25)
    assert page.evaluate("[...document.querySelectorAll('.card')].map(e => e.getBoundingClientRect().top)") == before


def test_the_browser_does_notice_violations_errors_and_requests_to_others(browser, deployment):
    visited = Visit(browser, deployment.url)
    page = visited.open_panel(deployment.admin)
    assert (visited.complaints, visited.foreign) == ([], [])
    with page.expect_event("console"):
        page.evaluate("document.body.append(Object.assign(document.createElement('script'), {textContent: '1'}))")
    with page.expect_event("pageerror"):
        page.evaluate("setTimeout(() => { throw new Error('thrown'); })")
    page.goto(deployment.url.replace("127.0.0.1", "localhost"))
    visited.close()
    assert any("content security policy: script-src" in complaint for complaint in visited.complaints)
    assert "thrown" in visited.complaints
    assert visited.foreign


def test_the_files_name_nobody_else_and_have_no_inline_code():
    vendored = STATIC / "vendor"
    for path in STATIC.rglob("*"):
        if path.suffix in {".js", ".css", ".html"} and vendored not in path.parents:
            text = path.read_text()
            assert "//" not in re.sub(r"(?m)(^|\s)//.*$", "", text), f"{path.name} names an address"
            assert not re.search(r"innerHTML|insertAdjacentHTML|\beval\(|\son\w+=|\sstyle=", text), path.name
    assert (vendored / "uplot" / "LICENSE").read_text().startswith("The MIT License")


# --- a student ----------------------------------------------------------------------------------------------------


def test_of_a_student_the_page_shows_its_claims_and_no_budget(visit, student):
    is_half = student.curator.figures["promise"] == "half"
    page = visit(student).open_panel(student.admin)
    claimed = page.locator("#promise").inner_text()
    assert student.http.get("/v1/privacy").json()["sentence"] in claimed
    assert page.locator("#promise-sentence").is_hidden()
    assert page.locator("#epsilon-row").is_hidden() == is_half
    assert page.locator("#total-row").is_hidden() != is_half
    assert CLAIMED in page.locator("#not-promised").inner_text()
    for hidden in ("#budget", "#spending", "#dissent", "#leak", "#plan-form", ".guarantee", ".marks", "#tpr-1"):
        assert page.locator(hidden).is_hidden(), hidden
    page.locator("#max-tokens").fill("6")
    page.locator("#go").click()
    page.locator("#answer-note", has_text="nothing charged").wait_for()


# --- the promise about the corpus ---------------------------------------------------------------------------------


def test_under_corpus_the_page_shows_the_promise_and_no_budget(visit, corpus):
    visited = visit(corpus)
    page = visited.open_panel(corpus.admin)
    promised = re.sub(r"\s+", " ", page.locator("#promise").inner_text())
    assert "whether a record was in the corpus succeeds more than 77.8 % of the time" in promised
    bounds = re.sub(r"\s+", " ", page.locator("#bounds").inner_text())
    for text in ("ε = 8", "δ = 1.00", "record", "0.1 % false alarms at most 21.0 %", "1 % false alarms at most 35.0 %"):
        assert text in bounds
    for hidden in ("#budget", "#spending", "#dissent", "#leak", "#plan-form", ".guarantee", ".marks"):
        assert page.locator(hidden).is_hidden(), hidden
    assert "worlds" not in page.locator("#panel").inner_text()
    assert "Nothing is charged" in page.locator("#no-budget").inner_text()
    tokens = "#keys tbody tr:has-text('admin') td[data-label=Tokens]"
    before = number(page, tokens)
    page.locator("#max-tokens").fill("6")
    page.locator("#go").click()
    page.locator("#answer-note", has_text="nothing charged").wait_for()
    wait_for_number(page, tokens, lambda found: before < found <= before + 6)
    assert page.locator("#tokens canvas").count() == 1
    assert "support_size" in page.locator("#settings").inner_text()
    assert visited.refused == []


def test_mixed_promises_are_the_first_thing_the_page_says(visit, start_corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_terms, "LOOK_SECONDS", 0.0)
    live = start_corpus()
    page = visit(live).open_panel(live.admin)
    assert page.locator("#promise-mixed").is_hidden()
    DpLog(dp_log_path(tmp_path / "clinic")).append("mixed", accepted="half")
    page.locator("#promise-mixed").wait_for(state="visible")
    assert "Nothing is promised about the corpus" in page.locator("#promise-mixed").inner_text()
    assert page.locator("#promise-sentence").is_hidden()
    assert page.locator("#bounds-card").is_hidden()
    assert page.title().startswith("Nothing promised")
