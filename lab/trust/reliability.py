"""results/reliability.md: what was done to a run, to its disk, its replies and its files, and what came of it.

    python -m lab.trust.faults --n 50              # 20 minutes on one core: kills                        -> results/faults/kill.json
    python -m lab.trust.storage                    # 20 minutes, root: disks, locks, clocks, damage       -> results/faults/storage.json
    python -m lab.trust.hostile --n 1000000        # 7 minutes: replies                                   -> results/hostile/fuzz.json
    python -m lab.trust.attack                     # 6 minutes: reward hacking                            -> results/hostile/README.md
    python -m lab.trust.longrun --hours 2          # memory, throughput, logs                             -> results/longrun/
    python -m lab.trust.longrun --frozen --hours 0.4 --runs runs/frozen     # its control
    python -m lab.trust.reliability                # this page, from those files; trains nothing

The page holds no number of its own: all come from the files above, and where a test is the proof, it is named (tests/test_reliability.py
checks that it exists, and that the page is what this writes).
"""

from lab.common import RESULTS, ROOT, interval_of, read_json, table, write_page

OUT = RESULTS / "reliability.md"

# What goes wrong in a training, what happens then, and the test that shows it.
TRAINING = [
    ("a learning rate of 30: finite weights that repeat one token", "named after five updates (STUCK … the learning rate is too high)",
     "test_bad_training", "test_a_learning_rate_that_explodes_is_named_and_no_broken_weights_are_kept"),
    ("a learning rate of 1e30: weights that give NaN", "stopped; the checkpoint is the one before that step", "test_bad_training",
     "test_a_learning_rate_that_explodes_is_named_and_no_broken_weights_are_kept"),
    ("equal rewards for 50 updates", "named once after ten (NO SIGNAL); no weight moves by a bit", "test_bad_training",
     "test_equal_rewards_teach_nothing_and_that_is_told_once"),
    ("NaN from a kernel while sampling", "stopped at that token; the checkpoint before stays", "test_bad_training",
     "test_nan_from_a_kernel_of_the_sampler_stops_the_run_with_the_last_good_checkpoint"),
    ("NaN from a kernel while training", "stopped before the optimizer steps", "test_train",
     "test_a_nan_stops_the_run_with_the_last_good_checkpoint"),
    ("weights that break in the step before a checkpoint", "stopped; they are not saved", "test_bad_training",
     "test_weights_that_break_in_the_last_step_before_a_checkpoint_are_not_saved"),
    ("one of 64 episodes hangs", "it is in error after its time, the other 63 are trained on, and it is told", "test_bad_training",
     "test_one_episode_of_64_that_hangs_is_left_out_and_the_run_goes_on"),
    ("an environment that raises or hangs in reset, step or score", "costs its own episode only", "test_rollout",
     "test_an_environment_that_raises_or_hangs_costs_its_own_episode_only"),
    ("every episode raises", "stopped; the first error is named with its file and line", "test_bad_training",
     "test_where_every_episode_raises_the_run_stops_and_names_the_first"),
    ("a tokenizer without an end, without digits, with tokens the model lacks, or a template that fails",
     "refused in one sentence before anything is trained", "test_policy", "test_a_tokenizer_that_lacks_something_is_told_in_one_sentence"),
]  # fmt: skip
TRUST = [
    ("a model's own code, and attention kernels from the hub", "never run", "test_trust", "test_a_models_own_code_never_runs"),
    ("weights that are no safetensors, also where an index or a config says so", "refused", "test_trust",
     "test_weights_are_safetensors_or_refused"),
    ("an optimizer.pt or reference.pt that is a program", "refused, not run", "test_checkpoint",
     "test_an_optimizer_that_is_a_program_is_not_run"),
    ("eval, exec, pickle, shells in our own code", "none but those the test lists with a reason", "test_trust",
     "test_there_is_no_door_in_the_code"),
    ("replies full of scripts, in Chromium", "stay text", "test_viewer", "test_hostile_text_stays_text"),
]  # fmt: skip


def read(name: str) -> dict | list:
    if not (RESULTS / name).exists():
        raise SystemExit(f"{RESULTS / name} is not there; `python -m lab.trust.reliability --help` says which command writes it")
    return read_json(RESULTS / name)


