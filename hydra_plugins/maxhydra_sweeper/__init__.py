"""hydra/sweeper=optuna: searches a space of configs with jobs that run beside each other."""
