"""The speedrun: from one committed checkpoint to 90% of tier 6, in as few seconds as an algorithm can. Anybody can enter; docs/speedrun.md
has the rules."""
