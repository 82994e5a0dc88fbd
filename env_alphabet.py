"""Alphabet sort: keep a list sorted while a user adds names, over several turns.

A scripted user gives some names and wants them sorted by first or by last name (the
same throughout an episode). In each later turn the user adds names and wants the whole
list so far, with the new ones marked. Names are written without a space, as in
EnginDurgun: the last name starts at the first capital after position 0.

    user       Sort these names by last name:
               MariaSilva
               EnginDurgun
               … inside <alphabetical_sorted> and </alphabetical_sorted> …
    assistant  <think>
               Sil MariaSilva          cut out the key: three letters of the last name …
               Dur EnginDurgun

               Dur EnginDurgun         … then sort by it …
               Sil MariaSilva
               </think>
               <alphabetical_sorted>   … then copy the names
               EnginDurgun
               MariaSilva
               </alphabetical_sorted>
    user       Sort all names so far with these more names by last name:
               ChenWei …
    assistant  … <combined_alphabetical_sorted>
               EnginDurgun
               MariaSilva
               ChenWei // new name!
               </combined_alphabetical_sorted>

The reward is smooth: the similarity of a list to the right one, raised to a power. A
list in the wrong order still shares most of its characters with the right one. So names
copied in the given order, with the new ones marked, have a similarity of 0.66 on
average. The power (8 in the public recipe) lowers their reward to 0.08 on average
(more than 0.66 to the 8th, because some lists happen to come nearly sorted) and leaves
1.0 as it is. By default the average over the turns is raised to the power, so only a
good *episode* pays. With `power_per_turn` each turn is raised, then they are averaged,
so one good turn pays.

The tasks and the scoring are those of Prime Intellect's alphabet-sort; the wording of
the prompts and the names are ours. Where its rules leave a choice, we chose as follows.
The names of one episode differ in both first *and* last name, so there is only one
right order. A turn that was never played scores 0. Blocks inside <think> are thoughts,
not attempts. Empty lines in a block are dropped. A block longer than twice the right
list plus 500 characters scores 0 (MOST_MORE).

Run me: `python env_alphabet.py` plays an episode with the expert, and scores it.
"""

import random
import re
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import islice
from typing import ClassVar

from env_letters import check_choice, is_one_block, split_thinking

# A varied pool: 219 x 271 = 59,349 combinations. In FIRST and in LAST no two names
# share their first three letters, and at most two their first two, so a key of three
# letters decides. With first letters alone, 70% of the lists of eight have a tie.
FIRST = """
Aaron Abena Adila Aiko Akira Alba Alejo Amara Amit Anika Antti Arash Arjun Asha Astrid
Ayumi Azra Bahar Bao Beatriz Benny Bianca Bilal Bjorn Boris Brigid Bruna Callum Camila
Cecile Chiara Clara Cosmin Cyrus Dalia Daria Deepak Diego Dilara Dmitri Doris Duncan
Dylan Ebele Edith Efua Eirik Elif Emeka Engin Erika Esra Ethan Eun Ewa Ezra Fabio Fatou
Felix Fiona Florin Franz Freya Fumiko Gareth Georgi Gita Gloria Goran Grace Gudrun Gwen
Hadiya Hana Hektor Hiro Hoang Huda Hyun Ibrahim Idris Ifeoma Igor Ilse Imani Ines Irina
Isamu Itzel Ivana Jack Jamila Jelena Jing Joana Jorge Juan Jutta Kaito Kamala Kemal
Khalid Kiran Kofi Kwame Kyle Laila Lars Leonie Liang Linh Lorenz Lucia Luz Lydia Maarten
Magda Meera Mei Miguel Mina Mona Mumin Myles Nadia Naoko Nesrin Ngozi Nia Nikhil Nora
Nuria Obi Oduya Oksana Olga Omar Orla Oskar Otto Pablo Paulo Pedro Petra Phuong Pilar
Piotr Pooja Priya Qasim Quentin Quinn Rafael Ravi Renata Rhys Ricardo Rin Rosa Roy Ruth
Ryota Sabine Sanjay Selma Sergei Shirin Sibel Simon Sofia Soren Stella Sunil Svea Sylvie
Tadeo Tamar Teresa Thabo Tian Tomas Tove Tuan Tyra Uche Ulla Umar Ursula Usha Vadim
Valeria Vera Victor Vikram Vlad Wanda Wei Wendy Wiktor Wojtek Xavier Xenia Ximena Xiu
Yael Yan Yetunde Ying Yolanda Yuki Yusuf Yvonne Zainab Zara Zeynep Zhen Zita Zoe Zuzana
""".split()

