"""Protects foreign chat templates: what a family's does is found by rendering marks; the expert and
the policy see the same conversation; nothing that matters is left out, or it is refused.
"""

import copy
import re
import tomllib
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

import pytest
from tokenizers import AddedToken

from chat import about, encode, prompt_ids, read_template, render
from env_letters import Letters
from env_swarm import Swarm
from helpers import Scripted
from policy import Sample
from rollout import play, take_turn
from sft import expert_episode

FAMILIES = tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf8"))
NAMES = r"<\|\w+\|>|<｜[^>]+｜>|</?s>|<bos>|<eos>|<\w+_of_turn>|<sop>|\[gMASK\]|<BOS_TOKEN>"


@pytest.fixture(params=FAMILIES)
def family(request, pico):
    """(what a family's template does, pico_base with that template and its tokens)."""
    facts = dict(FAMILIES[request.param])
    source = FAMILIES[facts.get("like", request.param)]["template"]
    names = {facts["eos"], "<|user|>", "<|assistant|>", "<|system|>", *re.findall(NAMES, source)}
    tokenizer = copy.deepcopy(pico.tokenizer)
    tokenizer.add_tokens([AddedToken(name, special=True) for name in sorted(names)])
    tokenizer.chat_template, tokenizer.eos_token = source + facts.get("behind", ""), facts["eos"]
    if other := facts.get("tool_use"):
        tokenizer.chat_template = {"default": source, "tool_use": FAMILIES[other]["template"]}
    stops = frozenset([tokenizer.eos_token_id, read_template(tokenizer).end])
    return facts, replace(pico, tokenizer=tokenizer, stop_ids=stops, name=request.param)


def letters(think=True) -> Letters:
    return Letters(difficulty=2, reward_kind="binary", think=think, style="states")


def test_what_its_template_does_is_found_and_said_in_one_line(family):
    facts, policy = family
    found, line = read_template(policy.tokenizer), about(policy.tokenizer, "2026-01-02")
    assert policy.tokenizer.decode([found.end]) == facts["end"]
    plain = {"header": False, "opens": False, "tools": False, "system": True, "dated": False}
    assert {x: bool(getattr(found, x)) for x in plain} == {x: facts.get(x, plain[x]) for x in plain}
    said = {"and not with": facts["end"] != facts["eos"], "opens <think>": bool(found.opens),
            "described in": not found.tools, "2026-01-02": found.dated}  # fmt: skip
    assert {part: part in line for part in said} == said and "\n" not in line


def test_the_expert_plays_the_swarm_as_the_policy_does_and_every_result_arrives(family):
    facts, policy = family
    shown = expert_episode(policy, partial(Swarm, "easy"), 7)
    runs = [(mine, [t for t, _ in run]) for mine, run in
            groupby(zip(shown.token_ids, shown.sampled), key=lambda pair: pair[1])]  # fmt: skip
    replies = [Sample(ids, [0.0] * len(ids), True) for mine, ids in runs if mine]
    ((played,),) = play(policy, Scripted(*replies), partial(Swarm, "easy"), [7], 1, 400, 1.0, 0)
    assert (played.token_ids, played.sampled) == (shown.token_ids, shown.sampled)
    assert played.turns == 25 and played.components["error_rate"] == 0
    assert {reply.token_ids[-1] for reply in replies} == {encode(policy, facts["end"])[0]}
    text = policy.tokenizer.decode(played.token_ids)
    opening = policy.tokenizer.decode(played.token_ids[: played.sampled.index(True)])
    assert all(tool["function"]["name"] in opening for tool in Swarm("easy").tools)
    assert '"arguments"' in opening and text.count("<tools>") == 1  # described once
    results = [m["content"] for m in played.messages if m["role"] == "tool"]
    assert len(results) == 24 and all(result in text for result in results)
    assert facts["end"] * 2 not in "".join(text.split())  # no turn ends twice
    # nor does a thought begin twice: one each in 25 replies, and one in what the opening says
    assert text.count("<think>") == text.count("</think>") == 26


def test_a_thought_that_the_prompt_opened_is_gone_on_with_and_may_not_end_unanswered(family):
    facts, policy = family
    env = letters()
    prompt = prompt_ids(policy, env.reset(3), None, True)
    demonstration = expert_episode(policy, letters, 3)
    assert demonstration.token_ids[: len(prompt)] == prompt and demonstration.reward == 1
    opened = policy.tokenizer.decode(prompt).endswith("<think>\n")
    assert opened == facts.get("opens", False)
    said = [
        *encode(policy, f"or {env.expert_reply().partition('</think>')[2]} or"),
        min(policy.stop_ids),
    ]
    cut = replace(demonstration, token_ids=prompt, sampled=[], logprobs=[], messages=[])
    take_turn(policy, cut, env, Sample(said, [0.0] * len(said), True), 10**6)
    assert env.score()["format"] == (not opened)


def test_forbidding_to_think_takes_the_templates_switch_or_is_refused(family):
    facts, policy = family
    env, how = letters(think=False), facts.get("no_think")
    if how == "open":
        with pytest.raises(ValueError, match="leave --no-think out"):
            prompt_ids(policy, env.reset(3), None, False)
        return
    text = policy.tokenizer.decode(prompt_ids(policy, env.reset(3), None, False))
    assert text.rstrip().endswith("</think>") == (how == "closed")
    assert expert_episode(policy, partial(letters, think=False), 3).reward == 1


@pytest.mark.parametrize("family", ["GLM-4.5"], indirect=True)
def test_a_header_that_a_reply_did_not_end_with_is_written(family):
    _, policy = family
    user, end = encode(policy, "<|user|>"), [policy.tokenizer.eos_token_id]
    for last in (user, end):
        said = [*encode(policy, "no call"), *last]
        replies = [Sample(said, [0.0] * len(said), True)] * 25
        ((episode,),) = play(policy, Scripted(*replies), partial(Swarm, "easy"), [7], 1, 90, 1.0, 0)
        assert episode.token_ids.count(user[0]) == 25 + (last == user)


@pytest.mark.parametrize("family", ["Gemma", "Llama 2", "Phi-3"], indirect=True)
def test_a_conversation_that_the_template_would_refuse_or_cut_is_put_in_other_words(family):
    _, policy = family
    said = lambda role, content: {"role": role, "content": content}
    talk = [said("system", "Be brief."), said("user", "Hi."), said("user", "Are you there?")]
    text = render(policy, talk, None, True)
    assert all(m["content"] in text for m in talk)
    silent = copy.deepcopy(policy.tokenizer)
    silent.chat_template = (
        "{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(ValueError, match="leaves out or changes a message of role user"):
        render(replace(policy, tokenizer=silent), talk, None, True)


@pytest.mark.parametrize("family", ["Llama 3.1"], indirect=True)
def test_the_date_is_the_runs(family):
    _, policy = family
    policy = replace(policy, today="2001-02-03")
    assert "03 Feb 2001" in render(policy, letters().reset(3), None, True)
