"""What a person writes: the model of a spec, the files it is read from, and what is said of mistakes in them."""
