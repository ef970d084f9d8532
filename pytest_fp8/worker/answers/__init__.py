"""What an arm answers to a question, as plain data: one module for each kind of evidence."""