LAST = """
Abbott Abe Acosta Adeyemi Afonso Aguilar Ahmed Aiyar Akin Alonso Alvarez Amado Andrade
Aoki Araujo Arslan Asante Atkins Aydin Azevedo Badawi Banerjee Becker Benitez Bhatt
Biondi Blanco Blum Boateng Bose Brandt Brown Bui Burke Byrne Cabral Castro Celik Cerny
Chavez Chen Cisse Clarke Conti Costa Cruz Cui Curie Dahl Das Demir Desai Diallo Dlamini
Dobbs Dong Drake Duarte Durgun Dvorak Eaton Ebert Ecevit Edwards Egede Eklund Eliasson
Elmas Endo Eriksen Esposito Evans Eze Fagan Farah Fekete Ferrari Fischer Flores Foster
Franco Fuchs Fujita Gallo Garcia Genc Gill Glass Gomez Gordon Grant Greco Guo Gupta
Hadid Hansen Hernan Hill Hoang Holm Huang Hughes Ibarra Ichiro Idowu Iglesias Ikeda
Iliev Imai Inoue Ionescu Iqbal Ivanov Iyer Jackson Jansen Jensen Jimenez Johnson Joshi
Juarez Jung Kaplan Katz Kebede Keller Khan Kim Klein Kone Kovac Kruger Kumar Kuznets
Kwon Lam Lange Lee Lehto Lima Liu Lopez Luna Lynch Madsen Malik Mbeki Mehta Meyer Mills
Mishra Molina Moreau Muller Murphy Mwangi Nagy Nair Ndiaye Nel Nguyen Nikolov Nilsen
Novak Nowak Nunez Nyong Obi Ochoa Odhiambo Ogawa Okafor Oliveira Olsen Omondi Onuoha
Ortiz Osei Otieno Owen Ozturk Pak Park Pereira Petrov Pham Pinto Pires Pohl Popov Prasad
Price Puig Quispe Qureshi Rahman Raman Reddy Reyes Rhodes Ricci Rivera Romero Rossi Ruiz
Russo Ryan Saito Santos Schmidt Sen Serra Shah Silva Singh Smith Soares Sousa Stein
Suzuki Svensson Szabo Tanaka Tapia Teixeira Thapa Tiwari Torres Toth Tran Turner Tutu
Ueda Ugarte Ulrich Umarov Unger Uribe Usman Vance Vargas Vega Vidal Vieira Vogel Vuong
Wagner Walker Weber Werner White Wilson Wolf Wright Xavier Ximenes Yadav Yamada Yeo
Yilmaz Yoon Young Yusuf Zaman Zapata Zhao Zhou Ziegler Zimmer Zola Zubair
""".split()

NEW = " // new name!"
FIRST_TAG, LATER_TAG = "alphabetical_sorted", "combined_alphabetical_sorted"

# The most characters that can follow the thinking; if there are more, the reply counts
# as having no list. The longest right list has 6,000.
MOST_ANSWER = 20_000
# A block this much longer than twice the right list scores 0. Comparing it could take
# seconds, and replies that slow down the reward could stop a training run. This loses
# little: its similarity would be less than 2/3, and that to the 8th power is 0.04. The
# 500 leave room for remarks in a short list. Among the blocks that are compared, the
# slowest we found takes 0.2 s.
MOST_MORE = 500

# How the scripted expert answers, and so what SFT teaches. Each gives the right list.
STYLES = {
    "bare": "the list alone",
    "states": "thinks, but only says what it will do: the format without the algorithm",
    "derives": "cuts out each name's key, sorts by it, then copies: the algorithm",
}
# What a reply's list looks like: names in the given order; sorted as plain strings;
# sorted by keys that the thinking spells out; none of these.
HABITS = ("given", "string", "keys", "other")


@dataclass(frozen=True)
class Task:
    by: str  # "first" or "last"
    turns: tuple[tuple[str, ...], ...]  # the names of each turn, in the order given


def key_of(name: str, by: str) -> str:
    """The part to sort by: 'EnginDurgun' -> 'Engin' (first) or 'Durgun' (last)."""
    cut = next((i for i in range(1, len(name)) if name[i].isupper()), len(name))
    return name[:cut] if by == "first" else name[cut:]


def make_task(
    rng: random.Random, turns: tuple[int, int], names: tuple[int, int]
) -> Task:
    """Draw one task: how many turns, the names of each, and the part to sort by."""
    counts = [rng.randint(*names) for _ in range(rng.randint(*turns))]
    total = sum(counts)
    firsts, lasts = rng.sample(FIRST, total), rng.sample(LAST, total)
    people = map("".join, zip(firsts, lasts))
    by = rng.choice(["first", "last"])
    return Task(by, tuple(tuple(islice(people, n)) for n in counts))


def names_so_far(task: Task, turn: int) -> list[str]:
    """All names given in turns 0 to `turn`, in the order given."""
    return [name for part in task.turns[: turn + 1] for name in part]


