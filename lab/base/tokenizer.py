"""The tokenizer and chat template of models/pico_base/, built from a word list.

One tokenizer has to serve three environments that want opposite things: letters and names must be
seen one character at a time, or a 0.9M-parameter model cannot count or sort them; swarm
observations are prose and JSON, 25 turns long, and want several characters a token. The way out is
a rule, not a training corpus:

    a piece of several letters always begins with a space (" resources"), or is markup ("<answer>",
    '": ')

so a word inside quotes ("resources") or glued to another (EnginDurgun) falls apart into letters,
and prose does not. SentencePiece-style Unigram does this directly (each piece costs 1, Viterbi
takes the cheapest cut); BPE would need a chain of merges for every word. Bytes are the fallback, so
any text round-trips.
"""

import json
import re
import string
from itertools import product
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from swarm import bots, economy, players, tools, view

VOCAB_SIZE = 1344
# as in Qwen3; special: never part of a reply's text
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = """<think> </think> <tool_call> </tool_call> <tool_response> </tool_response> <tools>
</tools>""".split()

# Pieces without a leading space. None of them is a plain word, so none can swallow part of a string
# or a name.
FRAGMENTS = [
    "<answer>", "</answer>", "<alphabetical_sorted>", "</alphabetical_sorted>", "<combined_alphabetical_sorted>",
    "</combined_alphabetical_sorted>", " // new name!", '{"', '": ', '": "', '", "', ', "', '"}', '"}}', "}}", '": {"',
    '{"name": "', '", "arguments": {', '", "arguments": {"', ".\n", ":\n", ",\n", "\n\n", ". ", "user\n", "assistant\n",
    "system\n", "tool\n", "_id", "_id\": \"", "(+", "(-", "/100", "0%", "## ", "- ", '{"type": "', '"type": "string"',
    '"type": "integer"', '"description": "', '"properties": {', '"required": [', '"parameters": {', '"function": {',
    "post_", "task_", "prop_", "agent_", "bot_",
]  # fmt: skip

# Swarm's tools, calls and observations repeat the same frames, some of them twenty-five times an
# episode: a frame is one piece, like any markup, up to the first thing in it that differs from one
# time to the next. So a call is one piece and its arguments, and which tool is called is decided in
# one token. What that wins is printed below; attention costs the square of it. An id is one piece
# too, and the same one wherever it stands: with "- task_" and ': "task_' as pieces, and the digits
# apart, 220 steps of pretraining did not teach the base to copy a single id from an observation
# into a call.
FRAMES = [
    # the prompt, but for its rules and schemas (prompt_frames)
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within ",
    " XML tags:\n", "\n\nFor each function call, return a json object with function name and arguments within ",
    '\n{"name": <function-name>, "arguments": <args-json-object>}\n',
    # calls
    '\n{"name": "', '", "arguments": {}}\n', '\n{"name": "pass_turn", "arguments": {}}\n', '", "content": "', '", "content": "I',
    '", "content": "it is done"}}\n', '."}}\n', '"}}\n', "}}\n", '", "direction": "', '", "direction": "up"}}\n',
    '", "direction": "down"}}\n', '", "offered_transfer": ', '", "offered_transfer": -', '", "offered_transfer": 0}}\n',
    "claim_task", "submit_work", "accept_proposal", "reject_proposal", "cancel_proposal", "propose_trade", "pass_turn", "post_id",
    "task_id", "proposal_id", "counterparty_id", "offered_transfer",
    # what the players write in them
    ". I check the data and the method", ", measure the risk", ", and give a clear summary", " with a plan for the team",
    ". I compare the options", ", explain the result", ", and note what to improve", ", so that others can verify it",
    ". The report is complete", "sharing a", ": sharing a", ", with all the data and a note for the whole team", "thank you",
    "thank you, that helps", "thank you, that helps the team", "a fair trade of", ": a fair trade of",
    ", it will help both of us and the whole team", ", it will help …", ", with …", ". I share all the data and the method",
    # thoughts
    "\nI wait.\n", "\nI try something.\n", "\nI propose a trade.\n", "\nI claim a task.\n", "\nI accept ", "\nI hold ",
    ", so I submit it.\n", " pays ", ", the most.\n", "\nThere is no task.\n", "\nEverybody has a proposal.\n",
    "\nI am frozen and can only wait.\n", "\nA fair trade with ",
    " is good for both.\n", "\nMy reputation is low, a post helps.\n", " gives me ", " asks for only ", ", that is good.\n",
    "\nI share something, that helps my reputation.\n", " asks for too much.\n", " is useful.\n", "\nI answer ",
    *(f"\n{thought}\n" for thought in players.NOVICE_SAYS.values()),
    # results of calls
    "\n# result: ", "\n# error: ", "\n# error: there is no ", "\n# error: there is no pending proposal ",
    "\n# error: you have no pending proposal ",
    "\n# error: you have voted on ", " already\n# step ", " is taken by ", " is your own post", "\n# error: claim ", " first",
    "\n# result: you passed", "\n# result: you accepted ", "\n# result: you rejected ", "\n# result: you replied to ",
    "\n# result: you replied to your own ", ", which earns nothing", "\n# result: you voted up on ", "\n# result: you voted down on ",
    " is in the feed, reputation +2.0", " is in the feed, reputation +0.5", ", reputation +1.5", ", reputation +0.3", " is proposed to ",
    " is cancelled", " is done",
    # observations
    ": resources ", ": reputation ", ", reputation ", "\n# tasks\n- ", "\n- ", " yours", " yours: ", "\n# more open tasks: ",
    "\n# proposals to you\n- ", " from ", ", you get ", ", you give ", "\n# your pending proposals: ",
    " to ", "\n# feed\n- ", " by ", "\n# bots: ", " frozen", " accepted ", " rejected ", "\n# ",
    " lapsed", " is past its deadline", " is frozen to the end of step ", " is back", "\n# you are frozen to the end of step ",
    " and can only pass", "\n# an audit of ", " found a fault, fine -", "\n# hint: claimed ", ", submitted ",
    " are frozen to the end of step ",
    # words of tasks, offers and posts, with what stands before them
    *(f" the {kind}" for kind in bots.KINDS), *(f" for {place}" for place in bots.PLACES), *(f" on {place}" for place in bots.PLACES),
    *(f'", "content": "{nice}' for nice in bots.NICE), *(f": sharing a {nice}" for nice in bots.NICE),
    # numbers: what stands before one takes in its first digit, and a decimal its point. A number
    # alone stays as letters needs it.
    *(f"\n# step {n}" for n in range(1, 26)), *(f".{n}" for n in range(10)),
    *(f"{name}{n}" for n in range(10) for name in (
        ": resources ", ": reputation ", ", reputation ", ", bounty ", ", quality 0.", ", gain +", ", gain -", ", you get ", ", you give ",
        "\n# hint: claimed ", ", submitted ", " accepted ", " of ", ", votes ", "\n# more open tasks: ")),
    *(f", difficulty {n}" for n in range(1, 11)),
    *(f"{name}{n}" for n in (10, 15, 20, 25) for name in (", deadline ", " is yours, submit it by step ")),
]  # fmt: skip
IDS = [
    f"{kind}_{n}"
    for kind, most in (("task", 16), ("prop", 50), ("post", 30), ("bot", 4))
    for n in range(1, most + 1)
]


