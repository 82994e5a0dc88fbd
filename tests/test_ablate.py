"""Protects lab/claims/ablate.py, lab/claims/ledger.py and lab/claims/claims.py: every claim can run, verdicts follow intervals and are
rarely wrong, what is kept is not made again."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import tyro
from scipy import stats

import metrics
import settings
from lab.claims import ablate, ledger, quantities
from lab.claims.ablate import minutes
from lab.claims.claims import CLAIMS, Check, Claim
from lab.claims.ledger import interval, judge, owner, together, verdict
from lab.claims.quantities import SAMPLED, TASKS, Run, Script, at_best_rate, halfway, less, own, pass_at, talker
from metrics import Interval

# ------------------------------------------------------------------------------------------------ the claims


def test_there_are_sixteen_claims_each_with_a_source_and_a_check_that_decides():
    assert len(CLAIMS) == len({claim.name for claim in CLAIMS}) == 16
    for claim in CLAIMS:
        assert claim.sentence and claim.source and claim.reading and claim.arms
        assert any(check.decides for check in claim.checks)
        for check in claim.checks:
            assert check.expect in ("above", "below", "equal", "") and check.margin >= 0
            assert check.expect != "equal" or check.margin > 0
            assert check.expect or not check.decides, f"{claim.name}: {check.text} decides and predicts nothing"
        assert len({check.text for check in claim.checks}) == len(claim.checks)
        assert all(set(arm) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-") for arm in claim.arms)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_every_arm_is_a_command_line_that_train_accepts(claim):
    for flags in (what for what in claim.arms.values() if isinstance(what, str)):
        cfg = tyro.cli(settings.Config, args=[*flags.split(), "--seed", "1"])
        settings.check(cfg)
        assert cfg.seed == 1 and not cfg.resume and not cfg.name
        words = [word for word in flags.split() if word.startswith("--")]
        assert len(words) == len(set(words)), f"{flags}: a flag stands there twice"


def test_each_claim_takes_at_most_about_an_hour_and_all_of_them_a_night():
    cost = lambda some: sum(minutes(c.arms[a]) for c, a in some) * 3 / 2  # three seeds, two cores
    runs = {claim.name: {owner(claim, arm) for arm, what in claim.arms.items() if isinstance(what, str)} for claim in CLAIMS}
    assert all(cost(some) < 75 for some in runs.values())
    assert cost(set.union(*runs.values())) < 8 * 60


def test_the_same_flags_are_the_same_run_unless_something_is_done_after_it():
    by = {claim.name: claim for claim in CLAIMS}
    assert ledger.home(by["larger_k"], "k8", 2) == ledger.home(by["invention"], "states", 2) == ledger.OUT / "invention" / "states-2"
    assert owner(by["sharpening"], "rl") == (by["sharpening"], "rl") and by["sharpening"].arms["rl"] == by["invention"].arms["states"]
    assert all(owner(by["single_steps"], arm)[0] is by["thinking"] for arm in by["single_steps"].arms)


# ------------------------------------------------------------------------------------------------ intervals


def test_scalars_of_three_seeds_give_the_textbook_interval():
    """mean 2, sd 1: 2 ± 4.303 / sqrt(3)."""
    i = interval([1.0, 2.0, 3.0])
    assert (i.mean, i.n) == (2.0, 3) and i.high - 2 == pytest.approx(4.30265 / math.sqrt(3), rel=1e-5) == pytest.approx(2 - i.low, rel=1e-5)


def test_seeds_that_agree_in_every_task_are_as_sure_as_there_are_tasks():
    one, three = metrics.mean([1.0] * 128), interval([np.ones(128)] * 3)
    assert three.n == 3 and one.low - 0.04 < three.low <= one.low and three.high == 1.0
    none = interval([np.zeros(128)] * 3)
    assert none.mean == 0 and none.high == pytest.approx(metrics.mean([0.0] * 128).high, abs=1e-4)
    assert interval([0.0, 0.0, 0.0]).high > 0.5  # of three numbers, three are all there is to know


def test_tasks_and_seeds_are_both_in_the_interval():
    """Seeds alike: what is left is the noise of the tasks. Tasks alike: that of the seeds, with two degrees of freedom."""
    tasks = np.array([0.0, 1.0, 0.0, 1.0] * 16)
    i = interval([tasks, tasks, tasks])
    reach = stats.t.ppf(0.975, 63) * tasks.std(ddof=1) / 8
    assert i.high - i.mean == pytest.approx(reach) and i.n == 3
    i = interval([np.full(64, x) for x in (1.0, 2.0, 3.0)])
    assert i.high == pytest.approx(2 + 4.30265 / math.sqrt(3), rel=1e-5)


def test_one_seed_and_none_and_nothing_that_varies():
    assert interval([np.ones(5)]) == Interval(1.0, -math.inf, math.inf, 1)
    assert interval([]).n == 0 and math.isnan(interval([]).mean)
    alike = interval([0.0, 0.0, 0.0])
    assert alike.low < alike.mean == 0.0 < alike.high and alike.n == 3  # three seeds that agree are no certainty
    assert interval([0.5, float("nan"), 0.5]).low == -math.inf


def test_two_independent_samples_are_welchs():
    rng = np.random.default_rng(0)
    a, b = rng.normal(1, 2, 30), rng.normal(0, 1, 20)
    theirs = stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    i = interval((list(a), list(b)))
    assert (i.low, i.high) == pytest.approx((theirs.low, theirs.high)) and i.n == 20


def test_the_interval_holds_the_truth_in_about_95_percent():
    rng, hit = np.random.default_rng(1), 0
    for _ in range(1000):  # three seeds, 100 tasks: seeds differ, tasks differ, and there is noise within
        rows = [rng.normal(0, 0.03) + task + rng.normal(0, 0.3, 100) for task in [rng.normal(0, 0.2, 100)] for _ in range(3)]
        i = interval(rows)
        hit += i.low <= 0 <= i.high
    assert 0.93 <= hit / 1000 <= 0.99  # a little too wide: what varies within a run counts twice


# ------------------------------------------------------------------------------------------------ verdicts


@pytest.mark.parametrize(
    "expect, low, high, than, margin, said",
    [
        ("above", 0.01, 0.2, 0.0, 0.0, "holds"), ("above", -0.01, 0.2, 0.0, 0.0, "undecided"), ("above", -0.2, -0.01, 0.0, 0.0, "fails"),
        ("above", -0.01, 0.04, 0.0, 0.05, "fails"), ("above", -0.01, 0.06, 0.0, 0.05, "undecided"),
        ("above", 0.01, 0.04, 0.0, 0.05, "fails"), ("above", 0.4, 0.6, 0.5, 0.0, "undecided"),
        ("above", 0.51, 0.6, 0.5, 0.0, "holds"), ("above", 0.3, 0.49, 0.5, 0.0, "fails"),
        ("below", -0.2, -0.01, 0.0, 0.0, "holds"), ("below", 0.01, 0.2, 0.0, 0.0, "fails"), ("below", -0.04, 0.01, 0.0, 0.05, "fails"),
        ("below", -0.06, 0.01, 0.0, 0.05, "undecided"), ("below", 0.1, 0.4, 0.5, 0.0, "holds"),
        ("equal", -0.04, 0.04, 0.0, 0.05, "holds"), ("equal", 0.01, 0.04, 0.0, 0.05, "holds"),
        ("equal", -0.04, 0.06, 0.0, 0.05, "undecided"), ("equal", 0.06, 0.2, 0.0, 0.05, "fails"),
        ("equal", -0.2, -0.06, 0.0, 0.05, "fails"), ("equal", -0.2, 0.2, 0.0, 0.05, "undecided"),
        ("equal", 0.6, 0.7, 0.65, 0.1, "holds"), ("", 0.1, 0.2, 0.0, 0.0, ""),
        ("above", -math.inf, math.inf, 0.0, 0.05, "undecided"), ("equal", -math.inf, math.inf, 0.0, 0.05, "undecided"),
    ],
)  # fmt: skip
def test_a_verdict_follows_the_interval(expect, low, high, than, margin, said):
    assert verdict(expect, Interval((low + high) / 2, low, high, 3), than, margin) == said


def test_nothing_measured_is_no_verdict():
    assert verdict("above", interval([])) == "not run"


def test_a_claim_holds_only_if_all_of_it_holds():
    assert together(["holds", "holds"]) == "holds" and together(["holds", "undecided"]) == "undecided"
    assert together(["holds", "fails", "undecided"]) == "fails" and together(["holds", "not run"]) == "undecided"
    assert together([]) == together(["not run", "not run"]) == "not run"


def test_the_rule_for_seeds_goes_on_while_a_part_is_undecided():
    check, beside = Check("a", less("a", "b"), "above"), Check("b", less("a", "b"), "above", decides=False)
    found = lambda rows, v, of=check: [(of, rows, interval(rows), v)]
    assert [ledger.goes_on(found([0.1] * n, "undecided")) for n in (1, 3, 4, 6, 12)] == [3, 6, 6, 12, 0]
    assert ledger.goes_on(found([0.1] * 3, "holds")) == ledger.goes_on(found([0.1] * 3, "undecided", beside)) == 0
    assert ledger.goes_on(found([0.1] * 200, "undecided")) == 0  # units of a script are as many as were planned
    assert ledger.goes_on(found([0.1] * 3, "holds") + found([0.1] * 3, "undecided")) == 6


def test_a_verdict_on_seeds_asks_more_than_95_percent_and_says_so():
    rows = [0.08, 0.1, 0.15]  # 95%: [0.020, 0.200]; 98.3%: below 0
    check = Check("a", less("a", "b"), "above")
    assert interval(rows).low > 0 > ledger.judged_by(rows).low
    assert ledger.told(check, rows, "undecided").startswith("**undecided** (at 98.3%: [-")
    units = rows * 10
    assert ledger.judged_by(units) == interval(units) and ledger.told(check, units, "holds") == "**holds**"
    assert ledger.in_parts(["holds", "fails", "holds"]) == "2 hold, 1 fails" and ledger.in_parts(["holds", "holds"]) == "holds"


def test_three_looks_are_wrong_less_often_than_one_in_twenty():
    from lab.claims import rule

    for noise in rule.NOISE:
        assert rule.share(0.0, noise, ledger.LEVEL, 400)[0].mean <= 0.05
        assert rule.share(4.0, noise, ledger.LEVEL, 400, "equal", 4.0)[0].mean <= 0.05
    by_rule, tempted = (rule.share(0.0, "normal", level, 400)[0].mean for level in (ledger.LEVEL, 0.95))
    assert by_rule < tempted


def rate(said: str, expect: str, truth: float, margin: float = 0.0, n: int = 1000) -> float:
    rng = np.random.default_rng(2)
    rows = lambda: [truth + rng.normal(0, 0.03) + rng.normal(0, 0.3, 100) for _ in range(3)]
    return sum(verdict(expect, interval(rows()), 0.0, margin) == said for _ in range(n)) / n


def test_what_is_not_so_is_seldom_called_so():
    assert rate("holds", "above", 0.0) <= 0.05 and rate("holds", "below", 0.0) <= 0.05
    assert rate("holds", "equal", 0.1, margin=0.1) <= 0.05  # the worst case: the truth is the margin itself
    assert rate("fails", "above", 0.1, margin=0.1) <= 0.05 and rate("fails", "equal", 0.1, margin=0.1) <= 0.05


def test_what_is_so_is_found():
    assert rate("holds", "above", 0.4) > 0.95 and rate("holds", "equal", 0.0, margin=0.4) > 0.95
    assert rate("fails", "above", -0.4) > 0.95 and rate("fails", "equal", 0.8, margin=0.4) > 0.95


# ------------------------------------------------------------------------------------------------ fake runs


def fake_run(flags: str, seed: int, exact: float) -> Run:
    """What train.py would have left, with 16 development tasks."""
    with ledger.PARSING:
        cfg = tyro.cli(settings.Config, args=[*flags.split(), "--seed", str(seed)])
    settings.check(cfg)
    rng = np.random.default_rng(seed)
    done = cfg.updates
    parts = ("payoff", "reputation", "quality", "diversity", "error_rate")
    lines = [
        {"update": u, "reward": float(rng.uniform(0.4, 0.6)), "exact": float(rng.uniform(0.4, 0.6)), "reply_tokens": 100.0,
         "groups_with_signal": 0.5, "grad_norm": 0.1, "advantage_abs": 0.2, "habit_derives": 0.1, "n": 64} | dict.fromkeys(parts, 0.5)
        for u in range(1, done + 1)
    ]  # fmt: skip
    evals, stages = (
        [],
        [("before", -1), ("after_sft", 0), *(("train", u) for u in range(cfg.eval_every, done, cfg.eval_every)), ("final", done)],
    )
    for stage, update in stages:
        p = exact if stage in ("train", "final") else 0.1
        for trained in (False, True):
            right = [float(x) for x in rng.random(16) < p]
            evals.append({"update": update, "stage": stage, "tasks": "tier 6" if trained else "tier 3", "trained": trained, "reward": right,
                          "exact": right,
                          "reply_tokens": [100] * 16, "noise": [0.5] * 16, **{part: list(rng.random(16)) for part in parts}})  # fmt: skip
    seconds = {"total": 90.0, "sft": 10.0, "rollout": 30.0, "environment": 1.0, "sync": 1.0, "train": 20.0, "eval": 20.0}
    tokens = {"sampled": 300_000, "trained": 200_000, "sft": 40_000}
    summary = {
        "config": vars(cfg),
        "seconds": seconds,
        "tokens": tokens,
        "machine": {"device": "a CPU, 1 threads", "torch": "2", "transformers": "5"},
    }
    return Run(summary, lines, evals, [int(x) for x in rng.integers(0, SAMPLED + 1, TASKS)])


def write_run(folder, run: Run) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(run.summary["config"]))
    for name, some in (("metrics", run.lines), ("evals", run.evals)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in some))
    (folder / "summary.json").write_text(json.dumps(run.summary))


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty results/claims and runs/claims."""
    monkeypatch.setattr(ablate, "ROOT", tmp_path)
    monkeypatch.setattr(ledger, "OUT", tmp_path / "claims")
    monkeypatch.setattr(ablate, "RUNS", ablate.RUNS)
    ledger.read.cache_clear()
    return tmp_path


