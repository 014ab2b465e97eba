"""What is wrong with a Daf, and what it consists of."""
