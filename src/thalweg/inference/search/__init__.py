"""Search over autoregressive energies: the protocol, and one module for each strategy."""
