"""Exercises: the heart of the book, for you to write. Eleven functions, in the order in which their
files are read.

    seed -> task -> messages -> token ids -> log-probs -> advantages -> loss -> policy
            1 reward            2 mask       4 shift      5 group       6-9
                                3 draw
    and how sure are we, whom to trust?    10 interval, 11 gate

Each is a few lines long, and each has a mistake that is easy to make and hard to see in a run's
curves. Open this file, read a docstring, write your lines below it, and run the file. Your
functions are compared with the real ones: first on known cases (equal rewards, an episode in error,
no task at all), then on random ones, the same for every reader. If they differ, you see the first
input that shows it (learn/judge.py does this; it has the answers, too).

Every docstring ends with a question. You know the function when you can answer it.

Run me: `python -m learn.exercises` checks all, `python -m learn.exercises 3` the third;
`--hint 3` and `--answer 3` help.
"""

import sys

import torch

from env_letters import Task, parse_answer  # noqa: F401  (for the first one)


def partial_reward(task: Task, reply: str) -> float:
    """1. The reward of a reply to a letter-counting task with partial credit, in [0, 1].

    parse_answer(reply, are several letters asked for?) gives {letter: count}; for a single letter
    the count; or None: then the reply is worth 0. It is worth 0.1 if it is not about exactly the
    letters asked for, or if only one was asked for and its count is wrong; otherwise 0.1 + 0.9 ·
    (share of the letters whose counts are exactly right).

        Task("banana", letters=("a", "n", "q"), counts=(3, 2, 0))
        '<answer>{"a": 3, "n": 2, "q": 1}</answer>'  ->  0.1 + 0.9 · 2/3 = 0.7

    The real one: env_letters.score_reply; look after you have tried.
    Question: the 0.1 helps a beginner to find the format. What else does partial credit teach, and
    what does `--reward binary` teach instead?
    """


def conversation(
    prompt: list[int], replies: list[list[int]], deltas: list[list[int]]
) -> tuple[list[int], list[bool]]:
    """2. A whole conversation as (token_ids, sampled): its tokens, and True exactly where the
    policy chose the token.

    Each reply is what was sampled, with its end-of-turn token (2). After each but the last comes a
    delta: what the template and the environment put between two turns. The policy learns only from
    tokens that are True.

        prompt [1, 5, 2, 1], replies [[7, 8, 2], [9, 2]], deltas [[1, 6, 2, 1]]  ->
        [1, 5, 2, 1,  7, 8, 2,  1, 6, 2, 1,  9, 2],
        [0, 0, 0, 0,  1, 1, 1,  0, 0, 0, 0,  1, 1]

    The real one: rollout.take_turn; look after you have tried.
    Question: what does a policy never learn if its end-of-turn tokens are left out of the mask?
    """


def draw(logits: torch.Tensor, uniform: float, temperature: float) -> tuple[int, float]:
    """3. (token, its log-prob): logits [V] float32, uniform in [0, 1). By inverse CDF
    (Devroye 1986, §II.2).

    The probabilities at this temperature lie end to end on [0, 1); the token is the one on which
    `uniform` falls. Temperature 0 is greedy: the likeliest token, with its log-prob at
    temperature 1.

        logits log [0.5, 0.25, 0.25], uniform 0.6
            temperature 1    ->  1, log 0.25 = -1.386
            temperature 0.5  ->  0, log 0.667 = -0.405     (the shares are 0.25 : 0.0625 : 0.0625)
            temperature 0    ->  0, log 0.5 = -0.693

    The real one: policy.draw (for many rows at once); look after you have tried.
    Question: at temperature 0.7, why must the log-prob be that of temperature 0.7 too, if we want
    to train on it?
    """