def kills(k: dict) -> list[str]:
    never = f" Never hit: {', '.join(k['places_never_hit'])}." if k["places_never_hit"] else ""
    return [
        "## 1. Killed anywhere", "",
        f"`python -m lab.trust.faults --n {k['n']} --seed {k['seed']}`: a run of letters ({k['seconds_undisturbed']} s undisturbed) was "
        f"done again {k['n']} times, killed by SIGKILL {k['kills']} times in all ({k['by_clock']} by the clock, {k['by_place']} by place, "
        f"{k['kills_of_resumed_runs']} of them in a run that was going on after a kill) and continued with `--resume`, {k['resumes']} "
        f"times. **{k['equal']} of {k['n']} ended equal to the undisturbed run to the last bit**: lines of metrics, evals and episodes but "
        f"for seconds, numbers of the summary, weights, optimizer, state. {len(k['failures'])} failed. In {k['folder_in_the_way']} cases "
        f"the kill left a folder that had to be removed by hand. {k['machine']}, torch {k['versions']['torch']}.", "",
        *table("| killed by place, in or around | times |", [[place, moments["all"]] for place, moments in k["places"].items()]), "",
        f"SIGINT and SIGTERM: tests/test_train.py and tests/test_parallel.py.{never}", "",
    ]  # fmt: skip


def storage(rows: list[dict]) -> list[str]:
    ok, skipped = sum(r["ok"] is True for r in rows), sum(r["ok"] is None for r in rows)
    bad = [r for r in rows if r["ok"] is False]
    equal = [r for r in rows if r["equal"] is not None]
    one_line = lambda text: text.replace("\n", " ")
    cells = [[one_line(r["case"]), one_line(r["expected"]), one_line(" / ".join(dict.fromkeys(r["said"])) or "—"),
              {None: "", True: "yes", False: "NO"}[r["equal"]]]
             for r in rows]  # fmt: skip
    return [
        "## 2. Bad storage", "",
        f"`python -m lab.trust.storage`: {ok} of {len(rows)} cases went as they should, {len(bad)} did not, {skipped} were skipped. "
        f"{sum(r['equal'] for r in equal)} of the {len(equal)} that could go on ended equal to the undisturbed run.", "",
        *table("| case | expected | what was said | ended equal |", cells), "",
    ]  # fmt: skip


def replies(f: dict) -> list[str]:
    slow = max(t["max_ms"] for e in f["environments"].values() for t in e["times"].values())
    leaks = ", ".join(f"{name} {t['leaked']} of {t['texts']:,} texts" for name, t in f["tokens"].items())
    return [
        "## 3. Hostile replies", "",
        f"`python -m lab.trust.hostile --n {f['asked']} --jobs 1`: {f['replies']:,} replies over the three environments, the longest "
        f"{max(e['longest'] for e in f['environments'].values()):,} characters: {f['exceptions']} exceptions, {f['failures']} failures of "
        f"any other sort (a reward out of its bounds or not finite, a message that is no text, a call over {f['limit_ms']:.0f} ms). The "
        f"slowest call took {slow:.1f} ms. Text that became a control token: {leaks}.", "",
    ]  # fmt: skip


def hacking(a: dict) -> list[str]:
    tables = {f"letters, {name}": rows for name, rows in a["letters"].items()} | {"alphabet": a["alphabet"]}
    tables |= {f"swarm, v{v}": part["rows"] for v, part in a["swarm"].items()}
    out = []
    for where, rows in tables.items():
        others = {name: row for name, row in rows.items() if name != "expert"}
        best = max(others, key=lambda name: others[name]["reward"]["mean"])
        ahead = [f"{name} {interval_of(row['gain']).signed()}" for name, row in others.items() if row["gain"]["low"] > 0]
        second = f"{best}, {interval_of(others[best]['reward']).text()}"
        out.append([where, len(others), interval_of(rows["expert"]["reward"]).text(), second, "; ".join(ahead) or "none"])
    return [
        "## 4. Reward hacking", "",
        "`python -m lab.trust.attack`: every attacker and what it earns stands in [results/hostile/README.md](hostile/README.md), with "
        "what was closed and what stays.", "",
        *table("| | attackers | expert | the best other | who earns more than the expert, by (paired) |", out), "",
        "The swarm's expert is not the best honest player: *long honest work* and *honest search* say what skill alone adds, and what is "
        "not more than they have is no hole. A dictionary beside the task's words, hoarded claims and, in v0.1, proposals of 2000 letters "
        "are holes that stay.", "",
    ]  # fmt: skip


