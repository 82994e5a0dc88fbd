"""How the models were made: their tokenizer, what they learn from, and their pretraining."""