class Launcher:
    """Stands for lab.common.launch: writes the run folder at once, and notes what it was asked."""

    def __init__(self, root, fails=()):
        self.root, self.fails, self.asked = root, fails, []

    def __call__(self, flags, runs, name, target, kept, threads):
        self.asked.append((name, flags))
        if name in self.fails:
            raise RuntimeError(f"{name} stopped with code 1; see the log")
        folder = self.root / runs / name
        if "--resume" in flags:
            assert flags == ["--resume", f"{runs}/{name}"]
            flags = (folder / "flags").read_text().split()
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
        seed = int(flags[flags.index("--seed") + 1])
        words = [word for i, word in enumerate(flags) if word != "--seed" and (i == 0 or flags[i - 1] != "--seed")]
        write_run(folder, fake_run(" ".join(words), seed, 0.2 if "--no-think" in flags else 0.9))


SMALL = "--env letters --updates 10 --eval-every 5"
TWO = Claim(
    "two", "Thinking helps.", "nobody", "as it says", {"think": SMALL, "no": f"{SMALL} --no-think", "ahead": f"{SMALL} --async-rollouts 1"},
    (Check("thinking minus none", less("think", "no"), "above", figure=0.5, scale=100, unit="points"),
     Check("seconds", own("no", lambda run: 1.0), decides=False)),
)  # fmt: skip


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_every_check_can_be_computed(claim):
    arms: dict = {}
    for name, what in claim.arms.items():
        if isinstance(what, Script):
            arms[name] = {
                key: np.linspace(0, 1, 30)
                for key in ("reward", "quality", "welfare", "toxicity", "thrash", "calls", "used_accept_proposal", "used_propose_trade")
            }
            arms[name] |= {key: np.linspace(0, 1, 30) for key in ("adaptive", "last 5", "last 10")} if name == "windows" else {}
        else:
            arms[name] = {seed: fake_run(what, seed, 0.5) for seed in range(3)}
    found, said = judge(claim, arms)
    assert all(i.n >= 3 and math.isfinite(i.mean) and i.low <= i.mean <= i.high for _, _, i, _ in found)
    assert said in ("holds", "fails", "undecided")
    assert judge(claim, {})[1] == "not run"