def token_logprobs(logits: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """4. The log-prob of each masked token given those before it:
    logits [N, T, V], ids [N, T], mask [N, T-1] bool -> [M], in row order.

    The causal shift: logits[:, t] were computed from tokens 0 … t, so they predict token t+1; and
    mask[:, t] asks for token t+1 (log p(text) = Σ log p(token | those before), Radford et al. 2018,
    eq. 1).

        position   0    1    2    3            mask [0, 0, 1] asks for <a>,
        token      <u>  how  many <a>          and so for log softmax(logits[0, 2])[<a>]
        predicts   how  many <a>  ...

    The real one: policy.plain_forward; look after you have tried.
    Question: which token of a row has no log-prob, and which position's logits are thrown away?
    """


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """5. rewards [G, k], k answers to each of G tasks -> advantages [G, k] float32:
    (reward - mean) / (std + 1e-6), both of its own group (Shao et al. 2024, §4.1.2).

    NaN is an episode in error: it gets 0 and does not count for the others. The std divides by the
    number of episodes, not by one less. If all rewards of a group are equal, its advantages are 0.

        [[1, 0, 0, 1]]     ->  [[1, -1, -1, 1]]
        [[1, nan, 0]]      ->  [[1, 0, -1]]
        [[0.9, 0.9, 0.9]]  ->  [[0, 0, 0]]

    The real one: grpo.group_advantages; look after you have tried.
    Question: every reward of an update is 1. How large is the gradient, and is that a bug?
    """


def token_weights(loss: str, lengths: torch.Tensor, max_tokens: int) -> torch.Tensor:
    """6. lengths [N] float32, the sampled tokens of each episode -> [N]: the weight of each of *its
    tokens*. The loss is Σ weight · token's loss.

    "grpo"     the mean over each episode's tokens, then the mean over episodes; a length of 0
               counts as 1 (Shao et al. 2024, eq. 3)
    "dr_grpo"  the sum over each episode's tokens, divided by the constant max_tokens; then the mean
               over episodes (Liu et al. 2025, §3.2)
    "dapo"     the mean over all tokens of the batch, whichever episode they are in
               (Yu et al. 2025, eq. 8)

        lengths [2, 8], max_tokens 10:   grpo [1/4, 1/16]   dr_grpo [1/20, 1/20]   dapo [1/10, 1/10]

    The real one: grpo.token_weights; look after you have tried.
    Question: under "grpo", which wrong replies are pushed down least, token by token, and how may a
    policy exploit that?
    """


def clipped_loss(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, eps: float, eps_high: float
) -> torch.Tensor:
    """7. The loss of each sampled token, [M], from (all [M]) its log-prob now, its log-prob when it
    was sampled, and its episode's advantage.

    - min(ratio · A, clip(ratio, 1 - eps, 1 + eps_high) · A), ratio = p_now / p_old
    (Schulman et al. 2017, eq. 7; two eps: Yu et al. 2025, §3.1).
    Its values and their gradient with respect to logprobs are checked.

        p 0.25 -> 0.25, A =  1:                loss -1,    gradient -1
        p 0.2  -> 0.3,  A =  1, eps_high 0.28: loss -1.28, gradient  0
        p 0.2  -> 0.3,  A = -1, eps_high 0.28: loss  1.5,  gradient  1.5

    The real one: grpo.clipped_surrogate; look after you have tried.
    Question: in a healthy run the printed loss is about 0 and the ratio 1.000. Why does the policy
    learn all the same?
    """


def importance_weights(log_ratio: torch.Tensor, row: torch.Tensor, cap: float) -> torch.Tensor:
    """8. How much each token from an older policy counts -> [M].
    log_ratio [M]: log p - log p_sampler of each token; row [M] int64: its episode.

    min(p(episode) / p_sampler(episode), cap), the same for all its tokens: truncated importance
    sampling (Espeholt et al. 2018, §4.1). An episode's probability is the product over its tokens.

        log_ratio log [0.8, 0.5, 3], row [0, 0, 1], cap 2  ->  [0.4, 0.4, 2]

    The real one: batch.importance_weights; look after you have tried.
    Question: each of 1,000 tokens is 1% less likely than when it was sampled. What would their
    weights be token by token, and what are they here?
    """


def k3(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """9. An estimate of KL(policy || reference) at each token that the policy sampled, from both
    log-probs [M] -> [M].

    r - log r - 1 with r = p_reference / p (Schulman 2020, "Approximating KL divergence", k3).
    Its values and their gradient with respect to logprobs are checked.

        p 0.5, reference 0.25: r = 0.5  ->  0.5 + 0.693 - 1 = 0.193          p = reference  ->  0

    The real one: grpo.k3; look after you have tried.
    Question: k1 = log p - log p_reference has the right mean too. Why not put that into the loss?
    """


def wilson(successes: int, n: int) -> tuple[float, float]:
    """10. The 95% interval (low, high) of a share (Wilson 1927): all shares p that lie at most
    z = 1.96 of *their own* standard errors from x/n.

    Solve (x/n - p)² = z² p (1 - p) / n for p. n = 0 says nothing: (0, 1).

        13 of 32  ->  0.255, 0.577          0 of 10  ->  0, 0.278

    The real one: metrics.proportion; look after you have tried.
    Question: 32 of 32 are right. What does the usual x/n ± 1.96 standard errors say, and what does
    Wilson?
    """


def expect(mean: float, var: float, spread: float, p: float, noise: float) -> float:
    """11. How good is this deal, really? A proxy has read p, with variance `noise`; the agent's
    deals are believed to lie around `mean`.

    The agent's mean is known with variance `var`, and its readings vary around it with variance
    `spread`. The part of `spread` that is not noise is real, from deal to deal, and never below 0.
    So before the reading, this deal's variance was prior = var + real. Weigh belief and reading by
    their precision: mean + prior / (prior + noise) · (p - mean) (Kalman 1960, for one number).
    The soft gate accepts if this is at least the bar.

        mean 0.5, var 0.05, spread 0.04, p 0.9, noise 0.05  ->  prior 0.05 + 0, half of the way: 0.7

    The real one: swarm.governance.expect; look after you have tried.
    Question: when does this decide as the reading alone does, and when does it hardly look at the
    reading?
    """


if __name__ == "__main__":
    from learn.judge import main  # here, because it gives everything away

    sys.exit(main(sys.argv[1:], globals()))
