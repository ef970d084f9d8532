"""Arms seen from pytest's process: started, spoken to, kept, ended. No torch here."""
