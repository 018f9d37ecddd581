"""Calibration from prompts to a policy file that serves, over the tiny pair."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_tuning_curve import COSTS, prompts
from tiny_pair import TinyPair

from gateway import cli
from gateway.config import Calibration, Config, ConfigError, load_config
from gateway.core import Accept
from gateway.loading import check_calibrated
from gateway.policy import Policy
from gateway.request import Served
from gateway.router import Router
from gateway.tuning import calibration_report as told
from gateway.tuning.calibrate import (
    Calibrated,
    Target,
    calibrate,
    candidates,
    certificate,
    default_policy,
    looser,
    split,
)
from gateway.tuning.curve import Track
from gateway.tuning.policy_file import write_policy
from gateway.tuning.report import html
from gateway.tuning.run import Runner, disagreement
from gateway.tuning.saved import Saved

SERVED = Served("s", "l", "a" * 64, "b" * 64, "cpu/float32/none+none", "0")
TARGET = Target(0.2, 0.95)
BASE = Policy(accept=Accept.TRUST, protect_first=2)


def run(
    pair: TinyPair, folder: Path, target: Target = TARGET, *, learns: bool = False, hidden: bool = False
) -> Calibrated:
    runner = Runner(pair.engine(), 12)
    parts = split(prompts(40), learns, target)
    saved = Saved(folder / "p.progress.jsonl", {})
    return calibrate(runner, saved, parts, BASE, target, COSTS, learns=learns, hidden=hidden)


def test_a_policy_with_a_guarantee(tiny_pair: TinyPair, tmp_path: Path) -> None:
    done = run(tiny_pair, tmp_path)
    assert done.policy is not None
    passed = [threshold for threshold, verdict in done.chosen.verdicts if verdict.passed]
    assert done.policy.threshold == min(passed)
    # The numbers are those of the answers, and the answers those of the policy run anew.
    answers = list(Runner(tiny_pair.engine(), 12).run(done.split.held, done.policy))
    mean = sum(disagreement(one, done.policy) for one in answers) / len(answers)
    note = certificate(done, SERVED, TARGET, "c" * 64)
    assert note.observed == pytest.approx(mean)
    assert (note.prompts, note.max_disagreement, note.confidence) == (len(answers), 0.2, 0.95)

    assert write_policy(tmp_path / "policy.toml", "stable", done.policy, note) == [tmp_path / "policy.toml"]
    config = load_config(tmp_path / "policy.toml", {})
    assert config.policies["stable"] == done.policy
    assert config.calibration["stable"] == note
    assert note.policy_hash == config.policies["stable"].hash
    assert {"accept", "threshold", "draft_length"} <= tomllib.loads((tmp_path / "policy.toml").read_text())[
        "policy"
    ]["stable"].keys()
    check_calibrated(config, SERVED)


def test_a_router_with_a_probe_runs_for_real_and_serves(tiny_pair: TinyPair, tmp_path: Path) -> None:
    """What it reads is asked of the model while it decodes, and the file names it."""
    width = tiny_pair.small.hidden_size
    router = Router((0.0,) * 9, (1.0,) * 9, (), (), (*(0.0,) * 8, 1.0), 0.0, (0.0078125,) * width)
    parts, saved = split(prompts(40), False, TARGET), Saved(tmp_path / "h.jsonl", {})
    base = replace(BASE, router=router)
    done = calibrate(Runner(tiny_pair.engine(), 12), saved, parts, base, TARGET, COSTS, hidden=True)
    assert done.policy is not None
    scores = {s for a in done.measured[done.policy.threshold] for s in a.columns["score"] if s is not None}
    assert len(scores) > 20
    write_policy(tmp_path / "p.toml", "stable", done.policy, certificate(done, SERVED, TARGET, ""))
    assert load_config(tmp_path / "p.toml", {}).policies["stable"] == done.policy


@pytest.mark.parametrize("tier", ["small_hash", "large_hash"])
def test_other_models_are_refused(tier: str) -> None:
    other = Calibration(
        small_hash="a" * 64, large_hash="b" * 64, policy_hash=Policy().hash, numerics=SERVED.numerics,
        max_disagreement=0.02, confidence=0.95, observed=0.01, prompts=300, prompts_sha256="",
        date="2026-11-30",
    )  # fmt: skip
    config = Config(calibration={"stable": other})
    check_calibrated(config, SERVED)
    with pytest.raises(ConfigError, match=rf"calibration\.stable\.{tier}: .*other models"):
        check_calibrated(config, replace(SERVED, **{tier: "f" * 64}))


def test_a_calibration_of_no_policy_is_an_error(tmp_path: Path) -> None:
    note = certificate_text("other")
    (tmp_path / "c.toml").write_text(f"[policy.stable]\nthreshold = 0.5\n{note}")
    with pytest.raises(ConfigError, match=r"calibration\.other: there is no"):
        load_config(tmp_path / "c.toml", {})


def certificate_text(name: str) -> str:
    return (
        f'[calibration.{name}]\nsmall_hash = "a"\nlarge_hash = "b"\npolicy_hash = "c"\nnumerics = "d"\n'
        'max_disagreement = 0.02\nconfidence = 0.95\nobserved = 0.01\nprompts = 300\nprompts_sha256 = "e"\n'
        'date = "2026-11-30"\n'
    )


def test_the_report_says_what_was_found(tiny_pair: TinyPair, tmp_path: Path) -> None:
    done = run(tiny_pair, tmp_path, learns=True, hidden=True)
    assert [rule.name for rule in done.learned.judged][3:] == [
        "logistic + hidden state",
        "mlp + hidden state",
    ]
    page = html("Calibration", told.sections(done, TARGET, ("about the run",)))
    assert f"Threshold {done.chosen.threshold:g} qualifies" in told.verdict(done, TARGET)
    for heading in ("Verdict", "The curve", "Run for real", "Facts", "Learned router"):
        assert f"<h2>{heading}</h2>" in page
    assert "about the run" in page
    # Nothing is loaded from elsewhere.
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []
    assert told.png(done, TARGET).startswith(b"\x89PNG")
    assert len(told.table_lines(done)) > 12


def test_nothing_qualifies(tiny_pair: TinyPair, tmp_path: Path) -> None:
    """A bound below what one wrong token in 40 answers makes: even the strictest threshold cannot show it."""
    parts = split(prompts(40), False, TARGET)
    runner = Runner(tiny_pair.engine(), 12)
    done = calibrate(
        runner,
        Saved(tmp_path / "x.jsonl", {}),
        parts,
        replace(BASE, protect_first=0),
        Target(0.02, 0.95),
        COSTS,
    )
    assert done.policy is None
    assert len(done.chosen.verdicts) == 1
    assert "No threshold qualifies" in told.verdict(done, Target(0.02, 0.95))
    with pytest.raises(ValueError, match="nothing to certify"):
        certificate(done, SERVED, TARGET, "")


def test_too_few_prompts_says_how_many() -> None:
    with pytest.raises(ConfigError, match=r"leave 72 to test on.*at least 149.*bring 187 or more"):
        split(prompts(90), False, Target(0.02, 0.95))
    parts = split(prompts(300), True, Target(0.02, 0.95))
    assert [len(part) for part in (parts.train, parts.tune, parts.held)] == [75, 60, 165]
    assert not {p.digest for p in parts.tune} & {p.digest for p in parts.held}


def test_looser_thresholds_follow_in_tenths() -> None:
    assert looser(0.82) == [0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]
    assert looser(0.25) == [0.2, 0.1, 0.0]
    assert looser(0.04) == []


def test_candidates_are_what_the_prompts_may_show() -> None:
    """64 tokens a prompt, of which one with score t is wrong for each t below .6: the loss grows steadily."""
    score = np.linspace(0, 1, 64)
    tracks = [Track(score, score > 0.6 * (i % 2), np.ones(64, bool), np.zeros(64, bool)) for i in range(20)]
    few, many = (candidates(tracks, Target(0.2, 0.95), n) for n in (20, 400))
    assert few == sorted(few, reverse=True)
    assert min(many) < min(few)
    mean = {t: np.mean([((score >= t) & ~one.agrees).mean() for one in tracks]) for t in many}
    assert mean[min(many)] < 0.2
    hopeless = [replace(one, agrees=np.zeros(64, bool)) for one in tracks]
    assert candidates(hopeless, Target(0.01, 0.95), 400) == [0.999]


def test_which_prompt_is_for_what_does_not_hang_on_the_files_order() -> None:
    asked = prompts(40)
    assert split(asked, True, TARGET) == split(asked[::-1], True, TARGET)


def test_what_is_calibrated() -> None:
    assert default_policy(None, None).accept is Accept.TRUST
    assert default_policy(None, Policy(alpha=0.5)) == Policy(alpha=0.5)
    assert default_policy(Accept.TYPICAL, Policy(alpha=0.5)) == Policy(accept=Accept.TYPICAL, alpha=0.5)


def test_a_learned_router_goes_beside_the_file(tmp_path: Path) -> None:
    router = Router((0.5,) * 8, (1.0,) * 8, (), (), (0.25,) * 8, -0.125)
    policy = Policy(accept=Accept.TRUST, router=router, fact_guard=True)
    note = Calibration(
        small_hash="a", large_hash="b", policy_hash=policy.hash, numerics="n", max_disagreement=0.02,
        confidence=0.95, observed=0.01, prompts=300, prompts_sha256="", date="2026-11-30",
    )  # fmt: skip
    files = write_policy(tmp_path / "p.toml", "mine", policy, note)
    assert [file.name for file in files] == ["p.toml", "p.router.safetensors"]
    config = load_config(tmp_path / "p.toml", {})
    assert config.policies["mine"] == policy
    assert config.policies["mine"].hash == note.policy_hash


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--max-disagreement", "0"], "--max-disagreement"),
        (["--confidence", "1"], "--confidence"),
        (["--rows", "0"], "--rows"),
        (["--tape", "x"], "--tape"),
        (["--out", "nowhere/p.toml"], "--out"),
        ([], "--prompts: 1 prompts"),
    ],
)
def test_usage_errors(
    tmp_path: Path, options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.txt").write_text("one\n")
    given = ["calibrate", "--prompts", str(tmp_path / "p.txt"), "--out", str(tmp_path / "o.toml"), *options]
    assert cli.main(given) == 2
    assert named in capsys.readouterr().err