# ------------------------------------------------------------------------------------------------ what is kept, and what is made again


def test_runs_are_made_once_and_kept_slim(place):
    launch = Launcher(place)
    assert ablate.run_all([TWO], 2, 2, 1, launch) == []
    assert sorted(name for name, _ in launch.asked) == sorted(f"two-{arm}-{seed}" for arm in TWO.arms for seed in (0, 1))
    kept = place / "claims/two/think-1"
    assert {file.name for file in kept.iterdir()} == {"summary.json", "metrics.jsonl", "evals.jsonl", "config.json"}
    evals = [json.loads(line) for line in (kept / "evals.jsonl").read_text().splitlines()]
    assert [e["stage"] for e in evals] == ["before", "after_sft", "train", "final"] and all(
        e["trained"] and "noise" not in e for e in evals
    )
    assert all(type(x) is int for x in evals[-1]["exact"])
    ablate.run_all([TWO], 2, 2, 1, launch)
    assert len(launch.asked) == 6  # nothing new
    ablate.run_all([TWO], 3, 1, 1, launch)
    assert {name for name, _ in launch.asked[6:]} == {"two-think-2", "two-no-2", "two-ahead-2"}


def test_a_cut_run_goes_on_and_one_ahead_begins_anew(place):
    launch = Launcher(place)
    for arm in ("think", "ahead"):
        folder = place / ablate.RUNS / f"two-{arm}-0"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(fake_run(TWO.arms[arm], 0, 0.9).summary["config"]))
        (folder / "flags").write_text(f"{TWO.arms[arm]} --seed 0")
    ablate.run_all([TWO], 1, 1, 1, launch)
    asked = dict(launch.asked)
    assert asked["two-think-0"] == ["--resume", "runs/claims/two-think-0"]
    assert "--resume" not in asked["two-ahead-0"] and asked["two-ahead-0"][-2:] == ["--seed", "0"]