def right_list(task: Task, turn: int) -> list[str]:
    """The lines expected in a turn: all names so far, sorted, the new ones marked."""
    by_key = lambda name: key_of(name, task.by).lower()
    return mark_new(sorted(names_so_far(task, turn), key=by_key), task, turn)


def mark_new(names: list[str], task: Task, turn: int) -> list[str]:
    """The names, with those new in this turn marked; in the first turn none are."""
    new = task.turns[turn] if turn else ()
    return [name + NEW if name in new else name for name in names]


def tag_of(turn: int) -> str:
    return LATER_TAG if turn else FIRST_TAG


def write_block(lines: list[str], turn: int) -> str:
    """The lines inside the tag of a turn: the answer, without any thinking."""
    return "\n".join([f"<{tag_of(turn)}>", *lines, f"</{tag_of(turn)}>"])


# What is said of the format in turn 0, 1, … The format of each tag is shown once.
FORMATS = (
    f"Give the sorted list, one name a line, "
    f"inside <{FIRST_TAG}> and </{FIRST_TAG}>, "
    f"like this:\n{write_block(['NameOne', 'NameTwo'], 0)}",
    f"Give the whole list, one name a line, "
    f"inside <{LATER_TAG}> and </{LATER_TAG}>, "
    f"with{NEW} after each name that is new in this turn, "
    f"like this:\n{write_block(['NameOne', 'NameTwo' + NEW], 1)}",
    "Same format.",
)


def question(task: Task, turn: int, think: bool) -> str:
    """The user's message of a turn."""
    names = "\n".join(task.turns[turn])
    which = "all names so far with these more names" if turn else "these names"
    thinking = "Think first inside <think> and </think> if that helps."
    hint = thinking if think else "Do not think."
    return (
        f"Sort {which} by {task.by} name:\n{names}\n\n{FORMATS[min(turn, 2)]}\n{hint}"
    )


def write_reply(task: Task, turn: int, style: str) -> str:
    """What the scripted expert says in turn 0, 1, …, in one of STYLES."""
    lines = right_list(task, turn)
    answer = write_block(lines, turn)
    if style == "bare":
        return answer
    if style == "states":
        return f"<think>\nLet me sort the names by {task.by} name.\n</think>\n{answer}"
    keyed = lambda name: f"{key_of(name, task.by)[:3]} {name}\n"
    # only the new names' keys: the others' are in the thinking of earlier turns
    new_keys = "".join(map(keyed, task.turns[turn]))
    sorted_keys = "".join(keyed(line.removesuffix(NEW)) for line in lines)
    return f"<think>\n{new_keys}\n{sorted_keys}</think>\n{answer}"


# -------------------------------------------------------------------------- the reward


def score_turn(reply: str, expected: list[str], turn: int) -> float | None:
    """The similarity of one reply to what was expected; None if there is no block.

    If there are several blocks, the last one's score counts, but only if each is
    strictly better than the one before. Otherwise the score is 0: a list of guesses is
    not an answer. Never raises, whatever the reply.
    """
    last = None
    for block in find_blocks(reply, turn):
        lines = [line for line in block.split("\n") if line.strip()]
        score = similarity(lines, expected)
        if last is not None and score <= last:
            return 0.0
        last = score
    return last


def similarity(predicted: list[str], expected: list[str]) -> float:
    """difflib's ratio of two lists, stripped, lower-cased and joined, in [0, 1].

    It compares characters: 2 * (how many match) / (how many there are in both). Its
    `autojunk` is left on, as in the public recipe: if the expected text has 200
    characters or more, its frequent letters no longer start a match. That makes long
    wrong lists score lower, and never affects a right one. A text that is far too long
    is not compared (MOST_MORE).
    """
    text = lambda lines: "\n".join(line.strip().lower() for line in lines)
    a, b = text(predicted), text(expected)
    if len(a) > 2 * len(b) + MOST_MORE:
        return 0.0
    return 1.0 if a == b else SequenceMatcher(None, a, b).ratio()


def find_blocks(reply: str, turn: int) -> list[str]:
    """The text inside each pair of a turn's tags, after the thinking.

    We split instead of matching a regex: a regex would read on to the end of the reply
    for every tag that is never closed, which takes 0.8 s for 2,048 of them.
    """
    tag, rest = tag_of(turn), split_thinking(reply)[1]
    if len(rest) > MOST_ANSWER:
        return []
    parts = rest.split(f"</{tag}>")[:-1]
    return [part.partition(f"<{tag}>")[2] for part in parts if f"<{tag}>" in part]


