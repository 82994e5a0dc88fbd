"""What every exercise is judged by: the real function, cases, and the usual mistakes. It gives
everything away.

    a check = (the real function, with the arguments of the exercise;
               cases: the example, edges, then random ones;
               {usual mistake: a function that makes it})

A mistake is a function, often the real one with something changed, and not a guess about code:
learn/judge.py runs it on the input on which a reader's function differs, and names the mistake if
the result is the same.
"""

import json
import math
import random
from types import SimpleNamespace

import torch
from scipy import stats

import env_letters
import grpo
import metrics
import rollout
from env_letters import Task, parse_answer
from fast import sampler
from policy import plain_logprobs
from swarm import governance


def check_reward():
    real = lambda task, reply: env_letters.score_reply(task, reply, "partial", True)["reward"]
    some, one = Task("banana", ("a", "n", "q"), (3, 2, 0)), Task("banana", ("a",), (3,))
    right = '<answer>{"a": 3, "n": 2, "q": 0}</answer>'
    said = ['<answer>{"a": 3, "n": 2, "q": 1}</answer>', right, "<answer>3, 2, 0</answer>"]
    said += [
        '<answer>{"a": 3, "n": 2}</answer>',
        '<answer>{"a": 3, "n": 2, "q": 0, "b": 0}</answer>',
    ]
    said += ["<answer>{}</answer>", "a: 3, n: 2, q: 0", "", 2 * right]
    said += [f"<think>{right}</think> so be it"]
    cases = [(some, reply) for reply in said]
    cases += [(one, f"<answer>{words}</answer>") for words in ('{"a": 3}', "3", "4", "three")]
    rng = random.Random(0)
    for task in [env_letters.make_task(rng, 6) for _ in range(20)]:
        counts = {c: n + (rng.random() < 0.3) for c, n in zip(task.letters, task.counts)}
        cases.append((task, f"<answer>{json.dumps(counts)}</answer>"))

    def any_letters(task, reply):
        answer = parse_answer(reply, len(task.letters) > 1)
        right = [answer.get(c) == n for c, n in zip(task.letters, task.counts)]
        return 0.1 + 0.9 * sum(right) / len(right)

    return real, cases, {
        "a malformed answer is given the 0.1 that only a well-formed one earns":
            lambda *case: max(0.1, real(*case)),
        "the 0.1 of a well-formed answer is missing":
            lambda *case: max(0.0, real(*case) - 0.1) / 0.9,
        "the letters are not compared with those asked for, so another question's answer is paid":
            any_letters,
        "all or nothing, which is --reward binary":
            lambda task, reply: env_letters.score_reply(task, reply, "binary", True)["reward"],
    }  # fmt: skip


END = 2


class Numbers:
    """A tokenizer whose texts are the ids themselves: "7 8 2" <-> [7, 8, 2]. Its template puts
    messages one after the other."""

    added_tokens_decoder, all_special_tokens, eos_token_id = {}, [], END

    def __call__(self, text: str, **_) -> dict:
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids: list[int], **_) -> str:
        return " ".join(map(str, ids))

    def apply_chat_template(self, messages: list[dict], **_) -> str:
        return " ".join(message["content"] for message in messages)


def check_conversation():
    def real(prompt, replies, deltas):  # the environment says the deltas, its expert the replies
        text, said, between = Numbers().decode, iter(replies), iter(deltas)
        message = lambda ids: [{"role": "user", "content": text(ids)}]

        def step(_):
            delta = next(between, None)
            if delta is None:
                return [], True
            return message([END, *delta]), False  # a template ends the turn, as the policy has done

        env = SimpleNamespace(tools=None, think=False, step=step, reset=lambda _: message(prompt))
        env.expert_reply = lambda: text(next(said)[:-1])
        env.score = lambda: {"reward": 0}
        policy = SimpleNamespace(tokenizer=Numbers(), stop_ids={END}, name="numbers")
        episode = rollout.expert_episode(policy, env, 0)
        return episode.token_ids, episode.sampled

    def wrong(prompt, replies, deltas, given=False, end=True, between=False):
        mask = [given] * len(prompt)
        for reply, delta in zip(replies, [*deltas, []]):
            mask += [True] * (len(reply) - 1) + [end] + [between] * len(delta)
        return real(prompt, replies, deltas)[0], mask

    rng = random.Random(0)
    ids = lambda end: [rng.randint(3, 99) for _ in range(rng.randint(1, 5))] + end
    cases = [([1, 5, 2, 1], [[7, 8, 2], [9, 2]], [[1, 6, 2, 1]])]
    cases += [([1, 5], [[7, 2]], []), ([5], [[2], [2]], [[6]])]
    for n in (1, 2, 3, 4):
        prompt, replies = ids([1]), [ids([2]) for _ in range(n)]
        cases.append((prompt, replies, [ids([1]) for _ in range(n - 1)]))
    return real, cases, {
        "the end-of-turn token is left out, and the policy never learns to stop":
            lambda *case: wrong(*case, end=False),
        "the prompt is in the mask, which nobody chose": lambda *case: wrong(*case, given=True),
        "what stands between two turns is in the mask": lambda *case: wrong(*case, between=True),
        "everything is in the mask": lambda *case: wrong(*case, given=True, between=True),
        "what stands between two turns is missing":
            lambda prompt, replies, deltas: wrong(prompt, replies, [[]] * len(deltas)),
    }  # fmt: skip