def test_flags_that_changed_since_are_noticed(place):
    run, launch = fake_run(f"{SMALL} --no-think --lr 3e-4", 0, 0.9), Launcher(place)
    config = run.summary["config"]
    assert ledger.agrees(config, f"{SMALL} --no-think --lr 3e-4") and ledger.agrees(config, f"{SMALL} --no-think")
    chosen = config | {"model": "pico_base", "engine": "torch"}  # a run writes down what "auto" became
    assert ledger.agrees(chosen, f"{SMALL} --no-think") and not ledger.agrees(chosen, f"{SMALL} --no-think --model pico_swarm")
    assert (
        not ledger.agrees(config, SMALL)
        and not ledger.agrees(config, f"{SMALL} --lr 1e-3")
        and not ledger.agrees(config, "--updates 11")
        and not ledger.agrees(config, "--curriculum")
    )
    write_run(place / ablate.RUNS / "two-think-0", fake_run("--env letters --updates 7", 0, 0.9))
    ablate.run(TWO, "think", 0, 1, launch)
    assert [name for name, _ in launch.asked] == ["two-think-0"]  # begun anew
    write_run(place / "claims/two/no-0", fake_run(SMALL, 0, 0.9))
    with pytest.raises(SystemExit, match="other flags than two/no"):
        ledger.collect(TWO)