def habit_of(task: Task, replies: list[str]) -> str:
    """Which of HABITS the replies look like, judged by the last one that has a list."""
    listed = [turn for turn, reply in enumerate(replies) if find_blocks(reply, turn)]
    if not listed:
        return "other"
    turn = listed[-1]
    thinking = split_thinking(replies[turn])[0]
    keys = re.findall(r"^[A-Z][a-z]{2} [A-Z]", thinking, re.MULTILINE)
    if len(keys) >= len(task.turns[turn]):
        return "keys"
    lines = find_blocks(replies[turn], turn)[-1].strip().split("\n")
    names = [line.strip().removesuffix(NEW) for line in lines]
    given = names_so_far(task, turn)
    if names == given:
        return "given"
    return "string" if names == sorted(given) else "other"


@dataclass
class Alphabet:
    """One alphabet-sort episode at a time. The defaults are the public recipe's."""

    min_turns: int = 3  # turns of an episode, at least
    max_turns: int = 3
    min_names: int = 1  # new names per turn, at least
    max_names: int = 4
    similarity_power: float = 8.0  # the given order (similarity 0.66) earns 0.08
    power_per_turn: bool = False  # True: raise each turn, not the mean, to the power
    think: bool = True  # may the replies think before they answer?
    style: str = "states"  # how the expert answers, one of STYLES
    # Is each reply judged by the rewards from its turn on? Needs power_per_turn.
    credit_per_turn: bool = False
    tools: ClassVar[None] = None  # no tool calls here; not a setting

    def __post_init__(self):
        most = min(len(FIRST), len(LAST))
        if not (
            1 <= self.min_turns <= self.max_turns
            and 1 <= self.min_names <= self.max_names
            and self.max_turns * self.max_names <= most
        ):
            raise ValueError(
                f"--set min_turns={self.min_turns} max_turns={self.max_turns} "
                f"min_names={self.min_names} max_names={self.max_names}: need 1 <= min "
                f"<= max, and at most {most} names in an episode"
            )
        if not 0 < self.similarity_power < float("inf"):
            raise ValueError(
                f"--set similarity_power={self.similarity_power}: must be positive, "
                "not inf"
            )
        if self.credit_per_turn and not self.power_per_turn:
            raise ValueError(
                "--set credit_per_turn=true: the power of a mean has no parts; add "
                "--set power_per_turn=true"
            )
        check_choice(f"--sft-style {self.style}", self.style, STYLES, "alphabet")

    def reset(self, seed: int) -> list[dict]:
        self.task = make_task(
            random.Random(seed),
            turns=(self.min_turns, self.max_turns),
            names=(self.min_names, self.max_names),
        )
        self.replies: list[str] = []
        return [{"role": "user", "content": question(self.task, 0, self.think)}]

    def step(self, reply: str) -> tuple[list[dict], bool]:
        self.replies.append(reply)
        turn = len(self.replies)
        if turn >= len(self.task.turns):
            return [], True
        text = question(self.task, turn, self.think)
        return [{"role": "user", "content": text}], False

    def score(self) -> dict[str, float]:
        """The reward in [0, 1] and its components.

        exact: every turn is perfect; similarity: the mean over the turns, before the
        power; turn_1, turn_2, …: the similarity of each turn; format: share of turns
        with a block; habit_*: 1 for the habit that the replies show, else 0.
        """
        n = len(self.task.turns)
        scores = [None] * n  # None: a turn without a block, or never played
        for turn, reply in enumerate(self.replies[:n]):
            if self.think or is_one_block(reply, tag_of(turn), MOST_ANSWER):
                scores[turn] = score_turn(reply, right_list(self.task, turn), turn)
        raw = [score or 0.0 for score in scores]
        power, mean = self.similarity_power, sum(raw) / n
        if self.power_per_turn:
            reward = sum(value**power for value in raw) / n
        else:
            reward = mean**power
        per_turn = [value**power / n for value in raw[: len(self.replies)]]
        credit = {"turn_rewards": per_turn} if self.credit_per_turn else {}
        habit = habit_of(self.task, self.replies[:n])
        habits = {f"habit_{name}": float(name == habit) for name in HABITS}
        turns = {f"turn_{turn}": value for turn, value in enumerate(raw, start=1)}
        return {
            "reward": reward,
            "exact": float(min(raw) == 1.0),
            "similarity": mean,
            "format": (n - scores.count(None)) / n,
            **habits,
            **turns,
            **credit,
        }

    def expert_reply(self) -> str:
        style = self.style if self.think else "bare"
        return write_reply(self.task, len(self.replies), style)


if __name__ == "__main__":
    env = Alphabet(style="derives")
    messages = env.reset(seed=14)
    done = False
    while not done:
        print("user      ", messages[-1]["content"].replace("\n", "\n           "))
        reply = env.expert_reply()
        print("assistant ", reply.replace("\n", "\n           "), "\n")
        messages, done = env.step(reply)
    scores = {name: round(value, 2) for name, value in env.score().items()}
    print("score     ", scores)
