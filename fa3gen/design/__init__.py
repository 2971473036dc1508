"""What follows from a spec before any code: whether it is legal, what it takes, how much work it is."""
