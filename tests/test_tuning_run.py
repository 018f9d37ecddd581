"""Closed-loop runs: what is kept, what counts as disagreement, and going on after a stop."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_tuning_curve import prompts
from tiny_pair import TinyPair
from transformers import AutoModelForCausalLM

from gateway.config import ConfigError
from gateway.core import Accept, Mode, Outcome, Tier
from gateway.policy import Policy
from gateway.tuning.prompts import read_prompts
from gateway.tuning.run import Answer, Runner, disagreement
from gateway.tuning.saved import Saved

TRUST = Policy(accept=Accept.TRUST, threshold=0.0, protect_first=2, lookup=False)


def answer(rows: list[tuple[Tier, Outcome, int, int | None]]) -> Answer:
    columns = {
        "tier": [r[0] for r in rows],
        "outcome": [r[1] for r in rows],
        "token_id": [r[2] for r in rows],
        "large_choice": [r[3] for r in rows],
    }
    return Answer("p", "stop", 1, 1, columns)


def test_disagreement_counts_what_the_large_model_would_not_have_written() -> None:
    rows = [
        (Tier.LARGE, Outcome.LARGE, 1, 1),
        (Tier.SMALL, Outcome.KEPT, 2, 2),
        (Tier.SMALL, Outcome.KEPT, 3, 9),
        (Tier.SMALL, Outcome.KEPT, 4, None),
    ]
    # A token that was never audited counts as the worst.
    assert disagreement(answer(rows), TRUST) == 0.5


def test_under_exact_rejected_proposals_are_counted() -> None:
    rows = [
        (Tier.SMALL, Outcome.ACCEPTED, 2, 2),
        (Tier.SMALL, Outcome.REJECTED, 3, 9),
        (Tier.LOOKUP, Outcome.REJECTED, 3, 9),
        (Tier.SMALL, Outcome.DISCARDED, 5, None),
        (Tier.LARGE, Outcome.RECOVERED, 9, 9),
    ]
    assert disagreement(answer(rows), Policy()) == 0.5
    assert disagreement(answer(rows), Policy(accept=Accept.TYPICAL)) == 0.0
    assert disagreement(answer([]), TRUST) == 0.0


def test_every_token_of_a_trusted_answer_gets_its_label(tiny_pair: TinyPair) -> None:
    runner = Runner(tiny_pair.engine(), 20)
    answers = list(runner.run(prompts(6), TRUST))
    assert len(answers) == 6
    losses = [disagreement(one, TRUST) for one in answers]
    assert 0 < max(losses) < 1
    for one in answers:
        assert None not in [
            one.columns["large_choice"][i] for i in one.written if one.columns["tier"][i] == "small"
        ]
        for top1_p, gap in zip(one.columns["large_top1_p"], one.columns["large_gap"], strict=True):
            assert top1_p is None or 0 <= gap <= top1_p <= 1
        assert one.count(Tier.SMALL) + one.count(Tier.LARGE) == len(one.tokens) == 20
    # Nothing kept, nothing wrong; and the large model alone writes what shadow writes.
    strict = list(runner.run(prompts(6), replace(TRUST, threshold=1.0)))
    assert [disagreement(one, TRUST) for one in strict] == [0.0] * 6
    shadow = {one.prompt: one.tokens for one in runner.run(prompts(6), replace(TRUST, mode=Mode.SHADOW))}
    assert {one.prompt: one.tokens for one in strict} == shadow
    assert runner.spent.passes[Tier.LARGE] >= 20


def test_both_models_signals_are_those_of_hf_forward_passes(tiny_pair: TinyPair) -> None:
    asked = prompts(2)
    shadow = replace(TRUST, mode=Mode.SHADOW)
    answers = list(Runner(tiny_pair.engine(), 16, keeps_hidden=True).run(asked, shadow))
    for prefix, folder in (("", "small"), ("large_", "large")):
        hf = AutoModelForCausalLM.from_pretrained(tiny_pair.folder / folder, attn_implementation="eager")
        for one in answers:
            prompt = next(p for p in asked if p.digest == one.prompt)
            ids = torch.tensor([[*prompt.ids(tiny_pair.tokenizer), *one.tokens]])
            with torch.inference_mode():
                said = hf(ids, output_attentions=True, output_hidden_states=True)
            behind = slice(-len(one.tokens) - 1, -1)
            p = torch.softmax(said.logits[0, behind], -1)
            top = p.topk(2, dim=-1).values
            expected = {
                "top1_p": top[:, 0],
                "gap": top[:, 0] - top[:, 1],
                "entropy": torch.special.entr(p).sum(-1),
                "attn_entropy": torch.special.entr(said.attentions[-1][0]).sum(-1).mean(0)[behind],
            }
            for name, want in expected.items():
                got = torch.tensor([one.columns[prefix + name][i] for i in one.written])
                torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
            if folder == "small":
                states = b"".join(one.signals(i).hidden for i in one.written)
                got = torch.frombuffer(bytearray(states), dtype=torch.float16).view(len(one.tokens), -1)
                want = said.hidden_states[-1][0, behind]
                torch.testing.assert_close(got.float(), want, rtol=2e-3, atol=1e-3)


def test_a_stopped_run_goes_on(tiny_pair: TinyPair, tmp_path: Path) -> None:
    about = {"small_hash": "a"}
    asked = prompts(5)
    file = tmp_path / "x.jsonl"
    runner = Runner(tiny_pair.engine(), 8)
    Saved(file, about).run(runner, asked[:3], TRUST, "first")
    with file.open("a") as half:
        half.write('{"policy": "cut o')

    again = Saved(file, about)
    assert len(again) == 3
    ran: list[str] = []

    class Watched(Runner):
        def run(self, prompts, policy):
            ran.extend(p.id for p in prompts)
            return super().run(prompts, policy)

    answers = again.run(Watched(runner.engine, 8), asked, TRUST, "second")

    assert ran == [p.id for p in asked[3:]]
    assert [one.prompt for one in answers] == [p.digest for p in asked]
    assert Saved(file, about).run(runner, asked, TRUST, "third") == answers
    with pytest.raises(ConfigError, match="other models"):
        Saved(file, {"small_hash": "b"})


def test_prompt_files(tmp_path: Path) -> None:
    text = tmp_path / "p.txt"
    text.write_text("one\n\ntwo\none\n")
    assert [p.messages[0]["content"] for p in read_prompts(text)] == ["one", "two"]
    lines = tmp_path / "p.jsonl"
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    lines.write_text(
        json.dumps({"prompt": "a", "reference": "b", "kind": "k", "id": 7})
        + "\n"
        + json.dumps({"messages": chat})
    )
    first, second = read_prompts(lines)
    assert (first.id, first.kind, first.reference) == ("7", "k", ("b",))
    assert list(second.messages) == chat


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "not valid JSON"),
        ("[]", "object"),
        ('{"prompt": "a", "answer": 1}', "answer: unknown key"),
        ("{}", "prompt"),
        ('{"prompt": "a", "messages": []}', "prompt"),
        ('{"prompt": 3}', "prompt"),
        ('{"messages": [{"role": "user"}]}', "messages"),
        ('{"messages": []}', "messages"),
        ('{"prompt": "a", "reference": 3}', "reference"),
    ],
)
def test_broken_lines_are_named(tmp_path: Path, line: str, named: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=rf"line 2: .*{named}"):
        read_prompts(file)


def test_no_prompts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.txt"):
        read_prompts(tmp_path / "missing.txt")
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ConfigError, match="no prompts"):
        read_prompts(tmp_path / "empty.txt")
