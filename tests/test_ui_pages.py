"""Each page's logic, driven through its real widgets against a gateway without models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fake_gateway import FakeGateway, demo
from streamlit.testing.v1 import AppTest
from streamlit.util import calc_hash

import replay_ui
from replay_ui import client, panel
from replay_ui.rules import policy_of
from replay_ui.steps import Steps

APP = str(Path(replay_ui.__file__).with_name("app.py"))
Open = Callable[..., AppTest]


@pytest.fixture(scope="module")
def traces() -> FakeGateway:
    """Traces are made once; the tests do not change them."""
    return demo()


@pytest.fixture
def fake(traces: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> FakeGateway:
    fake = FakeGateway()
    fake.traces = dict(traces.traces)
    monkeypatch.setattr(client, "transport", fake.transport)
    return fake


@pytest.fixture
def opened(fake: FakeGateway) -> Open:
    """Open a page by name with query parameters."""

    def at(page: str = "", **query: str) -> AppTest:
        app = AppTest.from_file(APP, default_timeout=20)
        if page:
            # Our pages are functions, and AppTest.switch_page knows files only.
            app._page_hash = calc_hash(page)
        for name, value in query.items():
            app.query_params[name] = value
        return app.run()

    return at


def html(app: AppTest) -> str:
    return "\n".join(str(e.proto.body) for e in app.get("html"))


def step(app: AppTest) -> int:
    return int(app.session_state["view"].step)


def test_traces_filters_come_from_the_url_and_show_as_chips(opened: Open, fake: FakeGateway) -> None:
    app = opened(arm="canary")
    assert not app.exception
    assert app.button(key="t_chip_arm").label.startswith("arm: canary")
    assert any("arm=canary" in target for method, target, _ in fake.calls if "/v1/traces?" in target)
    app.button(key="t_chip_arm").click().run()
    assert "arm" not in app.query_params


def test_traces_filter_widget_writes_the_url(opened: Open) -> None:
    app = opened()
    app.selectbox(key="t_w_arm").select("canary").run()
    assert app.query_params["arm"] == "canary"


def test_traces_empty_tape_says_what_to_do(opened: Open, fake: FakeGateway) -> None:
    fake.traces.clear()
    app = opened()
    assert "Nothing is on the tape yet" in app.info[0].value
    assert "/v1/chat/completions" in app.code[0].value


def test_traces_no_match_says_remove_a_filter(opened: Open) -> None:
    assert "No trace matches" in opened(q="no such words").info[0].value


def test_a_trace_opens_in_replay(opened: Open) -> None:
    app = opened()
    app.selectbox(key="t_open").select("chatcmpl-8f2c").run()
    assert not app.exception
    assert app.session_state["view"].trace == "chatcmpl-8f2c"


def test_gateway_down_has_a_sentence_and_an_action(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "transport", lambda: None)
    monkeypatch.setenv("TOKENTAPE_URL", "http://127.0.0.1:9")
    app = opened()
    assert "cannot be reached" in app.warning[0].value
    assert app.button[0].label == "Try again"


def test_a_wanted_key_is_asked_for_and_never_put_into_the_url(opened: Open, fake: FakeGateway) -> None:
    fake.key = "sk-secret"
    app = opened()
    assert "API key" in app.warning[0].value
    app.text_input(key="api_key_entry").input("sk-secret").run()
    assert not app.warning
    assert not any("sk-secret" in target for _, target, _ in fake.calls)
    assert "sk-secret" not in str(app.query_params)


def test_replay_permalink_restores_the_whole_view(opened: Open) -> None:
    query = {"trace": "chatcmpl-8f2c", "step": "37", "colour": "gap", "drafts": "1", "find": "out"}
    app = opened("replay", **query, zoom="10-60", threshold="0.8")
    assert not app.exception
    shown = app.session_state["view"]
    assert (shown.step, shown.colour, shown.drafts, shown.find) == (37, "gap", True, "out")
    assert shown.zoom == (10, 60)
    assert app.slider(key="r_w_threshold").value == 0.8
    assert app.toggle(key="r_drafts").value is True
    assert app.text_input(key="r_find").value == "out"
    assert "step 37" in html(app)


def test_replay_buttons_and_scrub_bar_step(opened: Open) -> None:
    app = opened("replay", trace="chatcmpl-8f2c", step="17")
    for button, expected in (
        ("forward", 18),
        ("forward 10", 28),
        ("back", 27),
        ("back 10", 17),
        ("last", 169),
        ("first", 0),
    ):
        app.button(key=f"b_{button}").click().run()
        assert step(app) == expected
        assert f"step {expected}" in html(app)
    app.slider(key="r_scrub").set_value(101).run()
    assert step(app) == 101


def test_replay_keeps_its_place_however_far_one_walks(opened: Open) -> None:
    app = opened("replay", trace="chatcmpl-8f2c", step="17")
    app.button(key="b_forward").click().run()
    app.session_state["issued"] = ["trace=chatcmpl-8f2c&step=99"]
    app.button(key="b_forward").click().run()
    assert step(app) == 19


def test_replay_jumps_to_rejections_and_back(opened: Open, fake: FakeGateway) -> None:
    _, columns = fake.traces["chatcmpl-8f2c"]
    recovered = [i for i, o in zip(columns["idx"], columns["outcome"], strict=True) if o == "recovered"]
    app = opened("replay", trace="chatcmpl-8f2c")
    app.button(key="b_next rejection").click().run()
    assert step(app) == recovered[0]
    assert "refused the draft" in html(app)
    app.button(key="b_next rejection").click().run()
    assert step(app) == recovered[1]
    app.button(key="b_prev rejection").click().run()
    assert step(app) == recovered[0]


def test_replay_jumps_to_the_lowest_gap(opened: Open, fake: FakeGateway) -> None:
    _, columns = fake.traces["chatcmpl-8f2c"]
    app = opened("replay", trace="chatcmpl-8f2c")
    app.button(key="b_next lowest gap").click().run()
    assert step(app) == columns["idx"][columns["gap"].index(min(columns["gap"]))]


def test_replay_shows_rules_both_models_and_the_decision_made_anew(opened: Open) -> None:
    page = html(opened("replay", trace="chatcmpl-8f2c", step="37"))
    assert "decided anew: the same" in page
    assert "small model's top tokens" in page
    assert "large model's top tokens" in page
    assert "→ keep" in page or "→ defer" in page


def test_replay_what_if_asks_the_gateway_and_says_why_nothing_greys_under_exact(
    opened: Open, fake: FakeGateway
) -> None:
    app = opened("replay", trace="chatcmpl-8f2c")
    app.slider(key="r_w_threshold").set_value(0.8).run()
    asked = [body for _, target, body in fake.calls if target.endswith("/what-if")]
    assert asked == [{"routing": {"threshold": 0.8}}]
    assert "the text is the same whatever the settings" in html(app)
    app.button(key="b_reset").click().run()
    assert app.session_state["view"].what_if == {}


def test_replay_what_if_under_trust_offers_a_fork(opened: Open) -> None:
    app = opened("replay", trace="chatcmpl-trust", threshold="0.8")
    assert "beyond this point the text itself would differ; fork to see it" in html(app)


def test_replay_survives_a_gateway_without_what_if(opened: Open, fake: FakeGateway) -> None:
    fake.missing = ("/v1/traces/chatcmpl-8f2c/what-if",)
    app = opened("replay", trace="chatcmpl-8f2c", threshold="0.8")
    assert not app.exception
    assert any("cannot answer what-if" in c.value.replace("\\", "") for c in app.caption)


def test_replay_fork_forces_a_token_and_opens_compare(opened: Open, fake: FakeGateway) -> None:
    app = opened("replay", trace="chatcmpl-8f2c", step="37")
    app.button(key="b_fork").click().run()
    assert len(app.selectbox(key="f_token").options) > 2
    app.selectbox(key="f_token").select_index(2)
    # AppTest reruns the page, not the dialog, so the page is told to keep it open.
    app.session_state["fork_asked"] = True
    app.button(key="b_run_fork").click().run()
    asked = [body for _, target, body in fake.calls if target.endswith("/fork")]
    assert asked[0]["at"] == 37
    assert "token_id" in asked[0]
    assert "chatcmpl-8f2c-fork37" in fake.traces


def test_replay_unknown_trace_says_so(opened: Open) -> None:
    assert "holds no such trace" in opened("replay", trace="nope").warning[0].value


def test_replay_says_when_a_trace_is_not_whole(opened: Open, fake: FakeGateway) -> None:
    row, columns = fake.traces["chatcmpl-8f2c"]
    fake.traces["cut"] = ({**row, "id": "cut", "request_id": "cut", "incomplete": True}, columns)
    app = opened("replay", trace="cut")
    assert any("dropped" in w.value for w in app.warning)


def test_replay_hostile_text_is_inert(opened: Open, fake: FakeGateway) -> None:
    page = html(opened("replay", trace="chatcmpl-hostile", step="0"))
    row, columns = fake.traces["chatcmpl-hostile"]
    steps = Steps.read(columns)
    cards = [
        panel.card(policy_of(row), steps, at, panel.token_names(steps, at, {})) for at in range(len(steps))
    ]
    for drawn in (page, *cards):
        assert "<script>alert" not in drawn
        assert "<img" not in drawn
        assert "\x1b" not in drawn
        assert "\u202e" not in drawn
        assert len(drawn) < 60_000


def test_compare_opens_where_the_answers_part(opened: Open, fake: FakeGateway) -> None:
    app = opened("compare", a="chatcmpl-8f2c", b="chatcmpl-other")
    assert not app.exception
    page = html(app)
    assert "They part at step 60" in page
    assert page.count("step 60") >= 2
    assert "<td>threshold</td><td>0.5</td><td>0.3</td>" in page
    app.button(key="c_forward").click().run()
    assert app.session_state["c_step"] == 61
    app.button(key="c_to").click().run()
    assert app.session_state["c_step"] == 60


def test_compare_of_equal_answers_says_so(opened: Open) -> None:
    page = html(opened("compare", a="chatcmpl-8f2c", b="chatcmpl-8f2c"))
    assert "The answers are the same, token for token." in page
    assert "Policy, models and seed are the same." in page


def test_compare_asks_which_two(opened: Open) -> None:
    app = opened("compare")
    app.selectbox(key="c_a").select("chatcmpl-8f2c").run()
    app.selectbox(key="c_b").select("chatcmpl-other").run()
    assert app.query_params["b"] == "chatcmpl-other"


def test_advisor_slider_reads_both_axes(opened: Open) -> None:
    app = opened("advisor")
    app.slider(key="a_threshold").set_value(0.75).run()
    page = html(app)
    # 0.95 - 0.04 * 15 and 0.9 + 0.005 * 15
    assert "<b>35 %</b>" in page
    assert "<b>0.9750</b>" in page
    assert "From 1,204 labels" in page
    assert "<tr class=tt-differs><td>threshold too loose</td>" in page
    assert "raise threshold to 0.62" in page


def test_live_shows_what_the_metrics_say(opened: Open) -> None:
    page = html(opened("live"))
    for tile in ("<small>running</small><b>2</b>", "<small>tape queue</small><b>12 rows</b>", "<b>41 %</b>"):
        assert tile in page
    assert "agreement" in page


def test_reviews_hide_the_arm_until_the_verdict(opened: Open, fake: FakeGateway) -> None:
    app = opened("reviews")
    assert "stable" not in html(app)
    assert "canary" not in html(app)
    assert app.caption == []
    app.text_input(key="v_note").input("well done")
    app.button(key="v_good").click().run()
    assert fake.reviews[0]["verdict"] == "good"
    assert fake.reviews[0]["note"] == "well done"
    assert "you said good" in app.caption[0].value


def test_reviews_end_with_the_draw(opened: Open, fake: FakeGateway) -> None:
    for name in list(fake.traces)[1:]:
        fake.traces.pop(name)
    app = opened("reviews")
    app.button(key="v_bad").click().run()
    assert "That is all" in app.success[0].value


def test_rollout_verdict_is_in_words_and_buttons_ask_once(opened: Open, fake: FakeGateway) -> None:
    app = opened("rollouts")
    page = html(app)
    assert "is on its way" in page
    assert "6.20 / 20" in page
    assert "threshold 0.4" in page
    app.button(key="o_abort").click().run()
    assert fake.rollouts[0]["verdict"] == "aborted"
    assert "was aborted by hand" in html(app)


def test_alerts_are_silenced_with_a_name_and_a_reason(opened: Open, fake: FakeGateway) -> None:
    app = opened("alerts")
    page = html(app)
    assert "QualityDrift" in page
    assert "<b>below</b>" not in page
    assert "failed after 5 attempts (503 )" in page
    assert app.button(key="n_silence").disabled
    app.text_input(key="n_author").input("ops")
    app.text_input(key="n_comment").input("known").run()
    app.button(key="n_silence").click().run()
    sent = next(body for method, target, body in fake.calls if target == "/v1/alerts/silences")
    assert sent["matchers"] == {"alertname": "QualityDrift"}
    assert sent["duration_s"] == 7200
    app.button(key="n_end_s1").click().run()
    assert fake.alerts["silences"] == []


@pytest.mark.parametrize(
    ("page", "path"),
    [
        ("advisor", "/v1/advisor"),
        ("reviews", "/v1/reviews"),
        ("rollouts", "/v1/rollouts"),
        ("alerts", "/v1/alerts"),
    ],
)
def test_a_page_the_gateway_does_not_serve_says_so(
    opened: Open, fake: FakeGateway, page: str, path: str
) -> None:
    fake.missing = (path,)
    app = opened(page)
    assert not app.exception
    assert "This gateway has no" in app.warning[0].value