def prompt_frames() -> list[str]:
    """The fixed parts of swarm's prompt: a schema, or a stretch of rules between numbers or names."""
    parts = ["\n" + json.dumps(schema) for schema in tools.schemas("0.2")]
    changing = (
        r"\d+%|\d\.\d+|(?<=below reputation )\d+|bot_\d|\nThink first inside <think> and </think>"
    )
    for version, think in product(("0.2", "0.1"), (True, False)):
        scenario = bots.draw_scenario(0, "medium", version)
        text = view.opening(economy.open_economy(scenario, bots.draw_tasks(scenario)), think)
        parts += re.split(changing, f"user\n{text}\n\n# step 1")
    return [part for part in parts if len(part) > 2]  # ", " would cut the letters' lists otherwise


# Words of the three environments' prompts, observations and tool schemas; each becomes one piece
# with its space.
WORDS = """
count the letter letters in think first inside and if that helps then give as json number do not let me occurs times sort these names name
by last given list one a line more new whole combined so far same format for example like only was were with each turn mark after it
sorted use you are an economy step of resources reputation tax rate audit risk tasks task claimed open done bounty difficulty deadline
feed post posts reply vote votes up down trade trades proposal proposals pending history accepted rejected from to offered transfer
content accept reject cancel claim submit work pass frozen bot bots events hint submitted proposed none your its has no is on at per round
decay score quality error unknown tool must be own may wrong type missing argument already taken steps left call calls function functions
arguments within xml tags object direction id write data analysis report review summary plan design test build code market research survey
model system network policy budget forecast paid earned lost bonus resource member active trust cooperate good fair bad help shared share
useful result verify check careful complete draft evaluate explain improve measure method note outline prepare present propose provide
question record response schedule signal source strategy study supply support team train update value weather sharing gain clear both
yours pays hold passed earn earns replies enough words costs nobody sides hurts past replied live below fault gives changed act fine voted
rule uses tools asks answer water energy food health transport city river bridge counts get this all something try wait most some take now
what nothing which much best found will us long many there can compare options others have
Claim Posts Some The You Then Think Do Let Give JSON XML
""".split()


def pieces() -> list[str]:
    """Every piece after the special tokens and the 256 bytes, in order of id, without repeats."""
    from spellchecker import SpellChecker

    chars = [chr(c) for c in range(32, 127)] + ["\n"]
    spaced = lambda words: [" " + word for word in words]
    letters = spaced(string.ascii_letters + string.digits)
    calls = [
        f'\n{{"name": "{tool}", "arguments": {{"{next(iter(arguments))}": "'
        for tool, (_, arguments) in tools.TOOLS.items()
        if arguments
    ]
    counts = SpellChecker(language="en").word_frequency.dictionary  # of English words
    plain = filter(re.compile("[a-z]{2,}").fullmatch, counts)
    frequent = sorted(plain, key=lambda word: (-counts[word], word))
    words = spaced(WORDS + frequent)
    return list(
        dict.fromkeys(chars + letters + FRAGMENTS + FRAMES + calls + prompt_frames() + IDS + words)
    )


def build() -> PreTrainedTokenizerFast:
    """The tokenizer with its chat template."""
    byte_pieces = [f"<0x{b:02X}>" for b in range(256)]
    # Unigram maximises the sum of scores: -1 a piece takes the fewest pieces; the tiny length term
    # breaks ties towards long pieces on the left, so that the cut is unique. Bytes and specials are
    # never worth taking.
    vocab = [(piece, -100.0) for piece in SPECIAL + MARKUP + byte_pieces]
    vocab += [(p, -1.0 + 1e-4 * min(len(p), 9) ** 2) for p in pieces()]
    unigram = models.Unigram(vocab[:VOCAB_SIZE], len(SPECIAL + MARKUP), byte_fallback=True)
    core = Tokenizer(unigram)
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    core.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        chat_template=(Path(__file__).parent / "chat_template.jinja").read_text(),
    )
