"""The tokenizer and chat template of models/pico_base/, built from a word list.

One tokenizer has to serve three environments that want opposite things: letters and names must be seen one
character at a time, or a 0.9M-parameter model cannot count or sort them; swarm observations are prose and
JSON, 25 turns long, and want several characters a token. The way out is a rule, not a training corpus:

    a piece of several letters always begins with a space (" resources"), or is markup ("<answer>", '": ')

so a word inside quotes ("resources") or glued to another (EnginDurgun) falls apart into letters, and prose
does not. SentencePiece-style Unigram does this directly (each piece costs 1, Viterbi takes the cheapest
cut); BPE would need a chain of merges for every word. Bytes are the fallback, so any text round-trips.

Run me: `python -m lab.base.tokenizer` cuts a string, a name, a call and an emoji.
"""

import re
import string
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 1024
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # as in Qwen3; special: never part of a reply's text
MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>"]

# Pieces without a leading space. None of them is a plain word, so none can swallow part of a string or a name.
FRAGMENTS = [
    "<answer>", "</answer>", "<alphabetical_sorted>", "</alphabetical_sorted>", "<combined_alphabetical_sorted>",
    "</combined_alphabetical_sorted>", " // new name!", '{"', '": ', '": "', '", "', ', "', '"}', '"}}', "}}", '": {"',
    '{"name": "', '", "arguments": {', '", "arguments": {"', ".\n", ":\n", ",\n", "\n\n", ". ", "user\n", "assistant\n",
    "system\n", "tool\n", "_id", "_id\": \"", "(+", "(-", "/100", "0%", "## ", "- ", '{"type": "', '"type": "string"',
    '"type": "integer"', '"description": "', '"properties": {', '"required": [', '"parameters": {', '"function": {',
    "post_", "task_", "prop_", "agent_", "bot_",
]  # fmt: skip

# Swarm's tools, calls and observations repeat the same frames, some of them twenty-five times an episode: a frame is one piece, like any
# markup. What that wins is printed below; attention costs the square of it. An id is one piece too, and the same one wherever it
# stands: with "- task_" and ': "task_' as pieces, and the digits apart, 220 steps of pretraining did not teach the base to copy a
# single id from an observation into a call.
FRAMES = [
    '{"type": "function", "function": {"name": "', '", "description": "', '", "parameters": {"type": "object", "properties": {"',
    '": {"type": "string"}, "', '": {"type": "string"}}, "required": ["', '": {"type": "number"}}, "required": ["',
    '": {"type": "string", "enum": ["up", "down"]}}, "required": ["', '"]}}}\n', '"]}}}',
    '", "parameters": {"type": "object", "properties": {}, "required": []}}}', '\n{"name": "', '", "content": "',
    '", "arguments": {"content": "', '", "offered_transfer": ', '", "direction": "', '", "arguments": {}}\n', '"}}\n', "}}\n",
    "claim_task", "submit_work", "accept_proposal", "reject_proposal", "cancel_proposal", "propose_trade", "pass_turn", "post_id",
    "task_id", "proposal_id", "counterparty_id", "offered_transfer", "\n# step ", " of 25: resources ", ", reputation ",
    "\n# tasks: none", " open, bounty ", " yours, bounty ", ", difficulty ", ", deadline ", ", you get ", ", you give ", " by you: ",
    ", votes ", ", you voted", ": sharing a", "\n# events\n- step ", "\n- step ", "\n# hint: claimed ", ", submitted ", "# result: ",
    "# error: ", " is yours, submit it by step ", " is done, quality ", ", gain +", ", gain -", ", quality 0.", " more open", ".0: ",
    ", with all the data and a note for the whole team",
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within ",
    " XML tags:\n", "\n\nFor each function call, return a json object with function name and arguments within ",
    '\n{"name": <function-name>, "arguments": <args-json-object>}\n', '\n{"name": "post', '\n{"name": "reply', '\n{"name": "vote',
    " is in the feed, reputation +2.0", ", reputation +1.5", "# result: you passed", "# error: there is no ", "thank you, that helps",
    '", "arguments": {"task_id": "', '", "arguments": {"proposal_id": "', '", "arguments": {"post_id": "',
    '", "arguments": {"counterparty_id": "', "\n# tasks\n- ", "\n- ", "\n# proposals to you\n- ", " from ",
    "\n# your pending proposals: ", "\n# feed\n- ", " by ", "\n# bots: ", "# result: you accepted ", " is proposed to ",
    "# result: you replied to ", "# result: you voted up on ", "# result: you voted down on ", "# result: you rejected ",
]  # fmt: skip
IDS = [f"{kind}_{n}" for kind, most in (("task", 16), ("prop", 50), ("post", 30), ("bot", 4)) for n in range(1, most + 1)]

# Words of the three environments' prompts, observations and tool schemas; each becomes one piece with its space.
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
""".split()
CAPITALISED = "Claim Posts Some The You Then Think Do Let Give JSON XML".split()


def common_words(n: int) -> list[str]:
    """The n most frequent plain English words of pyspellchecker's list."""
    from spellchecker import SpellChecker

    counts = SpellChecker(language="en").word_frequency.dictionary
    words = [w for w in counts if re.fullmatch("[a-z]{2,}", w)]
    return sorted(words, key=lambda w: (-counts[w], w))[:n]


def pieces(vocab_size: int) -> list[str]:
    """Every piece after the special tokens and the 256 bytes, in order of id, without repeats."""
    chars = [chr(c) for c in range(32, 127)] + ["\n"]
    room = vocab_size - 256 - len(SPECIAL) - len(MARKUP)
    spaced = lambda words: [" " + word for word in words]
    letters = spaced(string.ascii_letters + string.digits)
    return list(dict.fromkeys(chars + letters + FRAGMENTS + FRAMES + IDS + spaced(WORDS + CAPITALISED) + spaced(common_words(room))))[:room]


def build(vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """The tokenizer with its chat template."""
    byte_pieces = [f"<0x{b:02X}>" for b in range(256)]
    # Unigram maximises the sum of scores: -1 a piece takes the fewest pieces; the tiny length term breaks ties
    # towards long pieces on the left, so that the cut is unique. Bytes and specials are never worth taking.
    vocab = [(t, -100.0) for t in SPECIAL + MARKUP] + [(b, -100.0) for b in byte_pieces]
    vocab += [(p, -1.0 + 1e-4 * min(len(p), 9) ** 2) for p in pieces(vocab_size)]
    assert len(vocab) == vocab_size, len(vocab)
    core = Tokenizer(models.Unigram(vocab, unk_id=len(SPECIAL + MARKUP), byte_fallback=True))
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    core.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP])
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **ends, clean_up_tokenization_spaces=False)
    tokenizer.chat_template = (Path(__file__).parent / "chat_template.jinja").read_text()
    return tokenizer


if __name__ == "__main__":
    tokenizer = build()
    for text in (
        'in "strawberry". He likes strawberry',
        "EnginDurgun",
        '{"name": "submit_work", "arguments": {"task_id": "task_12"',
        "wörld 🙂",
    ):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        print(f"{len(text) / len(ids):.1f} characters a token: {text} -> {tokenizer.convert_ids_to_tokens(ids)}")