def test_a_run_that_finished_but_was_not_kept_is_not_run_again(place):
    launch = Launcher(place)
    write_run(place / ablate.RUNS / "two-think-0", fake_run(SMALL, 0, 0.9))
    ablate.run(TWO, "think", 0, 1, launch)
    assert launch.asked == [] and (place / "claims/two/think-0/summary.json").exists()


def test_a_run_that_fails_does_not_stop_the_others(place):
    launch = Launcher(place, fails=("two-think-0",))
    failed = ablate.run_all([TWO], 1, 1, 1, launch)
    assert len(failed) == 1 and "two-think-0 stopped" in failed[0]
    assert (place / "claims/two/no-0/summary.json").exists() and not (place / "claims/two/think-0").exists()


def test_what_is_done_after_a_run_comes_before_it_counts_as_kept(place):
    def then(folder, target):
        assert folder.name == "two-think-0" and not (target / "summary.json").exists()
        (target / "samples.json").write_text('{"right": [1, 2]}')

    ablate.run(replace(TWO, then=then), "think", 0, 1, Launcher(place))
    assert ledger.read(place / "claims/two/think-0").samples == [1, 2]


def test_claims_that_share_arms_ask_for_each_run_once():
    work = ablate.to_do([claim for claim in CLAIMS if claim.name in ("thinking", "single_steps", "too_short")], 50)
    assert len(work) == len({ledger.home(*job) for job in work})
    assert [seed for *_, seed in work] == sorted(seed for *_, seed in work)  # whole seeds first


# ------------------------------------------------------------------------------------------------ pages


def test_a_page_tells_verdict_numbers_and_arms(place):
    ablate.run_all([TWO], 3, 1, 1, Launcher(place))
    found, said = ledger.page(TWO)
    assert said == "holds" and found[0][2].low > 0
    text = (place / "claims/two/README.md").read_text()
    assert "**Holds.**" in text and "thinking minus none" in text and "3 seeds" in text and "+50.0" in text and f"`{SMALL}`" in text
    assert (place / "claims/two/claim.png").stat().st_size > 5000