def check_draw():
    def real(logits, uniform, temperature):
        token, logprob = sampler.draw(logits[None], torch.tensor([uniform]), temperature)
        return token.item(), logprob.item()

    g, half = torch.Generator().manual_seed(0), torch.tensor([0.5, 0.25, 0.25]).log()
    known = [(0.6, 1.0), (0.6, 0.5), (0.9, 0.0), (0.0, 1.0), (0.99, 2.0)]
    cases = [(half, uniform, temperature) for uniform, temperature in known]
    for t in (0.0, 0.3, 0.7, 1.0, 1.5) * 4:
        cases.append((3 * torch.randn(5, generator=g), torch.rand((), generator=g).item(), t))
    at = lambda logits, token: (token, logits.log_softmax(-1)[token].item())
    return real, cases, {
        "the log-prob is that of temperature 1, and the token was drawn at another":
            lambda logits, u, t: at(logits, real(logits, u, t)[0]),
        "the temperature multiplies where it should divide":
            lambda logits, u, t: real(logits * t**2, u, t),
        "the temperature is not used": lambda logits, u, t: real(logits, u, 1.0),
        "it is always the likeliest token": lambda logits, u, t: real(logits, u, 0.0),
        "greedy has a log-prob too, that of temperature 1":
            lambda logits, u, t: real(logits, u, t) if t else (real(logits, u, t)[0], 0.0),
        "an off-by-one: this is the token before":
            lambda logits, u, t: at(logits / (t or 1), max(0, real(logits, u, t)[0] - 1)),
    }  # fmt: skip


def check_shift():
    def real(logits, ids, mask):
        model = lambda **_: SimpleNamespace(logits=logits[:, :-1])
        return plain_logprobs(SimpleNamespace(model=model), ids, mask)[0]

    def case(N, T, V, asked):
        ids = torch.randint(0, V, (N, T), generator=g)
        logits = (2 * torch.randn(V, V, generator=g))[ids]
        return logits, ids, torch.rand(N, T - 1, generator=g) < asked

    at = lambda logits, ids, mask: logits.gather(-1, ids[..., None])[..., 0][mask]
    g = torch.Generator().manual_seed(0)
    cases = [case(1, 3, 3, 1.1), case(1, 2, 2, 1.1), case(1, 3, 3, 0)]
    cases += [case(3, 6, 5, 0.6) for _ in range(5)]
    return real, cases, {
        "no shift: the logits at position t are asked for token t, which they have seen":
            lambda logits, ids, mask: at(logits.log_softmax(-1)[:, 1:], ids[:, 1:], mask),
        "the shift goes the wrong way: logits that have seen a token are asked for the one before":
            lambda logits, ids, mask: at(logits.log_softmax(-1)[:, 1:], ids[:, :-1], mask),
        "the tokens are not shifted: the logits at t are asked for token t, and the first counts":
            lambda logits, ids, mask: at(logits.log_softmax(-1)[:, :-1], ids[:, :-1], mask),
        "these are logits, not yet log-probs":
            lambda logits, ids, mask: at(logits[:, :-1], ids[:, 1:], mask),
        "these are probabilities, without the log": lambda *case: real(*case).exp(),
        "the sign: a log-prob is negative, its negative is a loss": lambda *case: -real(*case),
        "the mask is not used": lambda logits, ids, mask: real(logits, ids, torch.ones_like(mask)),
    }  # fmt: skip