def cases(title: str, rows: list[tuple]) -> list[str]:
    cells = [[what, then, f"tests/{file}.py: {name}"] for what, then, file, name in rows]
    return [title, "", *table("| what goes wrong | what happens | shown by |", cells), ""]


def long_run(r: dict, frozen: dict) -> list[str]:
    slope = lambda s, digits, unit: f"{interval_of(s, 'slope').signed(digits)} {unit} an hour"
    word = lambda s: "the interval holds 0" if s["flat"] else "the interval does not hold 0"
    return [
        "## 7. Two hours of swarm", "",
        f"`{r['command']}`: {r['hours']} hours, {r['updates']} updates, the first {r['warm_up_updates']} of them warm-up; {r['machine']}. "
        "It was the base before, with longer observations; not run again.", "",
        "| | slope after the warm-up, 95% HAC interval | |", "|---|---|---|",
        f"| memory, mean RSS of an update (median {r['rss_mb']['median']:,.0f} MB, most {r['rss_mb']['most']:,.0f} MB) | "
        f"{slope(r['rss_mb_per_hour'], 0, 'MB')} | {word(r['rss_mb_per_hour'])} |",
        f"| the same, at equal tokens an update (they grew by {slope(r['tokens_percent_per_hour'], 1, '%')}) | "
        f"{slope(r['rss_mb_per_hour_at_equal_tokens'], 0, 'MB')} | {word(r['rss_mb_per_hour_at_equal_tokens'])} |",
        f"| control: a policy that does not move (`{frozen['command']}`, {frozen['hours']} hours, {frozen['updates']} updates of 8 "
        f"episodes) | {slope(frozen['rss_mb_per_hour'], 0, 'MB')} | {word(frozen['rss_mb_per_hour'])} |",
        f"| throughput ({r['tokens_per_cpu_second']:,.0f} tokens a CPU second) | {slope(r['throughput_percent_per_hour'], 1, '%')} | "
        f"{word(r['throughput_percent_per_hour'])} |",
        f"| the same, at equal tokens an update | {slope(r['throughput_percent_per_hour_at_equal_tokens'], 1, '%')} | "
        f"{word(r['throughput_percent_per_hour_at_equal_tokens'])} |",
        "",
        "An earlier run of this kind grew by 138 MB an hour [78, 199] although no object was left over from one update to the next: the C "
        "library kept what was freed, in blocks of ever other lengths. Since then memory is given back after every long update "
        "(`fast.memory.give_back_memory`; tests/test_runfolder.py shows that it goes). The control ran before that, when it was given back "
        "with every fifth update only, which is why its interval is wide. Throughput is by CPU time, of which a token takes less when "
        "replies are longer, and when less other work runs on the machine.", "",
        f"Logs: {r['log_bytes_per_update'] / 1000:.0f} kB an update, nearly all of it episodes to read, which are thinned at 64 MB "
        "(tests/test_runfolder.py).", "",
        "![memory, throughput and bytes of logs over two hours](longrun/longrun.png)", "",
    ]  # fmt: skip


def page() -> str:
    says = "Written by `python -m lab.trust.reliability` from the results of the commands below; its docstring says how long each takes."
    out = ["# Nothing lost, nothing trusted", "", says, "", *kills(read("faults/kill.json")), *storage(read("faults/storage.json"))]
    out += replies(read("hostile/fuzz.json")) + hacking(read("hostile/attack.json"))
    out += cases("## 5. Bad training", TRAINING) + cases("## 6. Trust", TRUST)
    return "\n".join(out + long_run(read("longrun/longrun.json"), read("longrun/frozen.json")))


if __name__ == "__main__":
    import argparse

    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    write_page(OUT, [page()])
    print(f"wrote {OUT.relative_to(ROOT)}")
