"""The claims ledger: every lesson that this project grew out of, tested again, with a verdict from an interval."""