def check_advantages():
    real, nan, g = grpo.group_advantages, float("nan"), torch.Generator().manual_seed(0)
    known = [[[1, 0, 0, 1]], [[1, 1, 1, 1]], [[1, nan, 0]], [[nan, 1]], [[nan, nan], [0, 2]]]
    known += [[[1, 0, 0, 0]], [[1, 0], [3, 1]], [[0.9] * 3]]
    cases = [(torch.tensor(rewards).float(),) for rewards in known]
    for _ in range(10):
        rewards = torch.rand(3, 4, generator=g)
        cases.append((rewards.masked_fill(torch.rand(3, 4, generator=g) < 0.1, nan),))
    count = lambda r: (~r.isnan()).sum(1, keepdim=True)
    coarse = lambda r: torch.where(r.isnan(), 0, (r - r.nanmean(1, keepdim=True)) / spread(r))
    return real, cases, {
        "the std is over n - 1 (torch's default, ddof=1); a group is no sample, it is all there is":
            lambda r: real(r) * ((count(r) - 1).clamp(min=0) / count(r).clamp(min=1)).sqrt(),
        "mean and std are those of the batch and not of the group: easy tasks teach, hard punish":
            lambda r: real(r, "batch"),
        "the mean is that of the batch":
            lambda r: torch.where(r.isnan(), 0, (r - r.nanmean()) / spread(r)),
        "it is not divided by the std": lambda r: real(r, normalize=False),
        "the group's mean is not taken off": lambda r: torch.where(r.isnan(), 0, r / spread(r)),
        "an episode in error counts as a reward of 0": lambda r: real(r.nan_to_num(0)),
        "an episode in error counts as a reward of 0 for the others":
            lambda r: torch.where(r.isnan(), 0, real(r.nan_to_num(0))),
        "one NaN makes NaN of its whole group": lambda r: real(r) + 0 * r.sum(1, keepdim=True),
        "an episode in error keeps its NaN, and so will the loss": lambda r: real(r) + 0 * r,
        "0 / 0 where all rewards are equal: the std needs its 1e-6":
            lambda r: real(r) / (real(r) != 0).any(1, keepdim=True),
        "rounding noise, made large by a std of nearly 0: in float32 0.9 less the mean of three "
        "0.9 is not 0; use .double() first": coarse,
    }  # fmt: skip


def spread(rewards):  # [G, 1]
    centered = rewards - rewards.nanmean(1, keepdim=True)
    return (centered**2).nanmean(1, keepdim=True).sqrt() + 1e-6


def check_weights():
    real, rng = grpo.token_weights, random.Random(0)
    known = [[2, 8], [5, 5], [0, 4], [7]]
    known += [[rng.randint(1, 64) for _ in range(rng.randint(2, 6))] for _ in range(4)]
    cases = []
    for n in [torch.tensor(lengths).float() for lengths in known]:
        cases += [(loss, n, 64 if max(n) > 10 else 10) for loss in ("grpo", "dr_grpo", "dapo")]
    only = lambda name, other: lambda loss, n, most: real(other if loss == name else loss, n, most)
    return real, cases, {
        "under grpo every episode counts the same, however long; here every token does, as in dapo":
            only("grpo", "dapo"),
        "under dapo every token counts the same; here every episode does, as in grpo":
            only("dapo", "grpo"),
        "under dapo the denominator is all sampled tokens, not a constant": only("dapo", "dr_grpo"),
        "this divides by the episode's own length, which is what Dr. GRPO takes out":
            only("dr_grpo", "grpo"),
        "the mean over episodes is missing: divide by their number too":
            lambda loss, n, most: real(loss, n, most) * (1 if loss == "dapo" else len(n)),
        "these are an episode's weights and not a token's":
            lambda loss, n, most: real(loss, n, most) * n,
        "a length of 0 is divided by":
            lambda loss, n, most: real(loss, n, most) / ((n > 0) if loss == "grpo" else 1),
    }  # fmt: skip


