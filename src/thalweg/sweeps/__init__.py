"""Many trainings over a space of settings: who chooses, who trains, what is recorded."""
