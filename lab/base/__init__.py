"""How the models were made: their tokenizer, what they learn from, their pretraining, and their
cards."""
