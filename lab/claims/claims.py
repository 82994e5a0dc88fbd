"""The lessons that this project grew out of, as data: each with its source, the arms that test it, and what it predicts.

lab/claims/ablate.py runs the arms, lab/claims/ledger.py judges them; `python -m lab.claims.ablate --list` shows what there is. To add a
claim, add a few lines to CLAIMS:

    arms      {name: flags of train.py, or a Script}. A Script is played without a model, for a number of units (scenarios, or seeds of a
              simulation). Arms with the same flags share their runs
    checks    each one number with an interval: how it is computed from the arms, and what is predicted of it: above or below a number, or
              equal to it within a margin (above, below: the smallest difference that would matter). Without a prediction it is only
              measured
    figure    what the document says this number is, where it says it

Three documents are quoted: the training report of picoRL (letters, Qwen3-4B, 32 tasks an evaluation), "RL Training Lessons for Multi-Agent
Governance" (alphabet sort, one run) and "Qwen3-30B v0.2 Training" (swarm, one run); "published" is what else their authors wrote.
"""

from functools import partial

from lab.claims import quantities as q
from lab.claims.quantities import SAMPLED, TASKS, Check, Claim, Script

PICORL, LESSONS, SWARM = "picoRL Training Report", "RL Training Lessons for Multi-Agent Governance", "Qwen3-30B v0.2 Training"


# ------------------------------------------------------------------------------------------------ flags
POINTS = {"scale": 100, "unit": "points"}
SHARE = {"scale": 100, "unit": "%", "share": True}
OF_REPLIES = SHARE | {"unit": "% of the replies"}


def letters(more: str = "", tier: int = 6, updates: int = 40) -> str:
    """40 updates: with the default settings accuracy has settled after 20 (results/letters)."""
    return f"--env letters --difficulty {tier} --updates {updates} --eval-n 256 --eval-every 20 --no-eval-other-tiers {more}".strip()


def swarm(more: str = "") -> str:
    """Tiny: 20 updates of 16 episodes. The novice tries every tool, so that there is diversity to lose."""
    return ("--env swarm --difficulty medium --sft-style novice --sft-steps 20 --updates 20 --warmup 2 --lr 1e-3 --num-tasks 2 --k 8 "
            f"--eval-n 24 --eval-every 1000 {more}").strip()  # fmt: skip


# ------------------------------------------------------------------------------------------------ the claims
UPDATES_100 = {"think": letters(updates=100), "no_think": letters("--no-think", updates=100),
               "no_think_partial": letters("--no-think --reward partial", updates=100)}  # fmt: skip
# Three for each, and more where the highest was the best: whose best is at the end of a row has not been found.
RATES = {"full": ("3e-5", "1e-4", "3e-4", "1e-3"), "rank1": ("3e-4", "1e-3", "3e-3", "1e-2", "3e-2"),
         "rank8": ("3e-4", "1e-3", "3e-3", "1e-2"), "rank32": ("3e-4", "1e-3", "3e-3")}  # fmt: skip
