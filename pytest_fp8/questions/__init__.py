"""One module a question: its evidence record, how that is gathered, its check. No torch here."""
