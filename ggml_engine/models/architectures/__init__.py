"""One file for each value of `general.architecture`: what its hyperparameters, weights and graph are."""