RANKS = {"full": "--lora-rank 0", **{f"rank{r}": f"--lora-rank {r} --lora-alpha {2 * r}" for r in (1, 8, 32)}}
ALL_RATES = {f"{kind}_{rate}": letters(f"{RANKS[kind]} --lr {rate}") for kind, rates in RATES.items() for rate in rates}
# A number that stands beside the claim and does not decide it.
Also = partial(Check, decides=False)
TALK = (2, 5, 10, 20)  # percent of the turns
CLAIMS = (
    Claim("thinking",
          "Without thinking GRPO plateaus on tier 6; with it, it does not.",
          f'{PICORL}, "Why It Plateaued": "No CoT = no learning signal … hard ceiling" (40.6% → 43.8% on 32 tasks)',
          "A plateau: the gain of GRPO over SFT is 0 within 5 points, after 100 updates. The report paid partial credit, so both rewards "
          "are tried. With thinking it must gain at least 20 points; it ends at a ceiling of its own, near 100%. This is of 100 updates, "
          "over which the rate falls to a tenth: in runs of 150 (results/letters, five seeds) the binary reward is undecided.",
          UPDATES_100,
          (Check("gain of GRPO over SFT, thinking allowed", q.own("think", q.gained), "above", margin=0.2, **POINTS),
           Check("gain of GRPO over SFT, not allowed, binary reward", q.own("no_think", q.gained), "equal", margin=0.05, **POINTS),
           Check("gain of GRPO over SFT, not allowed, partial reward (the report's)", q.own("no_think_partial", q.gained), "equal",
                 margin=0.05, figure=0.032, **POINTS),
           Also("thinking minus no thinking, at the end", q.less("think", "no_think"), "above", **POINTS),
           Also("follow-up, no thinking: partial minus binary reward, at the end", q.less("no_think_partial", "no_think"), **POINTS),
           Also("follow-up, no thinking: groups with a signal in the first ten updates, partial minus binary",
                 q.less("no_think_partial", "no_think", q.first_ten("groups_with_signal")), **POINTS),
           Also("follow-up, no thinking, partial: tokens of a reply, last ten updates minus first ten",
                 q.own("no_think_partial", lambda run: q.during(run, "reply_tokens", 91, 100) - q.during(run, "reply_tokens", 1, 10)),
                 unit="tokens"))),
    Claim("invention",
          "RL reinforces what was seeded and cannot invent the algorithm: once SFT has removed it, 40 updates do not bring it back.",
          f'{PICORL}, "Why It Plateaued": "RL can only reinforce existing reasoning patterns; it can\'t invent new ones"',
          "Seeded is whatever a policy does before RL, and pico_base derives in 13% of its replies, whatever its SFT shows. So three "
          "starts: SFT that states (the claim's words; the base still derives now and then), SFT that states until deriving is gone (200 "
          "steps at ten times the rate; 60 leave it in 1% of the replies), SFT that derives. Not invented: replies that derive stay within "
          "2% of none, over the last ten updates.",
          {"states": letters(),
           "states_only": letters("--sft-steps 200 --sft-lr 1e-3"),
           "derives": letters("--sft-style derives")},
          (Check("nothing left to reinforce: replies that derive in the end",
                 q.own("states_only", lambda run: q.during(run, "habit_derives", 31, 40)), "equal", margin=0.02, **OF_REPLIES),
           Check("SFT that derives minus nothing left, at the end", q.less("derives", "states_only"), "above", margin=0.05, **POINTS),
           Also("follow-up: a trace is left (SFT states, the base derives now and then): gain of GRPO", q.own("states", q.gained),
                **POINTS),
           Also("follow-up: nothing left: gain of GRPO", q.own("states_only", q.gained), **POINTS),
           Also("nothing left: replies that derive in the first five updates",
                q.own("states_only", lambda run: q.during(run, "habit_derives", 1, 5)), **OF_REPLIES))),
    Claim("partial_credit",
          "Partial credit compresses the variance within groups, so gradients vanish; binary gives fewer but larger signals.",
          f'{PICORL}, "Why It Plateaued": "Partial credit compresses variance … advantages are near-zero"; grad_norm 0.02 to 0.04',
          "The spread: mean |reward - group mean| without the division by the standard deviation (which hides it), first ten updates. The "
          "gradient: its norm, with that division, as in the report. Which reward wins is asked at four starts: SFT that answers bare, "
          "that states, tier 5, SFT that derives. Does partial credit pay the guess first? Then replies get shorter before "
          "they get longer.",
          {"binary": letters(), "partial": letters("--reward partial"),
           "binary_raw": letters("--no-normalize"), "partial_raw": letters("--reward partial --no-normalize"),
           "binary_bare": letters("--sft-style bare"), "partial_bare": letters("--sft-style bare --reward partial"),
           "binary_tier5": letters(tier=5), "partial_tier5": letters("--reward partial", tier=5),
           "binary_derives": letters("--sft-style derives"), "partial_derives": letters("--sft-style derives --reward partial")},
          (Check("spread within groups: partial minus binary", q.less("partial_raw", "binary_raw", q.first_ten("advantage_abs")), "below"),
           Check("gradient norm: partial minus binary", q.less("partial", "binary", q.first_ten("grad_norm")), "below"),
           Check("groups with a signal: binary minus partial", q.less("binary", "partial", q.first_ten("groups_with_signal")), "below",
                 **POINTS),
           Also("follow-up, not divided by the deviation: gradient norm: partial minus binary",
                q.less("partial_raw", "binary_raw", q.first_ten("grad_norm"))),
           Also("follow-up, not divided: end: binary minus partial", q.less("binary_raw", "partial_raw"), **POINTS),
           *(Also(f"{what}: binary minus partial, start: {start}", q.less(f"binary{arm}", f"partial{arm}", of), **POINTS)
             for start, arm in (("bare", "_bare"), ("states", ""), ("tier 5", "_tier5"), ("derives", "_derives"))
             for what, of in (("first 20 updates", q.early), ("end", q.held))),
           Also("partial, start bare: reply length in updates 6 to 15 minus the first three", q.own("partial_bare", q.longer), "below",
                unit="tokens"),
           Also("partial, start states: the same", q.own("partial", q.longer), "below", unit="tokens"))),
    Claim("larger_k",
          "Larger k: more groups with signal per episode, at equal episode budget.",
          f'{PICORL}, "What Would Improve Results": "Larger k: more rollouts per task increases chance of finding winning strategies"',
          "64 episodes an update in all arms; k = 16 against k = 4, first ten updates. The report speaks of a group's chance, the claim of "
          "groups per episode: the second is the first divided by k. Both are judged, and what it brings stands beside them.",
          {f"k{k}": letters("" if k == 8 else f"--k {k} --num-tasks {64 // k}") for k in (2, 4, 8, 16, 32)},
          (Check("share of the groups with a signal: k = 16 minus k = 4", q.less("k16", "k4", q.first_ten("groups_with_signal")), "above",
                 **POINTS),
           Check("groups with a signal per 100 episodes: k = 16 minus k = 4", q.less("k16", "k4", q.signal_by_episode), "above", scale=100,
                 unit="groups"),
           Also("exact answers in the first 20 updates: k = 16 minus k = 4", q.less("k16", "k4", q.early), **POINTS),
           Also("the same: k = 32 minus k = 2", q.less("k32", "k2", q.early), **POINTS),
           Also("the end: k = 16 minus k = 4", q.less("k16", "k4"), **POINTS))),
    Claim("curriculum",
          "A curriculum beats training on tier 6 all along.",
          f'{PICORL}, "What Would Improve Results": "Curriculum learning: start at easier difficulty, gradually increase"',
          "60 updates each; tier 1 first, up when the last five updates have 75% right; judged on tier 6. Its early updates are cheaper: "
          "the work stands below the table. Once more from a weaker start (SFT that answers bare), where tier 6 says less. The curves are "
          "of the tier that is played at the time, and fall where a harder one begins.",
          {"fixed": letters(updates=60), "curriculum": letters("--curriculum", updates=60),
           "fixed_bare": letters("--sft-style bare", updates=60), "curriculum_bare": letters("--sft-style bare --curriculum", updates=60)},
          (Check("curriculum minus fixed, end", q.less("curriculum", "fixed"), "above", margin=0.02, **POINTS),
           Also("… after 20 updates", q.less("curriculum", "fixed", lambda run: q.held(run, 20)), **POINTS),
           Also("… after 40 updates", q.less("curriculum", "fixed", lambda run: q.held(run, 40)), **POINTS),
           Also("weaker start: curriculum minus fixed, end", q.less("curriculum_bare", "fixed_bare"), "above", margin=0.02, **POINTS),
           Also("weaker start: after 20 updates", q.less("curriculum_bare", "fixed_bare", lambda run: q.held(run, 20)), **POINTS),
           Also("work, in tokens (a trained one counts as three): curriculum minus fixed",
                 q.less("curriculum", "fixed", q.work), scale=1e-3,
                 unit="thousand tokens"))),
    Claim("lora_rank",
          "LoRA of rank 1, 8 and 32 does as well as full fine-tuning, each at its own best learning rate.",
          f'{PICORL}, "Config" and "Previous Runs Summary": rank 32 because full fine-tuning did not fit; '
          'nothing is said of what that costs',
          "The documents make no prediction, so ours is: no difference, within 5 points at the end. Three to five learning rates each, so "
          "that the best is not the highest; alpha twice the rank. The best rate is the one whose other seeds have most of the number that "
          "is judged, so a run never chooses its own. The warm-up by SFT has one rate for all.",
          ALL_RATES | {"twice": letters("--lora-rank 0 --lr 3e-4", updates=80)},
          (*(Check(f"{kind.replace('rank', 'rank ')} minus full, end", q.at_best_rates(kind, "full"), "equal", margin=0.05, **POINTS)
             for kind in ("rank1", "rank8", "rank32")),
           *(Also(f"{kind.replace('rank', 'rank ')} minus full, first 20 updates", q.at_best_rates(kind, "full", q.early), **POINTS)
             for kind in ("rank1", "rank8", "rank32")),
           Also("follow-up, is full fine-tuning only slower? After 80 updates minus after 40 (3e-4)", q.less("twice", "full_3e-4"),
                **POINTS),
           Also("follow-up: rank 8 (1e-3, 40 updates) minus full (3e-4, 80 updates), end", q.less("rank8_1e-3", "twice"), **POINTS))),
    Claim("baselines",
          "A group's mean is a better baseline than the batch's; whether advantages are divided by the standard deviation, and whether a "
          "loss weighs sequences or tokens, does not matter in the end.",
          "the variants in grpo.py; the documents use one (GRPO: the group's mean, divided, a sequence at a time) and compare none",
          "Ours to predict. Better: more exact answers in the first 20 updates (in the end all are near 100%). Does not matter: equal at "
          "the end, within 5 points. Sequence "
          "against token level is grpo against dapo; on-policy gspo has the gradient of grpo, and dapo's higher clip never acts.",
          {"group": letters(), "batch": letters("--baseline batch"), "no_std": letters("--no-normalize"), "token": letters("--loss dapo")},
          (Check("group minus batch baseline, first 20 updates", q.less("group", "batch", q.early), "above", **POINTS),
           Check("with minus without the division, end", q.less("group", "no_std"), "equal", margin=0.05, **POINTS),
           Check("sequence minus token level, end", q.less("group", "token"), "equal", margin=0.05, **POINTS),
           Also("group minus batch, end", q.less("group", "batch"), **POINTS),
           Also("with minus without the division, first 20 updates", q.less("group", "no_std", q.early), **POINTS),
           Also("sequence minus token level, first 20 updates", q.less("group", "token", q.early), **POINTS))),
    Claim("single_steps",
          "Single-step reward is noise: the peak overstates the mean.",
          f'{LESSONS}, "The reward signal is noisier than you think" and "Peak vs. average" (peak 0.70, mean 0.53: 32%)',
          "From the training rewards of the first claim. Noise: where it learns so slowly that the report saw a plateau (no thinking, "
          "partial reward), single steps turn around as often as white noise does (2/3), within 0.1. Overstates: by more than 10%. "
          "Detectable: in four runs of five, from so many updates before and after; 64 episodes each.",
          UPDATES_100,
          (Check("share of the steps that turn around, plateau", q.own("no_think_partial", q.turned_around), "equal", than=2 / 3,
                 margin=0.1),
           Check("peak over mean, plateau", q.own("no_think_partial", q.overstated), "above", than=0.1, figure=0.32, scale=100, unit="%"),
           Also("peak over mean, binary reward, plateau", q.own("no_think", q.overstated), scale=100, unit="%"),
           Also("peak over mean, a run that learns", q.own("think", q.overstated), scale=100, unit="%"),
           Also("updates a side until 5 points can be told, plateau", q.own("no_think_partial", q.updates_needed), unit="updates"),
           Also("updates a side until 5 points can be told, learnt", q.own("think", q.updates_needed), unit="updates")),
          curve="reward"),
    Claim("too_short",
          "100 steps was not enough: the model was still improving, and a test for convergence would have told so half-way.",
          f'{LESSONS}, "100 steps wasn\'t enough" (halves of 0.50 and 0.55); "Run longer. Or … measure whether the system has converged"',
          "From the runs of the first claim, also 100 updates. Still improving: the reward of the last ten updates minus that of 41 to 50. "
          "The detector (metrics.trend) is right at half-way if it says settled and the last 20 updates stay within 0.05 of 41 to 50, or "
          "says anything else and they do not; it must be right in more than half of the runs. Letters, not alphabet sort: what is judged "
          "is the way to look, more than the run.",
          UPDATES_100,
          (Check("reward after update 90 minus around 50, a run that learns",
                 q.own("think", lambda run: q.during(run, "reward", 91, 100) - q.during(run, "reward", 41, 50)), "above", margin=0.02,
                 figure=0.05),
           Check("at half-way the detector is right, share of the arms",
                 q.share_of(UPDATES_100, q.called_right), "above", than=0.5, **SHARE),
           Also("it says settled and the reward moves on", q.share_of(UPDATES_100, q.too_soon), **SHARE),
           Also("it says that it cannot tell yet, which counts as right only if the reward moves on",
                q.share_of(UPDATES_100, q.cannot_tell), **SHARE)),
          curve="reward"),
    Claim("off_policy",
          "One step off-policy costs nothing with a correction; eight steps without one ruin a run.",
          f'{SWARM}, "Off-Policy Level Rising" (from 2 to 10 in 15 steps); {LESSONS}, "Async coordination costs dominate"',
          "Nothing: the end is within 5 points of strictly on-policy. The correction is truncated importance sampling of whole sequences. "
          "Follow-ups: one step without, eight with.",
          {"in_turn": letters(), "one_weighed": letters("--async-rollouts 1 --importance sequence"),
           "one_blind": letters("--async-rollouts 1 --importance none"),
           "eight_weighed": letters("--async-rollouts 8 --importance sequence"),
           "eight_blind": letters("--async-rollouts 8 --importance none")},
          (Check("one step, corrected, minus on-policy", q.less("one_weighed", "in_turn"), "equal", margin=0.05, **POINTS),
           Check("eight steps, not corrected, minus on-policy", q.less("eight_blind", "in_turn"), "below", margin=0.05, **POINTS),
           Also("follow-up: one step, not corrected", q.less("one_blind", "in_turn"), **POINTS),
           Also("follow-up: eight steps, corrected", q.less("eight_weighed", "in_turn"), **POINTS))),
    Claim("swarm_weights",
          "A higher weight on reputation, or a floor, raises reputation; diversity falls under RL (judged on greedy "
          "play), and a higher weight keeps it up; to accept beats to propose.",
          f'{SWARM}, "Reputation Stagnation" and "Accept, Don\'t Just Propose"; published: diversity 0.70 → 0.60 under RL',
          "A tiny training (20 updates of 16 episodes) from the novice's demonstrations, who tries every tool; only the weights differ, "
          "and the parts are compared, not the rewards. "
          "Accepting against proposing is played by scripts: the expert, blind for offers to it, or without anybody to propose to.",
          {"base": swarm(), "reputation_half": swarm("--swarm-reputation 0.5"), "floor": swarm("--swarm-floor 50 --swarm-floor-penalty 2"),
           "diversity_quarter": swarm("--swarm-diversity 0.25"),
           "accepts": Script(partial(q.one_sided, "bots"), 200), "proposes": Script(partial(q.one_sided, "incoming"), 200),
           "both": Script(partial(q.one_sided, "nothing"), 200)},
          (Check("reputation: weight 0.5 minus 0.3",
                 q.less("reputation_half", "base", lambda run: q.held(run, what="reputation")), "above"),
           Check("reputation: with a floor of 50 minus without", q.less("floor", "base", lambda run: q.held(run, what="reputation")),
                 "above"),
           Check("diversity: after RL minus after SFT", q.own("base", lambda run: q.gained(run, "diversity")), "below", figure=-0.10),
           Check("diversity: weight 0.25 minus 0.1", q.less("diversity_quarter", "base", lambda run: q.held(run, what="diversity")),
                 "above"),
           Check("reward: only accepts minus only proposes", q.by_unit("accepts", "proposes", "reward"), "above"),
           # The numbers above are of greedy replies, which after this SFT do one thing only: their diversity cannot fall.
           # What is sampled can.
           Also("follow-up, sampled replies: diversity in the last two updates minus the first two",
                 q.own("base", lambda run: q.during(run, "diversity", 19, 20) - q.during(run, "diversity", 1, 2)), figure=-0.10),
           Also("follow-up, sampled, last two updates: diversity, weight 0.25 minus 0.1",
                 q.less("diversity_quarter", "base", lambda run: q.during(run, "diversity", 19, 20))),
           Also("follow-up, sampled, last two updates: reputation, weight 0.5 minus 0.3",
                 q.less("reputation_half", "base", lambda run: q.during(run, "reputation", 19, 20))),
           Also("follow-up, sampled, last two updates: reputation, with a floor of 50 minus without",
                 q.less("floor", "base", lambda run: q.during(run, "reputation", 19, 20))),
           Also("follow-up, reward: accepts as well minus only proposes", q.by_unit("both", "proposes", "reward")),
           Also("follow-up, reward: proposes as well minus only accepts", q.by_unit("both", "accepts", "reward")),
           Also("follow-up, offers accepted in an episode of who only accepts", q.alone("accepts", "used_accept_proposal")),
           Also("follow-up, deals proposed in an episode of who only proposes", q.alone("proposes", "used_propose_trade")),
           Also("reward: after RL minus after SFT", q.own("base", lambda run: q.gained(run, "reward")))),
          shows=("reputation", "reputation at the end, development scenarios"), curve="reward",
          ours="In our economy only who proposes gains reputation by a trade (env_swarm.py), and the documents do not say who did in "
               "theirs. So the part on accepting and proposing, played by scripts, tells of our rules; "
               "the four other parts are of trained runs."),
    Claim("swarm_versions",
          "v0.1 has a low ceiling and an exploit; v0.2 raises the one and closes the other.",
          f'{SWARM}, "v0.1 vs v0.2" (1.131 → 1.377; ceiling 1.14 → 1.40) and "Interaction Quality": v0.1\'s "keyword-gameable heuristic"',
          "Scripted players, 200 scenarios of each difficulty. The exploit: 80 times the letter x instead of work; open if that earns the "
          "same reward within 0.02, closed if it earns less. The ceiling: the reward of the expert (1.6 is the most in both). Ours cannot "
          "saturate at a payoff of 1 as theirs did (env_swarm.py), so only the direction is tested. Other scenarios in each version.",
          {f"v{v.replace('.', '')}_{style}": Script(partial(q.swarm_player, v, style), 600) for v in ("0.1", "0.2")
           for style in ("grinder", "nonsense", "expert")},
          (Check("v0.1: reward of nonsense minus work", q.by_unit("v01_nonsense", "v01_grinder", "reward"), "equal", margin=0.02, most=1.6),
           Check("v0.2: reward of nonsense minus work", q.by_unit("v02_nonsense", "v02_grinder", "reward"), "below", margin=0.02),
           Check("the expert's reward: v0.2 minus v0.1", q.apart("v02_expert", "v01_expert", "reward"), "above", figure=0.246),
           Also("quality of nonsense minus work, v0.2", q.by_unit("v02_nonsense", "v02_grinder", "quality"))),
          shows=("reward", "reward, development scenarios"), curve="",
          ours="We wrote both versions from the description, the loophole of v0.1 among them. That ours has it and that v0.2 closes it "
               "shows that they are built as described, and nothing of the published environment."),
    Claim("stop_rule",
          "A text-only turn that ends the episode hides behaviour: the same player shows, and earns, much more where it only passes.",
          "published: an early-termination default hid 62.5% of behaviour; with the pass rule the same model went from 0.83 to 1.18",
          "The scripted expert, which writes text alone with a given chance a turn. Hidden: of the calls of an episode that goes on, the "
          "share that the rule cuts off. How often the published model wrote text alone is not told; at 10% a turn about as much is hidden "
          "as it says, so there it is asked whether the reward differs, by 0.05 at least. How much is hidden at other rates stands beside "
          "it: it depends on the rate alone.",
          {f"{rule}_{rate}": Script(partial(q.talker, rate / 100, rule == "ends"), 200) for rule in ("ends", "passes") for rate in TALK},
          (Check("reward, text in 10% of the turns: passes minus ends", q.by_unit("passes_10", "ends_10", "reward"), "above", margin=0.05,
                 figure=0.35),
           *(Also(f"hidden calls, {rate}%", q.hidden(rate), figure=0.625 if rate == 10 else None, **SHARE) for rate in TALK),
           *(Also(f"reward, {rate}%: passes minus ends", q.by_unit(f"passes_{rate}", f"ends_{rate}", "reward"))
             for rate in TALK if rate != 10)),
          shows=("reward", "reward, development scenarios"), curve="",
          ours="Player, economy and both stop rules are ours: an episode that ends early earns less here by construction. What the rule "
               "hides in an episode depends on how often a player only talks, and how often the published model did is not told."),
    Claim("governance",
          "Decisions by expectation thrash less than hard thresholds; adaptive windows beat fixed ones; what works at 37.5% adversarial "
          "fails at 50%, and collusion detection decides the first.",
          f'{LESSONS}, "The reward signal …", "Non-monotonic improvement …", "Async coordination …"; '
          'published: pair-wise detection let 37.5% survive',
          "Scripted bots (lab/swarm/governance.py), 24 seeds. Thrash: gates alone at a bar of 0.5, 25 epochs. Windows: how far each mean "
          "is from the present on four shapes of made-up rewards, against the fixed window that turned out best. Works: welfare above 0 in "
          "the last ten epochs. Decides: without the detection welfare at 37.5% is below 0. The whole sweep: results/governance.",
          {"hard_gate": Script(lambda i: q.economy(3, i, {"most": 25}, gate="hard"), 24),
           "soft_gate": Script(lambda i: q.economy(3, i, {"most": 25}, gate="soft"), 24),
           "hard_gate_no_ring": Script(lambda i: q.economy(3, i, {"most": 25, "collude": 0.0}, gate="hard"), 24),
           "soft_gate_no_ring": Script(lambda i: q.economy(3, i, {"most": 25, "collude": 0.0}, gate="soft"), 24),
           **{f"{name}_{share}": Script(partial(lambda i, n, pairs: q.economy(n, i, local=True, pairs=pairs), n=n, pairs=pairs), 24)
              for share, n in (("37", 3), ("50", 4)) for name, pairs in (("local", False), ("pairs", True))},
           **{f"{name}_37_ring_{ring}": Script(partial(
                  lambda i, ring, pairs: q.economy(3, i, {"collude": ring / 100}, local=True, pairs=pairs), ring=ring, pairs=pairs), 24)
              for ring in (25, 75) for name, pairs in (("local", False), ("pairs", True))},
           "windows": Script(q.window_errors, 300)},
          (Check("thrash: soft minus hard gate", q.by_unit("soft_gate", "hard_gate", "thrash"), "below"),
           Check("error of the adaptive window minus the best fixed one", q.adaptive_less_best, "below"),
           Check("welfare at 37.5%, with detection", q.alone("pairs_37", "welfare"), "above"),
           Check("welfare at 50%, with detection", q.alone("pairs_50", "welfare"), "below"),
           Check("welfare at 37.5%, without detection", q.alone("local_37", "welfare"), "below"),
           Also("thrash without a ring: soft minus hard gate", q.by_unit("soft_gate_no_ring", "hard_gate_no_ring", "thrash")),
           Also("toxicity: soft minus hard gate", q.by_unit("soft_gate", "hard_gate", "toxicity")),
           *(Also(f"follow-up: the ring seeks itself in {ring}% of its deals and not in 50%: welfare at 37.5%, without detection",
                  q.alone(f"local_37_ring_{ring}", "welfare"))
             for ring in (25, 75)),
           Also("follow-up: at 75%, what detection adds", q.by_unit("pairs_37_ring_75", "local_37_ring_75", "welfare")),
           Also("welfare: detection at 37.5%", q.by_unit("pairs_37", "local_37", "welfare")),
           Also("welfare: detection at 50%", q.by_unit("pairs_50", "local_50", "welfare"))),
          shows=("welfare", "welfare a possible deal, last ten epochs"), curve="",
          ours="Bots, economy, proxy and gates are ours. At equal toxicity the soft gate thrashes less by 0.012 only, and its memory does "
               "that, not its softness ([results/governance](../../governance/README.md))."),
    Claim("more_sft",
          "RL buys more than the same compute spent on more SFT on demonstrations that do not derive, be they scarce or plenty.",
          f'{PICORL}, "What Would Improve Results": "CoT SFT" beside RL; and "SFT works, RL flat" of a small model',
          "Scarce: 100 demonstrations. Plenty: 3,600, so that no batch of the longer SFT sees one twice. 450 SFT steps are meant to be at "
          "least as much work as 50 steps and 40 updates (tokens sampled, and three times the tokens trained: a backward pass is two "
          "forward ones); if SFT got less the comparison is not fair. The demonstrations state counts and do not derive them; if they "
          "derived, SFT alone might do: the follow-up. SFT has its default rate; tuned, and with as much work, it is behind by less "
          "(results/letters).",
          {"rl": letters(), "sft": letters("--sft-steps 450", updates=0),
           "rl_plenty": letters("--sft-examples 3600"), "sft_plenty": letters("--sft-examples 3600 --sft-steps 450", updates=0),
           "sft_derives": letters("--sft-style derives --sft-steps 450", updates=0)},
          (Check("RL minus more SFT, 100 demonstrations", q.less("rl", "sft"), "above", margin=0.05, **POINTS),
           Check("RL minus more SFT, 3,600 demonstrations", q.less("rl_plenty", "sft_plenty"), "above", margin=0.05, **POINTS),
           Also("work: more SFT minus SFT and RL (above 0: SFT had more)", q.less("sft", "rl", q.work), scale=1e-3, unit="thousand tokens"),
           Also("seconds, on a machine now idle, now busy: more SFT minus SFT and RL", q.less("sft", "rl", q.all_seconds), unit="s"),
           Also("follow-up: RL minus SFT on 100 demonstrations that derive", q.less("rl", "sft_derives"), **POINTS)),
          curve="exact"),
    Claim("sharpening",
          "RL sharpens rather than extends: pass@1 rises, pass@k does not.",
          f'{PICORL}, "Why It Plateaued": "RL can only reinforce existing reasoning patterns"',
          f"{SAMPLED} samples at temperature 1 of {TASKS} development tasks, after SFT and after 40 updates of GRPO. Does not rise: "
          f"pass@{SAMPLED} is equal within 5 points. Near 100% before RL it could not rise: "
          "read it beside its own height. Follow-up: SFT that states until deriving is gone, where there is room.",
          {"sft": letters(updates=0), "rl": letters(),
           "sft_states_only": letters("--sft-steps 200 --sft-lr 1e-3", updates=0),
           "rl_states_only": letters("--sft-steps 200 --sft-lr 1e-3")},
          (Check("pass@1: after RL minus before", q.less("rl", "sft", lambda run: q.pass_at(run, 1)), "above", margin=0.05, **POINTS),
           Check(f"pass@{SAMPLED}: after RL minus before", q.less("rl", "sft", lambda run: q.pass_at(run, SAMPLED)), "equal", margin=0.05,
                 **POINTS),
           Also("pass@4: after RL minus before", q.less("rl", "sft", lambda run: q.pass_at(run, 4)), **POINTS),
           Also(f"pass@{SAMPLED} before RL", q.own("sft", lambda run: q.pass_at(run, SAMPLED)), **SHARE),
           Also("follow-up, nothing left to derive with: pass@1",
                q.less("rl_states_only", "sft_states_only", lambda run: q.pass_at(run, 1)), **POINTS),
           Also(f"follow-up: pass@{SAMPLED}", q.less("rl_states_only", "sft_states_only", lambda run: q.pass_at(run, SAMPLED)), **POINTS),
           Also(f"follow-up: pass@{SAMPLED} before RL", q.own("sft_states_only", lambda run: q.pass_at(run, SAMPLED)), **SHARE)),
          then=q.sample_more),
)  # fmt: skip