def test_one_seed_is_undecided(place):
    ablate.run_all([TWO], 1, 1, 1, Launcher(place))
    assert ledger.page(TWO)[1] == "undecided"
    assert "∞" in (place / "claims/two/README.md").read_text()


def test_the_ledger_is_made_again_from_what_is_kept_without_training(place, monkeypatch):
    players = {"even": Script(lambda i: {"reward": 2.0 * i}, 12), "odd": Script(lambda i: {"reward": 2.0 * i + 1}, 12)}
    checks = (Check("odd minus even", quantities.by_unit("odd", "even", "reward"), "above"),)
    scripted = Claim("scripted", "Even is less.", "nobody", "so", players, checks, shows=("reward", "reward"), curve="")
    for room in (ablate, ledger):
        monkeypatch.setattr(room, "CLAIMS", (TWO, scripted))
    ablate.run_all([TWO, scripted], 2, 1, 1, Launcher(place))
    monkeypatch.setattr(ablate, "run_all", lambda *_: pytest.fail("nothing may be run"))
    ablate.main(table=True)
    text = (place / "claims/README.md").read_text()
    assert "[two](two/README.md)" in text and "| 2 | [scripted](scripted/README.md) | Even is less. | **holds** |" in text
    before = {p: p.read_text() for p in (place / "claims").rglob("README.md")}
    ablate.main(table=True)
    assert before == {p: p.read_text() for p in (place / "claims").rglob("README.md")} and len(before) == 3


def test_claims_that_have_not_run_say_so(place):
    ledger.write()
    text = (place / "claims/README.md").read_text()
    assert text.count("**not run**") == 16 and not (place / "claims/thinking").exists()


@pytest.mark.parametrize(
    "arguments, said", [({"claim": "nonsense"}, "no such claim"), ({}, "name a claim"), ({"all": True, "threads": 0}, "at least 1")]
)
def test_what_cannot_be_done_is_refused_in_a_sentence(arguments, said):
    with pytest.raises(SystemExit, match=said):
        ablate.main(**arguments)


def test_the_list_names_every_claim(capsys):
    ablate.main(list=True)
    told = capsys.readouterr().out
    assert all(claim.name in told for claim in CLAIMS) and "hours" in told


# ------------------------------------------------------------------------------------------------ quantities


def test_pass_at_k_by_hand():
    run = Run({}, [], [], [0, 16, 32])
    assert pass_at(run, 1).tolist() == [0.0, 0.5, 1.0]
    assert pass_at(run, 2)[1] == pytest.approx(1 - 0.5 * 15 / 31) and pass_at(run, 32).tolist() == [0.0, 1.0, 1.0]


def test_the_best_rate_is_chosen_by_the_other_seeds():
    line = lambda x: Run({}, [], [{"stage": "final", "update": 1, "exact": [x]}], [])
    arms = {"r_low": {0: line(0.1), 1: line(0.6), 2: line(0.6)}, "r_high": {0: line(0.9), 1: line(0.5), 2: line(0.5)}}
    assert at_best_rate(arms, "r", 0) is arms["r_low"][0]  # although its own seed says otherwise
    assert at_best_rate(arms, "r", 1) is arms["r_high"][1]


def test_halfway_asks_the_detector_and_then_looks():
    rng = np.random.default_rng(0)
    run = lambda values: Run({}, [{"update": u, "reward": float(v)} for u, v in enumerate(values, 1)], [], [])
    flat, steps = np.full(100, 0.5) + rng.normal(0, 0.001, 100), np.r_[np.full(50, 0.5), np.full(50, 0.8)] + rng.normal(0, 0.001, 100)
    assert halfway(run(flat)) == (True, False) and halfway(run(steps)) == (True, True)
    assert halfway(run(np.linspace(0, 1, 100))) == (False, True)


def test_a_text_turn_ends_the_episode_or_passes():
    assert talker(1.0, True, 0)["calls"] == talker(1.0, False, 0)["calls"] == 0.0
    assert talker(0.0, True, 0) == talker(0.0, False, 0) and talker(0.0, True, 0)["calls"] == 25.0
    ends, passes = talker(0.2, True, 3), talker(0.2, False, 3)
    assert ends["calls"] < passes["calls"] < 25 and ends["reward"] < passes["reward"]
