"""hydra/sweeper=optuna: hyperparameter search with parallel jobs."""