def check_loss():
    def real(now, old, A, eps, eps_high):
        return grpo.policy_loss("dapo", now, old, A, torch.arange(len(now)), eps, eps_high)[0]

    g, cases = torch.Generator().manual_seed(0), []
    known = [[[0.25], [0.25], [1]], [[0.3] * 2, [0.2] * 2, [1, -1]]]
    known += [[[0.1] * 2, [0.2] * 2, [1, -1]], [[0.3], [0.2], [0]]]
    for now, old, A in (map(torch.tensor, case) for case in known):
        cases.append((now.log(), old.log(), A.float(), 0.2, 0.28))
    for eps, eps_high in ((0.2, 0.2), (0.2, 0.28), (0.1, 0.5)) * 3:
        now, old, A = (torch.randn(6, generator=g) for _ in range(3))
        cases.append((0.3 * now - 2, 0.3 * old - 2, A, eps, eps_high))

    def surrogates(now, old, A, low, high):
        ratio = (now - old).exp()
        return ratio * A, ratio.clamp(1 - low, 1 + high) * A

    def without_exp(now, old, A, low, high):
        return -torch.minimum((now - old) * A, (now - old).clamp(1 - low, 1 + high) * A)

    return real, cases, {
        "the sign: this is what should become large": lambda *case: -real(*case),
        "max for min: it must be the worse of the two, or the clip never bites where it matters":
            lambda *case: -torch.maximum(*surrogates(*case)),
        "the clipped ratio alone, without the min: a token gone the wrong way gets no gradient":
            lambda *case: -surrogates(*case)[1],
        "there is no clip": lambda *case: -surrogates(*case)[0],
        "the ratio is upside down: p_now / p_old":
            lambda now, old, *rest: real(2 * old - now, old, *rest),
        "the log-ratio needs its exp":
            without_exp,
        "eps stands on both sides: above it is eps_high":
            lambda now, old, A, low, high: real(now, old, A, low, low),
        "this is the mean; what is asked for is the loss of each token":
            lambda *case: real(*case).mean(),
        "the ratio is detached: right values, and no gradient to learn from":
            lambda now, *rest: real(now.detach(), *rest) + 0 * now,
    }  # fmt: skip


def check_importance():
    real = lambda log_ratio, row, cap: grpo.importance_weights("sequence", log_ratio, row, cap)
    g = torch.Generator().manual_seed(0)
    known = [([0.8, 0.5, 3], [0, 0, 1]), ([1, 1], [0, 0]), ([4, 0.1, 0.1], [0, 0, 0])]
    known += [([1.5, 1.5], [0, 1])]
    cases = [(torch.tensor(ratio).float().log(), torch.tensor(row), 2.0) for ratio, row in known]
    cases += [(torch.tensor([500.0, 500.0, -500.0]), torch.tensor([0, 0, 1]), 2.0)]
    row = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    cases += [(0.3 * torch.randn(7, generator=g), row, cap) for cap in (1.0, 1.5, 2.0) * 2]
    count = lambda row: row.bincount()[row]
    return real, cases, {
        "each token has its own ratio here; the episode's is their product":
            lambda x, row, cap: grpo.importance_weights("token", x, row, cap),
        "the cap is on each token and not on the product":
            lambda x, row, cap: real(x.clamp(max=math.log(cap)), row, float("inf")),
        "there is no cap": lambda x, row, cap: real(x, row, float("inf")),
        "the geometric mean over the tokens, as in GSPO, and not their product":
            lambda x, row, cap: real(x / count(row), row, cap),
        "it is cut off below as well: an episode that became unlikely should weigh little":
            lambda x, row, cap: real(x, row, cap).clamp(min=1 / cap),
        "the product is over all episodes": lambda x, row, cap: real(x, 0 * row, cap),
        "the ratio is upside down": lambda x, row, cap: real(-x, row, cap),
    }  # fmt: skip


def check_k3():
    real, g = grpo.k3, torch.Generator().manual_seed(0)
    known = [([0.5], [0.25]), ([0.3], [0.3]), ([0.1, 0.9], [0.9, 0.1])]
    cases = [(torch.tensor(p).log(), torch.tensor(q).log()) for p, q in known]
    cases += [(torch.randn(5, generator=g) - 3, torch.randn(5, generator=g) - 3) for _ in range(10)]
    return real, cases, {
        "this is k1, the plain log-ratio: right on average, negative half of the time":
            lambda p, q: p - q,
        "this is k1 with its sign turned": lambda p, q: q - p,
        "this is k2, half the square of the log-ratio: only right for small ones":
            lambda p, q: (p - q) ** 2 / 2,
        "the ratio is upside down: r = p_reference / p": lambda p, q: (p - q).exp() - (p - q) - 1,
        "the sign of log r": lambda p, q: (q - p).exp() + (q - p) - 1,
        "the - 1 is missing: where both agree the KL is 0": lambda p, q: real(p, q) + 1,
        "the log-probs are detached: right values, and no gradient":
            lambda p, q: real(p.detach(), q) + 0 * p,
    }  # fmt: skip


