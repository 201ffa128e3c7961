"""Large-margin learning of structures: the solver over any structure, and an estimator for sequences."""
