"""Hidden Markov models: states in a chain, what each emits, and how both are learned."""
