"""What is believed of others: of their numbers, their words, and how they behave in rounds."""