def check_wilson():
    def real(x, n):
        interval = metrics.proportion(x, n)
        return interval.low, interval.high

    def wald(x, n, z=1.96):
        return x / n - z * math.sqrt(x * (n - x) / n**3), x / n + z * math.sqrt(x * (n - x) / n**3)

    def at(x, n, z):  # Wilson's, at any z
        middle = (x + z * z / 2) / (n + z * z)
        reach = z / (n + z * z) * math.sqrt(x * (n - x) / n + z * z / 4)
        return middle - reach, middle + reach

    def scipys(method):
        return lambda x, n: tuple(stats.binomtest(x, n).proportion_ci(0.95, method=method))

    rng, cases = random.Random(0), [(13, 32), (0, 0), (0, 10), (10, 10), (1, 1), (0, 1), (128, 256)]
    cases += [(rng.randint(0, n), n) for n in (2, 5, 20, 64, 256, 1024) * 2]
    plain = "the normal approximation, not Wilson: its standard error is that of x/n and not of p"
    return real, cases, {
        plain: wald,
        plain + ", cut off at 0 and 1":
            lambda x, n: (max(0.0, wald(x, n)[0]), min(1.0, wald(x, n)[1])),
        "Agresti and Coull's: the right middle, but the width of the normal approximation":
            lambda x, n: wald(x + 1.92, n + 3.84),
        "this is the 90% interval (z = 1.645)": lambda x, n: at(x, n, 1.645),
        "this is z = 1: one standard error, a 68% interval": lambda x, n: at(x, n, 1.0),
        "Clopper and Pearson's exact interval, wider than it need be": scipys("exact"),
        "Wilson's with the correction for continuity": scipys("wilsoncc"),
        "without a task the share may be anything: (0, 1)":
            lambda x, n: real(x, n) if n else (0.0, 0.0),
    }  # fmt: skip


def check_expect():
    def real(mean, var, spread, p, noise):
        return governance.expect(governance.Belief(mean, var, spread), p, noise)

    rng = random.Random(0)
    cases = [(0.5, 0.05, 0.04, 0.9, 0.05), (0.5, 0.0, 0.01, 0.9, 0.04)]
    cases += [(0.5, 0.05, 0.04, 0.9, 0.0), (0.4, 0.01, 0.06, 0.8, 0.02)]
    for _ in range(20):
        mean, var, spread = rng.random(), rng.uniform(0, 0.06), rng.uniform(0, 0.08)
        cases.append((mean, var, spread, rng.random(), rng.uniform(0.001, 0.05)))

    def by_deviation(mean, var, spread, p, noise):
        prior = (var + max(0.0, spread - noise)) ** 0.5
        return mean + prior / (prior + noise**0.5) * (p - mean)

    return real, cases, {
        "this is the reading alone, the hard gate": lambda mean, var, spread, p, noise: p,
        "this is the record alone: a deal is not always like the one before":
            lambda mean, var, spread, p, noise: mean,
        "the weights are the wrong way round: the noisier the reading, the *less* it counts":
            lambda mean, var, spread, p, noise: p + mean - real(mean, var, spread, p, noise),
        "how much deals really vary is left out of the prior":
            lambda mean, var, spread, p, noise: real(mean, var, 0.0, p, noise),
        "the noise is not taken off the spread, so it counts twice":
            lambda mean, var, spread, p, noise: real(mean, var + spread, 0.0, p, noise),
        "spread - noise may be below 0, and a variance may not": lambda mean, var, spread, p, noise:
            mean + (var + spread - noise) / (var + spread) * (p - mean),
        "standard deviations where variances belong": by_deviation,
    }  # fmt: skip


CHECKS = {
    "partial_reward": check_reward,
    "conversation": check_conversation,
    "draw": check_draw,
    "token_logprobs": check_shift,
    "group_advantages": check_advantages,
    "token_weights": check_weights,
    "clipped_loss": check_loss,
    "importance_weights": check_importance,
    "k3": check_k3,
    "wilson": check_wilson,
    "expect": check_expect,
}
# What is learnt here is the gradient: the values are compared, and d (their sum) / d logprobs.
WITH_SLOPE = ("clipped_loss", "k3")
