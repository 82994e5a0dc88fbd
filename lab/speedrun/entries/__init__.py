"""One file per entry; each has one function, train(policy, game)."""
