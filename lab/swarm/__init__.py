"""The economy of bots: what scripted players earn, which published findings come out again, which governance holds."""
